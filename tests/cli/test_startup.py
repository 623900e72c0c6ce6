"""The quick start imports what a segmentation needs and leaves the rest importable."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
from rdvit.cli.startup import import_monai
import_monai()
import rdvit.inference.predictor
assert "monai.inferers" in sys.modules
print(sorted({"mlflow", "matplotlib", "pandas", "sklearn", "pydicom"} & set(sys.modules)))
import matplotlib
import_monai()
print(matplotlib is sys.modules["matplotlib"])
"""


def test_optional_partners_stay_out_and_can_be_imported_later() -> None:
    """In a process of its own: this one has imported them all."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "True"]
