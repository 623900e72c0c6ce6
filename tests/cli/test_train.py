"""``rdvit train``: what the options mean, what is refused, what a signal leaves behind, and the whole way to volumes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import yaml

from rdvit.checkpoint import load_state
from rdvit.config import Config
from rdvit.errors import RdvitError
from rdvit.training import run
from rdvit.training.trainer import Trainer

Rdvit = Callable[..., CompletedProcess[str]]
Settled = Callable[..., Config]


class PlannedError(RdvitError):
    """Stops a command where the training would begin."""


@pytest.fixture
def planned(rdvit: Rdvit, phantom: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settled:
    """``planned("--moe", "--epochs", "3")``: the configuration that ``rdvit train`` would train with."""
    seen: list[Config] = []

    def catch(config: Config, *rest: Any) -> dict[str, Any]:
        seen.append(config)
        raise PlannedError("enough")

    monkeypatch.setattr(run, "start_run", catch)

    def call(*words: str | Path) -> Config:
        outcome = rdvit("train", "--data", phantom, *words)
        assert seen, outcome.stderr
        return seen.pop()

    return call


def refused(outcome: CompletedProcess[str], expected: str) -> None:
    """Exit code 2, nothing on standard output, one line on standard error."""
    assert (outcome.returncode, outcome.stdout) == (2, ""), outcome.stderr
    assert outcome.stderr.startswith("rdvit: error: ") and outcome.stderr.count("\n") == 1, outcome.stderr
    assert expected in outcome.stderr


# The whole way


def test_json_is_alone_on_standard_output(training: CompletedProcess[str], trained_run: Path) -> None:
    summary = json.loads(training.stdout)
    assert summary == json.loads((trained_run / "summary.json").read_text())
    assert summary["run"]["progress"]["epoch"] == 2
    assert "validation, best weights" in training.stderr and "MYO" in training.stderr
    assert f"run folder: {trained_run}" in training.stderr
    assert "8 cases of 4 patients train, 2 cases of 1 patients validate" in training.stderr


def test_run_folder(trained_run: Path) -> None:
    files = {"config.yaml", "split.json", "metrics.csv", "model.safetensors", "model.json", "state.pt", "summary.json"}
    assert {path.name for path in trained_run.iterdir()} == files | {"figures", "state.previous.pt"}
    assert {path.name for path in (trained_run / "figures").iterdir()} == {
        f"{k}_final.png" for k in ("preview", "halting", "curves")
    }
    assert [path.name for path in trained_run.parent.iterdir()] == ["tiny"]  # no mlflow.db with --no-mlflow


def test_from_training_to_ejection_fraction(rdvit: Rdvit, trained_run: Path, phantom: Path, tmp_path: Path) -> None:
    """Train, evaluate (test_evaluate.py), infer both phases with the newest run, score the masks, measure them."""
    (patient,) = json.loads((trained_run / "split.json").read_text())["validation_patients"]
    ed, es = sorted(phantom.glob(f"training/{patient}/*_frame[0-9][0-9].nii.gz"))
    out = tmp_path / "out"
    inferred = rdvit("infer", ed, es, "--runs", trained_run.parent, "--out", out, "--precision", "fp32", "--json")
    assert inferred.returncode == 0
    cases = json.loads(inferred.stdout)["cases"]
    masks = [Path(case["mask"]) for case in cases]

    measured = rdvit("measure", "--ed", masks[0], "--es", masks[1], "--json")
    assert measured.returncode == 0 and "no class names" not in measured.stderr  # they travelled with the masks
    result = json.loads(measured.stdout)
    for case, phase in zip(cases, ("ED", "ES"), strict=True):
        assert result[phase]["volumes_ml"] == pytest.approx(case["volumes_ml"])
    lv = [case["volumes_ml"]["LV"] for case in cases]
    expected = 100 * (lv[0] - lv[1]) / lv[0] if lv[0] else None
    assert result["measures"]["LV_EF_percent"] == pytest.approx(expected)

    for mask, source in zip(masks, (ed, es), strict=True):  # the same masks give the Dice that the training reported
        mask.rename(out / source.name)
    scored = json.loads(rdvit("evaluate", "--pred", out, "--ref", phantom, "--json").stdout)
    reported = json.loads((trained_run / "summary.json").read_text())
    dice = {case["case"]: case["metrics"] for case in scored["metric_per_case"]}
    for case in reported["metric_per_case"]:
        for label, metrics in case["metrics"].items():
            assert dice[case["case"]][label]["Dice"] == pytest.approx(metrics["Dice"])


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than a tiny training."""
    monkeypatch.setattr(Trainer, "_save_figures", lambda self, name: None)


