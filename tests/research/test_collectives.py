# SPDX-License-Identifier: Apache-2.0
"""Counting what compiled programs do.

And the bounds of the optimizers on a mesh of eight devices.
"""

import functools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import normpre_optax as npo
from examples.research import hlo
from tests import cases
from tests.research.test_ahead import computation

pytestmark = pytest.mark.every_platform


def counted(f, *arguments, **options):
    return hlo.cost(jax.jit(f).lower(*arguments).compile().as_text(), **options)


def test_products_in_loops_and_branches():
    def turn(_, y):
        return jnp.sin(y) @ jnp.eye(16) * 2

    branches = [
        lambda y: y @ y.T,
        lambda y: (y @ y.T) @ (y @ y.T),
        lambda y: jnp.zeros((8, 8)),
    ]

    def f(x, i):
        y = jax.lax.fori_loop(0, 3, turn, x)
        return jax.lax.switch(i, branches, y)

    # The most expensive branch: 8 x 16 by 16 x 8 (once, or twice where the compiler
    # does not see that it is the same).
    cost = counted(f, jnp.ones((8, 16)), 1)
    loop = 3 * 2 * 8 * 16 * 16
    wide = 2 * 8 * 8 * 16
    small = 2 * 8 * 8 * 8
    assert cost.flops in (loop + wide + small, loop + 2 * wide + small)
    assert cost.bytes == 0


