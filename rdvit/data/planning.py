"""Settle what a configuration leaves ``auto``, from the data: spacing, patch, crop, classes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rdvit.config import Config, merge, validate
from rdvit.data.components import largest_component
from rdvit.data.datalist import Case
from rdvit.data.volume import canonical_geometry, read_labels
from rdvit.errors import ConfigError

ANISOTROPIC = 2.5  # slices this many times as thick as a pixel keep their own axis out of patches
MAX_CROP_2D = 128  # pixels; a heart is less than 150 mm wide
MAX_CROP_3D = 96  # attention over a volume grows with the fourth power of this
SLICES_PER_CROP = 8
LABELS_LOOKED_AT = 100  # of the training cases, spread evenly, to see whether labels lie in one piece
STRAY_SHARE = 0.01  # of a label's voxels may lie apart and it still counts as one piece


def settle(config: Config, cases: Sequence[Case], class_names: dict[int, str]) -> Config:
    """A configuration without ``auto``.

    The working spacing is the median in-plane spacing, or the images' own where they all agree. Thick slices (ACDC: 10 mm
    at 1.5 mm pixels) get patches of 8 x 8 x 1 and crops of at most 96 x 96 x 8; nearly isotropic volumes patches of
    4 x 4 x 4 and crops of at most 96 per axis. Crops are whole patches, as many as cover the median volume. Predictions are
    reduced to their largest piece where the labels are one piece in every training case.

    Args:
        config: What the user chose; settled values are kept.
        cases: The training cases; the headers of their images are read, and the labels of up to 100 of them.
        class_names: Label values and names; the network gets one output more, for the background.

    Raises:
        ConfigError: If the chosen crop has not as many axes as the network.
    """
    geometry = [canonical_geometry(case.image) for case in cases]
    spacings = np.array([spacing for _, spacing in geometry])
    shapes = np.array([shape for shape, _ in geometry])
    data, model = config.data, config.model
    median = np.median(spacings, axis=0)
    in_plane = spacings[:, :2]
    spacing: float | str = data.spacing
    if spacing == "auto":
        spacing = "native" if in_plane.max() <= 1.01 * in_plane.min() else round(float(np.median(in_plane)), 2)
    working = shapes[:, :2] * (in_plane / spacing if isinstance(spacing, float) else 1.0)
    size = [*np.median(working, axis=0), np.median(shapes[:, 2])]
    thick = median[2] >= ANISOTROPIC * median[:2].max()
    patch = model.patch_size
    if patch == "auto":
        patch = (8, 8) if model.spatial_dims == 2 else (8, 8, 1) if thick else (4, 4, 4)
        if model.sret is not None:  # that of the first stage; the others halve the grid along the same axes
            patch = tuple(p if p == 1 else p * 2 ** (len(model.sret.blocks) - 1) for p in patch)
    crop = data.crop_size
    if crop == "auto":
        if model.spatial_dims == 2:
            limits = [MAX_CROP_2D] * 2
        else:
            limits = [MAX_CROP_3D, MAX_CROP_3D, SLICES_PER_CROP if thick else MAX_CROP_3D]
        crop = tuple(
            min(max(1, limit // p), int(np.ceil(n / p))) * p
            for n, p, limit in zip(size[: model.spatial_dims], patch, limits, strict=False)
        )
    if len(crop) != model.spatial_dims:
        raise ConfigError(f"data.crop_size {crop} has {len(crop)} axes, model.spatial_dims is {model.spatial_dims}")
    settled = {
        "model": {"patch_size": patch, "out_channels": len(class_names) + 1},
        "data": {
            "spacing": spacing,
            "crop_size": crop,
            "keep_largest": in_one_piece(cases) if data.keep_largest == "auto" else data.keep_largest,
        },
    }
    return validate(merge(config.model_dump(), settled))


def in_one_piece(cases: Sequence[Case]) -> bool:
    """Whether the foreground of each label (all structures together) is one connected piece, but for a few voxels."""
    labelled = [case.label for case in cases if case.label is not None]
    step = max(1, -(-len(labelled) // LABELS_LOOKED_AT))
    foregrounds = (read_labels(path).array > 0 for path in labelled[::step])
    return bool(labelled) and all(largest_component(mask).sum() >= (1 - STRAY_SHARE) * mask.sum() for mask in foregrounds)
