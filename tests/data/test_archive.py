"""Zip archives as data sets: the content is there, and nothing of a hostile one gets out of its folder or fills the disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from rdvit.data import archive
from rdvit.data.archive import is_archive, origin, unpack
from rdvit.data.datalist import load_data
from rdvit.errors import DataError


def zipped(path: Path, content: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as made:
        for name, data in content.items():
            made.writestr(name, data)
    return path


def test_the_content_is_unpacked_once_and_again_when_the_file_changed(tmp_path: Path) -> None:
    path = zipped(tmp_path / "set.pack", {"a/b.txt": b"first", "c": b""})
    folder = unpack(path)
    assert (folder / "a" / "b.txt").read_bytes() == b"first" and (folder / "c").read_bytes() == b""
    assert unpack(tmp_path / "." / "set.pack") == folder
    zipped(path, {"a/b.txt": b"the second"})
    assert (unpack(path) / "a" / "b.txt").read_bytes() == b"the second"


def test_the_folder_goes_with_the_process(tmp_path: Path) -> None:
    path = zipped(tmp_path / "set.zip", {"a": b"x"})
    code = "import sys, pathlib; from rdvit.data.archive import unpack; print(unpack(pathlib.Path(sys.argv[1])))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path / "temporary")}
    (tmp_path / "temporary").mkdir()
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True, env=environment)
    assert (tmp_path / "temporary").resolve() in Path(done.stdout.strip()).parents
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_file_has_one_name_in_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = zipped(tmp_path / "set.zip", {"a/b": b"x"})
    first = unpack(path) / "a" / "b"
    name, time = origin(first), first.stat().st_mtime_ns
    monkeypatch.setattr(archive, "_folders", {})  # as in a new process
    second = unpack(path) / "a" / "b"
    assert first != second and origin(second) == name == str(path.resolve() / "a" / "b")
    assert second.stat().st_mtime_ns == time == path.stat().st_mtime_ns
    assert origin(path) == str(path)  # what came from no archive keeps its path


@pytest.mark.parametrize("name", ["../out", "a/../../out", "/out", "a//out", "C:out", "..\\out", "a\nb", "./out"])
def test_names_that_lead_elsewhere_are_refused(name: str, tmp_path: Path) -> None:
    path = zipped(tmp_path / "set.zip", {"good": b"x", name: b"out"})
    before = set(tmp_path.rglob("*"))
    with pytest.raises(DataError, match="lead out of its folder"):
        unpack(path)
    assert set(tmp_path.rglob("*")) == before


def test_archives_that_promise_too_much_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDVIT_MAX_GB", "0.001")
    assert unpack(zipped(tmp_path / "small.zip", {"a": bytes(500_000), "b": bytes(400_000)}))
    path = zipped(tmp_path / "large.zip", {"a": bytes(600_000), "b": bytes(500_000)})
    assert path.stat().st_size < 3000
    with pytest.raises(DataError, match=r"large.zip: unpacks to 0.0011 GB; the limit is 0.001 GB .RDVIT_MAX_GB"):
        unpack(path)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_member_that_holds_more_than_it_says_is_refused(method: int, tmp_path: Path) -> None:
    path = zipped(tmp_path / "liar.zip", {"a": bytes(3_000_000)}, method)
    data = path.read_bytes()
    assert data.count((3_000_000).to_bytes(4, "little")) == 2  # before the member and in the table of contents
    path.write_bytes(data.replace((3_000_000).to_bytes(4, "little"), (1000).to_bytes(4, "little")))
    with pytest.raises(DataError, match="cannot be unpacked"):
        unpack(path)


@pytest.mark.parametrize("damage", ["cut", "content", "flag", "method", "twice"])
def test_damaged_and_odd_archives_give_one_clear_error(damage: str, tmp_path: Path) -> None:
    path = zipped(tmp_path / "set.zip", {"a": os.urandom(2000)})
    data = bytearray(path.read_bytes())
    table = data.index(b"PK\x01\x02")
    if damage == "cut":
        data = data[1000:]
    elif damage == "content":
        data[1000] ^= 0xFF
    elif damage == "flag":
        data[6] |= 1
        data[table + 8] |= 1  # encrypted
    elif damage == "method":
        data[8] = data[table + 10] = 77
    path.write_bytes(data)
    if damage == "twice":
        with zipfile.ZipFile(path, "a") as again, pytest.warns(UserWarning, match="Duplicate"):
            again.writestr("a", b"other")
    with pytest.raises(DataError, match=r"set.zip: cannot be unpacked: \S"):
        unpack(path)


def test_any_zip_with_the_content_of_a_folder_is_a_data_set(tmp_path: Path) -> None:
    voxels = nib.Nifti1Image(np.arange(8, dtype=np.uint8).reshape(2, 2, 2), np.eye(4)).to_bytes()
    content = {f"{folder}/case.nii": voxels for folder in ("imagesTr", "labelsTr")}
    path = zipped(
        tmp_path / "lungs.zip", content | {"dataset.json": json.dumps({"labels": {"0": "none", "1": "lung"}}).encode()}
    )
    data = load_data(path)
    assert (data.name, data.root, data.class_names) == ("lungs", path, {1: "lung"})
    assert [case.id for case in data.cases] == ["case"]
    with pytest.raises(DataError, match="no data set found"):
        load_data(zipped(tmp_path / "other.zip", {"thesis.tex": b""}))
    (tmp_path / "text").write_text("PK")
    assert not is_archive(tmp_path / "text")
    with pytest.raises(DataError, match="a zip archive of one"):
        load_data(tmp_path / "text")
