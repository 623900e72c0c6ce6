"""Configuration: every source in its order, clear refusals, a loss-free round trip, and nothing that is executed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from rdvit import config as config_module
from rdvit.config import PRESETS, Config, ModelConfig, config_folder, load_config, merge, read_yaml, resolve_config, validate
from rdvit.errors import ConfigError


def written(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("dim", ["2d", "3d"])
@pytest.mark.parametrize("preset", PRESETS)
def test_shipped_presets_resolve_to_what_they_are(dim: str, preset: str) -> None:
    model = resolve_config(dim, preset).model
    assert model.preset == preset
    assert model.spatial_dims == int(dim[0])
    assert (model.experts is not None) == (preset == "rdvit-moe")
    assert (model.bank is not None) == (preset == "revit")
    assert model.readout == ("soft" if preset == "softmor" else "last")
    assert model.shared_block == (preset != "vit")
    with_add_ons = preset in ("rdvit", "rdvit-moe")
    assert (model.injection, model.halting) == (("lti", "act") if with_add_ons else ("none", "none"))
    assert bool(model.lora_rank) == model.loop_embedding == with_add_ons
    assert (model.solver, model.step_size) == ("euler", 1.0)
    assert (model.sret is not None) == (preset == "sret")
    assert model.loops == {"bvit": 12, "sret": 2}.get(preset, 6)


def test_stack_bvit_and_sret_are_trained_at_one_depth_and_elastic_systems_at_many() -> None:
    kinds = {preset: resolve_config("2d", preset).training.loop_sampling.kind for preset in PRESETS}
    assert {preset for preset, kind in kinds.items() if kind == "fixed"} == {"vit", "bvit", "sret"}


def test_every_shipped_file_is_used() -> None:
    folder = config_folder()
    assert sorted(p.stem for p in (folder / "presets").glob("*.yaml")) == sorted(PRESETS)
    assert {"2d.yaml", "3d.yaml"} <= {p.name for p in folder.glob("*.yaml")}
    for path in folder.glob("*.yaml"):  # a dimension, or a file for --config that must fit the current keys
        assert resolve_config("2d", "rdvit", None if path.stem in ("2d", "3d") else path)


def test_sources_are_merged_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dimension sets all five keys, each stronger source one fewer: every key ends at its strongest source."""
    keys = ["batch_size", "epochs", "validate_every", "figures_every", "steps_per_epoch"]
    sources = [{"training": dict.fromkeys(keys[strength:], 21 + strength)} for strength in range(5)]
    written(tmp_path, yaml.safe_dump(sources[0]), "2d.yaml")
    written(tmp_path, yaml.safe_dump(sources[1]), "presets/rdvit.yaml")
    user = written(tmp_path, yaml.safe_dump(sources[2]))
    settings = [f"training.{key}={value}" for key, value in sources[3]["training"].items()]
    monkeypatch.setattr(config_module, "config_folder", lambda: tmp_path)
    training = resolve_config("2d", "rdvit", user, settings, sources[4]).training
    assert [getattr(training, key) for key in keys] == [21, 22, 23, 24, 25]


def test_later_settings_win_and_defaults_stay() -> None:
    config = resolve_config("2d", "rdvit", settings=["model.loops=3", "model.loops=5"])
    assert config.model.loops == 5
    assert config.model.local_kernel == (5, 5)  # from 2d.yaml
    assert config.model.mlp_ratio == ModelConfig().mlp_ratio


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *[("model.loops=12", 12), ("model.loop_embedding=false", False), ("model.experts.num_experts=4", 4)],
        *[("model.patch_size=[16, 16]", (16, 16)), ("model.local_kernel=null", None), ("training.learning_rate=1e-3", 1e-3)],
        *[("data.spacing=1.25", 1.25), ("data.spacing=native", "native"), ("training.device=cuda:1", "cuda:1")],
        *[(" training.loop_sampling.kind =poisson", "poisson"), ("training.betas=[0.8, 0.9]", (0.8, 0.9))],
    ],
)
def test_settings_are_read_as_yaml(setting: str, value: object) -> None:
    found: Any = resolve_config("2d", "rdvit-moe", settings=[setting])
    for part in setting.partition("=")[0].strip().split("."):
        found = getattr(found, part)
    assert found == value


def test_null_switches_an_optional_part_off() -> None:
    assert resolve_config("2d", "rdvit-moe", settings=["model.experts=null"]).model.experts is None


