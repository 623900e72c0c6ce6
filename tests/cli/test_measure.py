"""`rdvit measure` on small NIfTI files: JSON on standard output, everything else on standard error."""

from __future__ import annotations

import json
import os
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

from rdvit.cli.measure import measure, parse_labels
from rdvit.errors import ConfigError, RdvitError

SHARED = Path(os.environ.get("RDVIT_SHARED", Path(__file__).resolve().parents[3] / "shared" / "data"))

app = typer.Typer()
app.command()(measure)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def write(path: Path, lv: int, description: str = "") -> Path:
    """A label map of 2 x 2 x 10 mm voxels (0.04 mL): 100 voxels RV, 50 MYO and `lv` voxels LV in ACDC's values."""
    flat = np.zeros(12 * 12 * 5, dtype=np.uint8)
    flat[:100], flat[100:150], flat[150 : 150 + lv] = 1, 2, 3
    image = nib.Nifti1Image(flat.reshape(12, 12, 5), np.diag([2.0, 2.0, 10.0, 1.0]))
    image.header["descrip"] = description
    nib.save(image, path)
    return path


def test_one_file_gives_volumes_and_leaves_standard_output_empty(tmp_path: Path) -> None:
    result = run(write(tmp_path / "seg.nii.gz", lv=200))
    assert result.exit_code == 0 and result.stdout == ""
    assert "LV" in result.stderr and "8.0" in result.stderr
    assert "ACDC" in result.stderr  # says whose names it took


def test_json_alone_on_standard_output(tmp_path: Path) -> None:
    result = run(write(tmp_path / "seg.nii.gz", lv=200), "--json")
    read = json.loads(result.stdout)
    assert read["volumes_ml"] == pytest.approx({"RV": 4.0, "MYO": 2.0, "LV": 8.0})
    assert read["spacing_mm"] == pytest.approx([2.0, 2.0, 10.0])


def test_two_phases_give_ejection_fraction_and_mass(tmp_path: Path) -> None:
    ed, es = write(tmp_path / "ed.nii.gz", lv=200), write(tmp_path / "es.nii.gz", lv=80)
    result = run("--ed", ed, "--es", es, "--json")
    measures = json.loads(result.stdout)["measures"]
    assert measures["LV_EF_percent"] == pytest.approx(60.0)
    assert measures["LV_EDV_ml"] == pytest.approx(8.0)
    assert measures["RV_EF_percent"] == pytest.approx(0.0)
    assert measures["LV_mass_g"] == pytest.approx(2.0 * 1.05)
    assert "60.0 %" in result.stderr and "swapped" not in result.stderr
    assert "swapped" in run("--ed", es, "--es", ed).stderr


def test_empty_heart_has_a_null_ejection_fraction(tmp_path: Path) -> None:
    empty = write(tmp_path / "empty.nii.gz", lv=0)
    result = run("--ed", empty, "--es", empty, "--json")
    assert json.loads(result.stdout)["measures"]["LV_EF_percent"] is None


def test_class_names_come_from_the_option_then_the_file(tmp_path: Path) -> None:
    seg = write(tmp_path / "seg.nii.gz", lv=200, description="rdvit: 1=LV 2=MYO 3=RV")
    from_file = run(seg, "--json")
    assert json.loads(from_file.stdout)["volumes_ml"] == pytest.approx({"LV": 4.0, "MYO": 2.0, "RV": 8.0})
    assert "ACDC" not in from_file.stderr
    named = run(seg, "--labels", "1=anterior,2=posterior", "--json")
    volumes = json.loads(named.stdout)["volumes_ml"]
    assert volumes == pytest.approx({"anterior": 4.0, "posterior": 2.0, "label 3": 8.0})


def test_structures_without_cardiac_names_have_volumes_only(tmp_path: Path) -> None:
    seg = write(tmp_path / "seg.nii.gz", lv=200)
    result = run("--ed", seg, "--es", seg, "--labels", "1=a,2=b,3=c", "--json")
    assert json.loads(result.stdout)["measures"] == {}
    assert "--labels" in result.stderr


def test_file_name_with_brackets_is_shown_as_it_is(tmp_path: Path) -> None:
    assert "seg[bold]1.nii" in run(write(tmp_path / "seg[bold]1.nii", lv=10)).stderr


def test_help_is_for_users() -> None:
    text = run("--help").stdout
    assert "ejection fraction" in text and "Raises" not in text


def test_wrong_usage_is_told(tmp_path: Path) -> None:
    seg = write(tmp_path / "seg.nii.gz", lv=10)
    usages: list[list[str | Path]] = [[], ["--ed", seg], ["--es", seg], [seg, "--ed", seg, "--es", seg]]
    for arguments in usages:
        assert isinstance(run(*arguments).exception, ConfigError)
    assert isinstance(run(tmp_path / "absent.nii.gz").exception, RdvitError)


def test_labels_option() -> None:
    assert parse_labels("1=RV, 2=MYO,3=LV") == {1: "RV", 2: "MYO", 3: "LV"}
    for wrong in ("", "RV", "1=RV,1=LV", "1=RV,2=RV", "0=background", "1=RV,", "x=RV"):
        with pytest.raises(ConfigError, match="--labels"):
            parse_labels(wrong)


def test_true_spacing_of_acdc() -> None:
    folder = SHARED / "acdc" / "training" / "patient001"
    if not folder.is_dir():
        pytest.skip(f"ACDC's patient001 is not in {folder}")
    result = run(folder / "patient001_frame01_gt.nii.gz", "--json")
    assert json.loads(result.stdout)["volumes_ml"]["LV"] == pytest.approx(295.5, abs=0.1)  # 12.1 by the raw affine
