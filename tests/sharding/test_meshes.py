# SPDX-License-Identifier: Apache-2.0
"""Every optimizer on every mesh.

Updates equal those of one device within rounding, and are sharded as the parameters.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import normpre_optax as npo
from tests import cases

SMALL = {"rank": 4, "oversample": 2}
FACTORIES = {
    **cases.ONE_RATE,
    "normpre_l": functools.partial(npo.normpre_l, **SMALL),
    "normpre_g-columns": functools.partial(npo.normpre_g, orientation="columns"),
    "normpre_l-exact": functools.partial(npo.normpre_l, rank=4, method="exact"),
    "normpre_l-products": functools.partial(npo.normpre_l, method="products", **SMALL),
    "normpre_h": functools.partial(npo.normpre_h, adam_learning_rate=0.1),
}
# What an optimizer may meet, once in every sharding: a pair of layers, heads in stacked
# layers, vectors; 21, that nothing here divides; output blocks that the sharding cuts
# through; and experts behind layers.
MODEL = {
    "up": {"kernel": (16, 32), "bias": (32,)},
    "down": {"kernel": (32, 16)},
    "layers": {"query": {"kernel": (8, 16, 4, 8)}, "norm": {"scale": (8, 16)}},
}
LAYOUTS = ("rows", "columns", "both", "layers", "replicated")
SHAPES = dict.fromkeys(LAYOUTS, MODEL) | {
    "columns_of_21": {"odd": {"kernel": (16, 21)}},
    "wte": {"embedding": (64, 16)},
    "columns_of_blocks": {"qkv": {"kernel": (16, 24)}},
    "experts": {"kernel": (3, 4, 8, 12)},
}
MESHES = {
    "8": ((8,), ("fsdp",)),
    "2x4": ((2, 4), ("data", "fsdp")),
    "2x2x2": ((2, 2, 2), ("data", "fsdp", "tensor")),
}


def slow_but(*often):
    """All optimizers, those that are not named marked slow."""
    return [
        pytest.param(name, marks=() if name in often else pytest.mark.slow)
        for name in FACTORIES
    ]


SPECIAL = {"query": (1, (2, 3)), "experts": (2, 3), "qkv": (0, 1, (16, 4, 4))}


def rule(path, leaf):
    if not path.endswith("kernel"):
        return None
    module = path.split("/")[-2]
    return npo.MatrixDims(*SPECIAL.get(module, (0, 1)))


def numbers(seed, layouts=tuple(SHAPES)):
    shapes = {name: SHAPES[name] for name in layouts}
    return jax.tree.map(lambda x: 0.2 * x, cases.numbers(shapes, seed))


def spec_of(layout, mesh, x):
    """How a parameter is sharded.

    A layout that does not divide an axis leaves it unsharded.
    """
    names = mesh.axis_names
    data = "data" if "data" in names else None
    tensor = "tensor" if "tensor" in names else None
    many = names if len(names) < 3 else ("fsdp", "tensor")
    matrix, stack = {
        "rows": (("fsdp",), (None, "fsdp")),
        "columns": ((None, many), (None, None, many)),
        "both": (("fsdp", tensor or data), (None, "fsdp", tensor or data)),
        "layers": (("fsdp",), ("fsdp", None, None, tensor)),
        "experts": ((), (None, "fsdp", data)),
    }.get(layout, ((), ()))
    entries = {2: matrix, 4: stack}.get(x.ndim, ())

    spec = []
    for entry, n in zip(entries, x.shape, strict=False):
        axes = np.atleast_1d(entry or []).tolist()
        divides = n % math.prod(mesh.shape[axis] for axis in axes) == 0
        spec.append(entry if divides else None)
    return PartitionSpec(*spec)


@functools.cache
def alone(name, layouts):
    """Two updates on one device."""
    tx = FACTORIES[name](0.01, matrix_dims=rule)
    params = numbers(0, layouts)
    gradients = [numbers(step, layouts) for step in (1, 2)]
    updates, _ = cases.steps(cases.updater(tx), tx.init(params), params, gradients)
    return updates


def check(name, mesh_name, kind=AxisType.Explicit, known=False, layouts=tuple(SHAPES)):
    sizes, names = MESHES[mesh_name]
    mesh = jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes))

    def place(tree):
        def put(path, x):
            return cases.put(x, mesh, *spec_of(path[0].key.partition("_")[0], mesh, x))

        return jax.tree_util.tree_map_with_path(put, tree)

    params = place(numbers(0, layouts))
    options = {"shardings": jax.tree.map(lambda x: x.sharding, params)} if known else {}
    tx = FACTORIES[name](0.01, matrix_dims=rule, **options)
    gradients = [place(numbers(step, layouts)) for step in (1, 2)]
    found, state = cases.steps(
        cases.quick_jit(tx.update), tx.init(params), params, gradients
    )
    # Sums in another order: a few roundings of updates of 0.002, more where
    # Newton-Schulz amplifies them. Updates of NormPre-H are of 0.02; its first sets the
    # norms, is of 0.2, and is rounded accordingly. Those of SWAN are not scaled to an
    # RMS of 0.2.
    tolerance = {"atol": 2e-7, "rtol": 0}
    if name == "normpre_h":
        tolerance = {"atol": 1e-6, "rtol": 3e-6}
    if name == "swan":
        tolerance["atol"] = 2e-6
    cases.assert_close(found, alone(name, layouts), **tolerance)
    if kind == AxisType.Explicit or known:
        for u, x in zip(
            jax.tree.leaves(found[-1]), jax.tree.leaves(params), strict=True
        ):
            assert u.sharding.is_equivalent_to(x.sharding, x.ndim)
    if kind == AxisType.Explicit:
        check_state(state, params, mesh)


def check_state(state, params, mesh):
    """State of the kernels "up" is sharded as they are."""
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        names = [getattr(key, "key", None) for key in path]
        layout = next((name for name in names if name in LAYOUTS), "")
        # a momentum, a number per row, or per column
        if layout and x.shape in ((16, 32), (1, 32), (16, 1)):
            own = params[layout]["up"]["kernel"].sharding.spec
            spec = [
                entry if size > 1 else None
                for entry, size in zip((*own, None, None), x.shape, strict=False)
            ]
            expected = NamedSharding(mesh, PartitionSpec(*spec))
            assert x.sharding.is_equivalent_to(expected, 2), path


@cases.rows(
    "kind name layouts",
    (AxisType.Explicit, "normpre_g", ("both", "columns_of_blocks")),
    (AxisType.Auto, "normpre_g", ("both", "columns_of_blocks")),
    (AxisType.Explicit, "normpre_l", ("both",)),
    # Draws depend on a matrix's index among layers and experts.
    (AxisType.Auto, "normpre_l", ("experts",)),
    (AxisType.Explicit, "normpre_h", ("columns_of_blocks",)),
)
def test_a_mesh_of_two_axes_needs_no_option(kind, name, layouts):
    check(name, "2x4", kind, layouts=layouts)


@pytest.mark.every_platform
@pytest.mark.parametrize("name", slow_but(*cases.ONE_RATE))
def test_a_shape_may_have_several_shardings_on_every_platform(name):
    """What a platform stacks on a mesh differs from one device, also on a mesh of one.

    The updates are only traced.
    """
    tx = FACTORIES[name](0.01)
    specs = {"a": ("data", "fsdp"), "b": ("fsdp", "data"), "c": (None, None)}
    for sizes in ((2, 4), (1, 1)):
        devices = jax.devices()[: math.prod(sizes)]
        mesh = jax.make_mesh(sizes, ("data", "fsdp"), devices=devices)
        shardings = {
            key: {"kernel": NamedSharding(mesh, PartitionSpec(*spec))}
            for key, spec in specs.items()
        }
        params = jax.tree.map(
            lambda sharding: jax.device_put(jnp.ones((8, 16)), sharding), shardings
        )
        updates, _ = jax.eval_shape(tx.update, params, tx.init(params), params)
        found = {key: tuple(x["kernel"].sharding.spec) for key, x in updates.items()}
        assert found == specs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("normpre_g", "8"),
        ("normpre_l", "2x2x2"),
        ("normpre_g", "2x2x2"),
        ("normpre_h", "2x2x2"),
    ],
)
def test_every_mesh(name, mesh):
    check(name, mesh)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in FACTORIES if name not in ("normpre_g", "normpre_l")]
)
def test_every_optimizer(name):
    check(name, "2x2x2", layouts=("both", "layers"))


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", ["normpre_g", "normpre_h", "normpre_l", "normuon"])
def test_auto_axes(name, known):
    check(name, "2x4", AxisType.Auto, known, layouts=("rows", "both", "layers"))


def test_injected_hyperparameters_are_on_the_mesh_from_the_second_step_on():
    shapes = {"up": {"kernel": (8, 16)}}
    params, grads = (cases.numbers(shapes, seed) for seed in (0, 1))
    mesh = jax.make_mesh((8,), ("fsdp",))
    there = NamedSharding(mesh, PartitionSpec("fsdp"))
    static = npo.static_args(npo.normuon)
    inject = optax.inject_hyperparams(npo.normuon, static_args=static)

    def two_updates(tx, params, grads):
        update = cases.quick_jit(tx.update)
        return cases.steps(update, tx.init(params), params, [grads] * 2)[0]

    injected = inject(learning_rate=0.01, ns_steps=1)
    found = two_updates(injected, *jax.device_put((params, grads), there))
    expected = two_updates(npo.normuon(0.01, ns_steps=1), params, grads)
    cases.assert_close(found, expected, atol=2e-8)  # a few roundings of updates of 0.01


@pytest.mark.parametrize("name", slow_but("normpre_l", "normuon"))
def test_inside_shard_map_every_device_computes_its_own_update(name):
    """Weights that differ between devices: ensembles, local SGD."""
    mesh = jax.make_mesh(
        (2,), ("replica",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2]
    )
    tx = FACTORIES[name](0.01)

    def step(params, grads):
        params, grads = jax.tree.map(lambda x: x[0], (params, grads))
        updates, _ = tx.update(grads, tx.init(params), params)
        return jax.tree.map(lambda x: x[None], updates)

    shapes = {
        "a": {"kernel": (2, 6, 10), "bias": (2, 10)},
        "b": (2, 6, 10),
        "layers": {"up": (2, 2, 6, 6)},
    }
    params, grads = (cases.numbers(shapes, seed) for seed in (0, 1))
    spec = PartitionSpec("replica")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec)
    found = cases.quick_jit(mapped)(params, grads)
    second = jax.tree.map(lambda x: x[1:], (found, params, grads))
    expected = cases.quick_jit(step)(*second[1:])
    cases.assert_close(second[0], expected, atol=1e-6)
