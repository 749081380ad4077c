# SPDX-License-Identifier: Apache-2.0
"""Who treats which matrices: everything once, nobody much more than the others."""

import collections
import math

import numpy as np
import pytest
from jax.sharding import PartitionSpec

from normpre_optax.parameters import sharing

SIZES = {"data": 2, "fsdp": 4}


def stacks(*specs, shape=(12, 768, 2304)):
    return [sharing.stack_of(shape, "float32", PartitionSpec(*spec)) for spec in specs]


def owned(plan):
    """How often each matrix is owned within a team's devices."""
    return collections.Counter(item for team in plan.teams for own in team.owned for item in own)


@pytest.mark.parametrize("spec", [(), (None, "fsdp"), (None, "data", "fsdp"), ("fsdp",), (("data", "fsdp"),)])
def test_every_matrix_is_treated_once(spec):
    (stack,) = stacks(spec, shape=(16, 8, 8))
    found = sharing.plan(SIZES, [stack], sharing.newton_schulz_work)
    local = 16 // math.prod(SIZES[a] for a in stack.axes[0])
    assert owned(found) == {(0, j): 1 for j in range(local)}
    # Through all stacks of the model, every matrix stands in the slots of one device.
    slots = [found.slots[d][: sum(map(len, found.kinds[k]))] for d, k in enumerate(found.kind)]
    assert sorted(np.concatenate(slots)) == list(range(16))


def test_work_is_balanced_over_shapes():
    """GPT-2 Small: twelve of one size do not go into eight devices, but all sizes together nearly do."""
    shapes = [(768, 768), (2304, 768), (3072, 768), (768, 3072)]
    found = [sharing.stack_of((12, *shape), "float32", PartitionSpec(None, "fsdp")) for shape in shapes]
    plan = sharing.plan({"fsdp": 8}, found, sharing.newton_schulz_work)
    total = sum(12 * sharing.newton_schulz_work(*shape) for shape in shapes)
    assert plan.loads.sum() == total
    assert plan.loads.max() < 1.05 * total / 8


def test_with_more_devices_than_matrices_nobody_has_two():
    plan = sharing.plan({"fsdp": 64}, stacks((None, "fsdp")), sharing.newton_schulz_work)
    assert sorted(sum(map(len, plan.kinds[kind])) for kind in plan.kind) == [0] * 52 + [1] * 12


def test_layers_that_are_shared_out_already_stay():
    plan = sharing.plan({"fsdp": 4}, stacks(("fsdp",)), sharing.newton_schulz_work)
    assert sharing.traffic({"fsdp": 4}, plan) == 0
    assert (plan.loads == plan.loads[0]).all()


def test_copies_are_divided_and_gathered():
    (stack,) = stacks((), shape=(8, 4, 4))
    plan = sharing.plan({"data": 8}, [stack], sharing.newton_schulz_work)
    assert plan.loads.max() == sharing.newton_schulz_work(4, 4)
    assert sharing.traffic({"data": 8}, plan) == 8 * 4 * 4 * 4


def test_copies_are_not_divided_where_nobody_would_have_less():
    """Eight matrices over eight devices of eight copies: one each already, and nothing to gather."""
    sizes = {"data": 8, "fsdp": 8}
    plan = sharing.plan(sizes, stacks((None, "fsdp"), shape=(8, 16, 16)), sharing.newton_schulz_work)
    assert plan.loads.max() == sharing.newton_schulz_work(16, 16)
    assert sharing.traffic(sizes, plan) == 2 * 16 * 16 * 4


def test_ties_go_where_the_line_is_short():
    """Two layouts of equal work: whoever has two of one has one of the other."""
    plan = sharing.plan({"fsdp": 8}, stacks((None, "fsdp"), (None, None, "fsdp")), sharing.newton_schulz_work)
    assert [sorted(map(len, team.owned)) for team in plan.teams] == [[1] * 4 + [2] * 4] * 2
    assert {len(a) + len(b) for a, b in zip(*(team.owned for team in plan.teams), strict=True)} == {3}
