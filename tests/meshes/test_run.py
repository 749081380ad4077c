# SPDX-License-Identifier: Apache-2.0
"""Every optimizer on every mesh: the single-device update within rounding, lying where the parameters lie."""

import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen import Partitioned
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import normpre_optax as npo
from normpre_optax.transforms.oriented import OrientedTransformation, chain
from tests import cases

FACTORIES = {
    "normpre_g": npo.normpre_g,
    "normpre_g-undivided": functools.partial(npo.normpre_g, divide=False),
    "normpre_g-columns": functools.partial(npo.normpre_g, orientation="columns"),
    "normpre_l": functools.partial(npo.normpre_l, rank=4, oversample=2),
    "normpre_l-divided": functools.partial(npo.normpre_l, rank=4, oversample=2, divide=True),
    "normpre_l-warm": functools.partial(npo.normpre_l, rank=4, oversample=2, warm_start=True),
    "normpre_l-exact": functools.partial(npo.normpre_l, rank=4, method="exact"),
    "normpre_l-products": functools.partial(npo.normpre_l, rank=4, oversample=2, method="products"),
    "muon": npo.muon,
    "mano": npo.mano,
    **{name: getattr(npo, name) for name in ("rmnp", "muoneq", "muon_plus", "normuon", "adamuon", "moga", "swan")},
    "dion": functools.partial(npo.dion, rank=4),
    **{control: functools.partial(npo.muoneq, norm_control=control) for control in ("hyperball", "row_gains", "brake")},
}
# What an optimizer may meet, once in every layout: a pair of layers, heads in a stack of layers, vectors; and 21, which
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
DIMS = {"blocks": npo.MatrixDims(0, 1), "query": npo.MatrixDims(1, (2, 3))}
MESHES = {"8": ((8,), ("fsdp",)), "2x4": ((2, 4), ("data", "fsdp")), "2x2x2": ((2, 2, 2), ("data", "fsdp", "tensor"))}


def rule(path, leaf):
    if not path.endswith("kernel"):
        return None
    return DIMS["query" if "query" in path else "blocks"]


def numbers(seed, layouts=tuple(SHAPES)):
    random = np.random.default_rng(seed)
    draw = lambda shape: jnp.asarray(0.2 * random.standard_normal(shape), jnp.float32)  # noqa: E731
    return jax.tree.map(draw, {name: SHAPES[name] for name in layouts}, is_leaf=lambda x: isinstance(x, tuple))


def spec_of(layout, mesh, x):
    """Where a parameter lies. A layout that does not divide an axis leaves it whole."""
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


EXPERTS = {"experts": npo.MatrixDims(2, 3)}  # behind layers


def experts(seed):
    return {"experts": jnp.asarray(cases.gaussian((3, 4, 8, 12), seed), jnp.float32)}


@functools.cache
def experts_alone(name):
    """Two updates on one device, and the state after them."""
    tx, params, found = FACTORIES[name](0.1, matrix_dims=EXPERTS), experts(0), []
    state = tx.init(params)
    for _ in range(2):
        updates, state = cases.updater(tx)(experts(1), state, params)
        found.append(updates)
    return found, state


@functools.cache
def alone(name, layouts):
    """Two updates on one device."""
    tx, params = FACTORIES[name](0.01, matrix_dims=rule), numbers(0, layouts)
    state, found = tx.init(params), []
    for step in (1, 2):
        updates, state = cases.updater(tx)(numbers(step, layouts), state, params)
        found.append(updates)
    return found


def check(name, mesh_name, axis_type=AxisType.Explicit, told=False, layouts=tuple(SHAPES)):
    sizes, names = MESHES[mesh_name]
    mesh = jax.make_mesh(sizes, names, axis_types=(axis_type,) * len(sizes))

    def place(tree):
        def lay(path, x):
            return jax.device_put(x, NamedSharding(mesh, spec_of(path[0].key.partition("_")[0], mesh, x)))

        return jax.tree_util.tree_map_with_path(lay, tree)

    params = place(numbers(0, layouts))
    shardings = jax.tree.map(lambda x: x.sharding, params)
    options = {"shardings": shardings} if told else {}
    tx = FACTORIES[name](0.01, matrix_dims=rule, **options)
    state = tx.init(params)
    update = cases.quick_jit(tx.update)
    for step, expected in zip((1, 2), alone(name, layouts), strict=True):
        updates, state = update(place(numbers(step, layouts)), state, params)
        # Sums are taken in another order: a few roundings of updates of 0.002, more where Newton-Schulz amplifies them.
        for found, wanted in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(found, wanted, atol=2e-7, rtol=0)
    if axis_type == AxisType.Explicit or told:
        for found, x in zip(jax.tree.leaves(updates), jax.tree.leaves(params), strict=True):
            assert found.sharding.is_equivalent_to(x.sharding, x.ndim)
    if axis_type == AxisType.Explicit:
        momenta = {
            path: x
            for path, x in jax.tree_util.tree_leaves_with_path(state)
            if x.shape == (16, 32) and "trace" in str(path)
        }
        for path, x in momenta.items():
            layout = next(key.key for key in path if getattr(key, "key", None) in LAYOUTS)
            assert x.sharding.is_equivalent_to(params[layout]["up"]["kernel"].sharding, 2)


