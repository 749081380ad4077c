# SPDX-License-Identifier: Apache-2.0
"""What every optimizer promises for its matrices: one table of optimizers, one table of properties.

The same two matrices are stored in every layout that ``MatrixDims`` describe, so that one update shows that a stack is
a loop over its matrices, that transposed storage, several axes and output blocks change nothing, and more.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normpre_optax import MatrixDims
from tests import cases
from tests.cases import EPS32

OUT, IN = 6, 4
# Leaf: its axes, and the matrices that it holds: A and B are (6, 4), C is (2, 4). The first are for every optimizer.
LAYOUTS = {
    "kernel": (MatrixDims(0, 1), "A"),
    "twin": (MatrixDims(0, 1), "B"),
    "weight": (MatrixDims(1, 0), "A"),
    "stack": (MatrixDims(1, 2), "AB"),
    "bias": (None, ""),
}
COMMON = tuple(LAYOUTS)
LAYOUTS |= {
    "query": (MatrixDims(0, (1, 2)), "A"),  # (in, 2, 3)
    "fused": (MatrixDims(0, 1, output_blocks=2), "BA"),
    "few": (MatrixDims(0, 1), "C"),
    "output": (MatrixDims((0, 1), 2), "A"),  # (2, 2, out)
    "weights": (MatrixDims(2, 1), "BA"),
    "between": (MatrixDims(0, 2), "AB"),  # layers on axis 1
    "sizes": (MatrixDims(1, 0, output_blocks=(2, 6)), "CA"),
}
DIMS = {leaf: dims for leaf, (dims, _) in LAYOUTS.items()}


def stored(leaf, matrices):
    """The parameter ``leaf`` with these matrices (out, in)."""
    own = [matrices[name] for name in LAYOUTS[leaf][1]]
    if leaf == "bias":
        return matrices["A"][:, 0]
    if leaf in ("stack", "between"):
        return np.stack([x.T for x in own], axis=leaf == "between")
    if leaf == "weights":
        return np.stack(own)
    if leaf in ("fused", "sizes"):
        x = np.concatenate(own)
        return x.T if leaf == "fused" else x
    return (
        own[0]
        if leaf == "weight"
        else own[0].T.reshape({"query": (IN, 2, 3), "output": (2, 2, OUT)}.get(leaf, (IN, -1)))
    )


def restored(leaf, x):
    """The matrices (out, in) that a parameter holds: (name, matrix)."""
    x, names = np.asarray(x, np.float64), LAYOUTS[leaf][1]
    if leaf in ("stack", "between"):
        return list(zip(names, np.moveaxis(x, leaf == "between", 0).swapaxes(1, 2), strict=True))
    if leaf == "weights":
        return list(zip(names, x, strict=True))
    if leaf in ("fused", "sizes"):
        x = x.T if leaf == "fused" else x
        return list(zip(names, np.split(x, [2 if leaf == "sizes" else OUT]), strict=True))
    return [(names, x if leaf == "weight" else x.reshape(IN, -1).T)]


@functools.cache
def matrices(seed):
    """Matrices whose smallest singular value is no less than a tenth of the largest: a mild slope of Newton-Schulz."""
    shapes = {"A": (OUT, IN), "B": (OUT, IN), "C": (2, IN)}
    pairs = zip(shapes.items(), cases.gradients(1, seed, shapes)[0].values(), strict=True)
    return {name: x for (name, _), x in pairs}


def tree(seed, scale=1.0, leaves=COMMON):
    return {leaf: jnp.asarray(stored(leaf, matrices(seed)) * np.float32(scale)) for leaf in leaves}


def parameters(leaves=COMMON):
    own = cases.weights(0, {"A": (OUT, IN), "B": (OUT, IN), "C": (2, IN)})
    return {leaf: jnp.asarray(stored(leaf, own)) for leaf in leaves}


PARAMS = parameters()


@functools.cache
def optimizer(name, leaves=COMMON):
    return cases.make(name, weight_decay=0.0, matrix_dims={leaf: DIMS[leaf] for leaf in leaves})


def steps(name, *gradients):
    """Updates of some steps at fixed weights, and the last state."""
    leaves = tuple(gradients[0])
    tx, params = optimizer(name, leaves), parameters(leaves)
    state, out = tx.init(params), []
    for gradient in gradients:
        updates, state = cases.updater(tx)(gradient, state, params)
        out.append(updates)
    return out, state


@functools.cache
def plain(name, leaves=COMMON):
    return steps(name, tree(1, leaves=leaves), tree(2, leaves=leaves))[0]


def each(updates):
    """Every matrix of a tree: (leaf, name, matrix)."""
    return [(leaf, *pair) for leaf in updates if leaf != "bias" for pair in restored(leaf, updates[leaf])]


# Others take the same paths through the code; the float64 transcriptions see what is different.
SLOW = ("normpre_g-hyperball", "muon-keller", "muoneq-columns", "mano-2", "muon_plus-columns_rows", "moga-columns")
SLOW += ("muoneq-both", "normpre_g-both-none", "normpre_g-rows-polar", "swan-rms")
ALL = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in cases.FACTORIES]
every_optimizer = pytest.mark.parametrize("name", ALL)
# Rounding of a few eps at the start is amplified by at most the slope of Newton-Schulz at zero: 485, 970 for Polar
# Express. Rounding to bfloat16 is 2^-9 in every product, and these matrices see a slope below 50.
SLOPES = {"normpre_g-rows-polar": 970}


def bound(name):
    return 0.1 if name == "normpre_g-bfloat16" else 4 * SLOPES.get(name, 485) * EPS32


def assert_same(got, expected, name):
    for (leaf, _, x), (_, _, y) in zip(each(got), each(expected), strict=True):
        assert np.linalg.norm(x - y) <= bound(name) * np.linalg.norm(y), leaf


# Draws depend on the path and the batch index: a truncated sketch clips other modes in another layout.
TRUNCATED = ("normpre_l-small", "normpre_l-share-mean")


@pytest.mark.parametrize("name", [one for one in ALL if one.values[0] not in TRUNCATED])
def test_a_matrix_is_updated_alike_in_every_layout(name):
    leaves = tuple(LAYOUTS) if name in ("normpre_g", "normpre_l", "normuon", "muon-hyperball") else COMMON
    for updates in plain(name, leaves):
        expected = {label: x for leaf, label, x in each(updates) if leaf in ("kernel", "twin", "few")}
        for leaf, label, x in each(updates):
            error = np.linalg.norm(x - expected[label]) / np.linalg.norm(expected[label])
            assert error <= bound(name), (leaf, label)


@every_optimizer
def test_the_scale_of_gradients_has_no_effect(name):
    """From 1e-15 to 1e15; only AdamW has an epsilon."""
    for scale in (1e-15, 1e15):
        found, _ = steps(name, tree(1, scale=scale), tree(2, scale=scale))
        for got, expected in zip(found, plain(name), strict=True):
            assert_same(got, expected, name)


@every_optimizer
def test_zero_gradients_give_zero_updates_and_do_no_harm(name):
    (still, after), state = steps(name, jax.tree.map(jnp.zeros_like, PARAMS), tree(1))
    # Hyperball rescales to the initial norm: rounding of the weights.
    largest = 4 * EPS32 if "hyperball" in name else 0.0
    assert all(np.abs(u).max() <= largest for u in jax.tree.leaves(still))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((after, state)))
    assert all(np.any(u) for u in jax.tree.leaves(after))


# Where the first step works on columns against weights that are not zero there.
BY_COLUMNS = ("mano", "mano-2", "normpre_g-columns-strict", "normpre_l-exact", "normpre_l-share-mean")


@every_optimizer
def test_an_output_without_gradient_is_not_updated(name):
    gradient = tree(1)
    gradient["kernel"] = gradient["kernel"].at[:, 2].set(0)
    gradient["stack"] = gradient["stack"].at[0].set(0)
    (updates,), _ = steps(name, gradient)
    assert all(np.isfinite(u).all() for u in jax.tree.leaves(updates))
    rounding = 1e-6 if "hyperball" not in name else 4 * EPS32 * 1.7
    if name not in BY_COLUMNS and "hyperball" not in name:  # which rescales all of the weights
        assert np.abs(updates["kernel"][:, 2]).max() <= 1e-6 * np.abs(updates["kernel"]).max()
    assert np.abs(updates["stack"][0]).max() <= rounding * max(1, np.abs(updates["stack"][1]).max())
    (_, _, x), (_, _, y) = (next(row for row in each(u) if row[0] == "twin") for u in (updates, plain(name)[0]))
    np.testing.assert_array_equal(x, y)


@every_optimizer
def test_nan_stays_in_its_matrix_and_stays_visible(name):
    bad = tree(1)
    bad["stack"] = bad["stack"].at[1, 0, 0].set(jnp.nan)
    bad["weight"] = bad["weight"].at[0, 0].set(jnp.nan)
    hurt, _ = steps(name, bad, tree(2))
    for step, (found, expected) in enumerate(zip(hurt, plain(name), strict=True)):
        for (leaf, label, x), (_, _, y) in zip(each(found), each(expected), strict=True):
            if leaf == "weight" or (leaf == "stack" and label == "B"):
                assert np.isnan(x).any() or (step == 1 and name.startswith("swan"))  # which has no memory
            else:
                np.testing.assert_array_equal(x, y, err_msg=leaf)
        np.testing.assert_array_equal(found["bias"], expected["bias"])


# Structures of matrices that break optimizers, at the ends of the scale contract.
KINDS = ("gaussian", "zero rows", "zero columns", "rank one", "constant", "one entry", "orthogonal", "scattered")


def structured(kind, m, n, seed, size):
    random = np.random.default_rng(seed)
    x = random.standard_normal((m, n))
    if kind == "zero rows":
        x[: (m + 1) // 2] = 0
    elif kind == "zero columns":
        x[:, : (n + 1) // 2] = 0
    elif kind == "rank one":
        x = random.standard_normal((m, 1)) * random.standard_normal((1, n))
    elif kind == "constant":
        x = np.ones((m, n))
    elif kind == "one entry":
        x = np.zeros((m, n))
        x[m // 2, n // 2] = 1
    elif kind == "orthogonal":
        x = np.eye(m, n)
    elif kind == "scattered":  # every row of another magnitude
        x = x * np.logspace(-15, 15, m)[:, None] / size
    return np.float32(x * size)


def problems(m, n):
    """Stacks of gradients and weights: all structures at all sizes, also with gradients parallel to the weights."""
    pairs = []
    for seed, (kind, size) in enumerate(itertools.product(KINDS, (1e-38, 1e-15, 1.0, 1e15))):
        for weights in (
            structured(kind, m, n, seed + 99, 1.0),
            structured("gaussian", m, n, seed, 20.0),
            np.zeros((m, n)),
        ):
            pairs.append((structured(kind, m, n, seed, size), weights))
        pairs.append((weights + structured(kind, m, n, seed, size), structured(kind, m, n, seed, 1.0)))
    return [np.stack(x).astype(np.float32) for x in zip(*pairs, strict=True)]


@pytest.mark.filterwarnings("ignore:hyperball. parameter")
@pytest.mark.parametrize(
    "name",
    [
        *("normpre_g", "normpre_l", "normpre_l-products", "mano", "swan"),
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("normpre_g-msign", "normpre_l-exact", "normpre_l-small")),
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("muon-hyperball", "adamuon", "muon")),
    ],
)
def test_finite_gradients_of_any_structure_give_finite_updates(name):
    """Rows, columns and single numbers too; the rank and the sketch are larger than most of their dimensions."""
    sizes = ((1, 6), (6, 1), (1, 1), (4, 5))
    grads, params = ({f"{m}x{n}": jnp.asarray(problems(m, n)[i]) for m, n in sizes} for i in (0, 1))
    dims = dict.fromkeys(grads, MatrixDims(inputs=2, outputs=1))
    tx = cases.make(name, 1.0, weight_decay=0.0, matrix_dims=dims)
    state = tx.init(params)
    for _ in range(2):
        updates, state = cases.updater(tx)(grads, state, params)
        for leaf, u in updates.items():
            u = np.asarray(u, np.float64)
            bad = np.flatnonzero(~np.isfinite(u).all(axis=(1, 2)))
            assert not bad.size, (leaf, bad)
            if name in RMS:
                assert np.sqrt(np.mean(u**2, axis=(-2, -1))).max() <= RMS[name] * (1 + 1e-4)
    assert all(np.isfinite(np.asarray(x, np.float64)).all() for x in jax.tree.leaves(state))


# RMS of every matrix update, where the rule fixes it.
RMS = {name: 0.2 for name in cases.FACTORIES if name.startswith(("normpre", "adamuon", "mano", "swan-rms"))}
RMS |= {"normpre_l-products": 0.1}
RMS.pop("normpre_g-hyperball")


@pytest.mark.parametrize("name", [one for one in ALL if one.values[0] in RMS])
def test_every_matrix_update_has_the_rms_of_the_rule(name):
    for updates in plain(name):
        for leaf, _, x in each(updates):
            # Summation of 24 squares; in Gram form the norm comes from small matrices, whose condition leaves 1e-5.
            # bfloat16 products round the result itself, after its norm is known, by 2^-9 per entry.
            rtol = 5e-3 if name == "normpre_g-bfloat16" else 3e-5
            np.testing.assert_allclose(np.sqrt(np.mean(x**2)), RMS[name], rtol=rtol, err_msg=leaf)


EVERYWHERE = {name: [pytest.mark.every_platform] for name in cases.REPRESENTATIVES}


@pytest.mark.parametrize("name", [pytest.param(name, marks=EVERYWHERE.get(name, ())) for name in cases.FACTORIES])
def test_dtypes_and_shapes(name):
    """bfloat16 parameters keep bfloat16 updates and float32 accumulators; the state keeps its shapes."""
    tx, params = optimizer(name), jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    state = jax.eval_shape(tx.init, params)
    updates, after = jax.eval_shape(functools.partial(tx.update, value=1.0), params, state, params)
    same = lambda a, b: jax.tree.map(lambda x: (x.shape, x.dtype), a) == jax.tree.map(lambda x: (x.shape, x.dtype), b)  # noqa: E731
    assert same(updates, params)
    assert same(state, after)
    stored = {x.dtype for x in jax.tree.leaves(state)} - {jnp.dtype(jnp.int32)}
    assert stored <= {jnp.dtype(jnp.float32)} | ({jnp.dtype(jnp.bfloat16)} if name == "normpre_g-bfloat16" else set())


# State per parameter beyond the momentum: one number per row, one per element, one norm per row.
BEYOND = {"normuon": (1, OUT), "adamuon": (IN, OUT), "muon-hyperball": (1, OUT), "normpre_g-hyperball": (1, OUT)}


@pytest.mark.parametrize("name", cases.FACTORIES)
def test_state_of_a_kernel_is_its_momentum_and_what_the_rule_adds(name):
    state = jax.eval_shape(cases.make(name).init, {"up": {"kernel": PARAMS["kernel"]}})
    found = sorted(x.shape for x in jax.tree.leaves(state) if x.ndim)
    assert found == sorted([(IN, OUT)] * (not name.startswith("swan")) + [BEYOND.get(name, ())] * (name in BEYOND))


@pytest.mark.parametrize("name", ["normpre_g", "normpre_l", "normuon", "adamuon"])
def test_momentum_can_be_stored_in_bfloat16(name):
    state = jax.eval_shape(
        cases.make(name, mu_dtype=jnp.bfloat16, matrix_dims={leaf: DIMS[leaf] for leaf in COMMON}).init, PARAMS
    )
    low = [x.shape for x in jax.tree.leaves(state) if x.dtype == jnp.bfloat16]
    assert sorted(low) == sorted(x.shape for x in jax.tree.leaves(PARAMS))


SMALL = ("stack", "bias")


def small(seed=0, dtype=jnp.float32):
    """A stack of two matrices, and a vector."""
    return {leaf: x.astype(dtype) for leaf, x in tree(seed, leaves=SMALL).items()}


def small_optimizer(name):
    return cases.make(name, 0.01, matrix_dims={leaf: DIMS[leaf] for leaf in SMALL})


def stacked(*trees):
    return jax.tree.map(lambda *xs: jnp.stack(xs), *trees)


def assert_close(a, b, atol=1e-6):
    """Two programs for the same numbers: rounding of updates of size 0.01."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol), a, b)


