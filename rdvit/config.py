"""Every knob, typed and checked: model, data, training, inference. Configurations are data; nothing in them is ever executed.

Precedence, weakest first: the defaults here, ``configs/2d.yaml`` or ``3d.yaml``, the preset, the network of a model that is
fine-tuned, the user's ``--config`` file, ``--set key.sub=value``, the named flags. What is ``auto`` is settled from the data
(``rdvit/data/planning.py``).
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rdvit.errors import ConfigError

PRESETS = ("vit", "bvit", "rdvit", "rdvit-moe", "revit", "softmor", "sret")
Ints = tuple[int, ...]
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A part of the configuration: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ExpertsConfig(Section):
    """Mixture of experts in the recurrent block's feed-forward."""

    num_experts: int = Field(8, ge=1)
    top_k: int = Field(2, ge=1)
    num_shared: int = Field(1, ge=0)
    hidden_dim: int = Field(128, ge=8)
    bias_update_rate: float = Field(1e-3, ge=0)

    @model_validator(mode="after")
    def _check(self) -> ExpertsConfig:
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k is {self.top_k}, more than num_experts {self.num_experts}")
        return self


class BankConfig(Section):
    """Bank of feed-forwards of the recurrent block, mixed in weight space by depth (reViT)."""

    num_experts: int = Field(8, ge=1)
    noise: float = Field(
        0.1, ge=0, description="spread of the experts around their common start, as a share of the start's own"
    )
    frequencies: int = Field(4, ge=1, description="Fourier features of the depth coordinate: this many octaves")
    router_dim: int = Field(32, ge=1, description="hidden width of the MLP from depth to coefficients")


class SRetConfig(Section):
    """Stages of the sliced recursive transformer; widths double from stage to stage up to ``embed_dim``, heads likewise.

    Each block runs ``loops`` times.
    """

    blocks: Ints = Field((2, 5, 3), min_length=2, description="distinct blocks of each stage")
    slices: tuple[tuple[int, int], ...] = Field(
        ((8, 2), (4, 1), (1, 1)), description="slices that attention is cut into: on a block's first pass, on the later ones"
    )
    projection_ratio: float = Field(1.0, gt=0, description="hidden width of the projections, as a share of the width")
    drop_path: float = Field(0.1, ge=0, lt=1, description="probability of dropping a branch, rising to this over the blocks")
    seed: int = Field(0, ge=0, description="of the shuffles in evaluation")

    @model_validator(mode="after")
    def _check(self) -> SRetConfig:
        if min(self.blocks) < 1 or any(min(pair) < 1 for pair in self.slices) or len(self.blocks) != len(self.slices):
            raise ValueError(f"expected at least 1 block and two numbers of slices for each stage, found {self}")
        return self


SRET_HAS_NOT = {
    "stem": "conv", "local_kernel": None, "prelude_depth": 0, "coda_depth": 0, "shared_block": True, "injection": "none",
    "loop_embedding": False, "lora_rank": 0, "halting": "none", "readout": "last", "solver": "euler", "step_size": 1.0,
    "experts": None, "bank": None, "checkpoint_loops": False, "backprop_loops": None, "kv_pool": None,
}  # fmt: skip


