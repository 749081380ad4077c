# SPDX-License-Identifier: Apache-2.0
"""Which device owns which matrix, and how its pieces get there and back."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import normpre_optax as npo
from normpre_optax.linalg.platforms import on
from normpre_optax.parameters.dims import split_axes
from normpre_optax.sharding.exchange import exchange
from normpre_optax.sharding.plan import Shard, plan
from tests import cases

DIMS = npo.MatrixDims(0, 1)


def shard(count, rows, columns, pieces=(), grid=(1, 1), batch=()):
    """One device's part of ``count`` matrices of this shape."""
    return Shard(count, rows // grid[0], columns // grid[1], grid, batch, pieces)


def work(m, n):
    return shard(1, m, n).work


def largest_load(sizes, shards, teams):
    """Largest number of operations of a device."""
    total = np.zeros(tuple(sizes.values()))
    for team in teams:
        names = team.copies + team.pieces
        owners = np.arange(len(team.owned)).reshape([sizes[a] for a in names])
        for device in np.ndindex(*sizes.values()):
            at = dict(zip(sizes, device, strict=True))
            owner = owners[tuple(at[a] for a in names)]
            total[device] += sum(shards[i].work for i, _ in team.owned[owner])
    return total.max()


def test_every_matrix_has_one_owner_and_the_work_is_even():
    """GPT-2 Small's 48 matrices on 8 devices: at most a tenth above an even share."""
    shapes = ((768, 2304), (768, 768), (768, 3072), (3072, 768))
    found = [shard(12, *shape, ("fsdp",), (8, 1)) for shape in shapes]
    (team,) = plan({"fsdp": 8}, found)
    owned = sorted(itertools.chain(*team.owned))
    assert owned == list(itertools.product(range(4), range(12)))
    even = sum(12 * s.work for s in found) / 8
    assert largest_load({"fsdp": 8}, found, [team]) <= 1.1 * even


def test_copies_share_the_work_only_along_axes_that_shard_something():
    # Nothing is sharded: all share.
    (team,) = plan({"data": 8}, [shard(8, 16, 16)])
    assert team.copies == ("data",)
    assert sorted(map(len, team.owned)) == [1] * 8
    # Sixteen matrices over eight devices, in eight copies: nothing is communicated
    # between copies.
    sizes = {"data": 8, "fsdp": 8}
    found = [shard(16, 32, 32, ("fsdp",), (8, 1))]
    teams = plan(sizes, found)
    assert [team.copies for team in teams] == [()]
    assert largest_load(sizes, found, teams) == 2 * work(32, 32)
    # Four matrices that fsdp does not divide, beside eight that it does.
    sizes = {"data": 2, "fsdp": 4}
    found = [shard(8, 16, 16, ("fsdp",), (4, 1)), shard(4, 17, 17)]
    teams = plan(sizes, found)
    assert {team.members[0]: team.copies for team in teams} == {0: (), 1: ("fsdp",)}
    assert largest_load(sizes, found, teams) == 2 * work(16, 16) + work(17, 17)
    # With one matrix each, nobody would have less to do.
    alone = plan({"fsdp": 4}, [shard(4, 16, 16, ("fsdp",), (4, 1)), shard(1, 2, 2)])
    assert all(team.copies == () for team in alone)
    # Experts over one axis, each unsharded on a device, stay there.
    (team,) = plan({"expert": 4}, [shard(2, 8, 8, batch=("expert",))])
    assert len(team.owned) == 1


def test_ties_go_to_the_shortest_buffer():
    """Of two shardings with equal work, every device has three matrices in all."""
    by_rows = shard(12, 64, 32, ("fsdp",), (8, 1))
    by_columns = shard(12, 64, 32, ("fsdp",), (1, 8))
    teams = plan({"fsdp": 8}, [by_rows, by_columns])
    counts = [[len(own) for own in team.owned] for team in teams]
    assert [sorted(c) for c in counts] == [[1] * 4 + [2] * 4] * 2
    assert {a + b for a, b in zip(*counts, strict=True)} == {3}


def test_each_matrix_arrives_whole_and_results_return():
    """A matrix is divided by its Frobenius norm, which needs all of its pieces."""
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"))
    heads = npo.MatrixDims(0, (1, 2))
    shapes, dims, specs = zip(
        # does not fill lines
        ((16, 21), DIMS, PartitionSpec(("data", "fsdp"), None)),
        # fills lines: by columns, and by rows
        ((16, 256), DIMS, PartitionSpec(None, "data")),
        ((256, 24), DIMS, PartitionSpec("data", None)),
        ((16, 24), npo.MatrixDims(1, 0), PartitionSpec("data", "fsdp")),
        # flattened axes: the first one sharded, and the second one
        ((8, 4, 6), heads, PartitionSpec("fsdp", "data", None)),
        ((8, 3, 4), heads, PartitionSpec(None, None, "fsdp")),
        # a sharded batch axis
        ((4, 8, 6), npo.MatrixDims(1, 2), PartitionSpec("fsdp", "data", None)),
        strict=True,
    )
    arrays = cases.numbers(list(shapes))
    there = [cases.put(x, mesh, *spec) for x, spec in zip(arrays, specs, strict=True)]

    def normalized(x, one):
        return one * x / jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)

    def compute(stacks, one):
        return [normalized(x, one) for x in stacks]

    def distributed(xs):
        return exchange(compute, 1.0, xs, dims, specs, mesh.abstract_mesh)

    found = cases.quick_jit(distributed)(there)
    for x, y, d, given in zip(arrays, found, dims, there, strict=True):
        _, outputs, inputs = split_axes(x.ndim, d)
        norms = jnp.sqrt(jnp.sum(x * x, outputs + inputs, keepdims=True))
        np.testing.assert_allclose(y, x / norms, rtol=1e-6)
        assert y.sharding.is_equivalent_to(given.sharding, x.ndim)


