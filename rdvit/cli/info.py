"""``rdvit info``."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from rdvit.cli.console import console, print_json

_SHIPPED = Path(__file__).parents[1] / "weights"  # as rdvit.checkpoint has it, which imports torch


def info(
    model: Annotated[str | None, typer.Argument(help="Model folder, name of a run or of a model in the package.")] = None,
    runs: Annotated[Path, typer.Option(help="Folder of all runs.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON on standard output.")] = False,
) -> None:
    """What is installed and which runs there are, or what a model is: classes, spacing, loops, where it comes from.

    \f
    Raises:
        RdvitError: If the model is missing or damaged.
    """
    facts = _model_facts(model, runs) if model is not None else _installation(runs)
    if as_json:
        print_json(json.dumps(facts, indent=2))
        return
    for key, value in facts.items():
        console().print(f"{key}: {', '.join(map(str, value)) if isinstance(value, list) else value}")


def _installation(runs: Path) -> dict[str, Any]:
    """Versions and runs, found without importing any of the libraries."""
    import os
    import platform

    from rdvit.config import PRESETS

    packages = ("rdvit", "torch", "monai", "nibabel", "SimpleITK", "mlflow", "lightning-fabric", "numpy")
    versions = {}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        **versions,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "presets": list(PRESETS),
        "models in the package": sorted(path.parent.name for path in _SHIPPED.glob("*/model.json")),
        "runs": sorted(path.parent.name for path in runs.glob("*/model.json")),
    }


def _model_facts(model: str, runs: Path) -> dict[str, Any]:
    from rdvit.checkpoint import find_model, load_info

    folder = find_model(model, runs)
    description = load_info(folder)
    config = description.config
    return {
        "folder": str(folder),
        "classes": {str(value): name for value, name in description.class_names.items()},
        "preset": config.model.preset,
        "dimensions": config.model.spatial_dims,
        "loops": config.model.loops,
        "halting": config.model.halting,
        "spacing_mm": config.data.spacing,
        "training": description.training,
        "rdvit": description.version,
    }
