"""What the studies of trained models share: the models and their cases, and scores that are made once."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rdvit.atomic import write
from rdvit.checkpoint import DESCRIPTION, WEIGHTS, load_model
from rdvit.data.datalist import Case, digest, load_data, select
from rdvit.data.default import default_data
from rdvit.errors import ConfigError, DataError
from rdvit.evaluation.summary import summarize, to_json
from rdvit.inference.cases import score_cases
from rdvit.inference.predictor import Predictor
from rdvit.models.segmenter import Halting

_log = logging.getLogger("rdvit")


@dataclass(frozen=True, eq=False)
class Trained:
    """A model that is there already, and the cases it is looked at on.

    Attributes:
        name: What the tables call it.
        folder: Its folder.
        predictor: The model, ready to segment.
        cases: Labelled cases, by default those that validated it.
        fingerprint: Of all that decides its scores but the depth: weights, configuration, cases, precision.
    """

    name: str
    folder: Path
    predictor: Predictor
    cases: list[Case]
    fingerprint: str


def options(description: str | None) -> argparse.ArgumentParser:
    """What the command lines of studies of trained models share; :func:`models` reads it."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", required=True, metavar="NAME=RUN", help="trained models, by their folders")
    parser.add_argument("--data", type=Path, help="labelled data; as for rdvit train where not given")
    parser.add_argument("--split", help="the split that validated the model where not given")
    parser.add_argument("--fraction", type=float, default=1.0, help="share of the patients of the split, for a quick look")
    parser.add_argument("--out", type=Path, default=Path("runs/studies"), help="folder of tables, figures and scores")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, mps")
    return parser


def models(given: argparse.Namespace) -> list[Trained]:
    """The models of a command line made by :func:`options`.

    Raises:
        RdvitError: If a model is none, has other classes than the data, or two have one name.
    """
    data = load_data(given.data or default_data()[0])
    found: list[Trained] = []
    for word in given.models:
        name, equals, path = word.partition("=")
        if not (name and equals and path) or name in [model.name for model in found]:
            raise ConfigError(f"expected --models NAME=RUN, each with a name of its own, found '{word}'")
        folder = Path(path)
        network, info = load_model(folder)
        if info.class_names != data.class_names:
            raise DataError(f"classes {data.class_names} of the data are not the model's {info.class_names}", file=folder)
        split = given.split or info.training.get("validation", "fold0-val")
        cases = [case for case in select(data, split, given.fraction) if case.label is not None]
        predictor = Predictor(network, info, given.device)
        key = hashlib.sha256(f"{digest(cases)} {predictor.precision.name}".encode())
        for file in (WEIGHTS, DESCRIPTION):
            key.update((folder / file).read_bytes())
        found.append(Trained(name, folder, predictor, cases, key.hexdigest()[:12]))
    return found


def score_once(model: Trained, out: Path, loops: int, halting: Halting) -> dict[str, Any]:
    """The summary of a trained model's scores at one depth: found under ``OUT/scores/``, or made and kept there.

    Raises:
        DataError: If a case fails.
    """
    kept = out / "scores" / f"{model.fingerprint}-{loops}-{halting}.json"
    if not kept.is_file():
        _log.info("%s: %d cases with %d loops, halting %s", model.name, len(model.cases), loops, halting)
        results = score_cases(model.predictor, model.cases, model.predictor.info.class_names, loops, halting)
        summary = summarize(results, model.predictor.info.class_names)
        if summary["failures"]:
            raise DataError(f"case {summary['failures'][0]['case']} failed: {summary['failures'][0]['reason']}")
        write(kept, to_json(summary))
    return json.loads(kept.read_text(encoding="utf-8"))