class ModelConfig(Section):
    """The network. ``patch_size`` is the stride of a token per axis, of SReT's last stage; ``auto`` is settled from the data.

    What is read from the loop is decided by ``halting`` first: images that halt by ACT give its weighted sum. ``readout``
    is for the others, which run all their loops: the last state, or a soft mixture of all states (SoftMoR).
    """

    preset: Literal["vit", "bvit", "rdvit", "rdvit-moe", "revit", "softmor", "sret"] = "rdvit"
    spatial_dims: Literal[2, 3] = 2
    in_channels: int = Field(1, ge=1)
    out_channels: int = Field(4, ge=2)
    patch_size: Ints | Literal["auto"] = "auto"
    stem: Literal["conv", "patch"] = "conv"
    stem_channels: int = Field(16, ge=4, description="channels at full resolution, doubled with each stride")
    norm: Literal["batch", "instance"] = Field(
        "batch", description="in stem and decoder; batch statistics make a crop and a whole slice the same function"
    )
    skips: Literal["all", "image", "none"] = "all"
    embed_dim: int = Field(192, ge=16)
    num_heads: int = Field(3, ge=1)
    mlp_ratio: float = Field(4.0, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    position: Literal["sincos", "none"] = Field(
        "none", description="none: local mixing tells where a token lies, and any grid size looks like those in training"
    )
    local_kernel: Ints | None = Field(None, description="depth-wise convolution in the block, size per axis; null is off")
    kv_pool: Ints | None = Field(
        None,
        description="keys and values are means over so many tokens per axis (cf. PVT, arXiv:2102.12122); null: each its own",
    )
    prelude_depth: int = Field(0, ge=0)
    coda_depth: int = Field(0, ge=0)
    loops: int = Field(6, ge=1, description="trained depth; blocks of an unshared stack")
    shared_block: bool = True
    injection: Literal["lti", "none"] = "lti"
    loop_embedding: bool = True
    lora_rank: int = Field(8, ge=0)
    halting: Literal["act", "none"] = "act"
    halting_bias: float = -1.0
    halting_epsilon: float = Field(0.01, gt=0, lt=0.5)
    readout: Literal["last", "soft"] = Field("last", description="what tokens that run all loops are read from")
    solver: Literal["euler", "midpoint", "rk4"] = Field(
        "euler", description="of dz/dt = F(z) - z with F one loop; a loop then costs 1, 2 or 4 evaluations of the block"
    )
    step_size: float = Field(1.0, gt=0, le=2, description="of the solver; euler at 1 is the plain loop, bit for bit")
    experts: ExpertsConfig | None = None
    bank: BankConfig | None = None
    sret: SRetConfig | None = None
    checkpoint_loops: bool = False
    backprop_loops: int | None = Field(
        None, ge=1, description="gradient through the last so many loops only; the earlier ones run without. null: through all"
    )

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if self.embed_dim % self.num_heads:
            raise ValueError(f"num_heads {self.num_heads} does not divide embed_dim {self.embed_dim}")
        sizes: dict[str, Ints | None] = {"local_kernel": self.local_kernel, "kv_pool": self.kv_pool}
        if self.patch_size != "auto":
            sizes["patch_size"] = self.patch_size
            if any(p < 1 or p & (p - 1) for p in self.patch_size):
                raise ValueError(f"patch_size {self.patch_size} must hold powers of two (the decoder doubles its way up)")
        for name, size in sizes.items():
            if size is not None and len(size) != self.spatial_dims:
                raise ValueError(f"{name} {size} has {len(size)} axes, spatial_dims is {self.spatial_dims}")
        if self.kv_pool is not None and min(self.kv_pool) < 1:
            raise ValueError(f"kv_pool {self.kv_pool} must hold at least 1 token per axis")
        if self.local_kernel is not None and any(k % 2 == 0 for k in self.local_kernel):
            raise ValueError(f"local_kernel {self.local_kernel} must be odd, so that it has a centre")
        if self.loop_embedding and (self.embed_dim // 8 < 2 or (self.embed_dim // 8) % 2):
            raise ValueError(f"embed_dim {self.embed_dim}: the loop embedding needs embed_dim // 8 even and at least 2")
        self._check_system()
        return self

    def _check_system(self) -> None:
        """Parts of the loop that cannot go together."""
        for name, value in SRET_HAS_NOT.items() if self.sret is not None else ():
            if getattr(self, name) != value:
                raise ValueError(f"model.sret has no such part; expected {name} {value}, found {getattr(self, name)}")
        if self.sret is not None and self.embed_dim % 2 ** (len(self.sret.blocks) - 1):
            raise ValueError(f"embed_dim {self.embed_dim} cannot be halved for each stage of model.sret but the last")
        if self.readout == "soft" and self.halting == "act":
            raise ValueError("readout soft mixes the states of all loops and contradicts halting act; use halting none")
        if self.bank is not None and self.experts is not None:
            raise ValueError("bank and experts are both the block's feed-forward; set one of them to null")
        if self.bank is not None and not self.shared_block:
            raise ValueError("a bank is shared by all depths and needs shared_block true")
        if self.backprop_loops is not None and (self.injection == "none" or not self.shared_block):
            raise ValueError(
                "backprop_loops needs shared_block true and injection lti: otherwise the layers before the cut learn nothing"
            )
        if self.backprop_loops == 1 and self.halting == "act":
            raise ValueError("backprop_loops 1 teaches no halting: the last loop takes what is left; use 2 or more, or null")


class AugmentConfig(Section):
    """Random augmentation of training samples; probabilities per sample."""

    affine: Share = 0.8
    rotate_degrees: float = Field(45.0, ge=0)
    scale: float = Field(0.25, ge=0, lt=1)
    flip: Share = 0.0
    noise: Share = 0.2
    blur: Share = 0.2
    gamma: Share = 0.3
    bias_field: Share = 0.2
    low_resolution: Share = 0.15


class DataConfig(Section):
    """From files to tensors. Spacings are in-plane, in mm; the slice direction is never resampled."""

    spacing: float | Literal["auto", "native"] = "auto"
    crop_size: Ints | Literal["auto"] = "auto"
    foreground_share: Share = Field(0.7, description="share of training crops that are centred on a labelled voxel")
    clip_percentiles: tuple[float, float] = (0.5, 99.5)
    keep_largest: bool | Literal["auto"] = Field(
        "auto",
        description="keep the largest piece of the predicted foreground; auto: where it is one piece in all training labels",
    )
    cache: Literal["memory", "disk"] = "memory"
    num_workers: int = Field(0, ge=0)
    augment: AugmentConfig = AugmentConfig()

    @property
    def working_spacing(self) -> float | None:
        """In-plane spacing that images are resampled to, in mm; None where they keep their own."""
        return self.spacing if isinstance(self.spacing, float) else None


class LossConfig(Section):
    """Weights of the terms of the training loss."""

    dice: float = Field(1.0, ge=0)
    cross_entropy: float = Field(1.0, ge=0)
    ponder: float = Field(1e-3, ge=0, description="weight of the mean ponder cost n + R, after its ramp")
    balance: float = Field(1e-2, ge=0, description="weight of the Switch balance term")


class LoopSamplingConfig(Section):
    """How many loops a training step runs."""

    kind: Literal["fixed", "uniform", "poisson"] = "uniform"
    low: int = Field(2, ge=1)
    high: int = Field(9, ge=1)

    @model_validator(mode="after")
    def _check(self) -> LoopSamplingConfig:
        if self.low > self.high:
            raise ValueError(f"low is {self.low}, more than high {self.high}")
        return self


class TrainingConfig(Section):
    """The optimisation. An epoch is ``steps_per_epoch`` random batches."""

    epochs: int | None = Field(200, ge=1, description="null: as many as fit into max_minutes")
    steps_per_epoch: int = Field(50, ge=1)
    batch_size: int = Field(16, ge=1)
    max_minutes: float | None = Field(None, gt=0)
    learning_rate: float = Field(1.5e-3, gt=0)
    final_learning_rate_share: Share = 0.01
    warmup_share: Share = 0.04
    weight_decay: float = Field(0.05, ge=0)
    betas: tuple[float, float] = (0.9, 0.98)
    clip_norm: float = Field(1.0, gt=0)
    ema_decay: float = Field(0.995, ge=0, lt=1)
    loop_sampling: LoopSamplingConfig = LoopSamplingConfig()
    halting_share: Share = Field(
        0.5, description="share of training samples that halt by ACT; the others run all loops and use the last state"
    )
    supervision: Literal["final", "stagewise"] = Field(
        "final", description="stagewise: the loops in stages, decoded after each by the same layers; mean loss over the stages"
    )
    stages: int = Field(4, ge=1, description="of stagewise supervision; fewer where a step has fewer loops")
    finetune: str | None = Field(None, description="folder of the model that the training starts from; null: fresh weights")
    train_only: Literal["all", "lora", "norms", "head"] = Field(
        "all", description="what of that model is trained; the head always is. lora: low-rank updates, merged when saved"
    )
    finetune_rank: int = Field(4, ge=1, description="rank of the updates of train_only lora")
    loss: LossConfig = LossConfig()
    validate_every: int = Field(5, ge=1)
    figures_every: int = Field(5, ge=1, description="figures at each n-th validation, and at the end")
    patience: int | None = Field(None, ge=1, description="validations without a better Dice before stopping")
    seed: int = Field(0, ge=0)
    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"

    @model_validator(mode="after")
    def _check(self) -> TrainingConfig:
        if self.epochs is None and self.max_minutes is None:
            raise ValueError("one of epochs and max_minutes is needed")
        if self.train_only != "all" and self.finetune is None:
            raise ValueError(f"train_only {self.train_only} freezes the rest and needs a trained model: --finetune MODEL")
        return self


class InferenceConfig(Section):
    """When a loop ends whose number of turns is not fixed: ``--loops auto`` and ``--max-seconds``."""

    max_loops: int | None = Field(None, ge=1, description="null: twice the trained depth; of an unshared stack, its blocks")
    state_residual: float = Field(
        0.1, gt=0, description="--loops auto: the state has settled where it moved less than that, relative to its size"
    )
    label_change: Share | None = Field(
        None,
        description="of voxels, relative to the foreground: once the state has settled the segmentation is looked at, until "
        "fewer than that changed their label from look to look. null: no look, which costs as much as two or three loops",
    )


class Config(Section):
    """Everything that decides a run."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    inference: InferenceConfig = InferenceConfig()

    @property
    def most_loops(self) -> int:
        """Loops that a run without a fixed number of them may take."""
        trained = self.model.loops
        return self.inference.max_loops or (2 * trained if self.model.shared_block else trained)

    @model_validator(mode="after")
    def _check(self) -> Config:
        if self.model.backprop_loops is not None and self.training.supervision == "stagewise":
            raise ValueError("model.backprop_loops cuts the gradient of the early stages; use supervision final, or null loops")
        fixed = self.training.supervision == "final" and self.training.loop_sampling.kind == "fixed"
        if self.model.sret is not None and not fixed:
            raise ValueError("model.sret runs its loops as built; use training.loop_sampling.kind fixed and supervision final")
        return self

    def to_yaml(self) -> str:
        """The configuration as YAML; :func:`load_config` reads it back to an equal object."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def config_folder() -> Path:
    """The folder of the shipped YAML files: inside the installed package, or ``configs/`` of a checkout."""
    packaged = Path(__file__).parent / "configs"
    return packaged if packaged.is_dir() else Path(__file__).parents[1] / "configs"


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping; plain data only.

    Raises:
        ConfigError: If the file is missing, is not YAML, or is no mapping.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("expected a YAML file, found nothing there", file=path) from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"not a readable YAML file: {' '.join(str(error).split())}", file=path) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"expected a mapping of sections, found {type(content).__name__}", file=path)
    return content