@pytest.mark.parametrize(
    ("compute_dtype", "rounds"), [(None, True), (jnp.float32, False)]
)
def test_a_tpu_communicates_in_bfloat16_where_its_products_round(compute_dtype, rounds):
    mesh = jax.make_mesh((8,), ("fsdp",))
    there = {"up": cases.put(cases.numbers((64, 48)), mesh, "fsdp")}
    tx = npo.precondition_globally(compute_dtype=compute_dtype, matrix_dims=DIMS)

    def on_both(x):
        state = tx.init(x)
        return [on(kind, tx.update, x, state)[0]["up"] for kind in ("gpu", "tpu")]

    plain, tpu = cases.quick_jit(on_both)(there)
    error = float(jnp.linalg.norm(tpu - plain) / jnp.linalg.norm(plain))
    # Once each way, by at most 2^-9 of an entry; five steps on a flat spectrum hardly
    # enlarge it.
    if rounds:
        assert 0 < error < 2**-7
    else:
        assert error == 0


@pytest.mark.parametrize(("kind", "gathers"), [("gpu", True), ("tpu", False)])
def test_replicated_matrices_are_shared_out_except_on_a_tpu(kind, gathers):
    params = cases.numbers({f"up_{i}": (16, 24) for i in range(4)})
    there = cases.put(params, jax.make_mesh((8,), ("data",)))
    tx = npo.precondition_globally(
        ns_steps=1, compute_dtype=jnp.float32, matrix_dims=DIMS
    )
    update = jax.jit(functools.partial(on, kind, tx.update))
    lowered = update.lower(there, tx.init(there))
    assert ("all_gather" in lowered.as_text()) == gathers
    found, _ = lowered.compile()(there, tx.init(there))
    expected, _ = tx.update(params, tx.init(params))
    # Sums are in another order, and entries are near one.
    cases.assert_close(found, expected, atol=1e-5)