@pytest.mark.parametrize("setting", ["model.loops", "=3", "", " =1", "model.patch_size=[8", "model.loops={"])
def test_malformed_settings_are_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"--set"):
        resolve_config("2d", "rdvit", settings=[setting])


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        *[("model.lops", "model.loops"), ("model.experts.num_expert", "model.experts.num_experts"), ("modl", "model")],
        *[("training.loss.pondr", "training.loss.ponder"), ("training.loop_sampling.hihg", "training.loop_sampling.high")],
        *[("data.augment.flips", "data.augment.flip"), ("training.lerning_rate", "training.learning_rate")],
    ],
)
def test_unknown_keys_are_refused_with_the_nearest_one(key: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_config("2d", "rdvit-moe", settings=[f"{key}=1"])
    assert str(caught.value) == f"unknown key '{key}', did you mean '{nearest}'?"


def test_an_unknown_key_like_no_other_is_refused_without_a_guess() -> None:
    with pytest.raises(ConfigError, match=r"^unknown key 'model\.xyzzy'$"):
        resolve_config("2d", "rdvit", settings=["model.xyzzy=1"])


@pytest.mark.parametrize(
    ("setting", "key", "found"),
    [
        *[
            ("model.loops=many", "model.loops", "'many'"),
            ("model.loops=0", "model.loops", "0"),
            ("model.loops=2.5", "model.loops", "2.5"),
        ],
        *[("model.stem=resnet", "model.stem", "'resnet'"), ("model.patch_size=big", "model.patch_size", "'big'")],
        *[("training.loss=3", "training.loss", "3"), ("data.foreground_share=1.5", "data.foreground_share", "1.5")],
        *[("training.epochs=[1]", "training.epochs", r"\[1\]"), ("model.preset=bert", "model.preset", "'bert'")],
        *[("model.solver=rk5", "model.solver", "'rk5'"), ("model.step_size=0", "model.step_size", "0")],
        *[("model.readout=mean", "model.readout", "'mean'"), ("model.backprop_loops=0", "model.backprop_loops", "0")],
        ("model.bank={num_experts: 0}", "model.bank.num_experts", "0"),
        *[("training.supervision=deep", "training.supervision", "'deep'"), ("training.stages=0", "training.stages", "0")],
    ],
)
def test_values_of_the_wrong_kind_are_refused_with_key_and_value(setting: str, key: str, found: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}.*found {found}"):
        resolve_config("2d", "rdvit", settings=[setting])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        *[
            ("model.num_heads=5", "5 does not divide embed_dim 192"),
            ("model.patch_size=[8, 6]", r"\(8, 6\) must hold powers of two"),
        ],
        *[
            ("model.patch_size=[8, 8, 1]", "has 3 axes, spatial_dims is 2"),
            ("model.local_kernel=[3]", "has 1 axes, spatial_dims is 2"),
            ("model.kv_pool=[2, 2, 1]", r"kv_pool \(2, 2, 1\) has 3 axes, spatial_dims is 2"),
            ("model.kv_pool=[0, 2]", "at least 1 token per axis"),
        ],
        *[("model.local_kernel=[4, 3]", "must be odd"), ("model.embed_dim=24", r"embed_dim // 8 even")],
        *[("model.experts={num_experts: 2, top_k: 3}", "top_k is 3, more than num_experts 2")],
        *[
            ("training.loop_sampling={low: 5, high: 3}", "low is 5, more than high 3"),
            ("training.epochs=null", "one of epochs and max_minutes"),
        ],
        *[("model.readout=soft", "contradicts halting act"), ("model={experts: {}, bank: {}}", "bank and experts are both")],
        ("model={shared_block: false, bank: {}}", "bank is shared by all depths"),
        ("model.backprop_loops=1", "teaches no halting"),
        *[(f"model={{backprop_loops: 2, {other}}}", "learn nothing") for other in ("injection: none", "shared_block: false")],
    ],
)
def test_values_that_cannot_work_together_are_refused(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_config("2d", "rdvit", settings=[setting])


def test_truncated_gradients_and_early_stages_contradict_each_other() -> None:
    settings = ["model.backprop_loops=2", "training.supervision=stagewise"]
    with pytest.raises(ConfigError, match=r"model\.backprop_loops cuts the gradient of the early stages"):
        resolve_config("2d", "rdvit", settings=settings)
    assert resolve_config("2d", "rdvit", settings=settings[:1])
    assert resolve_config("2d", "rdvit", settings=["model.backprop_loops=null", *settings[1:]])


def test_several_faults_are_told_in_one_line(tmp_path: Path) -> None:
    path = written(tmp_path, "model: {lops: 3}\ntraining: {batch_size: 0}\n")
    with pytest.raises(ConfigError) as caught:
        resolve_config("2d", "rdvit", path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "model.lops" in message
    assert "training.batch_size" in message
    assert "\n" not in message


def test_unknown_presets_are_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown preset 'bert' \(one of vit, bvit, rdvit, rdvit-moe, revit, softmor, sret\)"
    ):
        resolve_config("2d", "bert")


@pytest.mark.parametrize("dim", ["2d", "3d"])
@pytest.mark.parametrize("preset", PRESETS)
def test_yaml_round_trip_is_equal(tmp_path: Path, dim: str, preset: str) -> None:
    odd = ["training.learning_rate=1e-7", "training.epochs=null", "training.max_minutes=0.1", "data.spacing=1.3671875"]
    for settings in ([], odd):
        config = resolve_config(dim, preset, settings=settings)
        assert load_config(written(tmp_path, config.to_yaml())) == config


def test_round_trip_keeps_what_differs(tmp_path: Path) -> None:
    config = resolve_config("3d", "rdvit-moe", settings=["model.patch_size=[8, 8, 1]", "training.device='no'"])
    again = load_config(written(tmp_path, config.to_yaml()))
    assert again.model.patch_size == (8, 8, 1)
    assert again.training.device == "no"  # a boolean in YAML, unless quoted
    assert again != resolve_config("3d", "rdvit-moe")


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.mkdir", "!!python/object/new:os.mkdir", "!!python/name:os.mkdir"])
def test_yaml_tags_execute_nothing(tmp_path: Path, tag: str) -> None:
    target = tmp_path / "made-by-yaml"
    attack = f"{tag} ['{target}']"
    with pytest.raises(ConfigError, match="not a readable YAML file"):
        resolve_config("2d", "rdvit", written(tmp_path, f"model: {attack}\n"))
    with pytest.raises(ConfigError, match="not a YAML value"):
        resolve_config("2d", "rdvit", settings=[f"model.loops={attack}"])
    assert not target.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [1", "not a readable YAML file"),
        ("- model", "expected a mapping of sections, found list"),
        ("loops", "found str"),
        ("7: 1\n", "7"),
    ],
)
def test_files_that_are_no_configuration_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_config("2d", "rdvit", path)
    assert str(caught.value).startswith(str(path))


