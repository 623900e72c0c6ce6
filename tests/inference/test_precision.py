"""Device and number format: a reason for every choice, an error in words for what is not there."""

from __future__ import annotations

import pytest
import torch

from rdvit.errors import ConfigError
from rdvit.inference import precision as precision_module
from rdvit.inference.precision import Precision, autocast, choose_device, choose_precision

CPU = torch.device("cpu")


def product(precision: Precision) -> torch.Tensor:
    with autocast(CPU, precision):
        return torch.nn.functional.linear(torch.ones(2, 8), torch.ones(4, 8))


# Devices


def test_named_device_is_taken() -> None:
    assert choose_device("cpu") == CPU


@pytest.mark.parametrize("name", ["cuda:99", "nonsense", "", "hpu"])
def test_a_device_that_is_not_here_is_an_error_that_says_what_to_do(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"device '{name}' cannot be used here: .+\(--device cpu\)"):
        choose_device(name)


@pytest.mark.parametrize(
    ("cuda", "mps", "expected"), [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu"), (True, False, "cuda")]
)
def test_auto_takes_cuda_then_mps_then_the_cpu(cuda: bool, mps: bool, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)  # the trial of a device that this machine may lack
    assert choose_device("auto").type == expected


# Formats


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_a_format_that_was_asked_for_is_taken(name: str) -> None:
    assert choose_precision(name, CPU) == Precision(name, "as asked")


def test_an_unknown_format_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown precision 'fp8'.*fp32, bf16, fp16"):
        choose_precision("fp8", CPU)


def test_auto_on_a_cpu_is_measured_and_has_a_reason() -> None:
    threads = torch.get_num_threads()
    chosen = choose_precision("auto", CPU)
    assert chosen.name in ("fp32", "bf16")
    assert "times as fast as float32 on this CPU" in chosen.reason
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(("gain", "expected"), [(0.2, "fp32"), (1.4, "fp32"), (1.5, "bf16"), (6.0, "bf16")])
def test_auto_on_a_cpu_takes_bfloat16_only_where_it_pays(gain: float, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision_module, "_bfloat16_gain", lambda: gain)
    chosen = choose_precision("auto", CPU)
    assert chosen.name == expected
    assert f"{gain:.1f}" in chosen.reason


@pytest.mark.parametrize(
    ("device", "bf16", "expected"), [("cuda", True, "bf16"), ("cuda", False, "fp16"), ("mps", False, "fp32")]
)
def test_auto_on_a_gpu_follows_what_it_supports(
    device: str, bf16: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: bf16)
    chosen = choose_precision("auto", torch.device(device))
    assert chosen.name == expected
    assert chosen.reason


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_products_run_in_the_chosen_format(name: str) -> None:
    precision = Precision(name, "")
    assert product(precision).dtype == precision.dtype


def test_float32_switches_an_outer_autocast_off() -> None:
    with autocast(CPU, Precision("bf16", "")):
        assert product(Precision("fp32", "")).dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")
