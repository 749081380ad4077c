# SPDX-License-Identifier: Apache-2.0
"""Which device owns which matrix, and how its pieces get there and back."""

import functools

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
        for device in np.ndindex(*sizes.values()):
            at = dict(zip(sizes, device, strict=True))
            place = (
                np.ravel_multi_index([at[a] for a in names], [sizes[a] for a in names])
                if names
                else 0
            )
            total[device] += sum(shards[i].work for i, _ in team.owned[place])
    return total.max()


def test_every_matrix_has_one_owner_and_the_work_is_even():
    """GPT-2 Small's 48 matrices over eight devices: at most a tenth above an even
    share.
    """
    found = [
        shard(12, *shape, ("fsdp",), (8, 1))
        for shape in ((768, 2304), (768, 768), (768, 3072), (3072, 768))
    ]
    (team,) = plan({"fsdp": 8}, found)
    assert sorted(item for own in team.owned for item in own) == [
        (i, j) for i in range(4) for j in range(12)
    ]
    assert (
        largest_load({"fsdp": 8}, found, [team])
        <= 1.1 * sum(12 * s.work for s in found) / 8
    )


def test_copies_share_the_work_only_along_axes_that_shard_something():
    # Nothing is sharded: all share.
    (team,) = plan({"data": 8}, [shard(8, 16, 16)])
    assert team.copies == ("data",)
    assert sorted(map(len, team.owned)) == [1] * 8
    # Sixteen matrices over eight devices, in eight copies: nothing is communicated
    # between copies.
    sizes, found = {"data": 8, "fsdp": 8}, [shard(16, 32, 32, ("fsdp",), (8, 1))]
    teams = plan(sizes, found)
    assert [team.copies for team in teams] == [()]
    assert largest_load(sizes, found, teams) == 2 * work(32, 32)
    # Four matrices that fsdp does not divide, beside eight that it does.
    sizes, found = (
        {"data": 2, "fsdp": 4},
        [shard(8, 16, 16, ("fsdp",), (4, 1)), shard(4, 17, 17)],
    )
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
    """Two shardings of equal work: a device with two matrices of one has one of the
    other.
    """
    teams = plan(
        {"fsdp": 8},
        [shard(12, 64, 32, ("fsdp",), (8, 1)), shard(12, 64, 32, ("fsdp",), (1, 8))],
    )
    assert [sorted(map(len, team.owned)) for team in teams] == [[1] * 4 + [2] * 4] * 2
    assert {
        len(a) + len(b) for a, b in zip(*(team.owned for team in teams), strict=True)
    } == {3}


def test_each_matrix_arrives_whole_and_results_return():
    """The spectral function is exact on whole matrices: here, division by the Frobenius
    norm.
    """
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"))
    shapes, dims, specs = zip(
        ((16, 21), DIMS, (("data", "fsdp"), None)),  # does not fill lines
        ((16, 256), DIMS, (None, "data")),  # whole lines, by columns
        ((256, 24), DIMS, ("data", None)),  # and by rows
        ((16, 24), npo.MatrixDims(1, 0), ("data", "fsdp")),
        (
            (8, 4, 6),
            npo.MatrixDims(0, (1, 2)),
            ("fsdp", "data", None),
        ),  # flattened axes, the first one sharded
        (
            (8, 3, 4),
            npo.MatrixDims(0, (1, 2)),
            (None, None, "fsdp"),
        ),  # and the second one
        (
            (4, 8, 6),
            npo.MatrixDims(1, 2),
            ("fsdp", "data", None),
        ),  # a sharded batch axis
        strict=True,
    )
    specs, arrays = (
        [PartitionSpec(*spec) for spec in specs],
        cases.numbers(list(shapes)),
    )
    there = [cases.put(x, mesh, *spec) for x, spec in zip(arrays, specs, strict=True)]

    def compute(stacks, one):
        return [
            one * s / jnp.linalg.norm(s, axis=(-2, -1), keepdims=True) for s in stacks
        ]

    found = cases.quick_jit(
        lambda x: exchange(compute, 1.0, x, dims, specs, mesh.abstract_mesh)
    )(there)
    for x, y, d, given in zip(arrays, found, dims, there, strict=True):
        axes = sum(split_axes(x.ndim, d)[1:], ())
        np.testing.assert_allclose(
            y, x / jnp.sqrt(jnp.sum(x * x, axes, keepdims=True)), rtol=1e-6
        )
        assert y.sharding.is_equivalent_to(given.sharding, x.ndim)


@pytest.mark.parametrize(
    ("compute_dtype", "rounds"), [(None, True), (jnp.float32, False)]
)
def test_a_tpu_communicates_in_bfloat16_where_its_products_round(compute_dtype, rounds):
    there = {
        "up": cases.put(cases.numbers((64, 48)), jax.make_mesh((8,), ("fsdp",)), "fsdp")
    }
    tx = npo.precondition_globally(compute_dtype=compute_dtype, matrix_dims=DIMS)
    both = cases.quick_jit(
        lambda x: [
            on(kind, tx.update, x, tx.init(x))[0]["up"] for kind in ("gpu", "tpu")
        ]
    )
    plain, tpu = both(there)
    error = float(jnp.linalg.norm(tpu - plain) / jnp.linalg.norm(plain))
    # Once each way, by at most 2^-9 of an entry; five steps on a flat spectrum hardly
    # enlarge it.
    assert 0 < error < 2**-7 if rounds else error == 0


@pytest.mark.parametrize(("kind", "gathers"), [("gpu", True), ("tpu", False)])
def test_replicated_matrices_are_shared_out_except_on_a_tpu(kind, gathers):
    params = cases.numbers({f"up_{i}": (16, 24) for i in range(4)})
    there = cases.put(params, jax.make_mesh((8,), ("data",)))
    tx = npo.precondition_globally(
        ns_steps=1, compute_dtype=jnp.float32, matrix_dims=DIMS
    )
    lowered = jax.jit(functools.partial(on, kind, tx.update)).lower(
        there, tx.init(there)
    )
    assert ("all_gather" in lowered.as_text()) == gathers
    found, expected = (
        lowered.compile()(there, tx.init(there))[0],
        tx.update(params, tx.init(params))[0],
    )
    cases.assert_close(
        found, expected, atol=1e-5
    )  # sums in another order, entries near one
