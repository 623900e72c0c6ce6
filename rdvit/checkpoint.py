"""A model folder: ``model.safetensors`` (weights), ``model.json`` (all it takes to use them), ``state.pt`` (to resume).

Of the training state the one before is kept as well, ``state.previous.pt``, for the day the newest cannot be read.

Weights are safetensors and the rest is JSON, so that loading a model runs no code. The training state is read with
``weights_only=True``: tensors and plain values, nothing else.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes

from rdvit import __version__
from rdvit.atomic import write
from rdvit.config import Config, validate
from rdvit.data.datalist import NAME_RULE, is_plain_name
from rdvit.errors import DataError, ModelError
from rdvit.models.build import build_segmenter
from rdvit.models.segmenter import Segmenter
from rdvit.tensorfile import load_tensors, save_tensors

_log = logging.getLogger("rdvit")

SHIPPED, DEFAULT = Path(__file__).parent / "weights", "acdc-2d"  # models in the package, and the one that is taken unasked
WEIGHTS, DESCRIPTION, STATE, PREVIOUS = "model.safetensors", "model.json", "state.pt", "state.previous.pt"


@dataclass(frozen=True)
class ModelInfo:
    """What a model needs to be used by someone who only has its folder.

    Attributes:
        config: The resolved configuration it was trained with: network, spacing, normalisation.
        class_names: Label value to structure name, in the order of the output channels after the background.
        training: Where the weights come from: data set, split, epochs, validation Dice; free-form, JSON-able.
        version: Version of rdvit that wrote it.
    """

    config: Config
    class_names: dict[int, str]
    training: dict[str, Any] = field(default_factory=dict)
    version: str = __version__


def save_model(folder: Path, model: Segmenter, info: ModelInfo) -> None:
    """Write weights and description; each file appears whole or not at all.

    Raises:
        RdvitError: If the disk is full, or the folder cannot be written.
    """
    tensors = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    write(folder / WEIGHTS, to_bytes(tensors))
    content = asdict(info) | {"config": info.config.model_dump(mode="json")}
    write(folder / DESCRIPTION, json.dumps(content, indent=2))


def load_info(folder: Path) -> ModelInfo:
    """Read a model's description.

    Raises:
        ModelError: If there is no model in the folder, or its description is damaged.
    """
    path = folder / DESCRIPTION
    if not path.is_file():
        raise ModelError(f"no model here: expected {DESCRIPTION} and {WEIGHTS}", file=folder)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        names = {int(value): str(name) for value, name in content["class_names"].items()}
        if len(set(names.values())) < len(names) or not all(map(is_plain_name, names.values())):
            raise ValueError(f"each class needs a name of its own, which {NAME_RULE}, found {names}")
        return ModelInfo(validate(content["config"], source=path), names, content["training"], content["version"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"damaged model description: {type(error).__name__} {error}", file=path) from error


def load_model(folder: Path) -> tuple[Segmenter, ModelInfo]:
    """Build the network that a folder describes and fill in its weights; in evaluation mode, on the CPU.

    Raises:
        ModelError: If a file is missing or damaged, or if the tensors do not match the configuration (they are named).
    """
    info = load_info(folder)
    path = folder / WEIGHTS
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read the weights: {error}", file=path) from error
    model = build_segmenter(info.config.model, seed=0)
    expected = model.state_dict()
    wrong = [
        name
        for name in sorted(expected.keys() | tensors.keys())
        if name not in tensors or name not in expected or tensors[name].shape != expected[name].shape
    ]
    if wrong:
        listed = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        raise ModelError(f"{len(wrong)} tensors do not match {DESCRIPTION}: {listed}", file=path)
    model.load_state_dict(tensors)
    return model.eval(), info


def find_model(name: str | None, runs: Path) -> Path:
    """The model folder that a user means.

    Args:
        name: A model folder, the name of a run, or that of a model in the package; None takes the run that finished last, and
            where there is none the package's own.
        runs: Folder of all runs.

    Raises:
        ModelError: If there is none.
    """
    if name is not None:
        found = next((path for path in (Path(name), runs / name, SHIPPED / name) if (path / DESCRIPTION).is_file()), None)
        if found is None:
            names = ", ".join(shipped_models()) or "none"
            raise ModelError(f"no model '{name}': neither it nor {runs / name} holds {DESCRIPTION}; in the package: {names}")
        return found
    finished = [path.parent for path in runs.glob("*/summary.json") if (path.parent / DESCRIPTION).is_file()]
    if finished:
        return max(finished, key=lambda folder: (folder / "summary.json").stat().st_mtime)
    if (SHIPPED / DEFAULT / DESCRIPTION).is_file():
        return SHIPPED / DEFAULT
    raise ModelError(f"no finished run under '{runs}'", hint="train one with `rdvit train`, or name one with --model")


def shipped_models() -> list[str]:
    """Names of the models in the package."""
    return sorted(path.parent.name for path in SHIPPED.glob(f"*/{DESCRIPTION}"))


def shown_name(folder: Path) -> str:
    """How a message names a model: its folder, or that it is one of the package."""
    return f"{folder.name}, shipped with rdvit" if folder.parent == SHIPPED else str(folder)


def save_state(folder: Path, state: dict[str, Any]) -> None:
    """Write the training state (tensors, numbers, strings, lists and dictionaries of them); the one before is kept.

    Raises:
        RdvitError: If the disk is full, or the folder cannot be written; what was saved before is still there.
    """
    hint = f"what was saved before is whole: make room, then `rdvit train --resume {folder}` continues"
    save_tensors(folder / STATE, state, keep=folder / PREVIOUS, hint=hint)


def load_state(folder: Path) -> dict[str, Any]:
    """Read the newest training state that is whole; says so where that is the one before.

    Raises:
        ModelError: If there is none.
    """
    found = [folder / name for name in (STATE, PREVIOUS) if (folder / name).exists()]
    if not found:
        raise ModelError(f"nothing to resume: {STATE} is missing", file=folder)
    problems = []
    for path in found:
        try:
            state: dict[str, Any] = load_tensors(path)
        except DataError as error:
            problems.append(str(error))
            continue
        if path.name == PREVIOUS:  # missing is what a kill between two renames leaves
            _log.warning("%s; the state before it is taken", problems[0] if problems else f"{folder / STATE}: missing")
        return state
    raise ModelError("; ".join(problems))
