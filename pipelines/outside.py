"""Networks of MONAI trained as rdvit trains its own: same samples, augmentation, loss, schedule, averaging and validation."""

from __future__ import annotations

import math
import shutil
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from monai.inferers import sliding_window_inference
from monai.networks.nets import UNETR, DynUNet
from peers import FILTERS, KERNELS, STRIDES
from study import run_folder
from torch import Tensor, nn

from rdvit.atomic import write
from rdvit.checkpoint import STATE, ModelInfo
from rdvit.config import Config, ModelConfig
from rdvit.data.datalist import patients
from rdvit.data.loaders import TrainingSamples, cached_cases
from rdvit.evaluation.summary import summarize, to_json
from rdvit.inference.cases import score_cases
from rdvit.inference.predictor import OVERLAP, Predictor
from rdvit.models.build import count_parameters
from rdvit.models.recurrence import LoopRecord
from rdvit.models.segmenter import Segmenter, crop, pad_to_patches
from rdvit.training.run import Split
from rdvit.training.tracking import NullTracker
from rdvit.training.trainer import Trainer
from rdvit.training.validation import Validation

LEVELS = 5  # of the small DynUNet: 16 pixels to one at the bottom, as in UNETR
NNUNET_FILTERS = {
    2: (32, 64, 128, 256, 512, 512),
    3: FILTERS,
}  # of nnU-Net v2's plans for ACDC; 2D pools once less: small crops


class Outside(nn.Module):
    """A network of another library that answers as a :class:`Segmenter` does: one loop, no halting.

    Args:
        network: From images to logits of the same size.
        config: What the trainer and the predictor ask of a model: dimensions, channels, patch.
        multiple: What image sizes must be multiples of; images are padded to that as rdvit's are to patches.
        window: The one size that the network is built for; larger images go through it in windows. None takes any size.
    """

    def __init__(
        self, network: nn.Module, config: ModelConfig, multiple: tuple[int, ...], window: tuple[int, ...] | None
    ) -> None:
        super().__init__()
        self.network, self.config, self.multiple, self.window = network, config, multiple, window

    def forward(
        self,
        images: Tensor,
        loops: int | None = None,
        halting: Any = None,
        *,
        merging: None = None,
        return_record: bool = False,
        early: Sequence[int] | None = None,
    ) -> Any:
        """Logits, or those and a record, or a list of those and a record; see :meth:`Segmenter.forward`."""
        padded = pad_to_patches(images, self.multiple)
        if self.training or self.window is None:
            logits = self.network(padded)
        else:
            how: dict[str, Any] = {"overlap": OVERLAP, "mode": "gaussian", "padding_mode": "replicate"}
            logits = sliding_window_inference(padded, self.window, 4, self.network, **how)
        logits = crop(logits, tuple(images.shape[2:]))
        assert self.config.patch_size != "auto"
        tokens = math.prod(-(-size // p) for size, p in zip(images.shape[2:], self.config.patch_size, strict=True))
        record = LoopRecord(logits.new_zeros(len(images), tokens, 1), 1, logits.new_zeros(1, len(images)))
        if early is not None:
            return [logits], record
        return (logits, record) if return_record else logits


@dataclass(frozen=True)
class Recipe:
    """Which outside network: the class and its sizes; what the digest of a training covers.

    Attributes:
        kind: ``UNETR`` or ``DynUNet``.
        filters: Channels of the levels of a DynUNet; of UNETR the channels at full resolution.
    """

    kind: str
    filters: tuple[int, ...]


def build(recipe: Recipe, config: Config, seed: int = 0) -> Outside:
    """The network of a recipe with fresh weights; the global random state is left alone.

    UNETR has the width and the heads of the configured model, and MONAI's twelve layers.

    Args:
        recipe: Which.
        config: A settled configuration.
        seed: Draws the weights.
    """
    model, size = config.model, config.data.crop_size
    assert size != "auto"
    dims = model.spatial_dims
    channels = {"in_channels": model.in_channels, "out_channels": model.out_channels, "spatial_dims": dims}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if recipe.kind == "UNETR":
            multiple = (16,) * dims
            window = tuple(-(-n // m) * m for n, m in zip(size, multiple, strict=True))
            widths = {"hidden_size": model.embed_dim, "mlp_dim": 4 * model.embed_dim, "num_heads": model.num_heads}
            unetr = UNETR(img_size=window, feature_size=recipe.filters[0], **widths, **channels)
            return Outside(unetr, model, multiple, window)
        levels = len(recipe.filters)
        kernels = [(3, 3)] * levels if dims == 2 else KERNELS[:levels]
        strides = [(1, 1), *[(2, 2)] * (levels - 1)] if dims == 2 else STRIDES[:levels]
        sizes = {"kernel_size": kernels, "strides": strides, "upsample_kernel_size": strides[1:], "filters": recipe.filters}
        network = DynUNet(norm_name=("instance", {"affine": True}), **sizes, **channels)
        for name in ("input_block", "downsamples", "bottleneck", "upsamples"):
            delattr(network, name)  # it runs them by its skip layers, which hold them again; safetensors refuses doubles
        return Outside(network, model, tuple(math.prod(axis) for axis in zip(*strides, strict=True)), None)


def matched_dynunet(config: Config, parameters: int) -> Recipe:
    """The DynUNet in nnU-Net's manner, channels doubled at each level, with as nearly so many parameters as there is."""

    def size(first: int) -> int:
        with torch.device("meta"):
            return count_parameters(build(doubling(first), config))

    firsts = range(2, 65)
    above = bisect_left(firsts, parameters, key=size)
    return doubling(min(firsts[max(above - 1, 0) : above + 1], key=lambda first: abs(math.log(size(first) / parameters))))


def doubling(first: int) -> Recipe:
    """A DynUNet whose channels double from level to level."""
    return Recipe("DynUNet", tuple(first * 2**level for level in range(LEVELS)))


def trainer(config: Config, split: Split, folder: Path, samples: TrainingSamples, network: Outside | None) -> Trainer:
    """A training of an outside network, or of the configured one where None; it validates at its end."""
    names = split.data.class_names
    info = ModelInfo(config, names, {"dataset": split.data.name, **split.names, "patients": len(patients(split.train))})
    validation = Validation(split.validation, config, names)
    return Trainer(config, info, folder, samples, validation, NullTracker(), network=cast(Segmenter, network))


def read_samples(config: Config, split: Split, out: Path) -> TrainingSamples:
    """The training samples, as ``rdvit train`` draws them."""
    return TrainingSamples(cached_cases(split.train, config, tuple(split.data.class_names), out / "models" / "cache"), config)


def train_once(split: Split, config: Config, name: str, recipe: Recipe, out: Path) -> Path:
    """The run folder of a finished training of an outside network; it is made, or continued, where there is none yet."""
    folder = run_folder(split, config, out, name, asdict(recipe))
    if (folder / "summary.json").is_file():
        return folder
    resumes = (folder / STATE).is_file()
    if not resumes:
        shutil.rmtree(folder, ignore_errors=True)  # stopped before its first epoch was saved
    network = build(recipe, config, config.training.seed)
    running = trainer(config, split, folder, read_samples(config, split, out), network)
    if resumes:
        running.resume()
    running.fit()
    predictor = Predictor(running.averaged, running.info, config.training.device, running.precision)
    results = score_cases(predictor, split.validation, split.data.class_names)
    run = {"network": asdict(recipe), "model": running.info.training, "progress": asdict(running.progress)}
    write(folder / "summary.json", to_json({"run": run, **summarize(results, split.data.class_names)}))
    return folder
