"""Inside trained models: where do tokens halt, and do experts specialise on structures?

    python pipelines/halting_and_experts.py --models 2d=runs/a moe=runs/b --data path/to/ACDC

Halting, of models with ACT: the loops until a token halts (ponder), at the boundaries of the structures against inside and
outside of them, and what halting costs in Dice. Experts, of models with experts: usage per structure, the normalised mutual
information between expert and structure, and two controls on the same tokens. One shuffles the labels among the labelled
tokens of each case. The other replaces the routers by random ones of the same spread, without balancing bias, in the same
network: its states are those of a network with random routers. An expert that gets less than 2 % of the tokens is dead.
Each case is looked at once; what was found is kept under ``OUT/inside/``.
"""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import study
import torch
from torch import Tensor
from trained import Trained, models, options, score_once

from rdvit.analysis.charts import expert_usage_figure, intervals_figure
from rdvit.analysis.experts import normalized_mutual_information, routing_counts, shares, shuffled, token_labels
from rdvit.analysis.figures import halting_figure, save_figure
from rdvit.analysis.halting import boundary_ponder, halting_summary, ponder_by_structure
from rdvit.atomic import write
from rdvit.data.datalist import Case
from rdvit.data.transforms import prepare_image, prepare_labels
from rdvit.data.volume import read_image, read_labels
from rdvit.errors import ConfigError
from rdvit.evaluation.intervals import bootstrap, ratio_of_means
from rdvit.inference.predictor import Predictor
from rdvit.models.build import expert_layers

LEAST_PONDER, MOST_PONDER = 1.5, 0.7  # in loops, and as a share of the trained depth
DICE_COST = 0.005
LEAST_SHARE = 0.02
RANDOM_SEED = 0
ROUTINGS = {"trained": "trained", "shuffled": "labels shuffled", "random": "router at random"}
_log = logging.getLogger("rdvit")
Row = dict[str, Any]


def main(words: list[str] | None = None) -> None:
    """Look at what was not looked at yet, write tables, figures and paragraph."""
    given = options(__doc__).parse_args(words)
    wanted: list[Row] = []
    cases: list[Row] = []
    usage: list[Row] = []
    for model in models(given):
        config = model.predictor.config.model
        if config.halting != "act" and config.experts is None:
            raise ConfigError("has neither ACT nor experts to look at", file=model.folder)
        found = look_once(model, given.out)
        if config.halting == "act":
            own = halting_rows(model, found, given.out)
            wanted += own
            halting_figures(model, found, own, given.out)
            cases += [{"model": model.name, "case": c["case"], "patient": c["patient"], **flat(c)} for c in found]
        if config.experts is not None:
            own = expert_rows(model, found)
            wanted += own
            usage += usage_rows(model, found)
            expert_figures(model, found, own, given.out)
    for name, table in (("cases", cases), ("usage", usage)):
        if table:
            study.write_table(given.out / f"halting_and_experts_{name}.csv", table)
    study.write_results(given.out / "halting_and_experts", wanted, study.wanted_paragraph(wanted))


# Looking at a case


def look_once(model: Trained, out: Path) -> list[Row]:
    """What each case shows of the model; kept case by case."""
    found = []
    random = Predictor(random_routers(model.predictor), model.predictor.info, str(model.predictor.device))
    for case in model.cases:
        kept = out / "inside" / model.fingerprint / f"{case.id}.json"
        if not kept.is_file():
            _log.info("%s: looking at %s", model.name, case.id)
            write(kept, json.dumps(look(model.predictor, random, case)))
        found.append(json.loads(kept.read_text(encoding="utf-8")))
    return found


def look(predictor: Predictor, random: Predictor, case: Case) -> Row:
    """Halting and routing of one case, on the network's grid."""
    image_1XYZ, labels_XYZ = prepared(predictor, case)
    found: Row = {"case": case.id, "patient": case.patient}
    batch = inputs(predictor, image_1XYZ)
    record = predictor.record(batch)
    if record.weights_BNT is not None and predictor.config.model.halting == "act":
        summary = halting_summary(record.weights_BNT.float().cpu().numpy())
        steps_XYZ = predictor.run(image_1XYZ)[-1].numpy()
        found["halting"] = {
            "ponder": summary.mean_steps,
            "graves": summary.mean_ponder,
            "expected_depth": summary.expected_depth,
            "at_one": summary.fraction_at_one,
            "at_cap": float((record.steps_BN == predictor.config.model.loops).float().mean()),
            **boundary_ponder(steps_XYZ, labels_XYZ),
        }
        names = dict(enumerate(predictor.info.class_names.values(), start=1))
        found["structures"] = {n: v for n, v in ponder_by_structure(steps_XYZ, labels_XYZ, names).items() if n != "background"}
    if record.gates_TBNE is not None:
        labels_BN = labels_of_tokens(predictor, labels_XYZ)
        shuffled_BN = shuffled(labels_BN.ravel(), np.random.default_rng(RANDOM_SEED)).reshape(labels_BN.shape)
        gates_TBNE = record.gates_TBNE.cpu().numpy()
        random_gates = random.record(batch).gates_TBNE
        assert random_gates is not None
        found["experts"] = {
            "trained": routing(gates_TBNE, labels_BN, predictor),
            "shuffled": routing(gates_TBNE, shuffled_BN, predictor),
            "random": routing(random_gates.cpu().numpy(), labels_BN, predictor),
        }
    return found


