"""From an image to labels on its own grid: slices in batches, or volumes by sliding window; halting and entropy maps."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from monai.inferers import sliding_window_inference
from torch import Tensor

from rdvit.checkpoint import ModelInfo
from rdvit.data.components import largest_component
from rdvit.data.transforms import Frame, prepare_image, restore
from rdvit.data.volume import Volume
from rdvit.errors import DataError, ModelError
from rdvit.inference.anytime import Loops, Pace
from rdvit.inference.precision import Precision, autocast, choose_device, choose_precision
from rdvit.models.build import channels_last, for_inference
from rdvit.models.merging import Merging
from rdvit.models.recurrence import LoopRecord
from rdvit.models.segmenter import Halting, Segmenter, crop

_log = logging.getLogger("rdvit")

SLICES_PER_BATCH = 4
OVERLAP = 0.5
# Larger volumes are tiled: attention over a window grows with the square of its tokens. Most hearts at 1.5 mm fit: taken as a
# whole, volumes of ACDC have a higher Dice (.810 against .806 in windows of 160) in 0.57 of the time.
WINDOW_IN_PLANE, WINDOW_SLICES = 288, 20


@dataclass(frozen=True, eq=False)
class Prediction:
    """One segmented image, on the grid and in the orientation of its file.

    Attributes:
        labels_XYZ: Label values as in ``class_names`` of the model, uint8 or uint16.
        loops: Loops that were asked for; where time was limited, the most that were allowed.
        mean_steps: Mean number of loops over all voxels, those of halted tokens counted until they halted.
        seconds: Time in preprocessing, network and postprocessing.
        steps_XYZ: Loops until the token of each voxel halted, float32; only with maps.
        entropy_XYZ: Entropy of the class probabilities in nats, float32; only with maps.
        loops_taken: Loops that were run, mean over slices or windows: fewer than asked for where they ended early, or where all
            tokens had halted.
    """

    labels_XYZ: np.ndarray
    loops: Loops
    mean_steps: float
    seconds: dict[str, float]
    steps_XYZ: np.ndarray | None = None
    entropy_XYZ: np.ndarray | None = None
    loops_taken: float = math.nan


class Predictor:
    """A model ready to segment.

    Args:
        model: The network.
        info: Its description.
        device: Device name or ``auto``.
        precision: ``auto``, ``fp32``, ``bf16`` or ``fp16``; or a settled one.
        keep_largest: Keep the largest piece of the foreground only; as the model's configuration says where None.
        merging: Merge similar tokens.

    Example:
        >>> model, info = load_model(Path("runs/my_run"))
        >>> prediction = Predictor(model, info)(read_image("patient001_frame01.nii.gz"), loops=12)
    """

    def __init__(
        self,
        model: Segmenter,
        info: ModelInfo,
        device: str = "auto",
        precision: str | Precision = "auto",
        keep_largest: bool | None = None,
        merging: Merging | None = None,
    ) -> None:
        self.info, self.config, self.merging = info, info.config, merging
        self.device = choose_device(device)
        self.precision = choose_precision(precision, self.device) if isinstance(precision, str) else precision
        self.model = for_inference(model.to(self.device))
        self.layout = channels_last(self.model, self.config.model.spatial_dims)
        self.class_values = np.array([0, *info.class_names])
        self.spacing = self.config.data.working_spacing
        self.keep_largest = self.config.data.keep_largest is True if keep_largest is None else keep_largest
        self.decode_rate: float | None = None

    def __call__(
        self,
        volume: Volume,
        loops: Loops | None = None,
        halting: Halting | None = None,
        maps: bool = False,
        max_seconds: float | None = None,
    ) -> Prediction:
        """Segment a volume as read from its file.

        Args:
            volume: The image.
            loops: Number of loops, or ``auto`` to end each batch of slices, or window, when it has settled (``inference`` of
                the configuration); the trained depth where None, the most that are allowed where time is limited.
            halting: ``act`` or ``none``; as trained where None.
            maps: Make the halting and the entropy map, too.
            max_seconds: Time for all of it; loops go on while it lasts, at most ``loops``, at least one.

        Raises:
            DataError: If the network gives values that are not finite.
            ModelError: If the loops or the halting are not possible with this model.
        """
        start = time.perf_counter()
        image_1XYZ, frame = prepare_image(volume, self.spacing, self.config.data.clip_percentiles)
        prepared = time.perf_counter()
        # The way back to the file's grid takes about as long as the way from it.
        seconds = None if max_seconds is None else max_seconds - 2 * (prepared - start)
        pace = Pace(self.config.inference, loops == "auto", seconds, self.decode_rate)
        if loops is None:
            loops = self.config.model.loops if max_seconds is None else self.config.most_loops
        try:
            output_CXYZ = self._run(image_1XYZ, self.config.most_loops if loops == "auto" else loops, halting, pace)
        except RuntimeError as error:  # out of memory, most of all: this image's failure, not the program's
            raise DataError(f"the network failed: {str(error).splitlines()[0]}", file=volume.path) from error
        ran = time.perf_counter()
        if not bool(torch.isfinite(output_CXYZ).all()):
            raise DataError("the network's output is not finite", file=volume.path, hint="try --precision fp32")
        self.decode_rate = pace.decode_rate
        prediction = self.finish(output_CXYZ, frame, loops, maps)
        done = time.perf_counter()
        if max_seconds is not None and done - start > max_seconds and max(pace.taken) == 1:
            _log.warning("warning: %s: one loop took %.2f s, more than %.2f s", volume.path, done - start, max_seconds)
        times = {"prepare": prepared - start, "network": ran - prepared, "finish": done - ran}
        return replace(prediction, loops_taken=float(np.mean(pace.taken)), seconds=times)

    def run(self, image_1XYZ: Tensor, loops: int | None = None, halting: Halting | None = None) -> Tensor:
        """Logits and, as a last channel, the loops of each voxel's token: (classes + 1, X, Y, Z) on the network's grid."""
        return self._run(image_1XYZ, self.config.model.loops if loops is None else loops, halting, Pace(self.config.inference))

    @torch.inference_mode()
    def _run(self, image_1XYZ: Tensor, loops: int, halting: Halting | None, pace: Pace) -> Tensor:
        """:meth:`run` at a pace: it says where the loops end, and is told how many were run."""
        self.model.eval()

        def network(images: Tensor) -> Tensor:
            with autocast(self.device, self.precision):
                images = images.to(self.device).contiguous(memory_format=self.layout)
                logits, record = pace(self.model, images, loops, halting, self.merging)
            steps_BN = (
                record.steps_BN if record.steps_BN is not None else torch.full(record.tokens_BND.shape[:2], float(record.loops))
            )
            return torch.cat([logits.float().cpu(), self._to_voxels(steps_BN.cpu(), images.shape[2:])], dim=1)

        if self.config.model.spatial_dims == 2:
            batches = image_1XYZ.movedim(-1, 0).split(SLICES_PER_BATCH)
            pace.batches = len(batches)
            return torch.cat([network(batch_BCXY) for batch_BCXY in batches]).movedim(0, -1)
        window = self.window(tuple(image_1XYZ.shape[1:]))
        if window == tuple(image_1XYZ.shape[1:]):
            return network(image_1XYZ[None])[0]
        pace.batches = window_count(tuple(image_1XYZ.shape[1:]), window)
        tiles = sliding_window_inference(
            image_1XYZ[None],
            window,
            sw_batch_size=1,
            predictor=network,
            overlap=OVERLAP,
            mode="gaussian",
            padding_mode="replicate",
        )
        return tiles[0]

    @torch.inference_mode()
    def record(self, images: Tensor, loops: int | None = None, halting: Halting | None = None) -> LoopRecord:
        """What the loop did with images (B, C, *space) taken as a whole: halting, routing, residuals."""
        self.model.eval()
        with autocast(self.device, self.precision):
            return self.model(images.to(self.device), loops, halting, merging=self.merging, return_record=True)[1]

    def gates(self, images: Tensor) -> Tensor:
        """Gate weights of the experts, (T, B, N, E), for images (B, C, *space) taken as a whole.

        Raises:
            ModelError: If the model has no experts.
        """
        gates_TBNE = self.record(images).gates_TBNE
        if gates_TBNE is None:
            raise ModelError("this model has no experts")
        return gates_TBNE.cpu()

    def window(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Size of the sliding window: the volume itself where it fits, at least the training crop."""
        trained, patch = self.config.data.crop_size, self.config.model.patch_size
        assert trained != "auto" and patch != "auto"
        limits = tuple(
            max(n, limit) for n, limit in zip(trained, (WINDOW_IN_PLANE, WINDOW_IN_PLANE, WINDOW_SLICES), strict=True)
        )
        if patch[2] > 1:  # thin slices: many tokens along every axis
            limits = trained
        return tuple(min(n, limit) for n, limit in zip(shape, limits, strict=True))

    def finish(self, output_CXYZ: Tensor, frame: Frame, loops: Loops | None, maps: bool) -> Prediction:
        """Labels and maps on the file's grid from what :meth:`run` gives."""
        restored_CXYZ = restore(output_CXYZ if maps else output_CXYZ[:-1], frame)
        logits_CXYZ = restored_CXYZ[: len(self.class_values)]
        values_XYZ = self.class_values[logits_CXYZ.argmax(0)]
        if self.keep_largest:
            values_XYZ = values_XYZ * largest_component(values_XYZ > 0)
        labels_XYZ = values_XYZ.astype(np.uint8 if self.class_values.max() < 256 else np.uint16)
        asked = self.config.model.loops if loops is None else loops
        mean_steps = float(output_CXYZ[-1].mean())
        if not maps:
            return Prediction(labels_XYZ, asked, mean_steps, {})
        log_p_CXYZ = torch.from_numpy(logits_CXYZ).log_softmax(0)
        entropy_XYZ = -(log_p_CXYZ.exp() * log_p_CXYZ).sum(0).numpy()
        return Prediction(labels_XYZ, asked, mean_steps, {}, restored_CXYZ[-1], entropy_XYZ)

    def _to_voxels(self, steps_BN: Tensor, sizes: torch.Size) -> Tensor:
        """Each token's value at all its voxels, (B, 1, *sizes)."""
        patch = self.config.model.patch_size
        assert patch != "auto"
        grid = [-(-size // p) for size, p in zip(sizes, patch, strict=True)]
        voxels = F.interpolate(steps_BN.view(len(steps_BN), 1, *grid), scale_factor=[float(p) for p in patch], mode="nearest")
        return crop(voxels, sizes)


def window_count(shape: tuple[int, ...], window: tuple[int, ...]) -> int:
    """Windows of :func:`monai.inferers.sliding_window_inference` over a volume that is at least as large as one."""
    return math.prod(-(-(n - w) // max(int(w * (1 - OVERLAP)), 1)) + 1 for n, w in zip(shape, window, strict=True))