@pytest.mark.usefixtures("no_figures")
def test_resume_trains_on(rdvit: Rdvit, trained_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "copy"
    shutil.copytree(trained_run, folder)
    outcome = rdvit("train", "--resume", folder, "--epochs", "3", "--no-mlflow", "--runs", tmp_path / "runs", "--json")
    assert outcome.returncode == 0
    assert json.loads(outcome.stdout)["run"]["progress"]["epoch"] == 3
    assert len((folder / "metrics.csv").read_text().splitlines()) == 4


# Fine-tuning


@pytest.mark.usefixtures("no_figures")
def test_finetune_says_the_share_and_loads_as_any_model(
    rdvit: Rdvit, trained_run: Path, phantom: Path, tiny_flags: list[str], tmp_path: Path
) -> None:
    flags = ["--set", "training.steps_per_epoch=2", "--set", "training.batch_size=2", *tiny_flags[-7:]]
    words = ("--finetune", trained_run.name, "--train-only", "lora", "--data", phantom, "--out", tmp_path / "run")
    outcome = rdvit("train", *words, "--runs", trained_run.parent, *flags, "--json")
    assert outcome.returncode == 0, outcome.stderr
    model = json.loads(outcome.stdout)["run"]["model"]
    assert model["finetuned_from"] == str(trained_run) and model["train_only"] == "lora"
    assert f"{model['trained_parameters']} of " in outcome.stderr and "parameters are trained" in outcome.stderr
    assert f"fine-tuning {trained_run} with its head" in outcome.stderr
    image = next(phantom.glob("training/*/*_frame01.nii.gz"))
    assert rdvit("infer", image, "--model", tmp_path / "run", "--out", tmp_path / "out").returncode == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--preset", "bvit"], "fine-tuning keeps the network of its model, 2d rdvit; bvit was asked for"),
        (["--moe"], "the dense feed-forward has 88 hidden units, shared and 2 chosen of 8 experts have 256 + 256"),
        (["--dim", "3d", "--train-only", "lora"], "freezes the rest, but the network grows and its new parts are fresh"),
        (["--set", "model.num_heads=4"], "num_heads is 2 there, 4 here"),
    ],
)
def test_finetune_keeps_the_network(rdvit: Rdvit, trained_run: Path, phantom: Path, words: list[str], expected: str) -> None:
    refused(rdvit("-q", "train", "--finetune", trained_run, "--data", phantom, "--no-mlflow", *words), expected)


@pytest.mark.usefixtures("no_figures")
def test_slices_become_volumes_and_experts(
    rdvit: Rdvit, trained_run: Path, phantom: Path, tiny_flags: list[str], tmp_path: Path
) -> None:
    flags = ["--set", "training.steps_per_epoch=2", "--set", "training.batch_size=2", *tiny_flags[-7:]]
    flags += ["--set", "model.experts.hidden_dim=22", "--set", "data.crop_size=auto", "--set", "model.patch_size=auto"]
    words = ("--dim", "3d", "--moe", "--finetune", trained_run, "--data", phantom, "--out", tmp_path / "run", "--no-mlflow")
    outcome = rdvit("train", *words, "--runs", trained_run.parent, *flags, "--json")
    assert outcome.returncode == 0, outcome.stderr
    model = json.loads(outcome.stdout)["run"]["model"]
    assert model["preset"] == "rdvit-moe" and model["finetuned_from"] == str(trained_run)
    back = rdvit("train", "--dim", "2d", "--finetune", tmp_path / "run", "--data", phantom, "--no-mlflow")
    refused(back, "keeps the network of its model, 3d rdvit-moe; 2d was asked for")


# Stopped by a signal