def prepared(predictor: Predictor, case: Case) -> tuple[Tensor, np.ndarray]:
    """Image (1, X, Y, Z) and class indices (X, Y, Z) as the network sees them."""
    assert case.label is not None
    image_1XYZ, _ = prepare_image(read_image(case.image), predictor.spacing, predictor.config.data.clip_percentiles)
    labels_1XYZ = prepare_labels(read_labels(case.label), predictor.spacing, tuple(predictor.info.class_names))
    return image_1XYZ, labels_1XYZ[0].numpy()


def inputs(predictor: Predictor, image_1XYZ: Tensor) -> Tensor:
    """The slices of a volume as a batch, or the volume as a batch of one."""
    return image_1XYZ.movedim(-1, 0) if predictor.config.model.spatial_dims == 2 else image_1XYZ[None]


def labels_of_tokens(predictor: Predictor, labels_XYZ: np.ndarray) -> np.ndarray:
    """Structure of each token, (B, N), in the order of :func:`inputs`."""
    patch = predictor.config.model.patch_size
    assert patch != "auto"
    if predictor.config.model.spatial_dims == 3:
        return token_labels(labels_XYZ, patch)[None]
    return np.stack([token_labels(labels_XYZ[..., z], patch) for z in range(labels_XYZ.shape[-1])])


def routing(gates_TBNE: np.ndarray, labels_BN: np.ndarray, predictor: Predictor) -> Row:
    """Joint counts of structure and expert over all loops, how many tokens each expert got, and of how many."""
    experts = gates_TBNE.shape[-1]
    gates_NE = gates_TBNE.reshape(-1, experts)
    labels_N = np.tile(labels_BN.ravel(), len(gates_TBNE))
    counts_CE = routing_counts(gates_NE, labels_N, len(predictor.info.class_names) + 1)
    used_NE = gates_NE > 0
    return {"counts": counts_CE.tolist(), "used": used_NE.sum(0).tolist(), "tokens": int(used_NE.any(1).sum())}


def random_routers(predictor: Predictor) -> Any:
    """The network with routers drawn anew, as widely spread as the trained ones, and no balancing bias."""
    model = copy.deepcopy(predictor.model)
    generator = torch.Generator().manual_seed(RANDOM_SEED)
    with torch.no_grad():
        for layer in expert_layers(model):
            weight = layer.router.weight
            weight.copy_(torch.randn(weight.shape, generator=generator).to(weight.device) * weight.std())
            layer.router_bias_E.zero_()
    return model


# Halting


def flat(found: Row) -> Row:
    """Halting of a case as columns of a table."""
    return found["halting"] | {f"ponder_{name}": value for name, value in found["structures"].items()}


def of_patients(found: list[Row], *keys: str) -> np.ndarray:
    """Columns of the halting of each patient (P, keys), the mean over the cases; patients without one are left out."""
    values: dict[str, list[list[float]]] = {}
    for case in found:
        values.setdefault(case["patient"], []).append([flat(case)[key] for key in keys])
    table_PK = np.array([np.mean(rows, axis=0) for rows in values.values()])
    return table_PK[np.isfinite(table_PK).all(axis=1)]


def halting_rows(model: Trained, found: list[Row], out: Path) -> list[Row]:
    """Ponder, its ratios, and what halting costs."""
    loops, name = model.predictor.config.model.loops, model.name
    rows = [study.wanted_row(name, "ponder", bootstrap(of_patients(found, "ponder")[:, 0]), LEAST_PONDER, MOST_PONDER * loops)]
    for key, what in (
        ("graves", "Graves's n + R"),
        ("expected_depth", "expected depth"),
        ("at_one", "share of tokens that halt after 1 loop"),
        ("at_cap", f"share of tokens that run all {loops}"),
        ("boundary", "ponder at boundaries"),
        ("interior", "ponder inside structures"),
        ("background", "ponder outside structures"),
        *((f"ponder_{structure}", f"ponder in {structure}") for structure in model.predictor.info.class_names.values()),
    ):
        rows.append(study.wanted_row(name, what, bootstrap(of_patients(found, key)[:, 0])))
    for key, where in (("interior", "inside"), ("background", "outside")):
        ratio = bootstrap(of_patients(found, "boundary", key), ratio_of_means)
        rows.append(study.wanted_row(name, f"ponder at boundaries over that {where}", ratio, 1.0))
    act, none = (study.dice_of_patients(score_once(model, out, loops, mode)) for mode in ("act", "none"))
    return [
        *rows,
        study.wanted_row(name, "Dice without halting less Dice with ACT", study.difference(none, act), None, DICE_COST),
    ]


