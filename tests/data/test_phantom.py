"""The phantom: voxels against the closed form, the closed form against numerical integration, files against ACDC's."""

from __future__ import annotations

import json
import math
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from rdvit.data import phantom
from rdvit.data.phantom import PhantomPatient, draw_labels, make_patient, write_phantom
from rdvit.data.phantom_heart import LV, MYO, RV, boundaries, heart_measures, heart_shape, heart_volumes
from rdvit.errors import ConfigError, DataError

PATIENTS = 10
GROUPS = ("NOR", "DCM", "HCM", "MINF", "RV")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_phantom(tmp_path_factory.mktemp("phantom") / "set", PATIENTS, cines=2)


def truth_of(folder: Path) -> dict[str, dict]:
    return json.loads((folder / "phantom.json").read_text())["patients"]


def info_of(folder: Path, name: str) -> dict[str, str]:
    lines = (folder / "training" / name / "Info.cfg").read_text().splitlines()
    return dict(line.split(": ") for line in lines)


def load(folder: Path, name: str, suffix: str) -> tuple[np.ndarray, nib.Nifti1Header]:
    image = nib.load(folder / "training" / name / f"{name}_{suffix}.nii.gz")
    return np.asarray(image.dataobj), image.header


def counted_ml(labels: np.ndarray, spacing: tuple[float, ...]) -> dict[int, float]:
    return {label: float(np.count_nonzero(labels == label) * np.prod(spacing) / 1000) for label in (RV, MYO, LV)}


def test_voxels_on_disk_agree_with_the_closed_form(folder: Path) -> None:
    assert len(truth_of(folder)) == PATIENTS
    for name, truth in truth_of(folder).items():
        info = info_of(folder, name)
        (ed, ed_header), (es, es_header) = (load(folder, name, f"frame{int(info[key]):02d}_gt") for key in ("ED", "ES"))
        ed_ml, es_ml = counted_ml(ed, ed_header.get_zooms()), counted_ml(es, es_header.get_zooms())
        measured = {"myo_ed_ml": ed_ml[MYO], "myo_es_ml": es_ml[MYO], "lv_mass_g": 1.05 * ed_ml[MYO]}
        for key, label in (("lv", LV), ("rv", RV)):
            measured[f"{key}_edv_ml"], measured[f"{key}_esv_ml"] = ed_ml[label], es_ml[label]
            measured[f"{key}_ef_percent"] = 100 * (1 - es_ml[label] / ed_ml[label])
        expected = {key: value for key, value in truth.items() if key.endswith(("_ml", "_percent", "_g"))}
        assert measured == pytest.approx(expected, rel=0.02), name


def test_voxels_of_many_patients_agree_with_the_closed_form() -> None:
    for number in range(1, 61):
        patient = make_patient(number, seed=7)
        for phase in (0, 1):
            counted = counted_ml(draw_labels(patient, phase), patient.spacing)
            assert counted == pytest.approx(heart_volumes(patient.heart, phase), rel=0.02), (number, phase)


@pytest.mark.parametrize("phase", [0, 0.4, 1])
def test_closed_form_is_the_integral_of_the_sections(phase: float) -> None:
    heart = make_patient(5).heart
    shape = heart_shape(heart, phase)
    depth, steps = shape.length + shape.wall, 2000
    z = (np.arange(steps) + 0.5) * depth / steps
    phi = (np.arange(steps) + 0.5) * 2 * math.pi / steps - math.pi
    _, endo, epi, rv = boundaries(heart, shape, np.cos(phi)[:, None, None], np.sin(phi)[:, None, None], z)
    areas = {RV: math.pi * (rv**2 - epi**2).mean((0, 1)), MYO: math.pi * (epi**2 - endo**2), LV: math.pi * endo**2}
    integrals = {label: area.sum() * depth / steps / 1000 for label, area in areas.items()}
    assert integrals == pytest.approx(heart_volumes(heart, phase), rel=1e-5)


@pytest.mark.parametrize("number", range(1, 6))
def test_beat_keeps_the_muscle_and_empties_the_ventricles(number: int) -> None:
    heart = make_patient(number).heart
    ed, middle, es = (heart_volumes(heart, phase) for phase in (0, 0.5, 1))
    assert ed[MYO] == pytest.approx(middle[MYO], rel=1e-9) == pytest.approx(es[MYO], rel=1e-9)
    assert heart_shape(heart, 0).wall == pytest.approx(heart.wall, rel=1e-9)
    assert heart_shape(heart, 1).wall > heart.wall
    assert (ed[LV], ed[RV]) == pytest.approx((heart.lv_edv, heart.rv_edv), rel=1e-9)
    emptied = (heart.lv_edv * (1 - heart.lv_ef), heart.rv_edv * (1 - heart.rv_ef))
    assert (es[LV], es[RV]) == pytest.approx(emptied, rel=1e-9)
    measures = heart_measures(heart)
    assert measures["lv_ef_percent"] == pytest.approx(100 * heart.lv_ef)
    assert measures["lv_mass_g"] == pytest.approx(1.05 * es[MYO])


