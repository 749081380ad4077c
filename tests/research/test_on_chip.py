# SPDX-License-Identifier: Apache-2.0
"""The command for an accelerator, rehearsed on the CPU with tiny shapes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.research import on_chip

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
def test_all_parts_with_tiny_shapes(tmp_path):
    tiny = (
        "--minutes 14 --steps 10 --models tiny --optimizers optax_muon normpre_h"
        " --config tiny --out out"
    )
    command = [sys.executable, "-m", "examples.research.on_chip", *tiny.split()]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0
    numerics = json.loads((tmp_path / "out" / "numerics.json").read_text())["rows"]
    # Two updates in float32: rounding of 6e-8, times a slope of Newton-Schulz at zero
    # of up to 1e3.
    assert numerics
    assert max(row["usual products"] for row in numerics.values()) < 1e-3
    steps = json.loads((tmp_path / "out" / "steps.json").read_text())
    assert [*steps["tiny"]["rows"]] == ["optax_muon", "normpre_h"]
    page = (tmp_path / "out" / "README.md").read_text()
    for title in (
        "## Distance from float64",
        "## Step of tiny",
        "## A training step of tiny",
        "## Training",
    ):
        assert title in page
    for label in ("AdamW", "optax Muon", "Muon, norm_control=hyperball", "NormPre-H"):
        assert f"| {label} | 0" in page


def test_estimates_stand_next_to_what_was_measured():
    h100 = "NVIDIA H100 80GB HBM3"
    assert float(on_chip.estimate(h100, "gpt2_small", "normpre_h")) > 1
    assert float(on_chip.estimate("TPU v5 lite", "gpt2_small", "normpre_g")) > 1
    assert on_chip.estimate("cpu", "gpt2_small", "normpre_g") == ""
