# SPDX-License-Identifier: Apache-2.0
"""Every optimizer on every mesh: the update of one device within rounding, sharded as the parameters."""

import functools
import itertools

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
    **npo.families(),
    "normpre_l": functools.partial(npo.normpre_l, **SMALL),
    "normpre_g-columns": functools.partial(npo.normpre_g, orientation="columns"),
    "normpre_l-exact": functools.partial(npo.normpre_l, rank=4, method="exact"),
    "normpre_l-products": functools.partial(npo.normpre_l, method="products", **SMALL),
    "muon-hyperball": functools.partial(npo.muon, norm_control="hyperball"),
}
# What an optimizer may meet, once in every sharding: a pair of layers, heads in stacked layers, vectors; and 21, that
# nothing here divides.
LAYOUTS = ("rows", "columns", "both", "layers", "replicated")
SHAPES = {
    layout: {
        "up": {"kernel": (16, 32), "bias": (32,)},
        "down": {"kernel": (32, 16)},
        "layers": {"query": {"kernel": (8, 16, 4, 8)}, "norm": {"scale": (8, 16)}},
    }
    for layout in LAYOUTS
} | {"columns_of_21": {"odd": {"kernel": (16, 21)}}, "wte": {"embedding": (64, 16)}}
MESHES = {"8": ((8,), ("fsdp",)), "2x4": ((2, 4), ("data", "fsdp")), "2x2x2": ((2, 2, 2), ("data", "fsdp", "tensor"))}


def slow_but(*often):
    """All optimizers, those that are not named marked slow."""
    return [pytest.param(name, marks=() if name in often else pytest.mark.slow) for name in FACTORIES]


def rule(path, leaf):
    if not path.endswith("kernel"):
        return None
    return npo.MatrixDims(1, (2, 3)) if "query" in path else npo.MatrixDims(0, 1)


def numbers(seed, layouts=tuple(SHAPES)):
    random = np.random.default_rng(seed)
    draw = lambda shape: jnp.asarray(0.2 * random.standard_normal(shape), jnp.float32)  # noqa: E731
    return jax.tree.map(draw, {name: SHAPES[name] for name in layouts}, is_leaf=lambda x: isinstance(x, tuple))


def spec_of(layout, mesh, x):
    """How a parameter is sharded. A layout that does not divide an axis leaves it unsharded."""
    names = mesh.axis_names
    tensor = "tensor" if "tensor" in names else None
    wanted = {
        "rows": ("fsdp", None),
        "columns": (None, names if len(names) < 3 else ("fsdp", "tensor")),
        "both": ("fsdp", tensor or ("data" if "data" in names else None)),
    }
    if x.ndim == 1 or layout not in (*wanted, "layers"):
        return PartitionSpec()
    if layout == "layers":
        entries = ("fsdp", *(None,) * (x.ndim - 2), tensor) if x.ndim > 2 else ("fsdp", None)
    else:
        entries = (None,) * (x.ndim > 2) + wanted[layout] + (None,) * (x.ndim - 2 - (x.ndim > 2))
    sizes = [int(np.prod([mesh.shape[a] for a in ([e] if isinstance(e, str) else e or [])])) for e in entries]
    return PartitionSpec(*(e if n % size == 0 else None for e, n, size in zip(entries, x.shape, sizes, strict=True)))


@functools.cache
def alone(name, layouts):
    """Two updates on one device."""
    tx, params = FACTORIES[name](0.01, matrix_dims=rule), numbers(0, layouts)
    state, found = tx.init(params), []
    for step in (1, 2):
        updates, state = cases.updater(tx)(numbers(step, layouts), state, params)
        found.append(updates)
    return found


