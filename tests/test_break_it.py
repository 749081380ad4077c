# SPDX-License-Identifier: Apache-2.0
"""The deliberate faults of ``break_it`` can still be made, and are in every part of the
package.
"""

from tests.break_it import FAULTS, ROOT


def test_every_fault_can_be_made_and_every_part_has_some():
    for name, fault in FAULTS.items():
        assert (ROOT / "normpre_optax" / fault.file).read_text().count(
            fault.old
        ) == 1, name
        assert all(
            (ROOT / test).exists() for test in fault.tests.split(" -k ")[0].split()
        ), name
    found = [fault.file.split("/")[0] for fault in FAULTS.values()]
    assert (
        min(
            found.count(folder)
            for folder in ("linalg", "parameters", "sharding", "stages", "relatives")
        )
        >= 3
    )
    assert {
        "optimizer.py",
        "hyperball.py",
        "checks.py",
        "algorithm.py",
        "learning_rates.py",
    } <= set(found)
