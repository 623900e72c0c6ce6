"""Device and number format: settled once, by measuring where it is not obvious, and always with the reason."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from rdvit.errors import ConfigError

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MIN_GAIN = 1.5  # bfloat16 products must be this much faster than float32 ones on a CPU: the casts around them cost, too


class Precision(NamedTuple):
    """Number format of the network's products, and why."""

    name: str
    reason: str

    @property
    def dtype(self) -> torch.dtype:
        """The type that products run in."""
        return FORMATS[self.name]


def choose_device(name: str) -> torch.device:
    """``auto`` (CUDA, then MPS, then the CPU) or a device by name.

    Raises:
        ConfigError: If there is no such device here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ConfigError(f"device '{name}' cannot be used here: {str(error).splitlines()[0]}", hint="--device cpu") from None
    return device


def choose_precision(name: str, device: torch.device) -> Precision:
    """Settle ``auto``: on a GPU by what it supports, on a CPU by timing a matrix product of this network's kind.

    Raises:
        ConfigError: If there is no such format.
    """
    if name not in ("auto", *FORMATS):
        raise ConfigError(f"unknown precision '{name}'", hint=f"one of auto, {', '.join(FORMATS)}")
    if name != "auto":
        return Precision(name, "as asked")
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported():
            return Precision("bf16", "the GPU supports bfloat16")
        return Precision("fp16", "the GPU has no bfloat16")
    if device.type != "cpu":
        return Precision("fp32", f"safest on {device.type}")
    gain = _bfloat16_gain()
    reason = f"bfloat16 products run {gain:.1f} times as fast as float32 on this CPU"
    return Precision("bf16" if gain >= MIN_GAIN else "fp32", reason)


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Autocast context for the chosen format; does nothing for float32."""
    enabled = precision.name != "fp32"
    return torch.autocast(device.type, precision.dtype if enabled else torch.bfloat16, enabled=enabled)


def _bfloat16_gain() -> float:
    """How many times as fast a bfloat16 product is.

    One thread, products of about a millisecond, in turns, each at its best: so that other load on the machine, which may
    well be another training, does not decide.
    """
    x, w = torch.randn(256, 192), torch.randn(768, 192)
    best = {torch.float32: float("inf"), torch.bfloat16: float("inf")}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(50):
            for dtype in (torch.float32, torch.bfloat16):
                a, b = x.to(dtype), w.to(dtype)
                start = time.perf_counter()
                torch.nn.functional.linear(a, b)
                best[dtype] = min(best[dtype], time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return best[torch.float32] / best[torch.bfloat16]