def long_training(phantom: Path, folder: Path, tiny_flags: list[str]) -> list[str]:
    """The words of a training of minutes, in epochs of a fraction of a second."""
    settings = ["--set", "training.steps_per_epoch=5", "--set", "training.validate_every=1000", "--epochs", "1000"]
    return ["train", "--data", str(phantom), "--out", str(folder), "--runs", str(folder.parent), *tiny_flags, *settings]


def terminate_in_the_second_epoch(folder: Path, pid: int, over: threading.Event) -> None:
    """Send SIGTERM to a process soon after its run has saved the first epoch; give up when ``over`` is set."""
    while not (folder / "state.previous.pt").exists():  # the first is from before the first epoch
        if over.wait(0.02):
            return
    os.kill(pid, signal.SIGTERM)


def check_stopped(outcome: CompletedProcess[str], folder: Path) -> int:
    """Exit code, message, and a folder in which all epochs that were done are whole; returns their number."""
    assert outcome.returncode == 128 + signal.SIGTERM, outcome.stderr
    assert outcome.stdout == "" and "Traceback" not in outcome.stderr
    assert f"stopped by SIGTERM; `rdvit train --resume {folder}` continues" in outcome.stderr.splitlines()
    assert not list(folder.glob(".tmp-*"))
    done = load_state(folder)["progress"]["epoch"]
    assert done >= 1 and len((folder / "metrics.csv").read_text().splitlines()) == 1 + done
    return int(done)


@pytest.mark.usefixtures("no_figures")
def test_sigterm_keeps_what_was_done(rdvit: Rdvit, phantom: Path, tiny_flags: list[str], tmp_path: Path) -> None:
    folder, over = tmp_path / "runs" / "stopped", threading.Event()
    sender = threading.Thread(target=terminate_in_the_second_epoch, args=(folder, os.getpid(), over))
    sender.start()
    try:
        outcome = rdvit(*long_training(phantom, folder, tiny_flags))
    finally:
        over.set()
        sender.join()
    done = check_stopped(outcome, folder)
    resumed = rdvit("train", "--resume", folder, "--epochs", str(done + 1), "--no-mlflow", "--runs", folder.parent, "--json")
    assert resumed.returncode == 0
    progress = json.loads(resumed.stdout)["run"]["progress"]
    assert (progress["epoch"], progress["step"]) == (done + 1, 5 * (done + 1))


@pytest.mark.slow
def test_sigterm_to_a_process_of_its_own(phantom: Path, tiny_flags: list[str], tmp_path: Path) -> None:
    folder, over = tmp_path / "runs" / "stopped", threading.Event()
    words = [sys.executable, "-c", "from rdvit.cli.app import main; main()", *long_training(phantom, folder, tiny_flags)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # as in the other tests
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, env=environment, **pipes) as process:
        sender = threading.Thread(target=terminate_in_the_second_epoch, args=(folder, process.pid, over))
        sender.start()
        try:
            out, err = process.communicate(timeout=120)
        finally:
            over.set()
            sender.join()
            process.kill()
    check_stopped(CompletedProcess(words, process.returncode, out, err), folder)


# What the options mean


def test_presets_and_dimensions(planned: Settled) -> None:
    assert (planned().model.preset, planned().model.spatial_dims) == ("rdvit", 2)
    moe = planned("--moe", "--dim", "3d").model
    assert moe.preset == "rdvit-moe" and moe.experts is not None and moe.spatial_dims == 3
    assert planned("--preset", "rdvit-moe", "--moe").model == planned("--moe").model
    assert not planned("--preset", "vit").model.shared_block
    sret = planned("--preset", "sret").model
    assert sret.sret is not None and sret.local_kernel is None


def test_flags_beat_settings_beat_the_file(planned: Settled, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"training": {"epochs": 7, "batch_size": 3, "seed": 4}, "model": {"loops": 5}}))
    config = planned("--config", file, "--set", "training.epochs=8", "--set", "training.batch_size=2", "--epochs", "9")
    assert (config.training.epochs, config.training.batch_size, config.training.seed, config.model.loops) == (9, 2, 4, 5)
    assert planned("--config", file, "--seed", "11").training.seed == 11
    assert planned("--set", "model.local_kernel=[7, 7]").model.local_kernel == (7, 7)
    assert planned("--device", "cpu", "--precision", "bf16").training.precision == "bf16"