def resolve_config(
    dim: str,
    preset: str,
    config_file: Path | None = None,
    settings: list[str] | None = None,
    flags: dict[str, Any] | None = None,
    pretrained: dict[str, Any] | None = None,
) -> Config:
    """Merge all sources of a configuration in their order of precedence.

    Args:
        dim: ``2d`` or ``3d``.
        preset: One of :data:`PRESETS`.
        config_file: A YAML file that names only what differs.
        settings: ``key.sub=value`` strings; values are read as YAML.
        flags: Nested values of named flags, the strongest.
        pretrained: Nested values of a model to fine-tune, just above the preset.

    Raises:
        ConfigError: On an unknown key (the nearest one is named) or a value that cannot work.
    """
    folder = config_folder()
    merged = read_yaml(folder / f"{dim}.yaml")
    if preset not in PRESETS:
        raise ConfigError(f"unknown preset '{preset}'", hint=f"one of {', '.join(PRESETS)}")
    merged = merge(merged, read_yaml(folder / "presets" / f"{preset}.yaml"))
    merged = merge(merged, pretrained or {})
    if config_file is not None:
        given = read_yaml(config_file)
        merged = merge(merged, {section: values for section, values in given.items() if values is not None})
    for setting in settings or []:
        merged = merge(merged, _parse_setting(setting))
    return validate(merge(merged, flags or {}), source=config_file)


