# SPDX-License-Identifier: Apache-2.0
"""What every optimizer promises for its matrices.

There is one table of optimizers, and one table of properties. The same two matrices are
stored in every layout that ``MatrixDims`` describe, so that one update shows that a
stack is a loop over its matrices, that transposed storage, several axes and output
blocks change nothing, and more.
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
from tests.reference_family import PROPERTIES, Properties

OUT, IN = 6, 4
SHAPES = {"A": (OUT, IN), "B": (OUT, IN), "C": (2, IN)}
# Leaf: its axes, the matrices that it holds, and how it is stored. The first five are
# for every optimizer.
LAYOUTS = {
    "kernel": (MatrixDims(0, 1), "A", lambda a: a.T),
    "twin": (MatrixDims(0, 1), "B", lambda b: b.T),
    "weight": (MatrixDims(1, 0), "A", lambda a: a),
    "stack": (MatrixDims(1, 2), "AB", lambda a, b: np.stack([a.T, b.T])),
    "bias": (None, "A", lambda a: a[:, 0]),
    "query": (MatrixDims(0, (1, 2)), "A", lambda a: a.T.reshape(IN, 2, 3)),
    "fused": (
        MatrixDims(0, 1, output_blocks=2),
        "BA",
        lambda b, a: np.concatenate([b, a]).T,
    ),
    "few": (MatrixDims(0, 1), "C", lambda c: c.T),
    "output": (MatrixDims((0, 1), 2), "A", lambda a: a.T.reshape(2, 2, OUT)),
    "weights": (MatrixDims(2, 1), "BA", lambda b, a: np.stack([b, a])),
    # Layers on axis 1.
    "between": (MatrixDims(0, 2), "AB", lambda a, b: np.stack([a.T, b.T], axis=1)),
    "sizes": (
        MatrixDims(1, 0, output_blocks=(2, 6)),
        "CA",
        lambda c, a: np.concatenate([c, a]),
    ),
}
ALL_LEAVES = tuple(LAYOUTS)
COMMON = ALL_LEAVES[:5]
SMALL = ("stack", "bias")


def stored(matrices, leaves=COMMON):
    """Parameters that hold these matrices (out, in)."""

    def leaf_of(leaf):
        _, names, store = LAYOUTS[leaf]
        return jnp.asarray(store(*(matrices[name] for name in names)))

    return {leaf: leaf_of(leaf) for leaf in leaves}


def numbered():
    """Every matrix with the numbers of its elements instead of their values."""
    places = {}
    for i, (name, shape) in enumerate(SHAPES.items()):
        places[name] = i * OUT * IN + np.arange(np.prod(shape)).reshape(shape)
    return places


def each(updates):
    """Every matrix of a tree: (leaf, name, matrix).

    It is found by where the layout stores the numbers of its elements.
    """
    places = numbered()
    for leaf, x in updates.items():
        dims, names, store = LAYOUTS[leaf]
        if dims is None:
            continue
        where = store(*(places[name] for name in names)).ravel()
        order = np.argsort(where)
        sorted_x = np.asarray(x, np.float64).ravel()[order]
        for name in names:
            yield leaf, name, sorted_x[np.isin(where[order], places[name])]


def weights(leaves=COMMON, dtype=jnp.float32):
    params = stored(cases.weights(0, SHAPES), leaves)
    return jax.tree.map(lambda x: x.astype(dtype), params)


def gradient(seed, leaves=COMMON, scale=1.0):
    """Matrices whose smallest singular value is at least a tenth of the largest.

    So Newton-Schulz has a mild slope there.
    """
    (matrices,) = cases.gradients(1, seed, SHAPES)
    return stored({name: np.float32(scale) * x for name, x in matrices.items()}, leaves)


def make(name, leaves=COMMON, learning_rate=1.0):
    dims = {leaf: LAYOUTS[leaf][0] for leaf in leaves}
    return cases.make(name, learning_rate, weight_decay=0.0, matrix_dims=dims)


optimizer = functools.cache(make)


def steps(name, *gradients):
    leaves = tuple(gradients[0])
    tx = optimizer(name, leaves)
    params = weights(leaves)
    return cases.steps(cases.updater(tx), tx.init(params), params, gradients)


@functools.cache
def plain(name, leaves=COMMON):
    return steps(name, gradient(1, leaves), gradient(2, leaves))[0]


# Others take the same paths through the code; the float64 transcriptions see what is
# different.
SLOW = (
    "muon-hyperball",
    "muon-keller",
    "muoneq-columns",
    "mano-2",
    "muoneq-both",
    "normpre_g-both-none",
    "normpre_g-rows-polar",
    "normpre",
)
ALL = [
    pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW))
    for name in cases.FACTORIES
]
HYPERBALL = ("normpre_h", "muon-hyperball")
every_optimizer = pytest.mark.parametrize("name", ALL)


def bound(name):
    """Rounding of a few eps, amplified by at most the slope of Newton-Schulz at zero.

    That is 485, and 970 for Polar Express. Rounding to bfloat16 is 2^-9 in every
    product, and these matrices see a slope below 50.
    """
    if name == "normpre_g-bfloat16":
        return 0.1
    slope = 970 if "polar" in name else 485
    return 4 * slope * EPS32


# Draws depend on the path and the batch index: a truncated sketch clips other modes in
# another layout.
TRUNCATED = ("normpre_l-small", "normpre_l-adaptive")


IN_ALL_LAYOUTS = ("normpre_g", "normpre_l", "normuon", "normpre_h", "muon-hyperball")
PLAIN_LAYOUT = ("kernel", "twin", "few")


@pytest.mark.parametrize("name", [one for one in ALL if one.values[0] not in TRUNCATED])
def test_a_matrix_is_updated_alike_in_every_layout(name):
    leaves = ALL_LEAVES if name in IN_ALL_LAYOUTS else COMMON
    for updates in plain(name, leaves):
        expected = {}
        for leaf, label, x in each(updates):
            if leaf in PLAIN_LAYOUT:
                expected[label] = x
        for leaf, label, x in each(updates):
            wanted = expected[label]
            error = np.linalg.norm(x - wanted) / np.linalg.norm(wanted)
            assert error <= bound(name), (leaf, label)


@every_optimizer
def test_the_scale_of_gradients_has_no_effect(name):
    """From 1e-15 to 1e15; only AdamW has an epsilon."""
    for scale in (1e-15, 1e15):
        found, _ = steps(name, gradient(1, scale=scale), gradient(2, scale=scale))
        for got, expected in zip(found, plain(name), strict=True):
            for (leaf, _, x), (_, _, y) in zip(each(got), each(expected), strict=True):
                assert np.linalg.norm(x - y) <= bound(name) * np.linalg.norm(y), leaf


@every_optimizer
def test_zero_gradients_give_zero_updates_and_do_no_harm(name):
    zeros = jax.tree.map(jnp.zeros_like, gradient(1))
    (still, after), state = steps(name, zeros, gradient(1))
    if name not in HYPERBALL:  # which sets norms in the first step
        assert not any(np.any(u) for u in jax.tree.leaves(still))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((after, state)))
    assert all(np.any(u) for u in jax.tree.leaves(after))


# Where the first step works on columns against weights that are not zero there.
BY_COLUMNS = (
    "mano",
    "mano-2",
    "normpre_g-columns-strict",
    "normpre_l-exact",
    "normpre_l-adaptive",
)


@every_optimizer
def test_an_output_without_gradient_is_not_updated(name):
    without = gradient(1)
    without["kernel"] = without["kernel"].at[:, 2].set(0)
    without["stack"] = without["stack"].at[0].set(0)
    (updates,), _ = steps(name, without)
    assert all(np.isfinite(u).all() for u in jax.tree.leaves(updates))
    kernel = np.abs(updates["kernel"])
    stack = np.abs(updates["stack"])
    if name not in (*BY_COLUMNS, *HYPERBALL):
        assert kernel[:, 2].max() <= 1e-6 * kernel.max()
    if name not in HYPERBALL:
        assert stack[0].max() <= 1e-6 * max(1, stack[1].max())
    np.testing.assert_array_equal(updates["twin"], plain(name)[0]["twin"])


@every_optimizer
def test_nan_and_infinity_stay_in_their_matrix_and_stay_visible(name):
    bad = gradient(1)
    bad["stack"] = bad["stack"].at[1, 0, 0].set(jnp.nan)
    bad["weight"] = bad["weight"].at[0, 0].set(jnp.nan)
    hides_infinity = properties_of(name).hides_infinity
    entry = jnp.nan if hides_infinity else jnp.inf
    bad["kernel"] = bad["kernel"].at[0, 0].set(entry)
    hurt, _ = steps(name, bad, gradient(2))
    remembers = bool(properties_of(name).state)
    for step, (found, expected) in enumerate(zip(hurt, plain(name), strict=True)):
        pairs = zip(each(found), each(expected), strict=True)
        for (leaf, label, x), (_, _, y) in pairs:
            if leaf in ("weight", "kernel") or (leaf == "stack" and label == "B"):
                assert np.isnan(x).any() or (step == 1 and not remembers), (
                    f"{name} hides the NaN or infinity of {leaf!r} at step {step}. If"
                    " only infinity is hidden, and by the rule itself, as by signs:"
                    " write @follows(..., hides_infinity=True) at its transcription in"
                    " tests/reference_family.py"
                )
            else:
                np.testing.assert_array_equal(x, y, err_msg=leaf)
        np.testing.assert_array_equal(found["bias"], expected["bias"])


# RMS of every matrix update, where the rule fixes it.
FIXED = ("normpre", "mano", "adamuon", "swan-rms")
RMS = {name: 0.2 for name in cases.FACTORIES if name.startswith(FIXED)}
RMS["normpre_l-products"] = 0.1
del RMS["normpre_h"]


@pytest.mark.parametrize("name", [one for one in ALL if one.values[0] in RMS])
def test_every_matrix_update_has_the_rms_of_the_rule(name):
    # Summation of 24 squares; in Gram form the norm comes from small matrices, whose
    # condition leaves 1e-5. bfloat16 products round the result itself, after its norm
    # is known, by 2^-9 per entry.
    rtol = 5e-3 if name == "normpre_g-bfloat16" else 3e-5
    for updates in plain(name):
        for leaf, _, x in each(updates):
            rms = np.sqrt(np.mean(x**2))
            np.testing.assert_allclose(rms, RMS[name], rtol=rtol, err_msg=leaf)


def structured(kind, m, n, seed, size):
    """Matrices that break optimizers, at the ends of the scale contract."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((m, n))
    if kind == "zero rows":
        x[: (m + 1) // 2] = 0
    elif kind == "zero columns":
        x[:, : (n + 1) // 2] = 0
    elif kind == "rank one":
        x = random.standard_normal((m, 1)) * random.standard_normal((1, n))
    elif kind == "one entry":
        x = x * (np.arange(m * n) == m * n // 2).reshape(m, n)
    elif kind == "scattered":  # every row of another magnitude
        x = x * np.logspace(-15, 15, m)[:, None] / size
    elif kind == "constant":
        x = np.ones((m, n))
    elif kind == "orthogonal":
        x = np.eye(m, n)
    return np.float32(x * size)


KINDS = (
    "gaussian",
    "zero rows",
    "zero columns",
    "rank one",
    "constant",
    "one entry",
    "orthogonal",
    "scattered",
)


SIZES = (1e-38, 1e-19, 1e-15, 1.0, 1e15)


def problems(m, n):
    """A stack of gradients and one of weights: all structures at all sizes.

    The last weights of each gradient are parallel to it.
    """
    gradients = []
    weights = []
    for seed, (kind, size) in enumerate(itertools.product(KINDS, SIZES)):
        gradients += [structured(kind, m, n, seed, size)] * 4
        weights += [
            structured(kind, m, n, seed + 99, 1.0),
            structured("gaussian", m, n, seed, 20.0),
            np.zeros((m, n)),
            structured(kind, m, n, seed, 1.0),
        ]
    return np.float32(np.stack(gradients)), np.float32(np.stack(weights))


ANY = ("normpre_g", "normpre_l", "normpre_l-products", "mano")
ANY_SLOW = (
    "normpre_g-msign",
    "normpre_l-exact",
    "normpre_l-small",
    "normpre_h",
    "muon-hyperball",
    "normuon",
    "muon",
)


@pytest.mark.parametrize(
    "name", [*ANY, *(pytest.param(x, marks=pytest.mark.slow) for x in ANY_SLOW)]
)
def test_finite_gradients_of_any_structure_give_finite_updates(name):
    """Rows, columns and single numbers too.

    The rank and the sketch are larger than most of their dimensions.
    """
    grads = {}
    params = {}
    for m, n in ((1, 6), (6, 1), (1, 1), (4, 5)):
        gradients, weights = problems(m, n)
        grads[f"{m}x{n}"] = jnp.asarray(gradients)
        params[f"{m}x{n}"] = jnp.asarray(weights)
    dims = dict.fromkeys(grads, MatrixDims(inputs=2, outputs=1))
    tx = cases.make(name, 1.0, weight_decay=0.0, matrix_dims=dims)
    update = cases.updater(tx)
    updates, state = cases.steps(update, tx.init(params), params, [grads] * 2)
    for x in jax.tree.leaves((updates, state)):
        assert np.isfinite(np.asarray(x, np.float64)).all()
    for update in jax.tree.leaves(updates):
        rms = np.sqrt(np.mean(np.float64(update) ** 2, axis=(-2, -1)))
        assert rms.max() <= RMS.get(name, np.inf) * (1 + 1e-4)


def signature(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


# State of a kernel: arrays with one number per row, per column or per entry.
STATE_SHAPES = {"entry": (IN, OUT), "row": (1, OUT), "column": (IN, 1)}
NORMPRE_H = Properties(state=("entry", "entry", "row", "column"))


def properties_of(name):
    """What the transcription of an optimizer says of it; NormPre has the momentum."""
    known = {"normpre_h": NORMPRE_H, **PROPERTIES}
    return known.get(name.partition("-")[0], Properties())


EVERYWHERE = {name: [pytest.mark.every_platform] for name in cases.REPRESENTATIVES}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=EVERYWHERE.get(name, ())) for name in cases.FACTORIES],
)
def test_dtypes_and_shapes(name):
    """bfloat16 parameters keep bfloat16 updates and float32 accumulators.

    Nothing relies on rank promotion.
    """
    leaves = ALL_LEAVES if name in cases.REPRESENTATIVES else COMMON
    tx = optimizer(name, leaves)
    params = weights(leaves, jnp.bfloat16)
    update = functools.partial(tx.update, value=1.0)
    with jax.numpy_rank_promotion("raise"):
        state = jax.eval_shape(tx.init, params)
        found = jax.eval_shape(update, params, state, params)
    assert signature(found) == signature((params, state))
    dtypes = {x.dtype for x in jax.tree.leaves(state)} - {jnp.dtype(jnp.int32)}
    low = {jnp.dtype(jnp.bfloat16)} if name == "normpre_g-bfloat16" else set()
    assert low <= dtypes <= {jnp.dtype(jnp.float32)} | low
    kernel = jax.tree_util.DictKey("kernel")
    leaves_of_state = jax.tree.leaves_with_path(state)
    of_kernel = [x.shape for path, x in leaves_of_state if kernel in path]
    expected = [STATE_SHAPES[kind] for kind in properties_of(name).state]
    assert sorted(of_kernel) == sorted(expected)


def stacked(*trees):
    return jax.tree.map(lambda *xs: jnp.stack(xs), *trees)


# Two programs for the same numbers: rounding of updates of size 0.01.
assert_close = functools.partial(cases.assert_close, atol=1e-6)


@pytest.mark.parametrize("name", cases.REPRESENTATIVES)
def test_jit_vmap_scan_and_donation_change_nothing(name):
    tx = make(name, SMALL, 0.01)
    params = weights(SMALL)
    gradients = [gradient(1, SMALL), gradient(2, SMALL)]
    eager, state = cases.steps(tx.update, tx.init(params), params, gradients)

    def step(state, grads):
        updates, state = tx.update(grads, state, params)
        return state, updates

    def scan(state, gradients):
        return jax.lax.scan(step, state, gradients)

    donated = tx.init(params)
    scan_and_donate = cases.quick_jit(scan, donate_argnums=0)
    after, scanned = scan_and_donate(donated, stacked(*gradients))
    assert all(x.is_deleted() for x in jax.tree.leaves(donated) if x.ndim)
    assert_close(scanned, stacked(*eager))
    assert_close(after, state, atol=1e-5)

    other = gradient(5, SMALL)
    lanes = stacked(params, other)
    mapped = cases.quick_jit(jax.vmap(tx.update))
    updates, _ = mapped(stacked(*gradients), jax.vmap(tx.init)(lanes), lanes)
    alone, _ = tx.update(gradients[1], tx.init(other), other)
    assert_close(updates, stacked(eager[0], alone))


@pytest.mark.slow
@pytest.mark.every_platform
@pytest.mark.parametrize("name", ["normpre_g", "normpre_l-small"])
def test_the_optimized_program_computes_the_same(name):
    tx = make(name, SMALL, 0.01)
    params = weights(SMALL)
    grads = gradient(1, SMALL)
    updates, _ = cases.users_jit(tx.update)(grads, tx.init(params), params)
    assert_close(updates, cases.first_update(tx, grads, params))
