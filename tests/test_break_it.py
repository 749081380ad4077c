# SPDX-License-Identifier: Apache-2.0
"""The deliberate faults of ``break_it`` can still be made, and are in every part of the package."""

import pytest

from tests.break_it import FAULTS, ROOT


@pytest.mark.parametrize("name", FAULTS)
def test_its_line_occurs_once_and_its_tests_exist(name):
    fault = FAULTS[name]
    assert (ROOT / "normpre_optax" / fault.file).read_text().count(fault.old) == 1
    assert all((ROOT / test).exists() for test in fault.tests.split(" -k ")[0].split())


def test_every_part_has_faults():
    assert len(FAULTS) >= 30
    folders = ("linalg", "parameters", "sharding", "stages", "relatives")
    found = [fault.file.split("/")[0] for fault in FAULTS.values()]
    assert min(found.count(folder) for folder in folders) >= 3
    assert {"optimizer.py", "hyperball.py", "checks.py", "algorithm.py", "learning_rates.py"} <= set(found)
