"""Which data set is taken when none is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rdvit.data import phantom as phantom_module
from rdvit.data.default import PHANTOM_FOLDER, default_data
from rdvit.errors import DataError


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Works in an empty folder, without the user's own choice."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RDVIT_DATA", raising=False)
    return tmp_path


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders for which a phantom was asked; it only gets its description, since a full one takes seconds."""
    folders: list[Path] = []

    def write(out: Path, **_: Any) -> Path:
        folders.append(out)
        out.mkdir(parents=True)
        (out / "phantom.json").write_text("{}")
        return out

    monkeypatch.setattr(phantom_module, "write_phantom", write)
    return folders


def test_the_environment_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[Path]) -> None:
    for folder in ("mine", "data/ACDC"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setenv("RDVIT_DATA", str(tmp_path / "mine"))
    path, why = default_data()
    assert path == tmp_path / "mine"
    assert "$RDVIT_DATA" in why
    assert not made


def test_an_environment_that_names_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a reason to fall back: a typo would train on the phantom."""
    (tmp_path / "data/ACDC").mkdir(parents=True)
    monkeypatch.setenv("RDVIT_DATA", str(tmp_path / "typo"))
    with pytest.raises(DataError, match=r"typo.*RDVIT_DATA"):
        default_data()


def test_acdc_comes_before_the_phantom(tmp_path: Path, made: list[Path]) -> None:
    (tmp_path / "data/ACDC").mkdir(parents=True)
    path, why = default_data()
    assert path == Path("data/ACDC")
    assert "default" in why
    assert not made


def test_the_phantom_is_made_once(made: list[Path]) -> None:
    for _ in range(2):
        path, why = default_data()
        assert path == PHANTOM_FOLDER
        assert "synthetic" in why
    assert made == [PHANTOM_FOLDER]
