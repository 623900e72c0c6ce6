"""Finding data sets on disk, and splits that keep patients together."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest

from rdvit.data import acdc
from rdvit.data.datalist import Case, DataList, digest, folds, load_data, patients, select
from rdvit.errors import DataError

SHARED = Path(os.environ.get("RDVIT_SHARED", Path(__file__).resolve().parents[3] / "shared" / "data"))
ACDC = SHARED / "acdc"
HIPPOCAMPUS = SHARED / "hippocampus"


def write_nifti(path: Path, *values: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.Nifti1Image(np.array(values or (0, 1), dtype=np.uint8).reshape(-1, 1, 1), np.eye(4) * 2).to_filename(path)


def write_acdc(root: Path, *numbers: int, suffix: str = ".nii.gz", info: str = "ED: 1\nES: 12\nGroup: DCM\n") -> Path:
    for number in numbers:
        folder = root / f"patient{number:03d}"
        for frame in (1, 12):
            for end in ("", "_gt"):
                write_nifti(folder / f"{folder.name}_frame{frame:02d}{end}{suffix}")
        (folder / "Info.cfg").write_text(info)
    return root


def made_up(**group_sizes: int) -> DataList:
    """A data set without files: two frames for each patient of each group."""
    cases = [
        Case(f"{group}{i:02d}_{phase}", f"{group}{i:02d}", Path("image.nii"), None, group, phase)
        for group, size in group_sizes.items()
        for i in range(size)
        for phase in ("ED", "ES")
    ]
    return DataList("made up", Path("."), tuple(cases), {1: "LV"})


class TestAcdcFolder:
    def test_cases_come_in_pairs(self, tmp_path: Path) -> None:
        data = load_data(write_acdc(tmp_path, 2, 1))
        assert [case.id for case in data.cases] == ["patient001_ED", "patient001_ES", "patient002_ED", "patient002_ES"]
        last = data.cases[-1]
        assert (last.patient, last.group, last.phase) == ("patient002", "DCM", "ES")
        assert last.image.name == "patient002_frame12.nii.gz"
        assert last.label is not None and last.label.name == "patient002_frame12_gt.nii.gz"
        assert data.class_names == {1: "RV", 2: "MYO", 3: "LV"}

    def test_training_is_taken_before_testing(self, tmp_path: Path) -> None:
        write_acdc(tmp_path / "testing", 101)
        assert patients(load_data(tmp_path).cases) == ["patient101"]
        write_acdc(tmp_path / "training", 1)
        assert patients(load_data(tmp_path).cases) == ["patient001"]
        assert patients(load_data(tmp_path / "training").cases) == ["patient001"]
        assert patients(load_data(tmp_path / "testing").cases) == ["patient101"]

    def test_unpacked_files(self, tmp_path: Path) -> None:
        assert load_data(write_acdc(tmp_path, 1, suffix=".nii")).cases[0].image.suffix == ".nii"

    def test_info_is_parsed_by_key(self, tmp_path: Path) -> None:
        path = tmp_path / "Info.cfg"
        path.write_bytes("\ufeffES:11\r\nGroup: RV\r\nWeight: 66.0\r\nNbFrame: 12\r\nED: 4\r\n\r\n".encode())
        assert acdc.read_info(path) == (4, 11, "RV")

    @pytest.mark.parametrize("text", ["ED: 1\n", "ED: one\nES: 2\n", "ED: 0\nES: 2\n", "", "ED 1\nES 12\n"])
    def test_broken_info(self, tmp_path: Path, text: str) -> None:
        write_acdc(tmp_path, 1, info=text)
        with pytest.raises(DataError, match=r"patient001.Info\.cfg: expected a line 'E[DS]: frame number"):
            load_data(tmp_path)

    def test_missing_files_are_named(self, tmp_path: Path) -> None:
        write_acdc(tmp_path, 1, 2)
        (tmp_path / "patient001" / "patient001_frame12.nii.gz").unlink()
        (tmp_path / "patient002" / "patient002_frame01_gt.nii.gz").unlink()
        with pytest.raises(DataError, match=r"2 frame files.*patient001_frame12\.nii\.gz, patient002_frame01_gt"):
            load_data(tmp_path)


class TestNnunetFolder:
    @staticmethod
    def describe(root: Path, **content: object) -> None:
        (root / "dataset.json").write_text(json.dumps(content))

    def test_decathlon(self, tmp_path: Path) -> None:
        for name in ("la_003.nii.gz", "la_001.nii"):
            write_nifti(tmp_path / "imagesTr" / name)
            write_nifti(tmp_path / "labelsTr" / name)
        (tmp_path / "imagesTr" / "._la_001.nii").write_bytes(b"macOS")
        self.describe(tmp_path, name="Left Atrium", labels={"0": "background", "1": "LA"})
        data = load_data(tmp_path)
        assert (data.name, data.class_names) == ("Left Atrium", {1: "LA"})
        assert [(case.id, case.patient) for case in data.cases] == [("la_001", "la_001"), ("la_003", "la_003")]

    def test_nnunet(self, tmp_path: Path) -> None:
        write_nifti(tmp_path / "imagesTr" / "case_0001_0000.nii.gz")
        write_nifti(tmp_path / "labelsTr" / "case_0001.nii.gz")
        self.describe(tmp_path, labels={"background": 0, "MYO": 2, "RV": 1})
        data = load_data(tmp_path)
        assert data.class_names == {1: "RV", 2: "MYO"}
        assert [case.id for case in data.cases] == ["case_0001"]
        assert data.cases[0].image.name == "case_0001_0000.nii.gz"

    def test_classes_are_scanned_without_dataset_json(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        for name, values in (("a.nii", (0, 4)), ("b.nii", (0, 2))):
            write_nifti(tmp_path / "imagesTr" / name)
            write_nifti(tmp_path / "labelsTr" / name, *values)
        assert load_data(tmp_path).class_names == {2: "label_2", 4: "label_4"}
        assert "no class names" in caplog.text

    @pytest.mark.parametrize(
        ("images", "labels", "message"),
        [
            (["a", "b"], ["a"], "1 images have no label in labelsTr: b"),
            (["a"], ["a", "c_x"], "1 labels have no image in imagesTr: c_x"),
            (["a_0000", "a_0001"], ["a"], "a_0001 is a second image of case a"),
            (["a_0000", "a"], ["a"], "a_0000 is a second image of case a"),
            ([".a"], [".a"], "holds no .nii"),
        ],
    )
    def test_what_does_not_pair(self, tmp_path: Path, images: list[str], labels: list[str], message: str) -> None:
        for folder, names in (("imagesTr", images), ("labelsTr", labels)):
            for name in names:
                write_nifti(tmp_path / folder / f"{name}.nii.gz")
        with pytest.raises(DataError, match=message):
            load_data(tmp_path)

    @pytest.mark.parametrize("labels", [{"tumor": [1, 2]}, {"1": 1}, [], {"RV": 1, "LV": 1}, {"RV": True}, {"RV": -1}])
    def test_class_names_that_make_no_sense(self, tmp_path: Path, labels: object) -> None:
        write_nifti(tmp_path / "imagesTr" / "a.nii")
        write_nifti(tmp_path / "labelsTr" / "a.nii")
        self.describe(tmp_path, labels=labels)
        with pytest.raises(DataError, match=r'dataset\.json: "labels"'):
            load_data(tmp_path)


class TestJsonList:
    @staticmethod
    def write(root: Path, **content: object) -> Path:
        for name in ("a", "b", "c"):
            write_nifti(root / "images" / f"{name}.nii.gz")
            write_nifti(root / "labels" / f"{name}.nii.gz")
        (root / "list.json").write_text(json.dumps({"labels": {"1": "LV"}, **content}))
        return root / "list.json"

    @staticmethod
    def item(name: str, **more: object) -> dict[str, Any]:
        return {"image": f"images/{name}.nii.gz", "label": f"./labels/{name}.nii.gz", **more}

    def test_lists_become_named_splits(self, tmp_path: Path) -> None:
        absolute = {"image": str(tmp_path / "images" / "c.nii.gz")}
        named = self.item("a", id="one", patient="p1", group="DCM", phase="ED")
        path = self.write(tmp_path, training=[named, self.item("b")], validation=[absolute], test=["d.nii"], numTest=1)
        data = load_data(path)
        assert data.cases[0] == Case("one", "p1", tmp_path / "images/a.nii.gz", tmp_path / "labels/a.nii.gz", "DCM", "ED")
        assert (data.cases[1].id, data.cases[1].patient) == ("b", "b")
        assert (data.cases[2].id, data.cases[2].label) == ("c", None)
        assert data.splits == {"training": ("one", "b"), "validation": ("c",)}
        assert [case.id for case in select(data, "validation")] == ["c"]
        assert len(select(data)) == 3

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ({"training": []}, "found only the keys labels, training"),
            ({"training": [{"image": "images/z.nii"}]}, "1 of 1 listed files are missing: .*z.nii"),
            ({"training": [{"image": ["images/a.nii.gz"]}]}, '"image" must be a text'),
            ({"training": [{"image": "images/a.nii.gz", "phase": "systole"}]}, '"phase" must be'),
            ({"training": [{"image": "images/a.nii.gz"}, {"imge": "images/b.nii.gz"}]}, "imge"),
            ({"training": [{"image": "images/a.nii.gz", "id": "../a"}]}, "slash"),
            ({"training": [{"image": "images/a.nii.gz", "id": ".."}]}, "nothing but dots"),
            ({"training": [{"image": "images/a.nii.gz", "id": "a\\b"}]}, "backslash"),
            ({"training": [{"image": "images/a.nii.gz"}], "labels": {"1": "../LV"}}, "the name of a class cannot hold a slash"),
            ({"training": [{"image": "images/a.nii.gz"}], "labels": {"1": "LV", "2": "LV"}}, "gives two values one name"),
            ({"training": [{"image": "images/a.nii.gz"}], "name": "../../home"}, "becomes a folder name"),
            ({"all": [{"image": "images/a.nii.gz"}]}, "'all', that name is built in"),
            ({"x": [{"image": "images/a.nii.gz", "id": "1"}, {"image": "images/b.nii.gz", "id": "1"}]}, "called '1'"),
        ],
    )
    def test_what_is_refused(self, tmp_path: Path, content: dict[str, Any], message: str) -> None:
        with pytest.raises(DataError, match=rf"list\.json: .*{message}"):
            load_data(self.write(tmp_path, **content))

    @pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
    def test_what_is_no_json_object(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "list.json").write_text(text, encoding="latin-1")
        with pytest.raises(DataError, match=r"list\.json"):
            load_data(tmp_path / "list.json")


class TestNothingFound:
    def test_says_what_was_looked_for_and_what_is_there(self, tmp_path: Path) -> None:
        (tmp_path / "scans").mkdir()
        with pytest.raises(DataError, match=r"Info\.cfg.*imagesTr.*the folder holds scans"):
            load_data(tmp_path)

    def test_missing_and_foreign_files(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").touch()
        with pytest.raises(DataError, match="no such folder or file"):
            load_data(tmp_path / "none")
        with pytest.raises(DataError, match=r"\.json data list"):
            load_data(tmp_path / "a.csv")


class TestSplits:
    data = made_up(DCM=7, HCM=11, NOR=8)

    def test_folds_are_disjoint_and_complete(self) -> None:
        parts = folds(self.data)
        assert sorted(patient for part in parts for patient in part) == patients(self.data.cases)

    @pytest.mark.parametrize("k", [2, 3, 5])
    def test_folds_are_even_in_total_and_in_each_group(self, k: int) -> None:
        for group in ("", "DCM", "HCM", "NOR"):
            sizes = [sum(patient.startswith(group) for patient in part) for part in folds(self.data, k)]
            assert max(sizes) - min(sizes) <= 1

    def test_folds_do_not_depend_on_the_order_of_cases(self) -> None:
        backwards = DataList("made up", Path("."), self.data.cases[::-1], {1: "LV"})
        assert folds(backwards) == folds(self.data)

    def test_folds_are_the_same_everywhere(self) -> None:
        """Written down, so that a change of the random generator cannot move patients unnoticed."""
        assert folds(made_up(A=5, B=5)) == [
            ["A01", "B02"],
            ["A00", "B00"],
            ["A03", "B04"],
            ["A02", "B03"],
            ["A04", "B01"],
        ]

    def test_train_and_val_part_by_patient(self) -> None:
        for i in range(5):
            train, val = select(self.data, f"fold{i}-train"), select(self.data, f"fold{i}-val")
            assert not set(patients(train)) & set(patients(val))
            assert patients(val) == folds(self.data)[i]
            assert len(train) + len(val) == len(self.data.cases)

    def test_too_few_patients(self) -> None:
        with pytest.raises(DataError, match="at least 5 patients, made up has 4"):
            select(made_up(A=4), "fold0-val")

    @pytest.mark.parametrize("split", ["fold5-val", "fold-val", "train", "", "fold0-val "])
    def test_unknown_split_lists_the_names(self, split: str) -> None:
        with pytest.raises(DataError, match="there are all, fold0-train to fold4-train, fold0-val to fold4-val"):
            select(self.data, split)

    def test_fractions_are_nested_and_stratified(self) -> None:
        inner: set[str] = set()
        for fraction in (0.01, 0.1, 0.25, 0.5, 0.75, 1.0):
            chosen = select(self.data, "fold1-train", fraction)
            outer = set(patients(chosen))
            assert inner <= outer
            assert len(chosen) == 2 * len(outer), "both frames of a patient or none"
            inner = outer
        train = Counter(patient[:3] for patient in inner)
        half = Counter(patient[:3] for patient in patients(select(self.data, "fold1-train", 0.5)))
        assert all(abs(half[group] - train[group] / 2) <= 1 for group in train)

    def test_fraction_sizes(self) -> None:
        data = made_up(A=40, B=40)
        sizes = [len(patients(select(data, "all", fraction))) for fraction in (0.001, 0.1, 0.25, 1)]
        assert sizes == [1, 8, 20, 80]

    @pytest.mark.parametrize("fraction", [0, -0.1, 1.01, float("nan")])
    def test_impossible_fraction(self, fraction: float) -> None:
        with pytest.raises(DataError, match="fraction must lie in"):
            select(self.data, "all", fraction)


class TestDigest:
    def test_follows_names_and_sizes_only(self, tmp_path: Path) -> None:
        cases = load_data(write_acdc(tmp_path / "here", 1, 2)).cases
        same = load_data(write_acdc(tmp_path / "there", 1, 2)).cases
        assert digest(cases) == digest(reversed(same))
        assert digest(cases) != digest(cases[:3])
        with same[0].image.open("ab") as stream:
            stream.write(b"more")
        assert digest(cases) != digest(same)


@pytest.mark.skipif(not ACDC.is_dir(), reason=f"needs {ACDC}")
class TestRealAcdc:
    def test_every_fold_holds_out_four_patients_of_each_group(self) -> None:
        data = load_data(ACDC)
        assert len(data.cases) == 200 and len(patients(data.cases)) == 100
        for i in range(5):
            val = select(data, f"fold{i}-val")
            assert Counter(case.group for case in val) == dict.fromkeys(acdc.GROUPS, 8)

    def test_ten_percent_lie_inside_twenty_five(self) -> None:
        data = load_data(ACDC / "training")
        small, large = (select(data, "fold0-train", fraction) for fraction in (0.1, 0.25))
        assert (len(patients(small)), len(patients(large))) == (8, 20)
        assert set(small) < set(large)
        assert Counter(case.group for case in large) == dict.fromkeys(acdc.GROUPS, 8)

    def test_patient090_has_its_own_frames(self) -> None:
        images = {case.id: case.image.name for case in load_data(ACDC).cases if case.patient == "patient090"}
        assert images == {
            "patient090_ED": "patient090_frame04.nii.gz",
            "patient090_ES": "patient090_frame11.nii.gz",
        }


@pytest.mark.skipif(not HIPPOCAMPUS.is_dir(), reason=f"needs {HIPPOCAMPUS}")
def test_hippocampus_has_80_cases_and_two_classes() -> None:
    data = load_data(HIPPOCAMPUS)
    assert len(data.cases) == 80
    assert data.class_names == {1: "label_1", 2: "label_2"}