def check(name, mesh_name, kind=AxisType.Explicit, known=False, layouts=tuple(SHAPES)):
    sizes, names = MESHES[mesh_name]
    mesh = jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes))

    def place(tree):
        def put(path, x):
            return jax.device_put(x, NamedSharding(mesh, spec_of(path[0].key.partition("_")[0], mesh, x)))

        return jax.tree_util.tree_map_with_path(put, tree)

    params = place(numbers(0, layouts))
    options = {"shardings": jax.tree.map(lambda x: x.sharding, params)} if known else {}
    tx = FACTORIES[name](0.01, matrix_dims=rule, **options)
    state, update = tx.init(params), cases.quick_jit(tx.update)
    for step, expected in zip((1, 2), alone(name, layouts), strict=True):
        updates, state = update(place(numbers(step, layouts)), state, params)
        # Sums in another order: a few roundings of updates of 0.002, more where Newton-Schulz amplifies them; SWAN is
        # not scaled to an RMS of 0.2.
        scale = 10.0 if name == "swan" else 1.0
        for found, wanted in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(found, wanted, atol=scale * 2e-7, rtol=0)
    if kind == AxisType.Explicit or known:
        for found, x in zip(jax.tree.leaves(updates), jax.tree.leaves(params), strict=True):
            assert found.sharding.is_equivalent_to(x.sharding, x.ndim)
    if kind == AxisType.Explicit:
        momenta = [
            (p, x) for p, x in jax.tree_util.tree_leaves_with_path(state) if "trace" in str(p) and x.shape == (16, 32)
        ]
        for path, x in momenta:
            layout = next(key.key for key in path if getattr(key, "key", None) in LAYOUTS)
            assert x.sharding.is_equivalent_to(params[layout]["up"]["kernel"].sharding, 2)


@pytest.mark.parametrize(
    ("kind", "name"), list(itertools.product((AxisType.Explicit, AxisType.Auto), ("normpre_g", "normpre_l")))
)
def test_a_mesh_of_two_axes_needs_no_option(kind, name):
    check(name, "2x4", kind, layouts=("both", "wte"))


@pytest.mark.every_platform
@pytest.mark.parametrize("name", FACTORIES)
def test_a_shape_may_have_several_shardings_on_every_platform(name):
    """Traced only; what a platform stacks on one device differs from what it may stack on a mesh."""
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"))
    kernel = numbers(0)["rows"]["up"]["kernel"]
    specs = {"a": ("data", "fsdp"), "b": ("fsdp", "data"), "c": (None, None)}
    params = {k: {"kernel": jax.device_put(kernel, NamedSharding(mesh, PartitionSpec(*s)))} for k, s in specs.items()}
    tx = FACTORIES[name](0.01)
    updates, _ = jax.eval_shape(tx.update, params, tx.init(params), params)
    for path, spec in specs.items():
        assert tuple(updates[path]["kernel"].sharding.spec) == spec


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), [("normpre_g", "8"), ("normpre_l", "2x2x2"), ("normpre_g", "2x2x2")])
def test_every_mesh(name, mesh):
    check(name, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FACTORIES if name not in ("normpre_g", "normpre_l")])
def test_every_optimizer(name):
    check(name, "2x2x2", layouts=("both", "layers"))


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", ["normpre_g", "normpre_l", "normuon"])
def test_auto_axes(name, known):
    check(name, "2x4", AxisType.Auto, known, layouts=("rows", "both", "layers"))


def test_an_explicit_mesh_of_one_device():
    mesh = jax.make_mesh((1,), ("fsdp",), devices=jax.devices()[:1])
    params = {"up": {"kernel": jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, PartitionSpec("fsdp")))}}
    tx = npo.normpre_g(0.01)
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    assert updates["up"]["kernel"].sharding.is_equivalent_to(params["up"]["kernel"].sharding, 2)


