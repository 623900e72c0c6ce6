"""The quick start imports what a segmentation needs and leaves the rest importable."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import ctypes, os, resource, sys
from rdvit.cli.startup import keep_memory
keep_memory()
import torch
def round_of_tensors():  # of several sizes at once, as in a network
    a, b = torch.ones(3_000_000), torch.ones(1_000_000)
    return a[0] + b[0]
round_of_tensors(), round_of_tensors()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    round_of_tensors()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc lets memory be kept")
def test_freed_memory_is_used_again_unless_the_user_decides() -> None:
    """Pages of 4 kB: ten rounds of 16 MB each are 39,000 faults in fresh memory."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    faults = []
    for more in ({}, {"MALLOC_TRIM_THRESHOLD_": "100000", "MALLOC_MMAP_THRESHOLD_": "100000"}):
        done = subprocess.run(
            [sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, env=environment | more
        )
        faults.append(int(done.stdout))
    assert faults[1] > 20_000
    assert faults[0] < faults[1] / 3
