"""From an image to labels and maps on the file's own grid, whatever its orientation, size and spacing.

Two kinds of networks: `Levels`, which labels each voxel by its intensity, so that the right answer is known for every voxel,
and small recurrent networks with noisy weights, so that nothing is the same everywhere.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nibabel import orientations
from scipy.spatial.transform import Rotation
from torch import Tensor, nn

from rdvit.checkpoint import ModelInfo, load_model
from rdvit.config import Config
from rdvit.data.transforms import normalize
from rdvit.data.volume import Volume, read_image
from rdvit.errors import ConfigError, DataError, ModelError
from rdvit.evaluation.metrics import dice
from rdvit.inference import predictor as predictor_module
from rdvit.inference.anytime import Pace
from rdvit.inference.precision import Precision
from rdvit.inference.predictor import Predictor
from rdvit.models.build import build_segmenter
from rdvit.models.recurrence import LoopRecord

SHARED = Path(os.environ.get("RDVIT_SHARED", Path(__file__).resolve().parents[3] / "shared" / "data"))
PATIENT_1 = SHARED / "acdc" / "training" / "patient001" / "patient001_frame01.nii.gz"

ACDC = {1: "RV", 2: "MYO", 3: "LV"}
MakeConfig = Callable[..., Config]


class Levels(nn.Module):
    """Labels voxels by the nearest of some intensities; says of each token that it took as many loops as its number.

    Args:
        config: Where the patch size comes from.
        values: Intensity of each class, background first.
    """

    def __init__(self, config: Config, values: list[float]) -> None:
        super().__init__()
        self.patch: Any = config.model.patch_size
        self.values = values
        self.shapes: list[tuple[int, ...]] = []

    def forward(
        self, images: Tensor, loops: int | None, halting: str | None, merging: None, return_record: bool
    ) -> tuple[Tensor, LoopRecord]:
        """Logits that fall with the distance to each class's intensity, and a record."""
        self.shapes.append(tuple(images.shape))
        tokens = math.prod(-(-n // p) for n, p in zip(images.shape[2:], self.patch, strict=True))
        steps_BN = torch.arange(1.0, tokens + 1).expand(len(images), tokens)
        record = LoopRecord(torch.zeros(len(images), tokens, 1), loops or 1, torch.zeros(1, len(images)), steps_BN=steps_BN)
        return torch.cat([-((images - value) ** 2) for value in self.values], dim=1), record


def oracle(config: Config, volume: Volume, class_names: dict[int, str] | None = None) -> Predictor:
    """A predictor that knows which intensities of the volume, in rising order, belong to which class."""
    levels = normalize(torch.from_numpy(volume.array), config.data.clip_percentiles).unique().tolist()
    model: Any = Levels(config, levels)
    return Predictor(model, ModelInfo(config, class_names or ACDC), "cpu", "fp32")


def network(config: Config, class_names: dict[int, str] | None = None) -> Predictor:
    """A predictor with a recurrent network of noisy weights, whose head is set so that every class wins somewhere."""
    model = build_segmenter(config.model, seed=0)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_((1.0 if "halting" in name else 0.1) * torch.randn(parameter.shape, generator=generator))
    predictor = Predictor(model, ModelInfo(config, class_names or ACDC), "cpu", "fp32")
    image = normalize(torch.from_numpy(smooth((30, 26, 6), np.eye(4)).array), config.data.clip_percentiles)
    deviation_C, mean_C = torch.std_mean(predictor.run(image[None])[:-1].flatten(1), dim=1)
    head = predictor.model.decoder.out.conv.conv
    head.weight.data /= deviation_C.view(-1, *[1] * (head.weight.ndim - 1))
    head.bias.data = (head.bias.data - mean_C) / deviation_C
    return predictor


def blocks(shape: tuple[int, ...], affine: np.ndarray, seed: int = 0) -> tuple[Volume, np.ndarray]:
    """A volume of four intensities in random blocks, and the class index of each voxel."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 4, [-(-n // 3) for n in shape])
    index = np.kron(coarse, np.ones((3, 3, 3), int))[tuple(slice(n) for n in shape)]
    index.flat[:4] = range(4)
    return Volume((100.0 + 50 * index).astype(np.float32), affine, Path("heart.nii.gz")), index


def smooth(shape: tuple[int, ...], affine: np.ndarray) -> Volume:
    """A volume without any symmetry, for networks."""
    x, y, z = np.meshgrid(*(np.linspace(0, 1, n) for n in shape), indexing="ij")
    wave = np.sin(9 * x + 4 * y**2) + np.cos(7 * y - 5 * x * z) + np.exp(-20 * ((x - 0.3) ** 2 + (y - 0.6) ** 2)) * 3
    noise = np.random.default_rng(1).normal(0, 0.1, shape)
    return Volume((wave + noise + 5).astype(np.float32), affine, Path("heart.nii.gz"))


def affine_of(spacing: tuple[float, float, float], degrees: tuple[float, float, float] = (0, 0, 0)) -> np.ndarray:
    """An affine with this spacing, turned in space."""
    affine = np.eye(4)
    affine[:3, :3] = Rotation.from_euler("xyz", degrees, degrees=True).as_matrix() * spacing
    affine[:3, 3] = (-30, 40, 12)
    return affine


def store(volume: Volume, orientation: list[tuple[int, int]]) -> Volume:
    """The same image, stored with its axes in another order and direction: (output axis, flip) of each axis."""
    target = np.array(orientation, float)
    array = np.ascontiguousarray(orientations.apply_orientation(volume.array, target))
    return Volume(array, volume.affine @ orientations.inv_ornt_aff(target, volume.array.shape), volume.path)


STORED = [
    [(0, -1), (1, 1), (2, 1)],  # left-right flipped, the commonest of all
    [(0, -1), (1, -1), (2, -1)],
    [(1, 1), (0, 1), (2, 1)],
    [(2, -1), (0, 1), (1, -1)],  # the slice axis first in the file
    [(1, -1), (2, 1), (0, 1)],
]
AFFINES = {
    "axial": affine_of((1.5, 1.5, 8.0)),
    "oblique": affine_of((1.4, 1.4, 10.0), (35, -20, 50)),
    "not square": affine_of((0.8, 1.9, 6.0)),
    "isotropic": affine_of((1.1, 1.1, 1.1), (10, 20, -15)),
}


# Geometry


@pytest.mark.parametrize("dim", ["2d", "3d"])
@pytest.mark.parametrize("affine", AFFINES.values(), ids=AFFINES)
@pytest.mark.parametrize("orientation", [[(0, 1), (1, 1), (2, 1)], STORED[1], STORED[3]], ids=["plain", "flipped", "permuted"])
def test_each_voxel_gets_the_label_of_its_place_in_the_file(
    dim: str, affine: np.ndarray, orientation: list[tuple[int, int]], tiny_config: MakeConfig
) -> None:
    volume, index = blocks((21, 18, 7), affine)
    stored, expected = store(volume, orientation), orientations.apply_orientation(index, np.array(orientation, float))
    predictor = oracle(tiny_config(dim, data={"spacing": "native"}), volume)
    np.testing.assert_array_equal(predictor(stored).labels_XYZ, expected)


@pytest.mark.parametrize("shape", [(21, 18, 1), (5, 3, 2), (8, 16, 3), (9, 17, 8)])
@pytest.mark.parametrize("dim", ["2d", "3d"])
def test_any_size_comes_back_in_its_own_size(shape: tuple[int, ...], dim: str, tiny_config: MakeConfig) -> None:
    volume, index = blocks(shape, AFFINES["axial"])
    config = tiny_config(dim, data={"spacing": "native"})
    np.testing.assert_array_equal(oracle(config, volume)(volume).labels_XYZ, index)
    labels = network(config)(volume, maps=True)
    assert labels.labels_XYZ.shape == labels.steps_XYZ.shape == labels.entropy_XYZ.shape == shape  # type: ignore[union-attr]


@pytest.mark.parametrize("dim", ["2d", "3d"])
@pytest.mark.parametrize("spacing", [(0.7, 0.7, 8.0), (1.2, 2.6, 8.0)])
def test_resampling_to_the_working_spacing_and_back_keeps_structures_in_place(
    dim: str, spacing: tuple[float, float, float], tiny_config: MakeConfig
) -> None:
    """A ball of 60 mm at 1.7 mm working spacing: half a pixel of shift would cost 3 % of Dice."""
    shape = tuple(round(100 / s) for s in spacing)
    x, y, z = np.meshgrid(*((np.arange(n) + 0.5) * s - 50 for n, s in zip(shape, spacing, strict=True)), indexing="ij")
    ball = x**2 + y**2 + z**2 < 30**2
    volume = Volume(np.where(ball, 200, 100).astype(np.float32), affine_of(spacing, (0, 0, 100)))
    predictor = oracle(tiny_config(dim, data={"spacing": 1.7}), volume, {1: "ball"})
    assert dice(predictor(volume).labels_XYZ == 1, ball) > 0.985


@pytest.mark.parametrize("dim", ["2d", "3d"])
@pytest.mark.parametrize("affine", ["oblique", "isotropic"])
def test_stored_differently_the_same_image_gives_the_same_labels_and_maps(
    dim: str, affine: str, tiny_config: MakeConfig
) -> None:
    predictor = network(tiny_config(dim, data={"spacing": 1.6}))
    volume = smooth((30, 26, 6), AFFINES[affine])
    expected = predictor(volume, maps=True)
    assert len(np.unique(expected.labels_XYZ)) > 2
    for orientation in STORED:
        got = predictor(store(volume, orientation), maps=True)
        for name, tolerance in (("labels_XYZ", 0), ("steps_XYZ", 0), ("entropy_XYZ", 1e-6)):
            moved = orientations.apply_orientation(getattr(expected, name), np.array(orientation, float))
            np.testing.assert_allclose(getattr(got, name), moved, atol=tolerance, rtol=0, err_msg=f"{name} {orientation}")


def test_slices_of_a_2d_model_do_not_see_each_other(tiny_config: MakeConfig) -> None:
    """Nine slices go through in batches of four, the last one alone."""
    predictor = network(tiny_config("2d"))
    image_1XYZ = torch.randn(1, 20, 24, 9, generator=torch.Generator().manual_seed(0))
    whole = predictor.run(image_1XYZ)
    for z in (0, 4, 8):
        torch.testing.assert_close(whole[..., z : z + 1], predictor.run(image_1XYZ[..., z : z + 1]), atol=1e-4, rtol=1e-4)


def test_halting_map_shows_each_token_at_its_own_voxels(tiny_config: MakeConfig) -> None:
    volume, _ = blocks((21, 18, 2), AFFINES["axial"])
    steps = oracle(tiny_config("2d", data={"spacing": "native"}), volume)(volume, maps=True).steps_XYZ
    x, y = np.arange(21)[:, None] // 8, np.arange(18)[None] // 8  # 3 x 3 tokens, the last ones cut by the border
    np.testing.assert_array_equal(steps, np.repeat((x * 3 + y + 1)[..., None], 2, axis=2))


# Sliding window


@pytest.mark.parametrize(
    ("patch", "crop", "shape", "expected"),
    [
        ((8, 8, 1), (32, 32, 4), (216, 140, 10), (216, 140, 10)),
        ((8, 8, 1), (32, 32, 4), (512, 400, 35), (288, 288, 20)),
        ((8, 8, 1), (320, 288, 24), (512, 270, 35), (320, 270, 24)),  # never less than in training
        ((4, 4, 4), (36, 52, 36), (35, 60, 90), (35, 52, 36)),
    ],
)
def test_window_is_the_volume_where_it_fits(
    patch: tuple[int, ...], crop: tuple[int, ...], shape: tuple[int, ...], expected: tuple[int, ...], tiny_config: MakeConfig
) -> None:
    config = tiny_config("3d", model={"patch_size": patch}, data={"crop_size": crop})
    assert network(config).window(shape) == expected


def test_tiles_are_fused_in_their_places(tiny_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictor_module, "WINDOW_IN_PLANE", 32)
    monkeypatch.setattr(predictor_module, "WINDOW_SLICES", 4)
    volume, index = blocks((50, 41, 9), AFFINES["oblique"])
    predictor = oracle(tiny_config("3d", data={"spacing": "native"}), volume)
    np.testing.assert_array_equal(predictor(volume).labels_XYZ, index)
    model: Any = predictor.model
    assert len(model.shapes) > 8
    assert set(model.shapes) == {(1, 1, 32, 32, 4)}


def test_tiled_network_gives_a_whole_and_repeatable_prediction(
    tiny_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor = network(tiny_config("3d", data={"spacing": "native"}))
    volume = smooth((40, 34, 5), AFFINES["axial"])
    whole = predictor(volume, loops=3)
    monkeypatch.setattr(predictor_module, "WINDOW_IN_PLANE", 32)
    tiled, again = (predictor(volume, loops=3, maps=True) for _ in range(2))
    np.testing.assert_array_equal(tiled.labels_XYZ, again.labels_XYZ)
    np.testing.assert_array_equal(tiled.steps_XYZ, again.steps_XYZ)
    assert tiled.labels_XYZ.shape == whole.labels_XYZ.shape
    assert np.mean(tiled.labels_XYZ == whole.labels_XYZ) > 0.6  # tiles see less around them, yet the same places
    assert tiled.steps_XYZ is not None
    assert 1 <= tiled.steps_XYZ.min() <= tiled.steps_XYZ.max() <= 3 + 1e-5


# Labels and maps


@pytest.mark.parametrize(
    ("class_names", "dtype"), [({2: "a", 5: "b", 9: "c"}, np.uint8), ({7: "a", 2: "b", 300: "c"}, np.uint16)]
)
def test_labels_are_the_models_own_values(class_names: dict[int, str], dtype: type, tiny_config: MakeConfig) -> None:
    volume, index = blocks((21, 18, 4), AFFINES["axial"])
    labels = oracle(tiny_config("2d", data={"spacing": "native"}), volume, class_names)(volume).labels_XYZ
    assert labels.dtype == dtype
    np.testing.assert_array_equal(labels, np.array([0, *class_names])[index])


@pytest.mark.parametrize("dim", ["2d", "3d"])
def test_maps_lie_in_their_range(dim: str, tiny_config: MakeConfig) -> None:
    prediction = network(tiny_config(dim), {2: "a", 5: "b", 6: "c"})(smooth((40, 33, 6), AFFINES["axial"]), loops=6, maps=True)
    assert set(np.unique(prediction.labels_XYZ)) <= {0, 2, 5, 6}
    steps, entropy = prediction.steps_XYZ, prediction.entropy_XYZ
    assert steps is not None
    assert entropy is not None
    assert 1 <= steps.min() < steps.max() <= 6 + 1e-5
    assert 1 < prediction.mean_steps < 6
    assert prediction.mean_steps == pytest.approx(float(steps.mean()), rel=0.1)
    assert 0 <= entropy.min() < entropy.max() <= math.log(4) + 1e-6
    assert steps.dtype == entropy.dtype == np.float32


def test_entropy_is_0_where_sure_and_log_of_the_classes_where_not(tiny_config: MakeConfig) -> None:
    volume, _ = blocks((16, 16, 2), AFFINES["axial"])
    predictor = oracle(tiny_config("2d", data={"spacing": "native"}), volume)
    model: Any = predictor.model
    model.values = [0.0] * 4
    unsure = predictor(volume, maps=True).entropy_XYZ
    assert unsure is not None
    np.testing.assert_allclose(unsure, math.log(4), rtol=1e-6)
    model.values = [0.0, 99.0, 99.0, 99.0]
    sure = predictor(volume, maps=True).entropy_XYZ
    assert sure is not None
    np.testing.assert_allclose(sure, 0, atol=1e-6)


@pytest.mark.parametrize("keep", [True, False])
def test_only_the_largest_piece_is_kept_where_the_model_says_so(keep: bool, tiny_config: MakeConfig) -> None:
    array = np.full((24, 20, 4), 100.0, np.float32)
    array[2:10, 2:10], array[4:8, 4:8], array[20:23, 15:18, 2], array[18:23, 2:6, 0] = 150, 200, 150, 250
    volume = Volume(array, affine_of((1.5, 1.5, 8.0)), Path("heart.nii.gz"))
    index = np.round((array - 100) / 50).astype(int)
    predictor = oracle(tiny_config("2d", data={"keep_largest": keep, "spacing": "native"}), volume)
    labels = predictor(volume).labels_XYZ
    expected = index.copy()
    if keep:
        expected[20:23, 15:18, 2] = expected[18:23, 2:6, 0] = 0
    assert np.array_equal(labels, expected)
    overruled = Predictor(predictor.model, predictor.info, "cpu", "fp32", keep_largest=not keep)
    assert (overruled(volume).labels_XYZ != labels).sum() == 29


def test_maps_are_made_only_when_asked_for_and_change_no_label(tiny_config: MakeConfig) -> None:
    predictor, volume = network(tiny_config("2d")), smooth((30, 26, 4), AFFINES["oblique"])
    plain, mapped = predictor(volume), predictor(volume, maps=True)
    assert plain.steps_XYZ is None
    assert plain.entropy_XYZ is None
    np.testing.assert_array_equal(plain.labels_XYZ, mapped.labels_XYZ)
    assert plain.mean_steps == mapped.mean_steps
    assert sorted(plain.seconds) == ["finish", "network", "prepare"]
    assert all(seconds >= 0 for seconds in plain.seconds.values())


# Loops, halting, precision


@pytest.mark.parametrize("dim", ["2d", "3d"])
def test_loops_and_halting_reach_the_network(dim: str, tiny_config: MakeConfig) -> None:
    predictor, volume = network(tiny_config(dim)), smooth((24, 24, 4), AFFINES["axial"])
    fixed = [predictor(volume, loops, "none", maps=True) for loops in (1, 3, 5)]
    assert [prediction.mean_steps for prediction in fixed] == [1, 3, 5]
    assert [prediction.loops for prediction in fixed] == [1, 3, 5]
    for one, other in itertools.pairwise(fixed):
        assert np.abs(one.entropy_XYZ - other.entropy_XYZ).max() > 1e-3  # type: ignore[operator]
    halted = predictor(volume, loops=5, halting="act")
    assert 1 < halted.mean_steps < 5
    assert predictor(volume, loops=5).mean_steps == halted.mean_steps  # ACT is how it was trained
    default = predictor(volume, halting="none")
    assert default.loops == default.mean_steps == 2  # so is the number of loops


def test_what_the_model_cannot_do_is_an_error(tiny_config: MakeConfig) -> None:
    predictor, volume = network(tiny_config("2d", "vit")), smooth((16, 16, 2), AFFINES["axial"])
    with pytest.raises(ModelError, match="cannot run 3 loops"):
        predictor(volume, loops=3)
    with pytest.raises(ModelError, match="halting"):
        predictor(volume, halting="act")
    with pytest.raises(ModelError, match="at least 1 loop"):
        predictor(volume, loops=0)


def test_weights_that_are_not_finite_are_an_error_that_names_the_image(tiny_config: MakeConfig) -> None:
    predictor = network(tiny_config("2d"))
    with torch.no_grad():
        predictor.model.decoder.out.conv.conv.bias[1] = math.nan
    with pytest.raises(DataError, match=r"heart\.nii\.gz: the network's output is not finite.*fp32"):
        predictor(smooth((16, 16, 2), AFFINES["axial"]))


def test_prediction_is_repeatable_even_if_the_model_was_left_in_training(tiny_config: MakeConfig) -> None:
    predictor = network(tiny_config("2d", model={"dropout": 0.5}))
    volume = smooth((24, 24, 3), AFFINES["axial"])
    predictor.model.train()
    one, other = (predictor(volume, maps=True) for _ in range(2))
    np.testing.assert_array_equal(one.entropy_XYZ, other.entropy_XYZ)


def test_bfloat16_gives_nearly_the_same_labels(tiny_config: MakeConfig) -> None:
    exact = network(tiny_config("2d"))
    rough = Predictor(exact.model, exact.info, "cpu", Precision("bf16", "a test"))
    volume = smooth((40, 33, 3), AFFINES["axial"])
    one, other = exact(volume, maps=True), rough(volume, maps=True)
    assert np.mean(one.labels_XYZ == other.labels_XYZ) > 0.95
    assert not np.array_equal(one.entropy_XYZ, other.entropy_XYZ)  # type: ignore[arg-type]


def test_device_and_precision_are_checked_at_once(tiny_model_folder: Path) -> None:
    model, info = load_model(tiny_model_folder)
    with pytest.raises(ConfigError, match="device 'nonsense'"):
        Predictor(model, info, "nonsense")
    with pytest.raises(ConfigError, match="precision 'fp8'"):
        Predictor(model, info, "cpu", "fp8")


def test_gates_are_those_of_every_loop_and_token(tiny_config: MakeConfig) -> None:
    gates = network(tiny_config("2d", "rdvit-moe", model={"halting": "none"})).gates(torch.randn(2, 1, 24, 16))
    assert gates.shape == (2, 2, 6, 4)
    assert (gates >= 0).all()
    assert ((gates > 0).sum(-1) == 2).all()  # top 2 of 4
    with pytest.raises(ModelError, match="no experts"):
        network(tiny_config("2d")).gates(torch.randn(1, 1, 16, 16))


# Any time


def settling(changes: dict[str, Any], dim: str, preset: str, tiny_config: MakeConfig, halting: str) -> Predictor:
    """A network whose loops are told when to end."""
    return network(tiny_config(dim, preset, model={"halting": halting}, inference={"max_loops": 9, **changes}))


@pytest.mark.parametrize("dim", ["2d", "3d"])
@pytest.mark.parametrize("preset", ["rdvit", "rdvit-moe"])
@pytest.mark.parametrize("halting", ["act", "none"])
@pytest.mark.parametrize(
    "changes", [{"state_residual": 0.3, "label_change": None}, {"state_residual": 0.5, "label_change": 0.3}]
)
def test_what_settles_is_what_a_run_of_so_many_loops_gives(
    dim: str, preset: str, halting: str, changes: dict[str, Any], tiny_config: MakeConfig
) -> None:
    """Slice by slice: each batch of four has loops of its own."""
    predictor = settling(changes, dim, preset, tiny_config, halting)
    image_1XYZ = torch.from_numpy(smooth((30, 26, 6), AFFINES["axial"]).array)[None]
    image_1XYZ[..., 4:] *= 0.2
    pace = Pace(predictor.config.inference, settle=True)
    ended = predictor._run(image_1XYZ, 9, None, pace)
    assert len(pace.taken) == (6 if dim == "2d" else 1)
    assert 1 < min(pace.taken) <= max(pace.taken) < 9
    for z in range(6):
        fixed = predictor.run(image_1XYZ, pace.taken[min(z, len(pace.taken) - 1)])
        torch.testing.assert_close(ended[..., z], fixed[..., z], atol=1e-5, rtol=1e-5)


def test_auto_ends_sooner_where_less_is_asked_and_says_after_how_many_loops(tiny_config: MakeConfig) -> None:
    volume = smooth((30, 26, 9), AFFINES["axial"])
    taken = []
    for residual in (1e3, 0.3, 1e-9):
        changes = {"state_residual": residual, "label_change": None}
        prediction = settling(changes, "2d", "rdvit", tiny_config, "none")(volume, loops="auto")
        assert prediction.loops == "auto"
        assert prediction.mean_steps == pytest.approx(prediction.loops_taken, rel=1e-3)  # no token halts before its slice ends
        taken.append(prediction.loops_taken)
    assert taken[0] == 1 < taken[1] < taken[2] == 9
    assert network(tiny_config("2d", model={"halting": "none"}))(volume, loops="auto").loops_taken <= 4  # twice the trained 2


def test_loops_taken_are_fewer_than_asked_for_where_all_tokens_have_halted(tiny_config: MakeConfig) -> None:
    predictor = network(tiny_config("2d"))
    with torch.no_grad():
        predictor.model.encoder.recurrence.halting.proj.bias += 50  # type: ignore[union-attr, operator]
    prediction = predictor(smooth((30, 26, 2), AFFINES["axial"]), loops=5)
    assert (prediction.loops, prediction.loops_taken) == (5, 1.0)


@pytest.mark.parametrize("dim", ["2d", "3d"])
def test_time_decides_how_many_loops_but_not_what_they_give(
    dim: str, tiny_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    predictor, volume = network(tiny_config(dim, model={"halting": "none"})), smooth((30, 26, 3), AFFINES["axial"])
    hurried = predictor(volume, loops=5, max_seconds=1e-6, maps=True)
    assert (hurried.loops, hurried.loops_taken) == (5, 1.0)
    assert "heart.nii.gz: one loop took" in caplog.text
    caplog.clear()
    patient = predictor(volume, loops=5, max_seconds=1e6, maps=True)
    assert (patient.loops, patient.loops_taken) == (5, 5.0)
    assert predictor(volume, max_seconds=1e6).loops_taken == 4  # twice the trained depth
    assert not caplog.text
    for prediction, loops in ((hurried, 1), (patient, 5)):
        fixed = predictor(volume, loops=loops, maps=True)
        np.testing.assert_array_equal(prediction.labels_XYZ, fixed.labels_XYZ)
        np.testing.assert_allclose(prediction.entropy_XYZ, fixed.entropy_XYZ, atol=1e-5)  # type: ignore[arg-type]


def test_windows_are_counted_before_they_come(tiny_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that each has its share of the time."""
    monkeypatch.setattr(predictor_module, "WINDOW_IN_PLANE", 32)
    monkeypatch.setattr(predictor_module, "WINDOW_SLICES", 4)
    predictor = network(tiny_config("3d", data={"spacing": "native"}))
    for shape in ((50, 41, 9), (32, 33, 4), (64, 32, 5)):
        pace = Pace(predictor.config.inference)
        predictor._run(torch.randn(1, *shape, generator=torch.Generator().manual_seed(0)), 1, None, pace)
        assert pace.batches == 0
        assert len(pace.taken) > 1


# A real file


@pytest.mark.skipif(not PATIENT_1.is_file(), reason=f"needs ACDC under {SHARED}")
def test_acdc_patient_keeps_its_grid(tiny_model_folder: Path) -> None:
    model, info = load_model(tiny_model_folder)
    volume = read_image(PATIENT_1)
    prediction = Predictor(model, info, "cpu", "fp32")(volume)
    assert prediction.labels_XYZ.shape == volume.array.shape == (216, 256, 10)
    assert prediction.labels_XYZ.dtype == np.uint8
    assert set(np.unique(prediction.labels_XYZ)) <= {0, *ACDC}