def test_minutes_alone_plan_the_learning_rate_over_them(planned: Settled) -> None:
    alone, both = planned("--max-minutes", "2.5").training, planned("--max-minutes", "2.5", "--epochs", "3").training
    assert (alone.epochs, alone.max_minutes) == (None, 2.5)
    assert (both.epochs, both.max_minutes) == (3, 2.5)


def test_data_that_nobody_named_is_said(
    rdvit: Rdvit, planned: Settled, phantom: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(phantom, tmp_path / "data" / "ACDC")
    outcome = rdvit("train")
    said = f"data: {Path('data/ACDC')} (the default; --data or $RDVIT_DATA choose another)"
    assert said in outcome.stderr.splitlines()


# What is refused


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--set", "training.batch_sise=2"], "unknown key 'training.batch_sise', did you mean 'training.batch_size'?"),
        (["--set", "modell.loops=2"], "unknown key 'modell', did you mean 'model'?"),
        (["--set", "model.loops"], "expected --set key.sub=value, found 'model.loops'"),
        (["--set", "model.loops=0"], "model.loops: Input should be greater than or equal to 1, found 0"),
        (["--precision", "fp8"], "training.precision"),
        (["--preset", "resnet"], "unknown preset 'resnet' (one of vit, bvit, rdvit, rdvit-moe, revit, softmor, sret)"),
        (["--moe", "--preset", "vit"], "--moe is preset rdvit-moe and contradicts --preset vit"),
        (["--fold", "5"], "expected --fold 0 to 4 or all, found 5"),
        (["--fraction", "0"], "fraction must lie in (0, 1], got 0"),
        (["--data", "none such"], "none such: no such folder or file"),
        (["--config", "none such.yaml"], "none such.yaml: expected a YAML file, found nothing there"),
        (["--resume", "some", "--set", "seed=1"], "--resume continues a run as it began; --out and --set begin a new one"),
        (["--finetune", "none such"], "no model 'none such'"),
        (["--finetune", "some", "--resume", "some"], "--resume continues a run as it began"),
        (["--train-only", "lora"], "--train-only freezes the rest of a trained model, which --finetune MODEL names"),
    ],
)
def test_wrong_options_are_one_line(rdvit: Rdvit, phantom: Path, tmp_path: Path, words: list[str], expected: str) -> None:
    out = tmp_path / "runs" / "run"
    refused(rdvit("-q", "train", "--data", phantom, "--out", out, "--no-mlflow", *words), expected)
    assert not (tmp_path / "runs").exists()


def test_nothing_to_resume(rdvit: Rdvit, tmp_path: Path) -> None:
    refused(rdvit("train", "--resume", tmp_path / "none", "--no-mlflow"), "none: no run to resume")


def test_an_existing_run_is_kept(rdvit: Rdvit, trained_run: Path, phantom: Path, tiny_flags: list[str]) -> None:
    before = (trained_run / "model.safetensors").read_bytes()
    words = ("--data", phantom, "--out", trained_run, "--runs", trained_run.parent, *tiny_flags)
    refused(rdvit("train", *words), f"{trained_run}: holds a run already (--resume {trained_run} continues it)")
    assert (trained_run / "model.safetensors").read_bytes() == before


def test_a_run_folder_that_cannot_be_made(rdvit: Rdvit, phantom: Path, tmp_path: Path, tiny_flags: list[str]) -> None:
    (tmp_path / "file").touch()
    refused(rdvit("train", "--data", phantom, "--out", tmp_path / "file" / "run", *tiny_flags), "cannot be created")


def test_data_without_labels(rdvit: Rdvit, phantom: Path, tmp_path: Path) -> None:
    (tmp_path / "imagesTr").mkdir()
    (tmp_path / "labelsTr").mkdir()
    for number, image in enumerate(sorted(phantom.glob("training/*/*_frame01.nii.gz"))):
        shutil.copy(image, tmp_path / "imagesTr" / f"case{number}_0000.nii.gz")
    outcome = rdvit("train", "--data", tmp_path, "--out", tmp_path / "run")
    refused(outcome, "images have no label in labelsTr")
    assert re.search(r"5 images .* case0", outcome.stderr)
