"""From a trained model to another data set: what is kept of it, and what its new classes make new."""

from __future__ import annotations

import logging
from pathlib import Path

from torch import Tensor

from rdvit.checkpoint import load_info, load_model
from rdvit.config import Config, merge, validate
from rdvit.errors import ConfigError
from rdvit.models.build import build_segmenter
from rdvit.models.growth import OWN, grow, obstacle

_log = logging.getLogger("rdvit")

HEAD = "decoder.out."
# What may differ from the model that is fine-tuned: none of it changes the function of a trained network.
FREE = {"out_channels", "dropout", "checkpoint_loops", "backprop_loops"}


def with_spacing_of_model(config: Config, class_names: dict[int, str]) -> Config:
    """A working spacing that is ``auto`` becomes that of the model where the classes are the same: scale matters to it.

    Other structures have other sizes; their spacing stays to be settled from the data.
    """
    if config.training.finetune is None or config.data.spacing != "auto":
        return config
    info = load_info(Path(config.training.finetune))
    if class_names != info.class_names:
        return config
    return validate(merge(config.model_dump(), {"data": {"spacing": info.config.data.spacing}}))


def pretrained_weights(config: Config, class_names: dict[int, str]) -> dict[str, Tensor]:
    """The tensors that a fine-tuning starts from: the model's; those of the head are fresh where the classes are others.

    A model of slices is inflated for a network of volumes, and a dense one dealt out to experts (``rdvit.models.growth``).

    Args:
        config: The settled configuration, with ``training.finetune``.
        class_names: Label value to structure name of the data.

    Raises:
        ConfigError: If the network is not the model's.
        ModelError: If there is no model, or it is damaged.
    """
    assert config.training.finetune is not None
    folder = Path(config.training.finetune)
    model, info = load_model(folder)
    asked, there = config.model.model_dump(), info.config.model.model_dump()
    kept = there.keys() - FREE - OWN
    different = [f"{key} is {there[key]} there, {asked[key]} here" for key in there if key in kept and asked[key] != there[key]]
    why = "; ".join(different[:3]) or obstacle(info.config.model, config.model)
    if why:
        raise ConfigError(f"fine-tuning keeps the network of its model: {why}", file=folder)
    if config.training.train_only != "all" and config.model.model_dump(include=OWN) != info.config.model.model_dump(
        include=OWN
    ):
        raise ConfigError(
            f"train_only {config.training.train_only} freezes the rest, but the network grows and its new parts are fresh",
            file=folder,
            hint="without --train-only",
        )
    tensors = build_segmenter(config.model, seed=config.training.seed).state_dict()
    learnt = grow(model.state_dict(), tensors, config.model)
    same = class_names == info.class_names
    tensors |= {name: value for name, value in learnt.items() if same or not name.startswith(HEAD)}
    head = "with its head" if same else f"with a new head: its classes are {info.class_names}, those of the data {class_names}"
    _log.info("fine-tuning %s %s", folder, head)
    return tensors
