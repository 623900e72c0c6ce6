"""Device and number format: settled once, by measuring where it is not obvious, and always with the reason."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rdvit.errors import ConfigError

MIN_GAIN = 1.5  # bfloat16 products must be this much faster than float32 ones on a CPU: the casts around them cost, too


class Precision(NamedTuple):
    """Number format of the network's products, and why."""

    name: str
    reason: str

    @property
    def dtype(self) -> torch.dtype:
        """The type that products run in."""
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.name]


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
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device '{name}' cannot be used here: {str(error).splitlines()[0]}", hint="--device cpu") from None
    return device


def choose_precision(name: str, device: torch.device) -> Precision:
    """Settle ``auto``: on a GPU by what it supports, on a CPU by timing a matrix product of this network's kind."""
    if name != "auto":
        return Precision(name, "as asked")
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported():
            return Precision("bf16", "the GPU supports bfloat16")
        return Precision("fp16", "the GPU has no bfloat16")
    if device.type != "cpu":
        return Precision("fp32", f"safest on {device.type}")
    gain = _product_seconds(torch.float32) / _product_seconds(torch.bfloat16)
    reason = f"bfloat16 products run {gain:.1f} times as fast as float32 on this CPU"
    return Precision("bf16" if gain >= MIN_GAIN else "fp32", reason)


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Autocast context for the chosen format; does nothing for float32."""
    enabled = precision.name != "fp32"
    return torch.autocast(device.type, precision.dtype if enabled else torch.bfloat16, enabled=enabled)


def _product_seconds(dtype: torch.dtype) -> float:
    x, w = torch.randn(3200, 192).to(dtype), torch.randn(768, 192).to(dtype)

    def product() -> Tensor:
        return torch.nn.functional.linear(x, w)

    return min(_seconds(product) for _ in range(5))


def _seconds(call: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
