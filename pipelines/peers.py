"""What a user would take instead: MONAI's networks, and a whole sliding-window pipeline around one of them.

    python pipelines/peers.py IMAGE.nii.gz OUT.nii.gz [--mirror]

DynUNet has the layout that nnU-Net v2 plans for ACDC (3d_fullres). By nnU-Net's rules the spacing is 1.5625 x 1.5625 x 5 mm
(median in the plane, tenth percentile along the slices, which are more than three times as thick), the patch 224 x 256 x 20,
pooled while an axis keeps 4 voxels, along the slices only where their spacing is less than twice the others'.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from monai.inferers import SlidingWindowInferer
from monai.networks.nets import UNETR, DynUNet, SegResNet, SwinUNETR
from monai.transforms import Compose, EnsureChannelFirst, Invert, LoadImage, NormalizeIntensity, SaveImage, Spacing
from torch import Tensor, nn

SPACING, PATCH = (1.5625, 1.5625, 5.0), (224, 256, 20)
KERNELS = [(3, 3, 1)] + [(3, 3, 3)] * 5
STRIDES = [(1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 2), (2, 2, 1), (2, 2, 1)]
FILTERS = (32, 64, 128, 256, 320, 320)
# What the sizes of an image must be multiples of.
MULTIPLES = {"UNETR": (16, 16, 16), "SwinUNETR": (32, 32, 32), "SegResNet": (8, 8, 8), "DynUNet": (32, 32, 4)}


def peer(name: str, size: tuple[int, ...]) -> nn.Module:
    """MONAI's network ``name`` with its defaults (DynUNet: nnU-Net's plan), one channel in, four classes out.

    Args:
        name: A key of :data:`MULTIPLES`.
        size: Image size; UNETR is built for it.
    """
    torch.manual_seed(0)
    if name == "UNETR":
        return UNETR(in_channels=1, out_channels=4, img_size=size).eval()
    if name == "SwinUNETR":
        return SwinUNETR(in_channels=1, out_channels=4).eval()
    if name == "SegResNet":
        return SegResNet(in_channels=1, out_channels=4).eval()
    return DynUNet(
        spatial_dims=3,
        in_channels=1,
        out_channels=4,
        kernel_size=KERNELS,
        strides=STRIDES,
        upsample_kernel_size=STRIDES[1:],
        filters=FILTERS,
        norm_name=("instance", {"affine": True}),
    ).eval()


def padded_size(name: str, size: tuple[int, ...]) -> tuple[int, ...]:
    """The smallest size that the network takes and that holds an image of ``size``."""
    return tuple(-(-n // m) * m for n, m in zip(size, MULTIPLES[name], strict=True))


@torch.inference_mode()
def segment(image: Path, out: Path, mirror: bool) -> None:
    """File in, file out: nnU-Net's preprocessing, windows with half overlap and Gaussian weights, back to the file's grid.

    Args:
        image: A NIfTI file.
        out: Where the labels go.
        mirror: Mean over the mirrorings of all axes, as nnU-Net does unless told otherwise.
    """
    network, inferer = peer("DynUNet", PATCH), SlidingWindowInferer(PATCH, 1, overlap=0.5, mode="gaussian")
    spacing = Spacing(SPACING)
    before = Compose([LoadImage(), EnsureChannelFirst(), spacing, NormalizeIntensity()])
    x = before(image)
    axes = [[d for d in (2, 3, 4) if bits >> (d - 2) & 1] for bits in range(8 if mirror else 1)]

    def network_mirrored(window: Tensor) -> Tensor:
        return sum(network(window.flip(a)).flip(a) for a in axes) / len(axes)

    logits = x.clone()
    logits.set_array(inferer(x[None].as_tensor(), network_mirrored)[0])
    labels = Invert(spacing)(logits).argmax(0, keepdim=True)
    SaveImage(out.parent, output_postfix="", separate_folder=False, print_log=False, output_dtype="uint8")(
        labels, filename=str(out).removesuffix(".nii.gz")
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Segment a file with DynUNet in nnU-Net's manner; the weights are random.")
    parser.add_argument("image", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--mirror", action="store_true")
    given = parser.parse_args()
    segment(given.image, given.out, given.mirror)
