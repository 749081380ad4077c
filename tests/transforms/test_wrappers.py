# SPDX-License-Identifier: Apache-2.0
"""Layout, orientation and dtype are conjugations: what is inside sees another view, and nobody outside can tell."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import normpre_optax as npo
from normpre_optax.platforms import on
from normpre_optax.transforms import oriented, wrappers
from normpre_optax.transforms.tangent import normalize_tangent_rows
from tests import cases
from tests.cases import EPS32


def gaussian(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


PARAMS = {
    "kernel": gaussian((4, 6)),
    "same": gaussian((4, 6), 1),
    "weight": gaussian((6, 4), 2),
    "stack": gaussian((3, 4, 6), 3),
    "query": gaussian((4, 2, 3), 4),
    "middle": gaussian((4, 3, 6), 5),
    "fused": gaussian((4, 6), 6),
}
DIMS = {
    "kernel": npo.MatrixDims(inputs=0, outputs=1),
    "same": npo.MatrixDims(inputs=0, outputs=1),
    "weight": npo.MatrixDims(inputs=1, outputs=0),
    "stack": npo.MatrixDims(inputs=1, outputs=2),
    "query": npo.MatrixDims(inputs=0, outputs=(1, 2)),
    "middle": npo.MatrixDims(inputs=0, outputs=2),  # the layer axis in the middle
    "fused": npo.MatrixDims(inputs=0, outputs=1, output_blocks=2),
}


def in_rows(name, x):
    """The matrices (out, in) of a leaf, by hand."""
    return {
        "kernel": lambda: x.T[None],
        "same": lambda: x.T[None],
        "weight": lambda: x[None],
        "stack": lambda: jnp.swapaxes(x, 1, 2),
        "query": lambda: x.reshape(4, 6).T[None],
        "middle": lambda: jnp.transpose(x, (1, 2, 0)),
        "fused": lambda: x.T.reshape(2, 3, 4),
    }[name]()


def row_numbers():
    """A transformation that tells rows from columns and one matrix from another: entry times row number."""

    def update(updates, state, params=None):
        return jax.tree.map(lambda x: x * (1 + jnp.arange(x.shape[-2], dtype=x.dtype))[:, None], updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


@pytest.mark.parametrize(
    "stage",
    [
        row_numbers,
        lambda: oriented.chain(row_numbers(), npo.scale_to_rms(None)),
        lambda: wrappers.in_dtype(jnp.float32, row_numbers()),
        lambda: wrappers.fixed_orientation(row_numbers()),
    ],
)
def test_as_matrices_shows_output_neurons_as_rows(stage):
    found = cases.first_update(npo.as_matrices(DIMS, stage()), PARAMS, PARAMS)
    assert jax.tree.structure(found) == jax.tree.structure(PARAMS)
    for name, x in found.items():
        assert x.shape == PARAMS[name].shape
        matrices = in_rows(name, PARAMS[name])
        np.testing.assert_allclose(
            in_rows(name, x), matrices * (1 + jnp.arange(matrices.shape[1], dtype=x.dtype))[:, None], rtol=2 * EPS32
        )


@pytest.mark.parametrize("first", ["rows", "columns"])
def test_alternation_turns_every_other_step(first):
    tx = npo.alternate_orientation(row_numbers(), first=first)
    x = gaussian((3, 5))
    rows = x * (1 + jnp.arange(3.0))[:, None]
    columns = x * (1 + jnp.arange(5.0))
    state = tx.init(x)
    for step in range(5):
        out, state = tx.update(x, state)
        np.testing.assert_allclose(out, rows if (step % 2 == 0) == (first == "rows") else columns, rtol=2 * EPS32)
    assert int(state.count) == 5


def test_alternation_hands_the_weights_over_in_the_same_orientation():
    tx = npo.alternate_orientation(npo.project_to_tangent("strict"))
    m, w = gaussian((3, 5)), gaussian((3, 5), 1)
    state = tx.init(w)
    rows, state = tx.update(m, state, w)
    columns, state = tx.update(m, state, w)
    np.testing.assert_allclose(jnp.sum(rows * w, axis=1), 0, atol=1e-5)
    np.testing.assert_allclose(jnp.sum(columns * w, axis=0), 0, atol=1e-5)
    assert jnp.abs(jnp.sum(rows * w, axis=0)).max() > 1e-2


def test_a_state_that_knows_the_orientation_is_refused_at_init():
    tx = npo.alternate_orientation(optax.trace(0.9))
    for shape in ((3, 5), (4, 4), (2, 3, 3)):  # squares too, whose transpose has the same shape
        with pytest.raises(ValueError, match=r"orientation.*outside alternate_orientation"):
            tx.init({"w": jnp.ones(shape)})
    npo.alternate_orientation(optax.scale_by_schedule(lambda count: 1.0)).init({"w": jnp.ones((3, 5))})  # a counter may


ROW_SCALINGS = {
    "tangent": normalize_tangent_rows,
    "length": lambda: normalize_tangent_rows("strict", length=lambda rows, columns: 2.0 * rows + columns),
    "rows": npo.normalize_rows,
    "columns": lambda: wrappers.fixed_orientation(npo.normalize_rows(), "columns"),
}


@pytest.mark.parametrize("platform", ["cpu", "tpu"])  # a branch, as on a GPU, and both with a choice
@pytest.mark.parametrize(
    ("stage", "transposed"),
    [
        *((stage, False) for stage in ROW_SCALINGS),
        ("length", True),
        *(pytest.param(stage, True, marks=pytest.mark.thorough) for stage in ROW_SCALINGS if stage != "length"),
    ],
)
def test_a_row_scaling_alternates_by_its_numbers_as_any_stage_does_by_its_results(platform, stage, transposed):
    """Which never makes either result before it has chosen; without `factors` it is any stage."""
    tx = ROW_SCALINGS[stage]()
    assert isinstance(tx, oriented.RowScaling)
    plain = oriented.OrientedTransformation(tx.init, tx.update)
    m, w = gaussian((3, 5)), gaussian((3, 5), 1)
    by_numbers, by_results = (npo.alternate_orientation(t, first="columns") for t in (tx, plain))
    states = by_numbers.init(w), by_results.init(w)
    layout = oriented.MatrixLayout(transposed)
    updates = [
        on(platform, cases.quick_jit(functools.partial(t.update, matrix_layout=layout)))
        for t in (by_numbers, by_results)
    ]
    for _ in range(2):
        found = [f(m, state, w) for f, state in zip(updates, states, strict=True)]
        states = [state for _, state in found]
        np.testing.assert_allclose(found[0][0], found[1][0], rtol=0, atol=8 * 15 * EPS32)  # rows of length up to 15
    assert [int(state.count) for state in states] == [2, 2]


@pytest.mark.parametrize("params", [True, False])
def test_the_parts_of_a_stack_change_nothing_but_where_a_gpu_puts_them_together(params):
    tx = npo.alternate_orientation(normalize_tangent_rows("relaxed" if params else "none"))
    updates = [gaussian((3, 3, 5)), gaussian((1, 5, 3), 2)]
    weights = [gaussian((3, 3, 5), 1), gaussian((1, 5, 3), 3)] if params else None
    state = tx.init(updates)
    told, untold = (
        on("gpu", jax.make_jaxpr(functools.partial(tx.update, matrix_layout=layout)))(updates, state, weights)
        for layout in (oriented.MatrixLayout(parts=[3, 1]), oriented.UPRIGHT)
    )
    given = jax.tree.leaves((updates, state, weights))
    for found, expected in zip(*(jax.core.eval_jaxpr(p.jaxpr, p.consts, *given) for p in (told, untold)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=4 * EPS32)
    # The branches are given single matrices, of which they make stacks themselves.
    assert ["concatenate" in str(program) for program in (told, untold)] == [True, False]


@pytest.mark.parametrize(
    ("before", "bounded"),
    [
        ([npo.normalize_rows()], True),
        ([wrappers.fixed_orientation(npo.normalize_rows(), "columns")], True),
        ([npo.alternate_orientation(normalize_tangent_rows())], True),
        ([], False),
        ([npo.normalize_rows(), npo.scale_to_rms(0.2)], False),  # only what comes right after it is told
        ([npo.normalize_rows(eps=1e-8)], False),  # rows far below eps come out short
        ([npo.alternate_orientation(npo.project_to_tangent())], False),
        ([npo.equalize_rows_and_columns()], False),
    ],
)
def test_a_chain_tells_the_next_stage_that_rows_have_a_length(before, bounded):
    seen = []

    def update(updates, state, params=None, *, matrix_layout, **extra_args):
        seen.append(matrix_layout.bounded)
        return updates, state

    told = oriented.OrientedTransformation(lambda params: optax.EmptyState(), update)
    tx, x = oriented.chain(*before, told), gaussian((3, 5))
    jax.eval_shape(tx.update, x, tx.init(x), x)
    assert seen == [bounded]


def test_alternation_keeps_the_inner_count():
    tx = npo.alternate_orientation(optax.scale_by_schedule(lambda count: count.astype(jnp.float32)))
    x, state = jnp.ones((2, 3)), tx.init(jnp.ones((2, 3)))
    seen = []
    for _ in range(4):
        out, state = tx.update(x, state)
        seen.append(float(out[0, 0]))
    assert seen == [0.0, 1.0, 2.0, 3.0]


def test_both_is_rows_and_then_columns():
    tx = wrappers.both_orientations(npo.normalize_rows())
    x = gaussian((3, 5))
    out, _ = tx.update(x, tx.init(x))
    rows = x / jnp.linalg.norm(x, axis=1, keepdims=True)
    np.testing.assert_allclose(out, rows / jnp.linalg.norm(rows, axis=0), rtol=8 * EPS32)


def test_at_least_float32_lifts_what_is_lower_and_only_that():
    seen = []

    def update(updates, state, params=None):
        seen.extend([x.dtype for x in jax.tree.leaves((updates, params))])
        return updates, state

    tx = wrappers.at_least_float32(optax.GradientTransformation(lambda params: optax.EmptyState(), update))
    low = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(2, jnp.float32)}
    out, _ = tx.update(low, tx.init(low), low)
    assert set(seen) == {jnp.dtype(jnp.float32)}
    assert (out["a"].dtype, out["b"].dtype) == (jnp.bfloat16, jnp.float32)
    with jax.enable_x64(True):
        wide = {"a": jnp.ones(2, jnp.float64)}
        assert tx.update(wide, tx.init(wide), wide)[0]["a"].dtype == jnp.float64


def stateful():
    """Keeps state for every matrix (its shape is the stack's) and a counter beside it, as a stage inside may."""

    def init(params):
        return {"sum": jax.tree.map(jnp.zeros_like, params), "count": jnp.zeros((), jnp.int32)}

    def update(updates, state, params=None, **extra_args):
        total = jax.tree.map(jnp.add, state["sum"], updates)
        return total, {"sum": total, "count": state["count"] + 1}

    return optax.GradientTransformationExtraArgs(init, update)


def test_state_inside_belongs_to_each_parameter():
    tx = npo.as_matrices(DIMS, stateful())
    state = tx.init(PARAMS)
    shapes = jax.tree.map(jnp.shape, state)
    for step in range(3):
        out, state = cases.updater(tx)(PARAMS, state, PARAMS)
        jax.tree.map(lambda o, p, k=step: np.testing.assert_allclose(o, (k + 1) * p, rtol=8 * EPS32), out, PARAMS)
        assert jax.tree.map(jnp.shape, state) == shapes
        assert int(state["count"]) == step + 1


def test_every_matrix_gets_its_own_identity():
    seen = {}

    def update(updates, state, params=None, *, matrix_ids=None, **extra_args):
        # Write the identity into the update, to read it outside.
        def write(x, ids):
            low = (ids % 1024).astype(x.dtype)
            return jnp.zeros_like(x) + (low[..., 0] + 4096 * low[..., 1])[..., None, None]

        return jax.tree.map(write, updates, matrix_ids), state

    tx = npo.as_matrices(DIMS, optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update))
    out = cases.first_update(tx, PARAMS, PARAMS)
    for name, x in out.items():
        for matrix in np.asarray(in_rows(name, x)):
            assert np.ptp(matrix) == 0
            seen[name, float(matrix[0, 0])] = True
    assert len(seen) == 1 + 1 + 1 + 3 + 1 + 3 + 2  # every layer of every stack apart