@pytest.mark.parametrize("name", ["normpre_g", "normuon"])
def test_injected_hyperparameters_are_on_the_mesh_from_the_second_step_on(name):
    mesh = jax.make_mesh((8,), ("fsdp",))
    here, grads = ({"up": {"kernel": numbers(seed, ("rows",))["rows"]["up"]["kernel"]}} for seed in (0, 1))
    there, grads_there = jax.device_put((here, grads), NamedSharding(mesh, PartitionSpec("fsdp")))
    factory = getattr(npo, name)
    tx = optax.inject_hyperparams(factory, static_args=npo.static_args(factory))(learning_rate=0.01, ns_steps=1)
    plain = factory(0.01, ns_steps=1)
    state, plain_state, update = tx.init(there), plain.init(here), cases.quick_jit(tx.update)
    for _ in range(2):
        updates, state = update(grads_there, state, there)
        expected, plain_state = cases.updater(plain)(grads, plain_state, here)
        # A few roundings of updates of 0.01.
        np.testing.assert_allclose(updates["up"]["kernel"], expected["up"]["kernel"], atol=2e-8)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("name", ["normpre_g", "muon-hyperball"])
def test_output_blocks_that_the_sharding_cuts_through(name, kind):
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(kind,))
    here = {"qkv": numbers(0)["rows"]["up"]["kernel"][:, :24], "kv": numbers(1)["rows"]["up"]["kernel"][:, :24]}
    dims = {"qkv": npo.MatrixDims(0, 1, output_blocks=3), "kv": npo.MatrixDims(0, 1, output_blocks=(16, 4, 4))}
    tx = FACTORIES[name](0.01, matrix_dims=dims)
    there = jax.device_put(here, NamedSharding(mesh, PartitionSpec(None, "fsdp")))
    found, expected = (cases.quick_jit(tx.update)(w, tx.init(w), w)[0] for w in (there, here))
    for key, x in expected.items():
        np.testing.assert_allclose(found[key], x, atol=2e-7)
        assert kind == AxisType.Auto or found[key].sharding.is_equivalent_to(there[key].sharding, 2)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("name", ["normpre_g", pytest.param("normpre_l", marks=pytest.mark.slow)])
def test_experts_behind_layers_are_as_on_one_device(name, kind):
    """Draws depend on a matrix's index among layers and experts, however these are sharded."""
    dims, spec = {"experts": npo.MatrixDims(2, 3)}, PartitionSpec(None, "expert", "fsdp")
    mesh = jax.make_mesh((4, 2), ("expert", "fsdp"), axis_types=(kind,) * 2)
    here = [{"experts": jnp.asarray(cases.gaussian((3, 4, 8, 12), seed), jnp.float32)} for seed in (0, 1)]
    params, grads = jax.device_put(here, NamedSharding(mesh, spec))
    tx = FACTORIES[name](0.1, matrix_dims=dims)
    found, _ = cases.updater(tx)(grads, tx.init(params), params)
    expected, _ = cases.updater(tx)(here[1], tx.init(here[0]), here[0])
    np.testing.assert_allclose(found["experts"], expected["experts"], atol=2e-6)


# Weights that differ between devices (ensembles, local SGD): each device's own update.


@functools.cache
def replicas():
    def tree(seed):
        x = lambda *shape: jnp.asarray(cases.gaussian((4, *shape), seed), jnp.float32)  # noqa: E731
        return {
            "up": {"kernel": x(6, 10), "bias": x(10)},
            "down": {"kernel": x(10, 6)},
            "twin": {"kernel": x(6, 10)},
            "square": {"weight": x(5, 5)},
            "layers": {"up": {"kernel": x(3, 6, 6)}},
        }

    return tree(0), tree(1)


@pytest.mark.parametrize("name", slow_but("normpre_g", "normpre_l", "mano", "normuon"))
def test_inside_shard_map_every_device_computes_its_own_update(name):
    mesh = jax.make_mesh((4,), ("replica",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    tx, first = FACTORIES[name](0.01), functools.partial(jax.tree.map, lambda x: x[0])

    def step(params, grads):
        params, grads = first((params, grads))
        updates, _ = tx.update(grads, tx.init(params), params)
        return jax.tree.map(lambda x: x[None], updates)

    spec = PartitionSpec("replica")
    found = cases.quick_jit(jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec))(*replicas())
    one = jax.tree.map(lambda x: x[2:3], replicas())
    expected = cases.quick_jit(step)(*one)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x[2:3], y, atol=1e-6)
