"""From a volume to what the network sees, back again, and what training does to it on the way.

Preprocessing: canonical orientation, in-plane resampling to the working spacing (the slice direction stays as it is),
percentile clip and z-score over the non-zero voxels. The extent of a slice is kept: n pixels of size s become
``round(n s / t)`` pixels, so going back is the same call with the old size.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from monai import transforms as mt
from monai.transforms import MapTransform, Randomizable
from torch import Tensor

from rdvit.config import AugmentConfig, Config
from rdvit.data.datalist import Case
from rdvit.data.volume import Volume, check_same_grid, from_canonical, read_image, read_labels, to_canonical
from rdvit.errors import DataError


@dataclass(frozen=True, eq=False)
class Frame:
    """What leads from the network's grid back to the file's: the orientation and the canonical size before resampling.

    ``spacing`` is that of the canonical volume before resampling, in mm.
    """

    orientation: np.ndarray
    shape: tuple[int, int, int]
    spacing: tuple[float, float, float]


def prepare_image(volume: Volume, spacing: float | None, percentiles: tuple[float, float]) -> tuple[Tensor, Frame]:
    """Preprocess an image.

    Args:
        volume: As read.
        spacing: Working in-plane spacing in mm; None keeps the image's own.
        percentiles: Lower and upper clip.

    Returns:
        Image (1, X, Y, Z), float32, and the frame that leads back.
    """
    canonical, orientation = to_canonical(volume)
    shape = canonical.array.shape
    frame = Frame(orientation, (shape[0], shape[1], shape[2]), canonical.spacing)
    image_XYZ = normalize(torch.from_numpy(canonical.array), percentiles)
    return resize_in_plane(image_XYZ[None], working_size(frame, spacing)), frame


def prepare_labels(volume: Volume, spacing: float | None, class_values: tuple[int, ...]) -> Tensor:
    """Preprocess labels: class index (position in ``class_values`` plus 1, background 0) as uint8 (1, X, Y, Z).

    Each class is resampled as a soft mask and the largest wins, since label numbers cannot be interpolated.

    Raises:
        DataError: If the labels hold a value that no class has.
    """
    canonical, orientation = to_canonical(volume)
    values = np.unique(canonical.array)
    if unknown := sorted(set(values.tolist()) - {0, *class_values}):
        counts = ", ".join(f"{v} ({int((volume.array == v).sum())} voxels)" for v in unknown)
        raise DataError(f"label values without a class: {counts}; known are {list(class_values)}", file=volume.path)
    shape = canonical.array.shape
    size = working_size(Frame(orientation, (shape[0], shape[1], shape[2]), canonical.spacing), spacing)
    index_of_value = np.zeros(max(class_values) + 1, np.uint8)
    index_of_value[list(class_values)] = np.arange(1, len(class_values) + 1)
    index_XYZ = torch.from_numpy(index_of_value[canonical.array])
    if size == shape[:2]:
        return index_XYZ[None]
    slices_ZXY = index_XYZ.movedim(-1, 0)
    best_ZXY, label_ZXY = torch.zeros(1), torch.zeros(1, dtype=torch.uint8)
    for c in range(len(class_values) + 1):  # a running maximum: argmax over a short axis is slow on a CPU
        share_ZXY = _resize_slices((slices_ZXY == c).float()[:, None], size)[:, 0]
        label_ZXY = torch.where(share_ZXY > best_ZXY, torch.tensor(c, dtype=torch.uint8), label_ZXY)
        best_ZXY = torch.maximum(share_ZXY, best_ZXY)
    return label_ZXY.movedim(0, -1)[None].contiguous()


def restore(array_CXYZ: Tensor, frame: Frame) -> np.ndarray:
    """Logits or maps on the network's grid back on the file's grid and orientation, (C, X, Y, Z) float32."""
    return from_canonical(resize_in_plane(array_CXYZ.float(), frame.shape[:2]).numpy(), frame.orientation)


def normalize(image: Tensor, percentiles: tuple[float, float]) -> Tensor:
    """Clip to the percentiles of the non-zero voxels, then z-score with their mean and deviation; constant images become 0."""
    values = image[image != 0]
    if values.numel() == 0:
        return torch.zeros_like(image)
    low, high = np.percentile(values.numpy(), percentiles)
    clipped = image.clamp(float(low), float(high))
    inside = values.clamp(float(low), float(high))
    if inside.min() == inside.max():  # their deviation is 0 only up to rounding
        return torch.zeros_like(image)
    return (clipped - inside.mean()) / inside.std(correction=0)


def working_size(frame: Frame, spacing: float | None) -> tuple[int, int]:
    """In-plane size (X, Y) at the working spacing."""
    if spacing is None:
        return frame.shape[:2]
    x, y = (max(1, round(n * s / spacing)) for n, s in zip(frame.shape[:2], frame.spacing[:2], strict=True))
    return x, y


def resize_in_plane(array_CXYZ: Tensor, size: tuple[int, int]) -> Tensor:
    """Linear resampling of each slice to ``size`` over the same extent, low-passed where it shrinks."""
    if tuple(array_CXYZ.shape[1:3]) == size:
        return array_CXYZ
    return _resize_slices(array_CXYZ.movedim(-1, 0).contiguous(), size).movedim(0, -1).contiguous()


def _resize_slices(slices_ZCXY: Tensor, size: tuple[int, int]) -> Tensor:
    return F.interpolate(slices_ZCXY, size, mode="bilinear", align_corners=False, antialias=True)


class PrepareCase(mt.Transform):
    """Read and preprocess a case: the deterministic part of the pipeline, which the cache keeps.

    Gives ``image`` (1, X, Y, Z) float32, ``label`` (1, X, Y, Z) uint8 class indices, ``foreground`` the flat positions of
    labelled voxels, and ``id``.
    """

    def __init__(self, spacing: float | None, percentiles: tuple[float, float], class_values: tuple[int, ...]) -> None:
        self.spacing, self.percentiles, self.class_values = spacing, percentiles, class_values

    def __call__(self, case: Case) -> dict[str, Any]:
        """Prepare one case; it must have a label."""
        if case.label is None:
            raise DataError(f"case {case.id} has no label, training and validation need one", file=case.image)
        image, labels = read_image(case.image), read_labels(case.label)
        check_same_grid(image, labels)
        label_1XYZ = prepare_labels(labels, self.spacing, self.class_values)
        return {
            "image": prepare_image(image, self.spacing, self.percentiles)[0],
            "label": label_1XYZ,
            "foreground": label_1XYZ.flatten().nonzero()[:, 0].to(torch.int32),
            "id": case.id,
        }


class RandCropRegiond(Randomizable, MapTransform):
    """A region around a random voxel, labelled with a given probability; repeats the border where it leaves the volume.

    Args:
        size: Region size, (X, Y) to take one slice, or (X, Y, Z).
        foreground_share: Probability that the centre is a labelled voxel.
    """

    def __init__(self, size: tuple[int, ...], foreground_share: float) -> None:
        super().__init__(("image", "label"))
        self.size, self.foreground_share = size, foreground_share

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Crop both keys at the same place; other keys are dropped except ``id``."""
        shape = data["image"].shape[1:]
        foreground = data["foreground"]
        if len(foreground) and self.R.random() < self.foreground_share:
            centre = np.unravel_index(int(foreground[self.R.randint(len(foreground))]), shape)
        else:
            centre = tuple(self.R.randint(n) for n in shape)
        out: dict[Hashable, Any] = {"id": data["id"]}
        for key in self.keys:
            region = data[key]
            for axis, size in reversed(list(enumerate((*self.size, 1)[:3]))):  # slices first: they leave the least to copy
                start = int(centre[axis]) - size // 2
                if size >= shape[axis] > 1 and axis == 2:
                    start = (shape[axis] - size) // 2  # all slices, padded alike at both ends
                index = torch.arange(start, start + size).clamp(0, shape[axis] - 1)
                region = region.index_select(axis + 1, index)
            out[key] = region[..., 0] if len(self.size) == 2 else region
        return out