def test_bytes_of_collectives():
    def f(x):
        total = jax.lax.psum(x, "x")  # 2 x 24
        everything = jax.lax.all_gather(x, "x")  # 16 x 24
        turned = jax.lax.all_to_all(x, "x", 1, 0, tiled=True)  # 16 x 3
        return total.sum() + everything.sum() + turned.sum()

    mesh = jax.make_mesh((8,), ("x",))
    f = jax.shard_map(
        f,
        mesh=mesh,
        in_specs=PartitionSpec("x"),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    found = counted(f, cases.put(jnp.ones((16, 24)), mesh, "x")).collectives
    assert found == {"all-reduce": 192, "all-gather": 1536, "all-to-all": 192}


GROUPS = {
    "replica_groups={{0,1},{2,3}}": [[0, 1], [2, 3]],
    "source_target_pairs={{0,2},{2,0}}": [[0, 2], [2, 0]],
    "replica_groups=[2,2]<=[4]": [[0, 1], [2, 3]],
    "replica_groups=[2,2]<=[2,2]T(1,0)": [[0, 2], [1, 3]],
    "replica_groups=mesh['data'=2,'fsdp'=2] {'fsdp'}": [[0, 1], [2, 3]],
    "replica_groups=mesh['data'=2,'fsdp'=2] {'data'}": [[0, 2], [1, 3]],
    "replica_groups=mesh['data'=2,'fsdp'=2] {'data','fsdp'}": [[0, 1, 2, 3]],
    "replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}": [
        [0, 2],
        [1, 3],
    ],
    "replica_groups=mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}": [[3, 1], [2, 0]],
}


def test_between_which_devices():
    for said, groups in GROUPS.items():
        one = hlo.Instruction(
            "x",
            "f32[2]",
            "all-reduce",
            (),
            "",
            f", channel_id=1, {said}, to_apply=%add",
            False,
        )
        assert hlo.groups(one) == groups
        several_hosts = []
        for group in groups:
            hosts = {device // 2 for device in group}
            several_hosts.append(len(hosts) > 1)
        assert hlo.goes_beyond(one, 2) == any(several_hosts)


def test_bytes_beyond_the_fast_network():
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"))
    x = cases.put(jnp.ones((8, 16)), mesh, "data", "fsdp")
    for axes, far in (
        (("fsdp",), 0),
        (("data",), 4 * 4 * 4),
        (("data", "fsdp"), 4 * 4 * 4),
    ):
        left = [None if axis in axes else axis for axis in ("data", "fsdp")]
        f = jax.shard_map(
            functools.partial(jax.lax.psum, axis_name=axes),
            mesh=mesh,
            in_specs=x.sharding.spec,
            out_specs=PartitionSpec(*left),
        )
        cost = counted(f, x, group=4)
        assert (cost.bytes, cost.far) == (64, far)


def half(name, target):
    """The start or the end of a collective that two fusions show."""
    gather = (
        "bf16[16]{0} all-gather(%p), channel_id=1, replica_groups={{0,1,2,3}},"
        " dimensions={0}"
    )
    call = (
        "%c = bf16[16]{0} custom-call(%g),"
        f' custom_call_target="AsyncCollective{target}"'
    )
    return computation(
        name, "%p = bf16[4]{0} parameter(0)", f'%g = {gather}, chain_id="0"', call
    )


def started(between):
    start = (
        "%s = f32[4]{0} all-reduce-start(%p), channel_id=1, replica_groups={{0,1}},"
        " to_apply=%add"
    )
    return computation(
        "main",
        "%p = f32[4]{0} parameter(0)",
        start,
        between,
        "%d = f32[4]{0} all-reduce-done(%s)",
    )


def test_what_is_communicated_while_the_device_computes():
    fusion = "bf16[16]{0} fusion(%p), kind=kCustom, calls="
    both = computation(
        "main",
        "%p = bf16[4]{0} parameter(0)",
        f"%a = {fusion}%begin",
        f"%b = {fusion}%end",
    )
    for text, moved, overlapped in (
        (half("begin", "Start") + half("end", "Done") + both, 32, 32),
        (started("%m = f32[4]{0} multiply(%p, %p)"), 16, 16),
        (started("%m = f32[4]{0} bitcast(%p)"), 16, 0),
    ):
        cost = hlo.cost(text)
        assert (cost.bytes, cost.overlapped) == (moved, overlapped)


@pytest.mark.parametrize("name", ["normpre_g", "normpre_l-small", "normpre_h"])
def test_nothing_goes_over_the_slow_axis_and_no_stack_of_experts_is_gathered(name):
    """Layers of experts that are sharded over experts and FSDP.

    There is a copy of all of them on each of two slices.
    """
    mesh = jax.make_mesh((2, 2, 2), ("data", "expert", "fsdp"))
    shapes = {"experts": (2, 4, 64, 96), "attention": (2, 32, 32)}
    specs = {"experts": (None, "expert", "fsdp"), "attention": (None, "fsdp")}
    params = {}
    for leaf, shape in shapes.items():
        params[leaf] = cases.put(jnp.ones(shape), mesh, *specs[leaf])

    def dims(path, leaf):
        return npo.MatrixDims(inputs=-2, outputs=-1)

    tx = cases.make(name, 0.1, matrix_dims=dims)
    lowered = jax.jit(tx.update).lower(params, tx.init(params), params)
    quick = {"xla_backend_optimization_level": 0}
    program = lowered.compile(compiler_options=quick)
    cost = hlo.cost(program.as_text(), 1.5, group=4)
    assert cost.far == 0
    share = 4 * (2 * 4 * 64 * 96 / 4 + 2 * 32 * 32 / 2)
    # There and back; sums a row, and attention's updates, which devices with other
    # experts have made, are the rest.
    assert 0 < cost.bytes <= 2.2 * share


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_byte_targets_hold_on_eight_devices(tmp_path):
    """GPT-2 Small under FSDP: these are counts, not times, so they can be held."""
    command = "-m examples.research.collectives --models gpt2_small --devices 1 8"
    command += " --optimizers optax_muon normpre_g normpre_l"
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    words = [sys.executable, *command.split(), "--out", str(tmp_path)]
    subprocess.run(words, check=True, env=environment, capture_output=True)
    rows = json.loads((tmp_path / "collectives.json").read_text())["rows"]
    at = {(row["optimizer"], row["devices"]): row for row in rows}
    peer = at["optax_muon", 8]["bytes"]
    assert at["normpre_g", 8]["bytes"] <= peer / 30
    assert at["normpre_l", 8]["bytes"] <= peer / 100
    assert at["normpre_g", 8]["flops"] <= 1.15 * at["normpre_g", 1]["flops"] / 8
