"""Clinical measures: phantoms with known volumes, and the mean ejection fractions of ACDC's own labels."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from rdvit.errors import DataError
from rdvit.evaluation.cardiac import agreement, cardiac_measures, cine_measures, ejection_fraction, structure_volumes_ml

SHARED = Path(os.environ.get("RDVIT_SHARED", Path(__file__).resolve().parents[3] / "shared" / "data"))
NAMES = {1: "RV", 2: "MYO", 3: "LV"}


def test_volume_counts_voxels_and_not_label_values() -> None:
    labels = np.zeros((10, 10, 5), dtype=np.uint8)
    labels[0:5, 0:5, 0:4] = 3  # 100 voxels
    labels[5:10, 0:5, 0:2] = 1  # 50 voxels
    assert structure_volumes_ml(labels, (2.0, 2.0, 10.0), NAMES) == pytest.approx({"RV": 2.0, "MYO": 0.0, "LV": 4.0})
    swapped = {1: "LV", 2: "MYO", 3: "RV"}
    assert structure_volumes_ml(labels, (2.0, 2.0, 10.0), swapped)["LV"] == pytest.approx(2.0)


def test_volume_needs_a_true_spacing() -> None:
    with pytest.raises(DataError, match="positive"):
        structure_volumes_ml(np.ones((2, 2, 2), dtype=np.uint8), (1.0, 1.0, -10.0), NAMES)


def test_ejection_fraction_of_known_volumes() -> None:
    assert ejection_fraction(120.0, 48.0) == pytest.approx(60.0)
    assert ejection_fraction(100.0, 110.0) == pytest.approx(-10.0)
    assert np.isnan(ejection_fraction(0.0, 0.0))


def test_measures_of_a_known_heart() -> None:
    measures = cardiac_measures({"LV": 150.0, "RV": 160.0, "MYO": 100.0}, {"LV": 60.0, "RV": 80.0, "MYO": 105.0})
    assert measures == pytest.approx(
        {
            **{"LV_EDV_ml": 150.0, "LV_ESV_ml": 60.0, "LV_SV_ml": 90.0, "LV_EF_percent": 60.0},
            **{"RV_EDV_ml": 160.0, "RV_ESV_ml": 80.0, "RV_SV_ml": 80.0, "RV_EF_percent": 50.0},
            "LV_mass_g": 105.0,
        }
    )


def test_only_structures_with_a_name_are_measured() -> None:
    assert set(cardiac_measures({"LV": 1.0}, {"LV": 1.0})) == {"LV_EDV_ml", "LV_ESV_ml", "LV_SV_ml", "LV_EF_percent"}
    assert cardiac_measures({"anterior": 1.0}, {"anterior": 1.0}) == {}
    assert set(cardiac_measures({"LV": 1.0, "MYO": 2.0}, {})) == {"LV_mass_g"}


def test_agreement_of_known_pairs() -> None:
    result = agreement([52.0, 40.0, 66.0, np.nan], [50.0, 42.0, 60.0, 55.0])
    differences = [2.0, -2.0, 6.0]
    assert result["n"] == 3
    assert result["bias"] == pytest.approx(2.0)
    assert result["mean_absolute_error"] == pytest.approx(10 / 3)
    assert result["sd"] == pytest.approx(np.std(differences, ddof=1)) == pytest.approx(4.0)
    assert (result["loa_low"], result["loa_high"]) == pytest.approx((2 - 7.84, 2 + 7.84))
    assert result["pearson_r"] == pytest.approx(np.corrcoef([52, 40, 66], [50, 42, 60])[0, 1])


def test_agreement_is_undefined_without_enough_pairs() -> None:
    assert agreement([], [])["n"] == 0 and np.isnan(agreement([], [])["bias"])
    one = agreement([5.0], [4.0])
    assert one["bias"] == 1.0 and np.isnan([one["sd"], one["loa_low"], one["pearson_r"]]).all()
    assert np.isnan(agreement([1.0, 2.0], [1.0, 2.0])["pearson_r"])
    assert np.isnan(agreement([1.0, 2.0, 3.0], [4.0, 4.0, 4.0])["pearson_r"])


def test_mean_lv_ejection_fraction_of_the_acdc_groups() -> None:
    nib = pytest.importorskip("nibabel")
    root = SHARED / "acdc" / "training"
    if not root.is_dir():
        pytest.skip(f"ACDC's training set is not in {root}")
    fractions: dict[str, list[float]] = {}
    for folder in sorted(root.glob("patient*")):
        info = dict(line.split(": ", 1) for line in (folder / "Info.cfg").read_text().splitlines() if ": " in line)
        volumes = []
        for phase in ("ED", "ES"):
            image = nib.load(folder / f"{folder.name}_frame{int(info[phase]):02d}_gt.nii.gz")
            labels = np.asanyarray(image.dataobj)
            volumes.append(structure_volumes_ml(labels, image.header.get_zooms()[:3], NAMES))
        fractions.setdefault(info["Group"].strip(), []).append(cardiac_measures(*volumes)["LV_EF_percent"])
    means = {group: float(np.mean(values)) for group, values in fractions.items()}
    assert means == pytest.approx({"DCM": 18.4, "MINF": 31.0, "RV": 54.7, "NOR": 60.3, "HCM": 67.4}, abs=0.1)


def test_cine_finds_the_phases_by_the_left_ventricle() -> None:
    frames = [(90.0, 110.0, 100.0), (99.0, 120.0, 100.0), (60.0, 48.0, 99.0)]
    curve = [dict(zip(("RV", "LV", "MYO"), volumes, strict=True)) for volumes in frames]
    measures = cine_measures(curve)
    assert (measures["ED_frame"], measures["ES_frame"]) == (2, 3)
    assert measures["LV_EF_percent"] == pytest.approx(60.0)
    assert measures["RV_EDV_ml"] == 99.0 and measures["LV_mass_g"] == pytest.approx(105.0)
    assert cine_measures([{"liver": 1.0}]) == {}
