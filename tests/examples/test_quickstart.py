# SPDX-License-Identifier: Apache-2.0
"""The example a newcomer runs first."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.py"
RECOMMENDED = "normpre_h(schedule, adam_learning_rate=adamw_schedule)"
ADAMW = "optax.adamw(adamw_schedule)"


def test_it_is_short_and_the_switch_is_one_line():
    lines = QUICKSTART.read_text().splitlines()
    assert len(lines) < 100
    assert [line for line in lines if "normpre_h(" in line] == [f"tx = {RECOMMENDED}"]
    assert f"# The line that was tx = {ADAMW}:" in lines


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", [RECOMMENDED, pytest.param(ADAMW, marks=pytest.mark.thorough)]
)
def test_it_learns(tmp_path, optimizer):
    script = tmp_path / "quickstart.py"
    script.write_text(QUICKSTART.read_text().replace(RECOMMENDED, optimizer))
    environment = {**os.environ, "PYTHONPATH": str(QUICKSTART.parents[1])}
    result = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", result.stdout)]
    assert len(losses) == 7
    # log 256 = 5.5 knowing nothing; 3.1 knowing the frequency of each byte.
    assert losses[0] > 5.0
    assert losses[-1] < 2.4
    assert "12 matrices" in result.stdout