def load_config(path: Path) -> Config:
    """A full configuration, as a run folder holds it."""
    return validate(read_yaml(path), source=path)


def validate(values: dict[str, Any], source: Path | None = None) -> Config:
    """Turn nested values into a :class:`Config`; errors name the key, what came, and the nearest valid key."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(e) for e in error.errors()), file=source) from None


def merge(base: dict[str, Any], update: dict[str, Any]) -> dict[str, Any]:
    """``base`` with the nested values of ``update`` put over it; neither is changed."""
    merged = dict(base)
    for key, value in update.items():
        old = merged.get(key)
        if isinstance(value, dict) and not isinstance(old, (dict, type(None))):
            raise ConfigError(f"'{key}' is a section of settings, found {old!r}")
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _parse_setting(setting: str) -> dict[str, Any]:
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"expected --set key.sub=value, found '{setting}'")
    try:
        value: Any = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"--set {key}: '{text}' is not a YAML value") from None
    if value is None and "." not in key:
        raise ConfigError(f"'{key}' is a section of settings, found null")
    for part in reversed(key.strip().split(".")):
        value = {part: value}
    return value


def _explain(error: Any) -> str:
    *parents, last = [str(part) for part in error["loc"]] or ["configuration"]
    where = ".".join([*parents, last])
    if error["type"] != "extra_forbidden":
        return (
            f"{where}: {error['msg']}, found {error['input']!r}"
            if error["type"] != "value_error"
            else f"{where}: {error['msg']}"
        )
    section: Any = Config
    for part in parents:
        field = section.model_fields.get(part)
        section = next((s for s in _sections(field.annotation) if field), section)
    near = difflib.get_close_matches(last, section.model_fields, n=1, cutoff=0.4)
    return f"unknown key '{where}'" + (f", did you mean '{'.'.join([*parents, near[0]])}'?" if near else "")


def _sections(annotation: Any) -> list[Any]:
    options = getattr(annotation, "__args__", None) or (annotation,)
    return [o for o in options if isinstance(o, type) and issubclass(o, Section)]