def test_what_a_stage_keeps_is_sharded_along_the_axes_that_it_shares_with_the_parameter():
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"))
    kernel = jax.device_put(jnp.ones((3, 16, 32)), NamedSharding(mesh, PartitionSpec(None, "data", "fsdp")))
    dims = npo.MatrixDims(1, 2)  # out = 32 over fsdp, in = 16 over data
    rows = npo.as_matrices(dims, npo.scale_by_row_moment()).init({"w": kernel}).moment["w"]
    assert (rows.shape, tuple(rows.sharding.spec)) == ((3, 32, 1), (None, "fsdp", None))
    thin = npo.as_matrices(dims, npo.orthogonalize_low_rank(4)).init({"w": kernel}).factors["w"]
    assert (thin.shape, tuple(thin.sharding.spec)) == ((3, 4, 16), (None, None, "data"))


def test_an_optimizer_on_a_mesh_of_three_axes_needs_no_argument():
    check("normpre_g", "2x2x2", layouts=("both", "wte"))


# Half a minute of one core each. CI runs what differs from others in a part that meshes touch; the rest is thorough.
PLACES = [("normpre_g", "8"), ("normpre_l", "2x2x2")]
OF_THEIR_OWN = {"normpre_l-divided", "normpre_l-warm", "dion", "hyperball", "row_gains"}


def often(cases, chosen):
    return [pytest.param(*case, marks=pytest.mark.slow if chosen(case) else pytest.mark.thorough) for case in cases]


@pytest.mark.parametrize(
    ("name", "mesh"), often(itertools.product(("normpre_g", "normpre_l"), MESHES), PLACES.__contains__)
)
def test_every_mesh(name, mesh):
    check(name, mesh)


@pytest.mark.parametrize(
    "name", often([(name,) for name in FACTORIES if name not in dict(PLACES)], lambda case: case[0] in OF_THEIR_OWN)
)
def test_every_optimizer(name):
    check(name, "2x2x2", layouts=("both", "layers"))


@pytest.mark.parametrize(
    ("name", "told"),
    often(itertools.product(("normpre_g", "normpre_l"), (True, False)), [("normpre_g", True)].__contains__),
)
def test_auto_axes(name, told):
    check(name, "2x4", AxisType.Auto, told)


@pytest.mark.parametrize("names", [("fsdp", None), ("embed", "mlp"), None])
def test_on_auto_axes_boxes_tell_where_parameters_lie_or_a_warning_asks(names):
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    kernel = jax.device_put(numbers(0)["rows"]["up"]["kernel"], NamedSharding(mesh, PartitionSpec("fsdp")))
    params = {"up": {"kernel": kernel if names is None else Partitioned(kernel, names=names)}}
    tx, told = npo.normpre_g(0.01), names == ("fsdp", None)
    with warnings.catch_warnings(record=True) as said:
        state = tx.init(params)
    assert (
        [str(one.message).partition(" of a mesh")[0] for one in said] == []
        if told
        else ["parameters lie spread over Auto axes"]
    )
    lowered = jax.jit(tx.update).lower(params, state, params)
    assert ("all_to_all" in lowered.as_text()) == told


def test_an_explicit_mesh_of_one_device():
    mesh = jax.make_mesh((1,), ("fsdp",), devices=jax.devices()[:1])
    params = {"up": {"kernel": jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, PartitionSpec("fsdp")))}}
    tx = npo.normpre_g(0.01)
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    assert updates["up"]["kernel"].sharding.is_equivalent_to(params["up"]["kernel"].sharding, 2)


def test_inside_shard_map_an_optimizer_sees_a_single_device():
    mesh = jax.make_mesh((8,), ("data",))
    tx, params = npo.normpre_g(0.01), {"up": {"kernel": jnp.eye(4, 8)}}
    grads = {"up": {"kernel": numbers(0)["rows"]["up"]["kernel"][:4, :8]}}
    state = tx.init(params)

    def step(grads):
        return tx.update(grads, state, params)[0]

    with jax.set_mesh(mesh):
        found = jax.jit(jax.shard_map(step, in_specs=PartitionSpec(), out_specs=PartitionSpec()))(grads)
    np.testing.assert_allclose(found["up"]["kernel"], tx.update(grads, state, params)[0]["up"]["kernel"], atol=1e-8)


