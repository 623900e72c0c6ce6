"""From a trained model to another data set: what is kept of it, and what its new classes make new."""

from __future__ import annotations

import logging
from pathlib import Path

from torch import Tensor

from rdvit.checkpoint import load_info, load_model
from rdvit.config import Config, merge, validate
from rdvit.errors import ConfigError
from rdvit.models.build import build_segmenter

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
    different = [
        f"{key} is {there[key]} there, {asked[key]} here" for key in there if key not in FREE and asked[key] != there[key]
    ]
    if different:
        raise ConfigError(f"fine-tuning keeps the network of its model: {'; '.join(different[:3])}", file=folder)
    tensors = build_segmenter(config.model, seed=config.training.seed).state_dict()
    same = class_names == info.class_names
    tensors |= {name: value for name, value in model.state_dict().items() if same or not name.startswith(HEAD)}
    head = "with its head" if same else f"with a new head: its classes are {info.class_names}, those of the data {class_names}"
    _log.info("fine-tuning %s %s", folder, head)
    return tensors
