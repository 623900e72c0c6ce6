"""Files appear complete or not at all."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from rdvit.atomic import atomic, remove_leftovers, write
from rdvit.errors import RdvitError


@pytest.fixture
def umask() -> Iterator[None]:
    """Puts the process's umask back."""
    mask = os.umask(0o022)
    yield
    os.umask(mask)


def test_content_appears_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "model.json"
    with atomic(path) as temporary:
        temporary.write_text("{}")
        assert not path.exists()
        assert temporary.parent == path.parent  # a rename from another disk would be a copy
    assert path.read_text() == "{}"
    assert os.listdir(path.parent) == ["model.json"]


def test_an_older_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a longer old text")
    with atomic(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "a longer old text"
    assert path.read_text() == "new"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_failure_keeps_the_old_file_and_leaves_no_trace(error: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(error), atomic(path) as temporary:
        temporary.write_text("half of the ne")
        raise error
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_failure_of_a_first_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="disk full"), atomic(tmp_path / "a.txt") as temporary:
        temporary.write_text("half")
        raise ValueError("disk full")
    assert os.listdir(tmp_path) == []


def test_failure_of_the_rename_leaves_no_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").mkdir()
    with pytest.raises(OSError), atomic(tmp_path / "a.txt") as temporary:
        temporary.write_text("new")
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.skipif(os.name != "posix", reason="permission bits are POSIX's")
@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_permissions_are_those_of_an_ordinary_file(mask: int, tmp_path: Path, umask: None) -> None:
    os.umask(mask)
    with atomic(tmp_path / "a.txt") as temporary:
        temporary.write_text("new")
    (tmp_path / "plain.txt").write_text("new")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a.txt", "plain.txt")]
    assert modes[0] == modes[1] == 0o666 & ~mask
    assert os.umask(mask) == mask  # asking for the mask must not change it


@pytest.mark.parametrize("name", ["labels.nii.gz", "model.safetensors", "patient.001.nii.gz", "README"])
def test_temporary_name_ends_like_the_final_one(name: str, tmp_path: Path) -> None:
    """Writers choose format and compression by the suffix."""
    with atomic(tmp_path / name) as temporary:
        assert "".join(temporary.suffixes[-2:]).endswith("".join(Path(name).suffixes[-2:]))
        assert temporary.name.startswith(".")  # hidden from whoever lists the folder meanwhile


def test_an_older_file_may_be_kept(tmp_path: Path) -> None:
    path, kept = tmp_path / "a.txt", tmp_path / "a.previous.txt"
    for text in ("first", "second", "third"):
        write(path, text, keep=kept)
    assert (path.read_text(), kept.read_text()) == ("third", "second")
    with pytest.raises(ValueError), atomic(path, keep=kept) as temporary:
        temporary.write_text("fourth")
        raise ValueError
    assert (path.read_text(), kept.read_text()) == ("third", "second")


def test_a_full_disk_is_one_line_and_the_old_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    write(path, "old")

    def full(self: Path, data: bytes) -> int:
        self.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(RdvitError, match=r"a\.txt: cannot be written: No space left on device \(make room\)"):
        write(path, "new", hint="make room")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.txt"]


def test_leftovers_of_a_kill_are_removed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "figures").mkdir()
    for name in (".tmp-abc.pt", "figures/.tmp-x.png", "state.pt", "figures/a.tmp-b.png"):
        (tmp_path / name).touch()
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.tmp-b.png", "figures", "state.pt"]
