"""The training loop: lightning-fabric underneath, an epoch at a time, each epoch saved so that nothing is lost.

All randomness is a function of the seed and the step (samples, loops, which images halt, dropout), so that a resumed training
repeats what an uninterrupted one would have done, to the last digit on a CPU.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import lightning_fabric as lf
import numpy as np
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from rdvit.analysis.charts import training_curves
from rdvit.analysis.figures import save_figure
from rdvit.atomic import remove_leftovers
from rdvit.checkpoint import ModelInfo, load_state, save_model, save_state
from rdvit.config import Config
from rdvit.data.loaders import TrainingSamples, naming_lost_workers, training_batches
from rdvit.errors import DataError
from rdvit.inference.precision import choose_device, choose_precision
from rdvit.inference.predictor import Predictor
from rdvit.models.build import build_segmenter, expert_layers, parameter_groups
from rdvit.models.lora import merged, train_only
from rdvit.models.segmenter import Segmenter
from rdvit.training.losses import SegmentationLoss, halting_images
from rdvit.training.schedule import ema_decay, learning_rate, stage_ends, training_loops
from rdvit.training.signals import held, stop_if_told
from rdvit.training.tracking import MetricsLog, NullTracker
from rdvit.training.validation import Validation, entropy_of_usage

_log = logging.getLogger("rdvit")
_FABRIC_PRECISION: dict[str, Any] = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}

Report = Callable[[str, int, int], None]
"""Called as ``report(text, done, total)`` after each step, for a progress bar."""


@dataclass
class Progress:
    """Where a training stands; saved with it."""

    epoch: int = 0
    step: int = 0
    seconds: float = 0.0
    best_dice: float = float("-inf")
    best_epoch: int = -1
    validations_without_gain: int = 0
    validation_seconds: float = 0.0
    ema_updates: int = 0
    run_id: str = ""


class Trainer:
    """One training in one run folder.

    Args:
        config: The resolved configuration.
        info: What the saved models say of themselves.
        folder: The run folder.
        samples: Training samples.
        validation: The validation cases.
        tracker: Where metrics and figures go besides the folder.
        report: Progress callback.
        weights: Tensors to start from, those of a model that is fine-tuned; fresh ones where None.
        network: Trained in the place of the one that ``config.model`` describes; it must answer as a :class:`Segmenter` does.
    """

    def __init__(
        self,
        config: Config,
        info: ModelInfo,
        folder: Path,
        samples: TrainingSamples,
        validation: Validation,
        tracker: NullTracker,
        report: Report = lambda text, done, total: None,
        weights: dict[str, Tensor] | None = None,
        network: Segmenter | None = None,
    ) -> None:
        self.config, self.info, self.folder = config, info, folder
        self.samples, self.validation, self.tracker, self.report = samples, validation, tracker, report
        training = config.training
        device = choose_device(training.device)
        self.precision = choose_precision(training.precision, device)
        _log.info("training on %s in %s: %s", device, self.precision.name, self.precision.reason)
        self.fabric = lf.Fabric(
            accelerator=device.type,
            devices="auto" if device.type == "cuda" else 1,
            precision=_FABRIC_PRECISION[self.precision.name],
        )
        self.fabric.launch()
        if self.fabric.global_rank == 0:
            remove_leftovers(folder)
        model = build_segmenter(config.model, seed=training.seed) if network is None else network
        if weights is not None:
            model.load_state_dict(weights)
        train_only(model, training.train_only, training.finetune_rank, training.seed)
        groups: Any = parameter_groups(model, training.weight_decay)
        optimizer = torch.optim.AdamW(groups, lr=training.learning_rate, betas=training.betas, fused=device.type != "mps")
        self.model, self.optimizer = self.fabric.setup(model, optimizer)
        self.ema = AveragedModel(self.model.module, multi_avg_fn=self._average)
        self.loss = SegmentationLoss(training.loss)
        self.progress = Progress()
        self.history = MetricsLog.open(folder, keep_until_epoch=0)
        self._layout: Any = torch.channels_last if config.model.spatial_dims == 2 else torch.channels_last_3d

    def resume(self) -> None:
        """Continue where the folder's last complete epoch ended."""
        state = load_state(self.folder)
        self.model.module.load_state_dict(state["model"])
        self.ema.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])
        self.history = MetricsLog.open(self.folder, keep_until_epoch=self.progress.epoch)

    def save(self) -> None:
        """Write the training state, from which :meth:`resume` continues.

        Raises:
            RdvitError: If the disk is full.
        """
        if self.fabric.global_rank == 0:
            with held():
                save_state(self.folder, self._state())

    def fit(self) -> Progress:
        """Train until the epochs, the minutes or the patience end.

        Raises:
            DataError: If the loss is not finite; names the cases of the batch.
            RdvitError: If the disk is full.
        """
        finished = self.finished()
        while not finished:
            finished = self._epoch()
        self._save_figures("final")
        return self.progress

    def finished(self) -> bool:
        """Whether the epochs, the minutes (less those of a last validation) or the patience are used up."""
        training, progress = self.config.training, self.progress
        out_of_patience = training.patience is not None and progress.validations_without_gain >= training.patience
        out_of_epochs = training.epochs is not None and progress.epoch >= training.epochs
        return out_of_patience or out_of_epochs or self._out_of_time()

    def share_done(self) -> float:
        """Share of the training that is done, 0 to 1: of the epochs, or of the minutes where there are no epochs."""
        training = self.config.training
        if training.epochs is not None:
            return min(self.progress.step / (training.epochs * training.steps_per_epoch), 1.0)
        return min(self._seconds() / max(self._time_budget(), 1e-9), 1.0)

    def _out_of_time(self) -> bool:
        return self._seconds() >= self._time_budget()

    def _time_budget(self) -> float:
        """Seconds for training: what ``max_minutes`` leaves after one more validation."""
        minutes = self.config.training.max_minutes
        return float("inf") if minutes is None else max(60 * minutes - 1.2 * self.progress.validation_seconds, 0.0)

    def _seconds(self) -> float:
        return self.progress.seconds + (time.monotonic() - self._epoch_start if self._epoch_start else 0.0)

    _epoch_start: float = 0.0

    def _epoch(self) -> bool:
        """Train for an epoch, validate if due or if it is the last, write everything down; whether it was the last."""
        self._epoch_start = time.monotonic()
        epoch, training = self.progress.epoch, self.config.training
        row = {"epoch": epoch, **self._train(), "lr": self.optimizer.param_groups[0]["lr"]}
        self.progress.epoch += 1
        last = self.finished()
        if last or self.progress.epoch % training.validate_every == 0:
            row.update(self._validate())
            last = last or self.finished()
        self.progress.seconds, self._epoch_start = self._seconds(), 0.0
        row["seconds"] = self.progress.seconds
        self.history.append(row)
        if self.fabric.global_rank == 0:
            self.tracker.log_metrics({k: v for k, v in row.items() if k != "epoch"}, step=epoch)
        self.save()
        return last

    def _train(self) -> dict[str, float]:
        """The steps of one epoch; mean loss parts, and the share of the time spent outside the data loading.

        Where the minutes alone plan the training, the epoch ends with them.
        """
        self.model.train()
        sums: dict[str, float] = {}
        start = waiting = time.perf_counter()
        data_seconds = 0.0
        total = self.config.training.steps_per_epoch
        batches = training_batches(
            self.samples, self.config, self.progress.step, self.fabric.global_rank, self.fabric.world_size
        )
        for done, batch in enumerate(batches, start=1):
            data_seconds += time.perf_counter() - waiting
            with naming_lost_workers():
                parts = self._step(batch)
            for name, value in parts.items():
                sums[name] = sums.get(name, 0.0) + value
            stop_if_told()
            self.report(f"epoch {self.progress.epoch + 1}  loss {parts['loss']:.3f}", done, total)
            waiting = time.perf_counter()
            if self.config.training.epochs is None and self._out_of_time():
                break
        share = 1 - data_seconds / (time.perf_counter() - start)
        return {f"train/{name}": value / done for name, value in sums.items()} | {"train/network_share": share}

    def _step(self, batch: dict[str, Any]) -> dict[str, float]:
        """One optimiser step."""
        config, training, step = self.config, self.config.training, self.progress.step
        seed = np.random.SeedSequence([training.seed, step, 4, self.fabric.global_rank])
        torch.manual_seed(int(seed.generate_state(1)[0]))  # of dropout, and of SReT's dropped paths and shuffles
        share = self.share_done()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(share, training)
        images = self.fabric.to_device(batch["image"].contiguous(memory_format=self._layout))
        labels = self.fabric.to_device(batch["label"])
        halts_B = self._halts(len(images), step)
        loops = training_loops(step, config.model, training)
        early = stage_ends(loops, training)[:-1]  # the last stage is read by the loop's own read-out
        logits, record = self.model(images, loops, "none" if halts_B is None else halts_B, early=early)
        loss, parts = self.loss(logits, labels, record, halts_B, share)
        if not torch.isfinite(loss):
            raise DataError(f"the loss became {loss.item()} in step {step}, on cases {', '.join(batch['id'])}")
        self.optimizer.zero_grad(set_to_none=True)
        self.fabric.backward(loss)
        norm = self.fabric.clip_gradients(self.model, self.optimizer, max_norm=training.clip_norm, error_if_nonfinite=False)
        if norm is not None and not torch.isfinite(norm) and self.precision.name != "fp16":  # whose scaler skips such a step
            raise DataError(f"the gradient became {norm.item()} in step {step}, on cases {', '.join(batch['id'])}")
        self.optimizer.step()
        self._balance(record.gates_TBNE)
        self.progress.step += 1
        self.progress.ema_updates += 1
        self.ema.update_parameters(self.model.module)
        extra = {"loops": float(loops), "gradient_norm": float(norm) if norm is not None else float("nan")}
        return {name: float(part) for name, part in parts.items()} | extra

    def _halts(self, batch_size: int, step: int) -> Tensor | None:
        if self.config.model.halting == "none":
            return None
        seed = int(np.random.SeedSequence([self.config.training.seed, step, 3]).generate_state(1)[0])
        halts_B = halting_images(batch_size, self.config.training.halting_share, torch.Generator().manual_seed(seed))
        return self.fabric.to_device(halts_B)

    def _balance(self, gates_TBNE: Tensor | None) -> None:
        """Move the experts' selection biases against their load in this step, over all loops and processes."""
        if gates_TBNE is None or self.config.model.experts is None:
            return
        load_E: Any = self.fabric.all_reduce((gates_TBNE > 0).float().sum((0, 1, 2)), reduce_op="sum")
        for layer in expert_layers(self.model.module):
            layer.balance(load_E, self.config.model.experts.bias_update_rate)

    @torch.no_grad()
    def _average(self, averages: Any, parameters: Any, updates: Any) -> None:
        torch._foreach_lerp_(averages, parameters, 1 - ema_decay(self.progress.ema_updates, self.config.training.ema_decay))

    @property
    def averaged(self) -> Segmenter:
        """The network with averaged weights."""
        return cast(Segmenter, self.ema.module)

    def _predictor(self) -> Predictor:
        return Predictor(self.averaged, self.info, self.config.training.device, self.precision)

    def _validate(self) -> dict[str, float]:
        """Validate the averaged weights; keep them if they are the best so far."""
        start = time.monotonic()
        self.report(f"epoch {self.progress.epoch}  validating {len(self.validation.cases)} cases", 0, 1)
        predictor = self._predictor()
        metrics = self.validation(predictor)
        usage = self.validation.expert_usage(predictor)
        if usage is not None:
            metrics["val/expert_entropy"] = entropy_of_usage(usage)
        progress = self.progress
        if metrics["val/dice"] > progress.best_dice or progress.best_epoch < 0:
            progress.best_dice, progress.best_epoch, progress.validations_without_gain = metrics["val/dice"], progress.epoch, 0
            if self.fabric.global_rank == 0:
                training = self.info.training | {"epoch": progress.epoch, "val_dice": metrics["val/dice"]}
                plain = merged(self.averaged) if self.config.training.train_only == "lora" else self.averaged
                save_model(self.folder, plain, ModelInfo(self.config, self.info.class_names, training))
        else:
            progress.validations_without_gain += 1
        if progress.epoch % (self.config.training.validate_every * self.config.training.figures_every) == 0:
            self._save_figures(f"epoch{progress.epoch:04d}")
        progress.validation_seconds = time.monotonic() - start
        return metrics

    def _save_figures(self, name: str) -> None:
        """Preview, halting map and expert usage of the current averaged weights, and the course of the training so far."""
        if self.fabric.global_rank > 0:
            return
        figures = self.validation.figures(self._predictor()) | {"curves": training_curves(self.history.rows)}
        for kind, figure in figures.items():
            self.tracker.log_artifact(save_figure(figure, self.folder / "figures" / f"{kind}_{name}.png"), "figures")

    def _state(self) -> dict[str, Any]:
        return {
            "model": self.model.module.state_dict(),
            "ema": self.ema.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": vars(self.progress),
        }
