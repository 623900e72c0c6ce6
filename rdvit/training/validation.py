"""Validation during training: Dice per volume on the file's own grid, what the loop did, and figures of one case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from rdvit.analysis.charts import expert_usage_figure
from rdvit.analysis.experts import routing_entropy, token_labels, usage_by_structure
from rdvit.analysis.figures import halting_figure, overlay_montage
from rdvit.config import Config
from rdvit.data.components import largest_component
from rdvit.data.datalist import Case
from rdvit.data.transforms import Frame, prepare_image, prepare_labels
from rdvit.data.volume import check_same_grid, read_image, read_labels
from rdvit.errors import DataError
from rdvit.evaluation.metrics import dice
from rdvit.inference.predictor import Predictor

FIGURE_CASES = 4  # cases whose routing makes the expert figure


@dataclass(frozen=True, eq=False)
class ValidationCase:
    """A case as the network sees it, and its reference as the file has it."""

    id: str
    image_1XYZ: Tensor
    label_1XYZ: Tensor
    frame: Frame
    reference_XYZ: np.ndarray


class Validation:
    """The validation cases, read once.

    Args:
        cases: Cases with labels.
        config: The resolved configuration.
        class_names: Label value to structure name.
    """

    def __init__(self, cases: Sequence[Case], config: Config, class_names: dict[int, str]) -> None:
        self.config, self.class_names = config, class_names
        self.cases = [_read(case, config, tuple(class_names)) for case in cases]

    def __call__(self, predictor: Predictor) -> dict[str, float]:
        """Mean Dice per structure and over all, and the mean loops until a token halted.

        A structure that is in neither mask of a case is left out of that case (``EMPTY_RULE`` of the metrics).
        """
        scores: dict[str, list[float]] = {name: [] for name in self.class_names.values()}
        steps = []
        for case in self.cases:
            prediction = predictor.finish(predictor.run(case.image_1XYZ), case.frame, None, maps=False)
            steps.append(prediction.mean_steps)
            for value, name in self.class_names.items():
                scores[name].append(dice(prediction.labels_XYZ == value, case.reference_XYZ == value))
        means = {name: _mean(values) for name, values in scores.items()}
        per_structure = {f"val/dice_{name}": value for name, value in means.items()}
        return {"val/dice": _mean(list(means.values())), **per_structure, "val/steps": float(np.mean(steps))}

    def figures(self, predictor: Predictor) -> dict[str, Figure]:
        """Segmentation preview and halting map of the first case, and expert usage per structure over the first few."""
        case = self.cases[0]
        output_CXYZ = predictor.run(case.image_1XYZ)
        image, reference = case.image_1XYZ[0].numpy(), case.label_1XYZ[0].numpy()
        labels, steps = output_CXYZ[:-1].argmax(0).numpy(), output_CXYZ[-1].numpy()
        if predictor.keep_largest:
            labels = labels * largest_component(labels > 0)
        spacing = [s * n / m for s, n, m in zip(case.frame.spacing, case.frame.shape, image.shape, strict=True)][:2]
        names = dict(enumerate(self.class_names.values(), start=1))  # class indices, as the network has them
        figures = {"preview": overlay_montage(image, labels, names, reference, spacing=spacing, title=case.id)}
        if self.config.model.halting == "act":
            loops = self.config.model.loops
            figures["halting"] = halting_figure(image, steps, loops, title=case.id, labels_XYZ=labels, spacing=spacing)
        usage = self.expert_usage(predictor)
        if usage is not None:
            title = f"Expert usage by structure, {len(self.cases[:FIGURE_CASES])} cases"
            figures["experts"] = expert_usage_figure(usage, ["background", *names.values()], title=title)
        return figures

    @torch.inference_mode()
    def expert_usage(self, predictor: Predictor) -> np.ndarray | None:
        """Share of each expert in each structure (classes, experts), over all loops; None without experts."""
        patch = self.config.model.patch_size
        assert patch != "auto"
        if self.config.model.experts is None:
            return None
        gates, labels = [], []
        for case in self.cases[:FIGURE_CASES]:
            for image, label in _inputs(case, self.config.model.spatial_dims):
                gates_TNE = predictor.gates(image[None])[:, 0].float().numpy()
                tokens_N = token_labels(label.numpy(), patch)
                gates.append(gates_TNE.reshape(-1, gates_TNE.shape[-1]))
                labels.append(np.tile(tokens_N, len(gates_TNE)))
        return usage_by_structure(np.concatenate(gates), np.concatenate(labels), len(self.class_names) + 1)


def entropy_of_usage(usage_CE: np.ndarray) -> float:
    """Mean routing entropy over the structures, 1 where all experts are used alike, 0 where one is."""
    return _mean(list(np.atleast_1d(routing_entropy(usage_CE))))


def _read(case: Case, config: Config, class_values: tuple[int, ...]) -> ValidationCase:
    if case.label is None:
        raise DataError(f"case {case.id} has no label, validation needs one", file=case.image)
    image, labels = read_image(case.image), read_labels(case.label)
    check_same_grid(image, labels)
    spacing = config.data.working_spacing
    image_1XYZ, frame = prepare_image(image, spacing, config.data.clip_percentiles)
    return ValidationCase(case.id, image_1XYZ, prepare_labels(labels, spacing, class_values), frame, labels.array)


def _inputs(case: ValidationCase, spatial_dims: int) -> list[tuple[Tensor, Tensor]]:
    """Network inputs (C, *space) with their labels (*space): the slices of a case, or the case."""
    if spatial_dims == 3:
        return [(case.image_1XYZ, case.label_1XYZ[0])]
    return [(case.image_1XYZ[..., z], case.label_1XYZ[0, ..., z]) for z in range(case.image_1XYZ.shape[-1])]


def _mean(values: list[float]) -> float:
    finite = [v for v in values if np.isfinite(v)]
    return float(np.mean(finite)) if finite else float("nan")
