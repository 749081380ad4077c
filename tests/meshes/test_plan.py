# SPDX-License-Identifier: Apache-2.0
"""Who treats which matrices: everything once, nobody much more than the others."""

import collections
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import normpre_optax as npo
from normpre_optax.meshes.plan import make_plan, newton_schulz_work, stack_of, traffic

SIZES = {"data": 2, "fsdp": 4}


def stacks(*specs, shape=(12, 768, 2304)):
    return [stack_of(shape, "float32", PartitionSpec(*spec)) for spec in specs]


def owned(plan):
    """How often each matrix is owned within a team's devices."""
    return collections.Counter(item for team in plan.teams for own in team.owned for item in own)


@pytest.mark.parametrize("spec", [(), (None, "fsdp"), (None, "data", "fsdp"), ("fsdp",), (("data", "fsdp"),)])
def test_every_matrix_is_treated_once(spec):
    (stack,) = stacks(spec, shape=(16, 8, 8))
    found = make_plan(SIZES, [stack], newton_schulz_work)
    local = 16 // math.prod(SIZES[a] for a in stack.axes[0])
    assert owned(found) == {(0, j): 1 for j in range(local)}
    # Through all stacks of the model, every matrix stands in the slots of one device, or one of each copy along data.
    slots = [found.slots[d][: sum(map(len, found.kinds[k]))] for d, k in enumerate(found.kind)]
    copies = 2 if any(stack.axes) and "data" not in sum(stack.axes, ()) else 1
    assert sorted(np.concatenate(slots)) == sorted(list(range(16)) * copies)


def test_work_is_balanced_over_shapes():
    """GPT-2 Small: twelve of one size do not go into eight devices, but all sizes together nearly do."""
    shapes = [(768, 768), (2304, 768), (3072, 768), (768, 3072)]
    found = [stack_of((12, *shape), "float32", PartitionSpec(None, "fsdp")) for shape in shapes]
    plan = make_plan({"fsdp": 8}, found, newton_schulz_work)
    total = sum(12 * newton_schulz_work(*shape) for shape in shapes)
    assert plan.loads.sum() == total
    assert plan.loads.max() < 1.05 * total / 8


def test_with_more_devices_than_matrices_nobody_has_two():
    plan = make_plan({"fsdp": 64}, stacks((None, "fsdp")), newton_schulz_work)
    assert sorted(sum(map(len, plan.kinds[kind])) for kind in plan.kind) == [0] * 52 + [1] * 12


def test_layers_that_are_shared_out_already_stay():
    plan = make_plan({"fsdp": 4}, stacks(("fsdp",)), newton_schulz_work)
    assert traffic({"fsdp": 4}, plan) == 0
    assert (plan.loads == plan.loads[0]).all()


def test_copies_are_divided_and_gathered():
    (stack,) = stacks((), shape=(8, 16, 16))
    plan = make_plan({"data": 8}, [stack], newton_schulz_work)
    assert plan.loads.max() == newton_schulz_work(16, 16)
    assert traffic({"data": 8}, plan) == 8 * 16 * 16 * 4


def test_copies_along_an_axis_that_shards_nothing_do_the_same():
    """Sixteen matrices over eight devices, two each, in eight copies: nothing goes over the axis of the copies."""
    sizes = {"data": 8, "fsdp": 8}
    plan = make_plan(sizes, stacks((None, "fsdp"), shape=(16, 32, 32)), newton_schulz_work)
    assert plan.loads.max() == 2 * newton_schulz_work(32, 32)
    assert [team.copies for team in plan.teams] == [()]
    assert traffic(sizes, plan) == 2 * 2 * 32 * 32 * 4


def test_copies_along_an_axis_that_shards_others_are_divided():
    """Four matrices that fsdp does not divide, beside eight that it does."""
    sizes = {"data": 2, "fsdp": 4}
    found = stacks((None, "fsdp"), shape=(8, 16, 16)) + stacks((), shape=(4, 17, 17))
    plan = make_plan(sizes, found, newton_schulz_work)
    assert [team.copies for team in plan.teams] == [(), ("fsdp",)]
    assert plan.loads.max() == 2 * newton_schulz_work(16, 16) + newton_schulz_work(17, 17)
    # One already each: nobody would have less.
    alone = make_plan(
        {"fsdp": 4}, stacks((None, "fsdp"), shape=(4, 16, 16)) + stacks((), shape=(1, 2, 2)), newton_schulz_work
    )
    assert alone.teams[0].copies == ()


def test_ties_go_where_the_line_is_short():
    """Two layouts of equal work: whoever has two of one has one of the other."""
    plan = make_plan({"fsdp": 8}, stacks((None, "fsdp"), (None, None, "fsdp")), newton_schulz_work)
    assert [sorted(map(len, team.owned)) for team in plan.teams] == [[1] * 4 + [2] * 4] * 2
    assert {len(a) + len(b) for a, b in zip(*(team.owned for team in plan.teams), strict=True)} == {3}


def test_explain_says_who_computes_what():
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "fsdp"))
    params = {str(i): {"kernel": jax.ShapeDtypeStruct((16, 32), jnp.float32)} for i in range(8)}
    text = npo.explain(params, mesh=mesh, shardings=PartitionSpec("fsdp"))
    assert "mesh data=2, fsdp=4: 8 devices" in text
    # Over fsdp, and the same again along data.
    assert "2 to 2 of 8 matrices each, at most 2.00 of an even share of work (along data all do the same)" in text
    assert f"{2 * 2 * 16 * 32 * 4 / 1e6:,.3g} MB" in text


def test_explain_refuses_what_is_no_mesh_and_says_what_it_cannot_know():
    params = {"up": {"kernel": jnp.ones((16, 32))}}
    with pytest.raises(TypeError, match=r"mesh must be a jax\.sharding\.Mesh"):
        npo.explain(params, mesh="fsdp=8")
    with pytest.raises(ValueError, match="say nothing without mesh="):
        npo.explain(params, shardings=PartitionSpec())
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    assert "shardings=jax.tree.map(lambda x: x.sharding, params)" in npo.explain(params, mesh=mesh)
    assert "no matrices to divide" in npo.explain({"bias": jnp.ones(16)}, mesh=mesh)
    there = jax.device_put(params["up"]["kernel"], NamedSharding(mesh, PartitionSpec("fsdp")))
    with pytest.raises(ValueError, match="'up/kernel' lies on another mesh"):
        npo.explain({"up": {"kernel": there}}, mesh=jax.sharding.AbstractMesh((2, 4), ("data", "fsdp")))