def halting_figures(model: Trained, found: list[Row], rows: list[Row], out: Path) -> None:
    """Ponder by region, and the map of the first case."""
    regions = [row for row in rows if row["what"].startswith("ponder ") and not row["wanted"]]
    groups = {row["what"].removeprefix("ponder "): ends(row) for row in regions}
    title = f"{model.name}: loops until a token halts, of {model.predictor.config.model.loops}"
    figure = intervals_figure(groups, "loops, 95 % over patients", title=title)
    save_figure(figure, out / f"halting_and_experts_{model.name}_ponder.png")
    case = model.cases[0]
    image_1XYZ, labels_XYZ = prepared(model.predictor, case)
    steps_XYZ = model.predictor.run(image_1XYZ)[-1].numpy()
    loops = model.predictor.config.model.loops
    figure = halting_figure(image_1XYZ[0].numpy(), steps_XYZ, loops, title=f"{model.name}: {case.id}", labels_XYZ=labels_XYZ)
    save_figure(figure, out / f"halting_and_experts_{model.name}_map.png")


def ends(row: Row) -> tuple[float, float, float]:
    """Value and interval of a row of what is wanted."""
    return row["value"], row["low"], row["high"]


# Experts


def counts_of_patients(found: list[Row], kind: str) -> np.ndarray:
    """Joint counts of structure and expert of each patient, (P, C, E)."""
    counts: dict[str, np.ndarray] = {}
    for case in found:
        counts[case["patient"]] = counts.get(case["patient"], 0) + np.array(case["experts"][kind]["counts"])
    return np.stack([*counts.values()])


def information(counts_PCE: np.ndarray) -> float:
    """Normalised mutual information of all patients' tokens."""
    return normalized_mutual_information(counts_PCE.sum(axis=0))


def least_used(tokens_PE1: np.ndarray) -> float:
    """Share of the tokens that the least used expert gets; the last column counts the tokens."""
    totals = tokens_PE1.sum(axis=0)
    return float(totals[:-1].min() / totals[-1])


def expert_rows(model: Trained, found: list[Row]) -> list[Row]:
    """Mutual information with its controls, and the least used expert."""
    counts = {kind: counts_of_patients(found, kind) for kind in ROUTINGS}
    rows = [
        study.wanted_row(model.name, f"NMI, {word}", bootstrap(counts[kind], information)) for kind, word in ROUTINGS.items()
    ]
    for kind in ("shuffled", "random"):
        pairs_P2CE = np.stack([counts["trained"], counts[kind]], axis=1)
        excess = bootstrap(pairs_P2CE, lambda pairs: information(pairs[:, 0]) - information(pairs[:, 1]))
        rows.append(study.wanted_row(model.name, f"NMI, trained less {ROUTINGS[kind]}", excess, 0.0))
    tokens: dict[str, np.ndarray] = {}
    for case in found:
        routed = case["experts"]["trained"]
        tokens[case["patient"]] = tokens.get(case["patient"], 0) + np.array([*routed["used"], routed["tokens"]])
    least = bootstrap(np.stack([*tokens.values()]), least_used)
    return [*rows, study.wanted_row(model.name, "share of the tokens that the least used expert gets", least, LEAST_SHARE)]


def usage_rows(model: Trained, found: list[Row]) -> list[Row]:
    """Share of each expert in the routing of each structure, trained and controls."""
    rows = []
    for kind, word in ROUTINGS.items():
        usage_CE = shares(counts_of_patients(found, kind).sum(axis=0))
        for structure, shares_E in zip(["background", *model.predictor.info.class_names.values()], usage_CE, strict=True):
            columns = {f"expert_{i}": float(share) for i, share in enumerate(shares_E, start=1)}
            rows.append({"model": model.name, "routing": word, "structure": structure, **columns})
    return rows


def expert_figures(model: Trained, found: list[Row], rows: list[Row], out: Path) -> None:
    """Usage per structure, trained and with random routers; mutual information with its controls."""
    names = ["background", *model.predictor.info.class_names.values()]
    for kind, word in ROUTINGS.items():
        usage_CE = shares(counts_of_patients(found, kind).sum(axis=0))
        figure = expert_usage_figure(usage_CE, names, title=f"{model.name}: expert usage by structure, {word}")
        save_figure(figure, out / f"halting_and_experts_{model.name}_usage_{kind}.png")
    groups = {word: ends(row) for row, word in zip(rows, ROUTINGS.values(), strict=False)}
    label = "share of the structure's entropy, 95 % over patients"
    figure = intervals_figure(groups, label, title=f"{model.name}: normalised mutual information")
    save_figure(figure, out / f"halting_and_experts_{model.name}_information.png")


if __name__ == "__main__":
    study.run(main)