def test_missing_unreadable_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found nothing there"):
        read_yaml(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="not a readable YAML file"):
        read_yaml(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a readable YAML file"):
        read_yaml(binary)
    assert read_yaml(written(tmp_path, "# nothing yet\n")) == {}


def test_an_empty_section_of_the_users_file_changes_nothing(tmp_path: Path) -> None:
    """``model:`` with all its lines commented out must not wipe out the preset, with flags or without."""
    path = written(tmp_path, "model:\n  # loops: 8\ntraining:\n")
    flags = {"model": {"patch_size": [8, 8]}}
    assert resolve_config("2d", "vit", path, flags=flags) == resolve_config("2d", "vit", flags=flags)
    assert resolve_config("2d", "vit", path) == resolve_config("2d", "vit")


@pytest.mark.parametrize("setting", ["model=3", "model=[1]", "model=null"])
def test_a_value_in_place_of_a_section_is_refused_even_under_a_flag(setting: str) -> None:
    with pytest.raises(ConfigError, match="model"):
        resolve_config("2d", "vit", settings=[setting], flags={"model": {"patch_size": [8, 8]}})


def test_merge_is_deep_and_changes_neither_side() -> None:
    base, update = {"a": {"x": 1, "y": {"z": 2}}, "b": 3}, {"a": {"y": {"w": 4}, "x": 5}, "c": 6}
    assert merge(base, update) == {"a": {"x": 5, "y": {"z": 2, "w": 4}}, "b": 3, "c": 6}
    assert base == {"a": {"x": 1, "y": {"z": 2}}, "b": 3}
    assert update == {"a": {"y": {"w": 4}, "x": 5}, "c": 6}


def test_configurations_are_frozen() -> None:
    with pytest.raises(ValidationError):
        validate({}).model.loops = 3  # type: ignore[misc]
    assert Config() == validate({})


def test_a_model_from_before_any_time_inference_has_its_defaults(tmp_path: Path) -> None:
    old = Config().model_dump(mode="json")
    del old["inference"]
    assert load_config(written(tmp_path, yaml.safe_dump(old))) == Config()


def test_loops_without_a_fixed_number_end_at_twice_the_trained_or_where_it_is_said() -> None:
    assert resolve_config("2d", "rdvit", settings=["model.loops=5"]).most_loops == 10
    assert resolve_config("2d", "vit", settings=["model.loops=5"]).most_loops == 5
    assert resolve_config("2d", "rdvit", settings=["model.loops=5", "inference.max_loops=7"]).most_loops == 7