def test_header_has_the_fault_of_acdc(folder: Path) -> None:
    for name, truth in truth_of(folder).items():
        es = f"frame{truth['es_frame']:02d}"
        for suffix, dtype in (("frame01", "int16"), (es, "int16"), ("frame01_gt", "uint8"), (f"{es}_gt", "uint8")):
            array, header = load(folder, name, suffix)
            assert (int(header["qform_code"]), int(header["sform_code"])) == (0, 2)
            assert np.array_equal(header.get_sform(), np.diag([-1.0, -1.0, 1.0, 1.0]))
            assert np.array_equal(header.get_best_affine(), header.get_sform())
            assert header["pixdim"][1:4] == pytest.approx(truth["spacing_mm"], rel=1e-6)
            assert array.ndim == 3 and array.dtype == dtype and header.get_data_dtype() == dtype


def test_folder_is_laid_out_as_acdc(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["phantom.json", "training"]
    for number in range(1, PATIENTS + 1):
        name = f"patient{number:03d}"
        info = info_of(folder, name)
        assert list(info) == ["ED", "ES", "Group", "Height", "NbFrame", "Weight"]
        assert info["ED"] == "1" and 1 < int(info["ES"]) < int(info["NbFrame"])
        assert info["Group"] == truth_of(folder)[name]["group"] == GROUPS[(number - 1) % 5]
        assert 100 < float(info["Height"]) < 220 and 40 < float(info["Weight"]) < 150
        frames = [f"{name}_frame{int(info[key]):02d}{kind}.nii.gz" for key in ("ED", "ES") for kind in ("", "_gt")]
        cine = [f"{name}_4d.nii.gz"] if number <= 2 else []
        files = {path.name for path in (folder / "training" / name).iterdir()}
        assert files == {"Info.cfg", *frames, *cine}


def touches(labels: np.ndarray, inner: int, outer: int) -> np.ndarray:
    """Where a voxel of `inner` has a neighbour `outer` among its four neighbours in the slice: (X, Y, Z)."""
    found = np.zeros(labels.shape, bool)
    for axis in (0, 1):
        for shift in (-1, 1):
            found |= (labels == inner) & (np.roll(labels, shift, axis) == outer)
    return found


def test_anatomy(folder: Path) -> None:
    for name, truth in truth_of(folder).items():
        for frame in (1, truth["es_frame"]):
            labels, _ = load(folder, name, f"frame{frame:02d}_gt")
            assert np.unique(labels).tolist() == [0, RV, MYO, LV], name
            assert not touches(labels, LV, 0).any() and not touches(labels, LV, RV).any(), name
            with_rv = (labels == RV).any((0, 1))
            assert np.array_equal(touches(labels, RV, MYO).any((0, 1)), with_rv), name
            border = np.concatenate([labels[[0, -1]].ravel(), labels[:, [0, -1]].ravel()])
            assert not border.any(), name


def test_groups_differ_as_in_acdc() -> None:
    patients = [make_patient(number) for number in range(1, 61)]
    means = {
        group: {
            key: np.mean([heart_measures(p.heart)[key] for p in patients if p.group == group])
            for key in heart_measures(patients[0].heart)
        }
        for group in GROUPS
    }

    def ranked(key: str) -> list[str]:
        return sorted(GROUPS, key=lambda group: means[group][key])

    assert ranked("lv_ef_percent") == ["DCM", "MINF", "RV", "NOR", "HCM"]
    assert ranked("lv_edv_ml")[-1] == "DCM"
    assert ranked("lv_mass_g")[-1] == "HCM"
    assert ranked("rv_edv_ml")[-1] == "RV" and ranked("rv_ef_percent")[0] == "RV"
    assert max(GROUPS, key=lambda g: np.mean([p.heart.wall for p in patients if p.group == g])) == "HCM"


def test_grids_vary_as_promised() -> None:
    patients = [make_patient(number) for number in range(1, 101)]
    shapes = np.array([patient.shape for patient in patients])
    spacings = np.array([patient.spacing for patient in patients])
    assert shapes[:, :2].min() >= 95 and shapes[:, :2].max() <= 136
    assert (shapes[:, :2] % 8 != 0).all()
    assert len(np.unique(shapes[:, 0])) > 10
    assert shapes[:, 2].min() >= 6 and shapes[:, 2].max() <= 10
    assert spacings[:, :2].min() >= 1.3 and spacings[:, :2].max() <= 1.8
    assert np.isin(spacings[:, 2], [8, 8.5, 9, 9.5, 10]).all()
    bare = [not draw_labels(patient, 0).any((0, 1)).all() for patient in patients[:20]]
    assert any(bare) and not all(bare)  # some have a slice without a label, as 49 of ACDC's 200 volumes do


def test_small_images_still_hold_the_whole_heart() -> None:
    for number in range(1, 21):
        patient = make_patient(number, shape_range=(48, 64))
        labels = draw_labels(patient, 0)
        assert labels.shape[0] < 64 and labels.shape[1] < 64
        assert not labels[[0, -1]].any() and not labels[:, [0, -1]].any()
        assert counted_ml(labels, patient.spacing) == pytest.approx(heart_volumes(patient.heart, 0), rel=0.06)


def test_cine_beats_and_holds_the_frames(folder: Path) -> None:
    for name in ("patient001", "patient002"):
        info, (cine, header) = info_of(folder, name), load(folder, name, "4d")
        es = int(info["ES"])
        assert cine.shape[3] == int(info["NbFrame"]) and 6 <= cine.shape[3] <= 8
        assert header["pixdim"][1:4] == pytest.approx(truth_of(folder)[name]["spacing_mm"], rel=1e-6)
        for frame in (1, es):
            assert np.array_equal(cine[..., frame - 1], load(folder, name, f"frame{frame:02d}")[0])
        pool_at_ed = load(folder, name, "frame01_gt")[0] == LV  # muscle moves in and darkens it
        assert np.argmin(cine[pool_at_ed].mean(0)) == es - 1


def lv_curve(patient: PhantomPatient) -> list[int]:
    frames = range(1, patient.frames + 1)
    return [int(np.count_nonzero(draw_labels(patient, patient.phase(frame)) == LV)) for frame in frames]


@pytest.mark.parametrize("number", range(1, 6))
def test_volume_curve_falls_to_es_and_rises_again(number: int) -> None:
    patient = make_patient(number)
    assert (patient.phase(1), patient.phase(patient.es_frame)) == (0, 1)
    curve = lv_curve(patient)
    assert np.argmax(curve) == 0 and np.argmin(curve) == patient.es_frame - 1
    assert (np.diff(curve[: patient.es_frame]) < 0).all() and (np.diff(curve[patient.es_frame - 1 :]) > 0).all()


def test_es_frames_differ_between_patients() -> None:
    assert len({make_patient(number).es_frame for number in range(1, 31)}) > 1


def test_intensities_look_like_ssfp(folder: Path) -> None:
    for name in truth_of(folder):
        image, labels = load(folder, name, "frame01")[0].astype(float), load(folder, name, "frame01_gt")[0]
        mean = {label: image[labels == label].mean() for label in (RV, MYO, LV)}
        assert image.min() >= 0
        assert mean[LV] > 2 * mean[MYO] and mean[RV] > 2 * mean[MYO]
        as_bright_as_blood = (labels == 0) & (image > 0.9 * mean[LV])
        assert np.count_nonzero(as_bright_as_blood) > 0.02 * image.size  # intensity alone must not solve the task
        assert np.count_nonzero((labels == 0) & (image < mean[MYO])) > 0.1 * image.size


def bytes_of(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_same_seed_gives_the_same_files_in_sets_of_any_size(folder: Path, tmp_path: Path) -> None:
    few = bytes_of(write_phantom(tmp_path / "few", 2, cines=1) / "training")
    many = bytes_of(folder / "training")
    assert len(few) == 11
    assert all(many[name] == content for name, content in few.items())
    other = bytes_of(write_phantom(tmp_path / "other", 1, seed=1, cines=0) / "training")
    assert other["patient001/patient001_frame01.nii.gz"] != few["patient001/patient001_frame01.nii.gz"]


def test_overwrite_replaces_a_phantom_and_nothing_else(tmp_path: Path) -> None:
    out = write_phantom(tmp_path / "set", 2, cines=0, shape_range=(33, 40))
    with pytest.raises(DataError, match="already holds a phantom"):
        write_phantom(out, 1)
    write_phantom(out, 1, cines=0, shape_range=(33, 40), overwrite=True)
    assert [path.name for path in (out / "training").iterdir()] == ["patient001"]
    assert list(truth_of(out)) == ["patient001"]

    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("precious")
    with pytest.raises(DataError, match="no phantom"):
        write_phantom(mine, 1, overwrite=True)
    with pytest.raises(DataError, match="found a file"):
        write_phantom(mine / "thesis.txt", 1, overwrite=True)
    assert [path.name for path in mine.iterdir()] == ["thesis.txt"]


def test_failure_leaves_an_earlier_phantom_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = write_phantom(tmp_path / "set", 1, cines=0, shape_range=(33, 40))
    before = bytes_of(out)

    def full_disk(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(phantom, "_save", full_disk)
    with pytest.raises(OSError, match="no space"):
        write_phantom(out, 1, seed=1, overwrite=True)
    assert bytes_of(out) == before


@pytest.mark.parametrize("wrong", [{"patients": 0}, {"seed": -1}, {"cines": -1}, {"shape_range": (8, 64)}])
def test_wrong_numbers_are_refused(tmp_path: Path, wrong: dict) -> None:
    with pytest.raises(ConfigError, match="expected"):
        write_phantom(tmp_path / "set", **wrong)
    assert not (tmp_path / "set").exists()
