"""Connected components of a foreground: what lies apart from the organ is an error, where labels always lie in one piece."""

from __future__ import annotations

import numpy as np
from scipy import ndimage


def largest_component(mask_XYZ: np.ndarray) -> np.ndarray:
    """The largest piece of a boolean mask, neighbours over faces, edges and corners; the mask itself if it is empty."""
    pieces_XYZ, count = ndimage.label(mask_XYZ, np.ones((3,) * mask_XYZ.ndim))
    if count < 2:
        return mask_XYZ
    sizes = np.bincount(pieces_XYZ.ravel())
    return pieces_XYZ == 1 + sizes[1:].argmax()