@pytest.mark.parametrize("name", ["normpre_g", "normuon"])
def test_injected_hyperparameters_lie_on_the_mesh_from_the_second_step_on(name):
    mesh = jax.make_mesh((8,), ("fsdp",))
    place = lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec("fsdp")))  # noqa: E731
    here, grads = ({"up": {"kernel": numbers(seed, ("rows",))["rows"]["up"]["kernel"]}} for seed in (0, 1))
    there, grads_there = jax.tree.map(place, here), jax.tree.map(place, grads)
    factory = getattr(npo, name)
    static = npo.static_args(factory)
    tx = optax.inject_hyperparams(factory, static_args=static)(learning_rate=0.01, ns_steps=1)
    plain = factory(0.01, ns_steps=1)
    state, plain_state, update = tx.init(there), plain.init(here), cases.quick_jit(tx.update)
    for _ in range(2):
        updates, state = update(grads_there, state, there)
        expected, plain_state = cases.updater(plain)(grads, plain_state, here)
        # A few roundings of updates of 0.01.
        np.testing.assert_allclose(updates["up"]["kernel"], expected["up"]["kernel"], atol=2e-8)


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_a_few_parameters_stored_the_other_way_are_turned_and_not_all_others(axis_type):
    seen = []

    def update(updates, state, params=None, *, matrix_layout, **extra_args):
        seen.append(matrix_layout.transposed)
        return updates, state

    watch = OrientedTransformation(lambda params: optax.EmptyState(), update)
    shapes = {"up": (16, 32), "down": (32, 16), "qkv": (16, 24), "torch": (8, 16)}
    dims = {"up": npo.MatrixDims(0, 1), "down": npo.MatrixDims(0, 1)}
    dims |= {"qkv": npo.MatrixDims(0, 1, output_blocks=3), "torch": npo.MatrixDims(1, 0)}
    tx = npo.as_matrices(dims, chain(npo.normalize_rows(), npo.divided(npo.precondition_globally(1)), watch))
    random = np.random.default_rng(0)
    here = {name: jnp.asarray(random.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}
    expected = cases.first_update(tx, here, here)
    seen.clear()
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(axis_type,))
    there = jax.device_put(here, NamedSharding(mesh, PartitionSpec("fsdp")))
    found, _ = cases.quick_jit(tx.update)(there, tx.init(there), there)
    assert set(seen) == {True}
    for name, x in found.items():
        np.testing.assert_allclose(x, expected[name], atol=1e-5)  # sums in another order, entries near one


def test_the_optimizer_state_of_optax_is_the_same_tree_on_a_mesh():
    mesh = jax.make_mesh((8,), ("fsdp",))
    params = {"up": {"kernel": jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, PartitionSpec("fsdp")))}}
    tx = optax.chain(optax.clip_by_global_norm(1.0), npo.normpre_l(0.01, rank=2, warm_start=True))
    there, here = tx.init(params), tx.init({"up": {"kernel": jnp.ones((8, 8))}})
    assert jax.tree.structure(there) == jax.tree.structure(here)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), there, here)


@pytest.mark.parametrize("spec", [("data", "fsdp"), (None, "fsdp")])
def test_norms_of_blocks_are_held_where_a_mesh_cuts_through_them(spec):
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"))
    here = {"qkv": numbers(0)["rows"]["up"]["kernel"][:, :24]}
    there = jax.device_put(here, NamedSharding(mesh, PartitionSpec(*spec)))
    tx = npo.hold_norm(matrix_dims={"qkv": npo.MatrixDims(0, 1, output_blocks=3)})
    found, expected = (jax.jit(tx.update)(w, tx.init(w), w)[0] for w in (there, here))
    np.testing.assert_allclose(found["qkv"], expected["qkv"], atol=1e-7)
    assert found["qkv"].sharding.is_equivalent_to(there["qkv"].sharding, 2)


@pytest.mark.parametrize(
    ("name", "axis_type"),
    [
        ("normpre_g", AxisType.Explicit),
        ("normpre_g", AxisType.Auto),
        ("normpre_l-warm", AxisType.Explicit),
        ("dion", AxisType.Auto),
        pytest.param("normpre_l-warm", AxisType.Auto, marks=pytest.mark.thorough),
        pytest.param("dion", AxisType.Explicit, marks=pytest.mark.thorough),
    ],
)
def test_experts_behind_layers_are_as_on_one_device_and_so_is_their_state(name, axis_type):
    """Draws go by a matrix's place among layers and experts, whichever of them comes first in the stack of a mesh."""
    mesh = jax.make_mesh((4, 2), ("expert", "fsdp"), axis_types=(axis_type,) * 2)
    spec = {"experts": PartitionSpec(None, "expert", "fsdp")}
    params, grads = jax.device_put((experts(0), experts(1)), NamedSharding(mesh, spec["experts"]))
    told = {} if axis_type is AxisType.Explicit else {"shardings": spec}
    tx = FACTORIES[name](0.1, matrix_dims=EXPERTS, **told)
    state_there, (steps, state) = tx.init(params), experts_alone(name)
    for expected in steps:
        found, state_there = cases.updater(tx)(grads, state_there, params)
        np.testing.assert_allclose(found["experts"], expected["experts"], atol=2e-6)
    shapes = [x.shape for x in jax.tree.leaves(state)]
    assert [x.shape for x in jax.tree.leaves(state_there)] == shapes
    if name != "normpre_g":
        assert any(shape[:2] == (3, 4) and shape != (3, 4, 8, 12) for shape in shapes)
    for one, other in zip(jax.tree.leaves(state_there), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(np.abs(one), np.abs(other), atol=1e-4)  # a basis is known up to signs