@pytest.mark.parametrize("name", cases.REPRESENTATIVES)
def test_jit_vmap_scan_and_donation_change_nothing(name):
    tx, params, gradients = small_optimizer(name), small(0), [small(1), small(2)]
    state = start = tx.init(params)
    eager = []
    for gradient in gradients:
        updates, state = tx.update(gradient, state, params)
        eager.append(updates)

    def step(state, gradient):
        updates, state = tx.update(gradient, state, params)
        return state, updates

    donated = jax.tree.map(jnp.copy, start)
    after, scanned = cases.quick_jit(lambda s, g: jax.lax.scan(step, s, g), donate_argnums=0)(
        donated, stacked(*gradients)
    )
    assert all(x.is_deleted() for x in jax.tree.leaves(donated) if x.ndim)
    assert_close(scanned, stacked(*eager))
    assert_close(after, state, atol=1e-5)
    lanes = stacked(params, small(5))
    both = jax.vmap(tx.init)(lanes)
    updates, _ = cases.quick_jit(jax.vmap(tx.update))(stacked(gradients[0], gradients[1]), both, lanes)
    assert_close(jax.tree.map(lambda u: u[0], updates), eager[0])
    alone, _ = tx.update(gradients[1], tx.init(small(5)), small(5))
    assert_close(jax.tree.map(lambda u: u[1], updates), alone)


@pytest.mark.parametrize("name", cases.REPRESENTATIVES)
def test_vmap_and_scan_keep_bfloat16(name):
    """Traced only: ``scan`` refuses a state whose dtype changes."""
    tx, params = small_optimizer(name), small(0, jnp.bfloat16)
    lanes = stacked(params, params)
    _, scanned = jax.eval_shape(
        lambda g: jax.lax.scan(lambda s, g: tx.update(g, s, params)[::-1], tx.init(params), g), lanes
    )
    mapped, _ = jax.eval_shape(lambda p: jax.vmap(tx.update)(p, jax.vmap(tx.init)(p), p), lanes)
    for updates in (scanned, mapped):
        assert jax.tree.map(lambda x: (x.shape, x.dtype), updates) == jax.tree.map(lambda x: (x.shape, x.dtype), lanes)


@pytest.mark.slow
@pytest.mark.every_platform
@pytest.mark.parametrize("name", ["normpre_g", "normpre_l-small"])
def test_the_optimized_program_computes_the_same(name):
    tx, params = small_optimizer(name), small(0)
    updates, _ = cases.users_jit(tx.update)(small(1), tx.init(params), params)
    assert_close(updates, tx.update(small(1), tx.init(params), params)[0])
