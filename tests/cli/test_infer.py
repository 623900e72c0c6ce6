"""``rdvit infer`` on files as they come: masks in the geometry of their image, and one clear line for what cannot be done."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from nibabel.eulerangles import euler2mat

from rdvit.data.volume import Volume
from rdvit.inference.predictor import Prediction, Predictor

Rdvit = Callable[..., CompletedProcess[str]]
Segment = Callable[..., CompletedProcess[str]]

GEOMETRY = (
    *("pixdim", "xyzt_units", "qform_code", "sform_code", "quatern_b", "quatern_c", "quatern_d"),
    *("qoffset_x", "qoffset_y", "qoffset_z", "srow_x", "srow_y", "srow_z"),
)


@pytest.fixture
def segment(rdvit: Rdvit, tiny_model_folder: Path, tmp_path: Path) -> Segment:
    """``segment(image, *options)``: ``rdvit -q infer`` with the tiny model into ``tmp_path / "out"``, unless told otherwise."""

    def call(*words: str | Path) -> CompletedProcess[str]:
        fixed = ("--model", tiny_model_folder, "--out", tmp_path / "out", "--device", "cpu", "--precision", "fp32")
        return rdvit("-q", "infer", *fixed, *words)

    return call


@pytest.fixture(scope="module")
def image(phantom: Path) -> Path:
    return phantom / "training" / "patient001" / "patient001_frame01.nii.gz"


@pytest.fixture(scope="module")
def cine(phantom: Path) -> Path:
    return phantom / "training" / "patient001" / "patient001_4d.nii.gz"


def data_of(path: Path) -> np.ndarray:
    return np.asarray(nib.load(path).dataobj)


def write_oblique(path: Path) -> Path:
    """A double-oblique stack, slices first and flipped, with different qform and sform codes and scaled integers."""
    turn = euler2mat(0.5, -0.4, 0.3)
    affine = np.eye(4)
    affine[:3, :3] = turn @ np.array([[0, 0, 1.7], [0, -1.6, 0], [-9.0, 0, 0]])
    affine[:3, 3] = (-31.5, 40.25, 12.125)
    noise = np.random.default_rng(0).integers(0, 900, (6, 41, 35)).astype(np.int16)
    picture = nib.Nifti1Image(noise, affine)
    picture.set_sform(affine, code=1)
    picture.set_qform(affine, code=3)
    picture.header.set_xyzt_units("mm", "sec")
    picture.header.set_slope_inter(0.5, 10)
    nib.save(picture, path)
    return path


# What comes out


def test_mask_has_the_geometry_of_its_image_bit_for_bit(segment: Segment, image: Path, tmp_path: Path) -> None:
    oblique = write_oblique(tmp_path / "oblique.nii")
    outcome = segment(image, oblique, "--maps")
    assert (outcome.returncode, outcome.stderr, outcome.stdout) == (0, "", "")
    for source, stem in ((image, "patient001_frame01"), (oblique, "oblique")):
        original = nib.load(source)
        for kind, dtype in (("seg", np.uint8), ("halting", np.float32), ("entropy", np.float32)):
            result = nib.load(tmp_path / "out" / f"{stem}_{kind}.nii.gz")
            assert result.shape == original.shape and result.get_data_dtype() == dtype
            assert np.array_equal(result.affine, original.affine)
            for field in GEOMETRY:
                assert result.header[field].tobytes() == original.header[field].tobytes(), field
            assert result.header.get_slope_inter() in ((None, None), (1.0, 0.0))
        labels = data_of(tmp_path / "out" / f"{stem}_seg.nii.gz")
        assert set(np.unique(labels)) <= {0, 1, 2, 3}
    assert b"1=RV 2=MYO 3=LV" in nib.load(tmp_path / "out" / "oblique_seg.nii.gz").header["descrip"].item()


def test_maps_are_what_they_say(segment: Segment, image: Path, tmp_path: Path) -> None:
    segment(image, "--maps", "--loops", "3")
    steps = data_of(tmp_path / "out" / "patient001_frame01_halting.nii.gz")
    entropy = data_of(tmp_path / "out" / "patient001_frame01_entropy.nii.gz")
    assert steps.min() > 1 - 1e-5 and steps.max() < 3 + 1e-5  # resampled, hence not quite whole
    assert entropy.min() >= 0 and entropy.max() <= np.log(4) + 1e-5


def test_preview_is_a_picture(segment: Segment, image: Path, tmp_path: Path) -> None:
    outcome = segment(image, "--preview", "--json")
    (case,) = json.loads(outcome.stdout)["cases"]
    assert Path(case["preview"]) == tmp_path / "out" / "patient001_frame01_preview.png"
    assert Path(case["preview"]).read_bytes().startswith(b"\x89PNG")


def test_json_is_alone_on_standard_output(segment: Segment, image: Path, tmp_path: Path, tiny_model_folder: Path) -> None:
    outcome = segment(image, "--json", "--loops", "4", "--halting", "none")
    result = json.loads(outcome.stdout)
    (case,) = result["cases"]
    assert result["model"] == str(tiny_model_folder) and result["failures"] == []
    assert (case["file"], case["loops"], case["mean_loops"]) == (str(image), 4, 4.0)
    mask = tmp_path / "out" / "patient001_frame01_seg.nii.gz"
    assert case["mask"] == str(mask)
    voxel_ml = float(np.prod(nib.load(image).header.get_zooms())) / 1000
    counted = {name: float((data_of(mask) == value).sum()) * voxel_ml for value, name in ((1, "RV"), (2, "MYO"), (3, "LV"))}
    assert case["volumes_ml"] == pytest.approx(counted)
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["cases"] == [case] and record["model"] == str(tiny_model_folder)


def test_frame_picks_the_frame(segment: Segment, image: Path, cine: Path, tmp_path: Path) -> None:
    alone, first, second = tmp_path / "alone", tmp_path / "first", tmp_path / "second"
    assert segment(image, "--maps", "--out", alone).returncode == 0
    assert segment(cine, "--maps", "--out", first, "--frame", "1").returncode == 0
    assert segment(cine, "--maps", "--out", second, "--frame", "2").returncode == 0
    expected = data_of(alone / "patient001_frame01_entropy.nii.gz")  # frame 1 of the cine is this file
    assert np.array_equal(data_of(first / "patient001_4d_entropy.nii.gz"), expected)
    assert not np.array_equal(data_of(second / "patient001_4d_entropy.nii.gz"), expected)
    assert nib.load(first / "patient001_4d_seg.nii.gz").shape == nib.load(cine).shape[:3]


def test_loops_change_the_result(segment: Segment, image: Path, tmp_path: Path) -> None:
    maps, means = {}, {}
    for loops in (1, 2, 6):
        out = tmp_path / str(loops)
        outcome = segment(image, "--maps", "--json", "--out", out, "--loops", str(loops))
        means[loops] = json.loads(outcome.stdout)["cases"][0]["mean_loops"]
        maps[loops] = data_of(out / "patient001_frame01_entropy.nii.gz")
    assert means[1] == 1 and means[2] == 2 and 2 < means[6] <= 6  # an untrained token halts at loop 4 or so
    assert not np.array_equal(maps[1], maps[2]) and not np.array_equal(maps[2], maps[6])
    trained = segment(image, "--json", "--out", tmp_path / "trained")
    assert json.loads(trained.stdout)["cases"][0]["loops"] == 2  # as trained where not given


def test_auto_and_a_time_limit_say_how_many_loops_they_took(
    segment: Segment, rdvit: Rdvit, image: Path, tmp_path: Path, tiny_model_folder: Path
) -> None:
    cases = {}
    for name, words in {
        "auto": ("--loops", "auto"),
        "hurried": ("--max-seconds", "0.001", "--loops", "3"),
        "patient": ("--max-seconds", "600"),
        "both": ("--max-seconds", "600", "--loops", "auto"),
    }.items():
        outcome = segment(image, "--json", "--halting", "none", "--out", tmp_path / name, *words)
        assert outcome.returncode == 0
        assert ("one loop took" in outcome.stderr) == (name == "hurried")
        (cases[name],) = json.loads(outcome.stdout)["cases"]
        record = json.loads((tmp_path / name / "patient001_frame01_result.json").read_text())
        assert record["loops_taken"] == cases[name]["loops_taken"]
    asked = {name: (case["loops"], case["max_seconds"]) for name, case in cases.items()}
    assert asked == {"auto": ("auto", None), "hurried": (3, 0.001), "patient": (4, 600), "both": ("auto", 600)}
    assert cases["hurried"]["loops_taken"] == 1 < cases["patient"]["loops_taken"] == 4  # at most twice the trained 2
    assert cases["both"]["loops_taken"] == cases["auto"]["loops_taken"] <= 4
    one = tmp_path / "one"
    assert segment(image, "--loops", "1", "--halting", "none", "--out", one).returncode == 0
    mask = "patient001_frame01_seg.nii.gz"
    assert np.array_equal(data_of(tmp_path / "hurried" / mask), data_of(one / mask))
    words = ("--model", tiny_model_folder, "--out", tmp_path / "told", "--max-seconds", "600", "--halting", "none")
    assert "4.00 of 4.00 (at most 4)" in rdvit("infer", image, *words).stderr


def test_two_files_of_one_name_are_told_apart(segment: Segment, image: Path, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        shutil.copy(image, tmp_path / folder / "scan.nii.gz")
    assert segment(tmp_path / "a", tmp_path / "b").returncode == 0
    assert {path.name for path in (tmp_path / "out").glob("*.nii.gz")} == {"a_scan_seg.nii.gz", "b_scan_seg.nii.gz"}


def test_messages_name_the_model_and_the_result(rdvit: Rdvit, image: Path, tiny_model_folder: Path, tmp_path: Path) -> None:
    outcome = rdvit("infer", image, "--model", tiny_model_folder, "--out", tmp_path / "out", "--precision", "fp32")
    assert outcome.returncode == 0 and outcome.stdout == ""
    assert f"model: {tiny_model_folder}" in outcome.stderr and "patient001_frame01_seg.nii.gz" in outcome.stderr


# What goes wrong with one of several


def test_one_bad_file_never_stops_the_others(segment: Segment, image: Path, phantom: Path, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    shutil.copy(image, folder / "c.nii.gz")
    shutil.copy(phantom / "training" / "patient002" / "patient002_frame01.nii.gz", folder / "a.nii.gz")
    (folder / "b.nii.gz").write_text("not an image")
    (folder / "notes.txt").write_text("passed over")
    (folder / "._a.nii.gz").write_text("what macOS leaves behind, passed over")
    outcome = segment(folder, "--json")
    assert outcome.returncode == 1
    assert outcome.stderr.count("\n") == 1 and str(folder / "b.nii.gz") in outcome.stderr
    written = {path.name for path in (tmp_path / "out").iterdir()}
    results = {f"{stem}_{end}" for stem in "ac" for end in ("seg.nii.gz", "result.json")}
    assert written == results | {"run.json", "failures.json"}
    failures = json.loads((tmp_path / "out" / "failures.json").read_text())["failures"]
    assert [failure["file"] for failure in failures] == [str(folder / "b.nii.gz")]
    assert "cannot be read as NIfTI" in failures[0]["reason"]
    result = json.loads(outcome.stdout)
    assert result["failures"] == failures and len(result["cases"]) == 2

    (folder / "b.nii.gz").unlink()
    assert segment(folder, "--overwrite").returncode == 0
    assert not (tmp_path / "out" / "failures.json").exists()


# What is refused


def refused(outcome: CompletedProcess[str], expected: str) -> None:
    """Exit code 2, one line on standard error, nothing on standard output."""
    assert outcome.returncode == 2, outcome.stderr
    assert outcome.stdout == ""
    assert outcome.stderr.startswith("rdvit: error: ") and outcome.stderr.count("\n") == 1, outcome.stderr
    assert expected in outcome.stderr


def write_bad(kind: str, folder: Path) -> Path:
    """A file, or the lack of one, that is no image."""
    path = folder / f"{kind}.nii.gz"
    if kind == "empty":
        path.touch()
    elif kind == "text":
        path.write_text("patient,EF\n1,60\n")
    elif kind == "suffix":
        path = folder / "image.png"
        path.write_bytes(b"\x89PNG")
    elif kind == "nan":
        array = np.ones((16, 16, 3), np.float32)
        array[:, :2] = np.nan  # one voxel in eight
        nib.save(nib.Nifti1Image(array, np.diag([2.0, 2.0, 8.0, 1.0])), path)
    elif kind == "folder":
        path = folder / "nothing"
        path.mkdir()
    return path


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("missing", "missing.nii.gz: no such file"),
        ("empty", "empty.nii.gz: cannot be read as an image: the file is empty"),
        ("text", "text.nii.gz: cannot be read as NIfTI"),
        ("suffix", "not the name of an image"),
        ("nan", "96 of 768 voxels (12.5%) are NaN or infinite"),
        ("folder", "holds no image"),
    ],
)
def test_bad_input_is_one_line(segment: Segment, tmp_path: Path, kind: str, expected: str) -> None:
    refused(segment(write_bad(kind, tmp_path)), expected)
    assert list((tmp_path / "out").glob("*")) == []  # nothing that looks like a result


def test_a_few_bad_voxels_are_repaired_and_reported(segment: Segment, image: Path, tmp_path: Path) -> None:
    source = nib.load(image)
    array = source.get_fdata(dtype=np.float32)
    array[:3, 0, 0] = np.nan
    spoiled = tmp_path / "spoiled.nii.gz"
    nib.save(nib.Nifti1Image(array, source.affine), spoiled)
    outcome = segment(spoiled)
    assert outcome.returncode == 0
    assert "3 voxels are NaN or infinite" in outcome.stderr


def test_a_cine_needs_a_frame_that_it_has(segment: Segment, cine: Path) -> None:
    frames = nib.load(cine).shape[3]
    refused(segment(cine), f"holds {frames} time frames")
    refused(segment(cine, "--frame", "99"), f"has no frame 99, its frames run from 1 to {frames}")


def test_an_output_folder_that_cannot_be_written(segment: Segment, image: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        refused(segment(image, "--out", out, "--model", "none such"), "output folder cannot be written")  # before the model


def test_existing_results_are_kept(segment: Segment, image: Path, tmp_path: Path) -> None:
    mask = tmp_path / "out" / "patient001_frame01_seg.nii.gz"
    mask.parent.mkdir()
    mask.write_text("my corrections of a week")
    refused(segment(image), "--overwrite replaces them")
    assert mask.read_text() == "my corrections of a week"
    assert segment(image, "--overwrite").returncode == 0
    assert nib.load(mask).shape == nib.load(image).shape


@pytest.mark.parametrize(("kind", "option"), [("halting.nii.gz", "--maps"), ("preview.png", "--preview")])
def test_existing_maps_and_previews_are_kept_too(segment: Segment, image: Path, tmp_path: Path, kind: str, option: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / f"patient001_frame01_{kind}").write_text("mine")
    refused(segment(image, option), "exist already")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [f"patient001_frame01_{kind}"]


def test_models_that_are_missing_or_damaged(segment: Segment, image: Path, tiny_model_folder: Path, tmp_path: Path) -> None:
    refused(segment(image, "--model", "none such"), "no model 'none such'")
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny_model_folder, damaged)
    (damaged / "model.safetensors").write_bytes(b"half of a downl")
    refused(segment(image, "--model", damaged), "cannot read the weights")
    (damaged / "model.json").write_text("{")
    refused(segment(image, "--model", damaged), "damaged model description")


def test_without_a_run_the_model_of_the_package_segments_and_says_so(rdvit: Rdvit, image: Path, tmp_path: Path) -> None:
    outcome = rdvit("infer", image, "--out", tmp_path / "out", "--runs", tmp_path / "runs")
    assert outcome.returncode == 0, outcome.stderr
    assert "model: acdc-2d, shipped with rdvit" in outcome.stderr
    assert (tmp_path / "out" / "patient001_frame01_seg.nii.gz").is_file()


def test_options_that_cannot_work(segment: Segment, image: Path) -> None:
    refused(segment(image, "--loops", "0"), "expected at least 1 loop, found 0")
    refused(segment(image, "--loops", "automatic"), "expected a number of loops or auto, found 'automatic'")
    refused(segment(image, "--loops", "2.5"), "expected a number of loops or auto, found '2.5'")
    refused(segment(image, "--max-seconds", "-1"), "expected --max-seconds above 0, found -1")
    refused(segment(image, "--max-seconds", "nan"), "expected --max-seconds above 0, found nan")
    refused(segment(image, "--device", "abacus"), "device 'abacus' cannot be used here")
    assert segment(image, "--precision", "fp8").returncode == 2


def test_debug_shows_where(rdvit: Rdvit, tiny_model_folder: Path, tmp_path: Path) -> None:
    outcome = rdvit("--debug", "infer", tmp_path / "absent.nii", "--model", tiny_model_folder, "--out", tmp_path / "out")
    assert outcome.returncode == 2 and outcome.stdout == ""
    assert "Traceback" in outcome.stderr and "read_image" in outcome.stderr


def test_all_frames_give_a_4d_mask_a_volume_curve_and_measures(segment: Segment, cine: Path, tmp_path: Path) -> None:
    done = segment(cine, "--all-frames", "--maps", "--preview", "--json")
    assert done.returncode == 0, done.stderr
    (case,) = json.loads(done.stdout)["cases"]
    source, mask = nib.load(cine), nib.load(case["mask"])
    assert mask.shape == source.shape
    for field in GEOMETRY:
        np.testing.assert_array_equal(mask.header[field], source.header[field], err_msg=field)
    assert nib.load(case["halting"]).shape == nib.load(case["entropy"]).shape == source.shape

    # Each frame is what --frame K gives, and the curve holds its volumes.
    third = segment(cine, "--frame", "3", "--out", tmp_path / "third", "--json")
    (single,) = json.loads(third.stdout)["cases"]
    np.testing.assert_array_equal(data_of(Path(case["mask"]))[..., 2], data_of(Path(single["mask"])))
    assert case["volumes_per_frame_ml"][2] == single["volumes_ml"]
    rows = Path(case["volumes"]).read_text().splitlines()
    assert rows[0] == "frame,RV_ml,MYO_ml,LV_ml" and len(rows) == source.shape[3] + 1

    curve = [volumes["LV"] for volumes in case["volumes_per_frame_ml"]]
    assert curve[case["measures"]["ED_frame"] - 1] == max(curve)
    assert curve[case["measures"]["ES_frame"] - 1] == min(curve)
    assert case["measures"]["LV_EDV_ml"] == max(curve)


def test_the_frames_of_a_cine_share_the_time(segment: Segment, cine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits, predict = [], Predictor.__call__

    def listen(self: Predictor, volume: Volume, *rest: Any) -> Prediction:
        limits.append(rest[-1])
        return predict(self, volume, *rest)

    monkeypatch.setattr(Predictor, "__call__", listen)
    assert segment(cine, "--all-frames", "--max-seconds", "60").returncode == 0
    assert limits == [60 / len(limits)] * nib.load(cine).shape[3]


def test_a_frame_and_all_frames_contradict_each_other(segment: Segment, cine: Path) -> None:
    done = segment(cine, "--all-frames", "--frame", "2")
    assert done.returncode == 2 and "--all-frames" in done.stderr and done.stdout == ""


def test_a_case_that_fails_leaves_no_older_result_behind(segment: Segment, image: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.nii.gz"
    shutil.copy(image, again)
    assert segment(again).returncode == 0
    again.write_bytes(b"")
    assert segment(again, "--overwrite").returncode == 2
    assert not (tmp_path / "out" / "again_seg.nii.gz").exists()


# Other kinds of files


def test_nrrd_gives_a_nifti_mask_in_its_place(segment: Segment, image: Path, tmp_path: Path) -> None:
    import SimpleITK as sitk  # noqa: N813 - its customary name

    source = tmp_path / "scan.nrrd"
    sitk.WriteImage(sitk.ReadImage(str(write_oblique(tmp_path / "oblique.nii"))), str(source))
    assert segment(source, tmp_path / "oblique.nii").returncode == 0
    from_nrrd, from_nifti = (tmp_path / "out" / f"{stem}_seg.nii.gz" for stem in ("scan", "oblique"))
    np.testing.assert_array_equal(data_of(from_nrrd), data_of(from_nifti))
    np.testing.assert_allclose(nib.load(from_nrrd).affine, nib.load(from_nifti).affine, atol=1e-4)


def test_a_dicom_folder_is_one_input(segment: Segment, tmp_path: Path) -> None:
    pydicom = pytest.importorskip("pydicom", reason='needs pydicom: pip install "rdvit[dicom]"')
    import SimpleITK as sitk  # noqa: N813 - its customary name

    def write_series(uid: str) -> None:
        for z in range(3):
            slice_ = sitk.GetImageFromArray(np.random.default_rng(z).integers(0, 900, (1, 30, 32)).astype(np.int16))
            path = tmp_path / "Scan 1" / f"{uid}-{z}.dcm"
            path.parent.mkdir(exist_ok=True)
            sitk.WriteImage(slice_, str(path))
            header = pydicom.dcmread(path)
            header.SeriesInstanceUID, header.SOPInstanceUID = uid, f"{uid}.{z}"
            header.ImageOrientationPatient, header.ImagePositionPatient = [1, 0, 0, 0, 1, 0], [5, 6, 8.0 * z]
            header.PixelSpacing, header.PatientName = [1.5, 1.5], "Doe^Jane"
            header.save_as(path)

    write_series("1.2.3")
    assert segment(tmp_path / "Scan 1", "--preview").returncode == 0
    mask = nib.load(tmp_path / "out" / "Scan 1_seg.nii.gz")
    assert mask.shape == (32, 30, 3)
    np.testing.assert_allclose(mask.affine, [[-1.5, 0, 0, -5], [0, -1.5, 0, -6], [0, 0, 8, 0], [0, 0, 0, 1]], atol=1e-5)
    write_series("1.2.4")
    refused(segment(tmp_path / "Scan 1", "--overwrite"), "holds 2 series: 1.2.3 (no description, 3 images); 1.2.4")
    assert segment(tmp_path / "Scan 1", "--overwrite", "--series", "2.4").returncode == 0


def test_merged_tokens_give_masks_and_maps_of_full_size(segment: Segment, image: Path, tmp_path: Path) -> None:
    outcome = segment(image, "--merge", "0.4", "--maps", "--json")
    assert outcome.returncode == 0
    (case,) = json.loads(outcome.stdout)["cases"]
    assert case["merge"] == 0.4
    for kind in ("mask", "halting", "entropy"):
        assert data_of(Path(case[kind])).shape == data_of(image).shape
    for rate in ("1", "-0.25"):
        refused = segment(image, "--merge", rate, "--out", tmp_path / "other")
        assert refused.returncode == 2 and f"below 1, the share of tokens to merge away, found {rate}" in refused.stderr
