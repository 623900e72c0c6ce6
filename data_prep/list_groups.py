"""List the cases of one or more pathology groups of a data set, to train or fine-tune on: python data_prep/list_groups.py
path/to/ACDC DCM --out dcm.json. The list is split into the usual five folds of its own patients."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rdvit.atomic import atomic
from rdvit.data.datalist import load_data, patients
from rdvit.errors import RdvitError


def main() -> None:
    """Parse the command line and write the list; wrong input exits with 2."""
    parser = argparse.ArgumentParser(description="Write a JSON data list with the patients of some pathology groups.")
    parser.add_argument("data", help="data set folder or list")
    parser.add_argument("groups", nargs="+", help="DCM, HCM, MINF, NOR, RV in ACDC")
    parser.add_argument("--out", type=Path, required=True, help="the list")
    options = parser.parse_args()
    try:
        data = load_data(options.data)
        cases = [case for case in data.cases if case.group in options.groups]
        if missing := set(options.groups) - {case.group for case in cases}:
            there = sorted({case.group for case in data.cases if case.group})
            parser.error(f"no patient of group {', '.join(sorted(missing))}; there are {', '.join(there) or 'no groups'}")
    except RdvitError as error:
        parser.error(str(error))
    entries = [
        {"id": case.id, "patient": case.patient, "group": case.group, "phase": case.phase, "image": str(case.image.resolve())}
        | ({} if case.label is None else {"label": str(case.label.resolve())})
        for case in cases
    ]
    names = {str(value): name for value, name in data.class_names.items()}
    with atomic(options.out) as path:
        content = {"name": f"{data.name} {' '.join(options.groups)}", "labels": names, "cases": entries}
        path.write_text(json.dumps(content, indent=1), encoding="utf-8")
    print(f"{options.out}: {len(cases)} cases of {len(patients(cases))} patients", file=sys.stderr)


if __name__ == "__main__":
    main()
