# SPDX-License-Identifier: Apache-2.0
"""The deliberate faults of ``break_it``: that they can still be made."""

import pytest

from tests.break_it import FAULTS, ROOT


@pytest.mark.parametrize("name", FAULTS)
def test_its_line_stands_there_once(name):
    fault = FAULTS[name]
    assert (ROOT / "normpre_optax" / fault.file).read_text().count(fault.old) == 1