class RandLowResolutiond(Randomizable, MapTransform):
    """An image as if taken with larger pixels: shrunk in-plane by a random zoom and enlarged again.

    MONAI's RandSimulateLowResolution works on volumes only and would also blend the thick slices.
    """

    def __init__(self, prob: float, zoom: tuple[float, float]) -> None:
        super().__init__(("image",))
        self.prob, self.zoom = prob, zoom

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Lower the resolution of ``image`` (C, X, Y) or (C, X, Y, Z)."""
        out = dict(data)
        if self.R.random() < self.prob:
            image = out["image"]
            x, y = image.shape[1:3]
            zoom = self.R.uniform(*self.zoom)
            image_CXYZ = image.reshape(*image.shape[:3], -1)
            small = resize_in_plane(image_CXYZ, (max(1, round(x * zoom)), max(1, round(y * zoom))))
            out["image"] = resize_in_plane(small, (x, y)).reshape(image.shape)
        return out


def training_transform(config: Config) -> mt.Compose:
    """Random crop and augmentation of a prepared case: MONAI transforms, in-plane where they move things.

    Rotation and zoom come before the crop's border is cut, from a region 1.5 times as large.
    """
    crop, augment = config.data.crop_size, config.data.augment
    assert crop != "auto"
    region = tuple(int(np.ceil(c * 1.5)) if axis < 2 else c for axis, c in enumerate(crop))
    keys = ("image", "label")
    angle = float(np.deg2rad(augment.rotate_degrees))
    scale = (augment.scale, augment.scale, 0.0)[: len(crop)]
    affine = mt.RandAffined(
        keys,
        prob=augment.affine,
        rotate_range=angle if len(crop) == 2 else (0.0, 0.0, angle),
        scale_range=scale,
        spatial_size=crop,
        mode=("bilinear", "nearest"),
        padding_mode="border",
    )
    flips = [mt.RandFlipd(keys, prob=augment.flip, spatial_axis=axis) for axis in (0, 1)]
    crop_region = RandCropRegiond(region, config.data.foreground_share)
    plain = mt.EnsureTyped(keys, dtype=(torch.float32, torch.uint8), track_meta=False)
    return mt.Compose([crop_region, affine, *flips, *_intensity(augment), plain])


def _intensity(augment: AugmentConfig) -> list[mt.Transform]:
    """What differs between scanners and breath-holds: contrast, noise, sharpness, coil sensitivity, resolution."""
    return [
        mt.RandAdjustContrastd("image", prob=augment.gamma, gamma=(0.7, 1.5)),
        mt.RandBiasFieldd("image", prob=augment.bias_field, degree=2, coeff_range=(0.0, 0.2)),
        mt.RandGaussianSmoothd("image", prob=augment.blur, sigma_x=(0.5, 1.0), sigma_y=(0.5, 1.0), sigma_z=(0.0, 0.0)),
        RandLowResolutiond(augment.low_resolution, zoom=(0.5, 1.0)),
        mt.RandGaussianNoised("image", prob=augment.noise, std=0.15),
    ]