def test_extra_arguments_may_have_any_name_but_one():
    """What stages tell each other goes by a name of its own, and a user's words reach whoever asks for them."""
    seen = []

    def update(updates, state, params=None, *, transposed=None, layout=None, parts=None, bounded=None, **extra_args):
        seen.append((transposed, layout, parts, bounded))
        return updates, state

    theirs = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    stage = oriented.chain(npo.alternate_orientation(npo.normalize_rows()), npo.precondition_globally(1), theirs)
    words = {"transposed": 1, "layout": "mine", "parts": 3, "bounded": None}
    params, dims = ({name: tree[name] for name in ("weight", "fused")} for tree in (PARAMS, DIMS))
    for tx in (npo.as_matrices(dims, stage), npo.normpre(0.01, stage, matrix_dims=dims)):
        expected, _ = tx.update(params, tx.init(params), params)
        seen.clear()
        found, _ = tx.update(params, tx.init(params), params, **words)
        assert set(seen) == {tuple(words.values())}
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=8 * EPS32), found, expected)
        with pytest.raises(TypeError, match="matrix_layout is what as_matrices tells its stages"):
            tx.update(params, tx.init(params), params, matrix_layout=oriented.UPRIGHT)


def test_a_leaf_that_is_no_matrix_is_named():
    tx = npo.as_matrices(None, npo.normalize_rows())
    params = {"dense": {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}}
    with pytest.raises(ValueError, match=r"dense/bias.*(?s:.*)optax\.masked"):
        tx.init(params)


def test_dims_that_do_not_fit_are_named():
    tx = npo.as_matrices(npo.MatrixDims(inputs=0, outputs=2), npo.normalize_rows())
    with pytest.raises(ValueError, match=r"'kernel'.*outputs=2 is out of range"):
        tx.init({"kernel": jnp.ones((3, 4))})


def test_a_bare_array_is_a_parameter_like_any_other():
    """A state that no parameter owns is told from theirs, though both are bare arrays."""

    def update(updates, state, params=None):
        del params
        return jax.tree.map(lambda u: u * state[0], updates), state + 1

    tx = npo.as_matrices(None, optax.GradientTransformation(lambda params: jnp.arange(5.0), update))
    x = gaussian((3, 4))
    _, state = cases.updater(tx)(x, tx.init(x))
    updates, state = cases.updater(tx)(x, state)
    np.testing.assert_array_equal(updates, x)
    np.testing.assert_array_equal(state, jnp.arange(5.0) + 2)
