"""What the tests of the command line share: the command as a user calls it, and one finished tiny training."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from rdvit.cli.app import main
from rdvit.data.volume import read_image

TINY_SETTINGS = (
    *("model.embed_dim=32", "model.num_heads=2", "model.stem_channels=4", "model.loops=2", "model.local_kernel=[3,3]"),
    *("data.spacing=3.0", "data.crop_size=[32,32]", "training.steps_per_epoch=2", "training.batch_size=2"),
    *("training.loop_sampling.low=1", "training.loop_sampling.high=3"),
)


@pytest.fixture(scope="session")
def rdvit() -> Callable[..., CompletedProcess[str]]:
    """``rdvit("infer", file, "--json")``: exit code, standard output and standard error of the command.

    It runs inside the process of the tests, through the entry point of the package; importing torch anew takes seconds.
    """

    def call(*arguments: str | Path) -> CompletedProcess[str]:
        words = ["rdvit", *map(str, arguments)]
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, _logging_as_it_was(), redirect_stdout(out), redirect_stderr(err):
            patch.setattr(sys, "argv", words)
            patch.delenv("RDVIT_DATA", raising=False)
            with pytest.raises(SystemExit) as end:
                main()
        code = end.value.code
        assert code is None or isinstance(code, int)
        return CompletedProcess(words, code or 0, out.getvalue(), err.getvalue())

    return call


@contextmanager
def _logging_as_it_was() -> Iterator[None]:
    """The command sets up logging for its process, which other tests of this process should not notice."""
    ours, nibabels = logging.getLogger("rdvit"), logging.getLogger("nibabel.global")
    handlers, propagate, levels = ours.handlers[:], ours.propagate, (ours.level, nibabels.level)
    try:
        yield
    finally:
        ours.handlers[:], ours.propagate = handlers, propagate
        ours.setLevel(levels[0])
        nibabels.setLevel(levels[1])


@pytest.fixture(scope="session")
def phantom(phantom: Path) -> Path:
    """The phantom, after the word on its spacing: it is said once per process, by whichever test happens to come first."""
    read_image(phantom / "training" / "patient001" / "patient001_frame01.nii.gz")
    return phantom


@pytest.fixture(scope="session")
def tiny_flags() -> list[str]:
    """Options that make a training last a second; two epochs unless ``--epochs`` comes after them."""
    settings = [word for setting in TINY_SETTINGS for word in ("--set", setting)]
    return [*settings, "--device", "cpu", "--precision", "fp32", "--no-mlflow", "--epochs", "2"]


@pytest.fixture(scope="session")
def training(
    tmp_path_factory: pytest.TempPathFactory,
    phantom: Path,
    rdvit: Callable[..., CompletedProcess[str]],
    tiny_flags: list[str],
) -> CompletedProcess[str]:
    """The outcome of a whole ``rdvit train --json`` on the phantom."""
    runs = tmp_path_factory.mktemp("cli") / "runs"
    return rdvit("train", "--data", phantom, "--out", runs / "tiny", "--runs", runs, "--json", *tiny_flags)


@pytest.fixture(scope="session")
def trained_run(training: CompletedProcess[str]) -> Path:
    """The run folder that ``training`` made, called ``tiny``, the only run in its parent folder; read-only."""
    assert training.returncode == 0, training.stderr
    return Path(json.loads(training.stdout)["run"]["folder"])
