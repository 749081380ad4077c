# SPDX-License-Identifier: Apache-2.0
"""The relatives against literal transcriptions of their rules, at their edges, and as their gallery page shows them."""

import functools
import re
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import normpre_optax as npo
from normpre_optax.platforms import on
from normpre_optax.transforms import batches
from normpre_optax.transforms.draws import sketch_draws
from tests import cases
from tests import reference_family as oracles
from tests.reference import decoupled_step

STEPS, LEARNING_RATE, WEIGHT_DECAY, RANK = 10, 0.03, 0.1, 3
SHAPES = {name: cases.SHAPES[name] for name in ("wide", "stack")}
DIMS = {name: cases.DIMS[name] for name in SHAPES}


def modes(factory, oracle, tolerance, names):
    """One variant a mode, by its name here and in the authors' code."""
    for mode, theirs in names.items():
        ours, theirs = functools.partial(factory, mode=mode), functools.partial(oracle, mode=theirs)
        yield f"{factory.__name__}-{mode}", (ours, theirs, tolerance)


# Factory, oracle, and by how much they may part in float64, relative to the path: by rounding, or by the 1e-8 that some
# rules add to squared lengths of order one and we do without, times the slope of Newton-Schulz, 20 to 100.
VARIANTS = {
    "rmnp": (npo.rmnp, oracles.rmnp, 1e-13),
    **dict(modes(npo.moga, oracles.moga, 1e-13, {"rows": "rows", "columns": "columns"})),
    **dict(modes(npo.muoneq, oracles.muoneq, 1e-6, {"rows": "R", "C": "C", "both": "RC"})),
    **dict(
        modes(
            npo.muon_plus,
            oracles.muon_plus,
            1e-12,
            {"rows": "row", "col": "col", "both": "row_col", "columns_rows": "col_row"},
        )
    ),
    "normuon": (npo.normuon, oracles.normuon, 1e-12),
    "adamuon": (npo.adamuon, oracles.adamuon, 1e-8),
    "swan": (npo.swan, oracles.swan, 1e-12),
    "dion": (functools.partial(npo.dion, rank=RANK, seed=5), oracles.dion, 1e-6),
}
RELATIVES = [name for name in npo.families() if name not in ("normpre_g", "normpre_l", "muon", "mano")]
every_relative = pytest.mark.parametrize("name", RELATIVES)


def ours(factory, dtype):
    """Weights (…, out, in) after free steps."""
    tx = factory(LEARNING_RATE, weight_decay=WEIGHT_DECAY, matrix_dims=DIMS)
    update = cases.quick_jit(tx.update)
    params = cases.as_jax(cases.to_layout(cases.weights(shapes=SHAPES)), dtype)
    state = tx.init(params)
    for gradient in cases.gradients(STEPS, shapes=SHAPES):
        updates, state = update(cases.as_jax(cases.to_layout(gradient), dtype), state, params)
        params = optax.apply_updates(params, updates)
    return cases.from_layout(params)


def theirs(oracle):
    """The same by the oracle, matrix by matrix; Dion's Q starts from the library's draws."""

    def one(name, index, w, *gradients):
        drawn = ()
        if oracle is oracles.dion:
            shape = (min(RANK, *w.shape), w.shape[1])
            drawn = (np.float64(sketch_draws(5, 0, zlib.crc32(name.encode()), index, shape)).T,)
        step, w = oracle(w.shape, *drawn), np.float64(w)
        for gradient in gradients:
            w = decoupled_step(w, step(np.float64(gradient)), LEARNING_RATE, WEIGHT_DECAY)
        return w

    return cases.each_matrix(one, cases.weights(shapes=SHAPES), *cases.gradients(STEPS, shapes=SHAPES))


def assert_same_path(got, expected, tolerance):
    start = cases.weights(shapes=SHAPES)
    for name, x in expected.items():
        error = np.linalg.norm(got[name] - x) / np.linalg.norm(x - start[name])
        assert error < tolerance, (name, error)


@pytest.mark.parametrize("variant", VARIANTS)
def test_ten_steps_follow_the_rule(variant):
    factory, oracle, tolerance = VARIANTS[variant]
    with jax.enable_x64(True):
        assert_same_path(ours(factory, jnp.float64), theirs(oracle), tolerance)


@pytest.mark.parametrize(
    "variant", ["muoneq-both", "normuon", "adamuon", "swan", pytest.param("dion", marks=pytest.mark.slow)]
)
def test_ten_steps_follow_the_rule_in_float32(variant):
    factory, oracle, _ = VARIANTS[variant]
    # A few eps32 a step, times a slope of 20 to 100 in Newton-Schulz or the condition of a thin basis.
    assert_same_path(ours(factory, jnp.float32), theirs(oracle), 5e-5)


def numbers(seed=0, dtype=jnp.float32):
    """A tall, a wide and a stacked kernel (in, out), and a bias."""
    random = np.random.default_rng(seed)
    shapes = {"up": (4, 6), "down": (6, 4), "layers": (2, 4, 6), "bias": (6,)}
    return {
        name: {"kernel" if len(shape) > 1 else "bias": random.standard_normal(shape).astype(dtype)}
        for name, shape in shapes.items()
    }


def members(name, **kwargs):
    return npo.families()[name](1.0, **{"weight_decay": 0.0, **({"rank": 2} if name == "dion" else {}), **kwargs})


@every_relative
def test_what_a_gradient_may_be(name):
    """One compiled update per optimizer, asked everything that a rule of its own could get wrong."""
    tx, params = members(name), numbers()
    update = cases.quick_jit(tx.update)

    def two_steps(first, second):
        state = tx.init(params)
        updates, state = update(first, state, params)
        return (updates, *update(second, state, params))

    first, second, state = two_steps(numbers(1), numbers(2))
    # The scale of the gradients is forgotten, from 1e-15 to 1e15; AdamW's epsilon is not, so matrices only.
    for scale in np.float32([1e-15, 1e15]):
        scaled = two_steps(*(jax.tree.map(functools.partial(np.multiply, scale), numbers(seed)) for seed in (1, 2)))
        for a, b in zip(scaled[:2], (first, second), strict=True):
            for path in ("up", "down", "layers"):
                np.testing.assert_allclose(a[path]["kernel"], b[path]["kernel"], atol=2e-4, err_msg=f"{path} {scale}")
    # Nothing comes of nothing, and it does no harm to what follows.
    still, after, _ = two_steps(jax.tree.map(np.zeros_like, params), numbers(1))
    assert not any(np.any(u) for u in jax.tree.leaves(still))
    if name in ("normuon", "adamuon"):  # whose averages begin a step later
        assert all(np.isfinite(u).all() for u in jax.tree.leaves(after))
    else:
        np.testing.assert_allclose(after["up"]["kernel"], first["up"]["kernel"], atol=1e-5)
    # One output neuron without a gradient gets no update.
    dead = numbers(1)
    dead["up"]["kernel"][:, 2] = 0
    updates, _ = update(dead, tx.init(params), params)
    # A row of length 0 stays exactly 0, but for the last bit that thin products leave.
    found = np.asarray(updates["up"]["kernel"])
    assert np.abs(found[:, 2]).max() < 1e-6
    assert np.isfinite(found).all()
    # NaN stays visible, and stays where it is: in its own matrix of a stack.
    bad = numbers(1)
    bad["layers"]["kernel"][1, 0, 0] = np.nan
    updates, poisoned = update(bad, tx.init(params), params)
    assert np.isnan(updates["layers"]["kernel"][1]).any()
    np.testing.assert_array_equal(updates["layers"]["kernel"][0], first["layers"]["kernel"][0])
    np.testing.assert_array_equal(updates["up"]["kernel"], first["up"]["kernel"])
    updates, _ = update(numbers(2), poisoned, params)
    np.testing.assert_array_equal(updates["layers"]["kernel"][0], second["layers"]["kernel"][0])
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))


@every_relative
def test_bfloat16_parameters_have_float32_state(name):
    tx, params = members(name), numbers(dtype=jnp.bfloat16)
    state = tx.init(params)
    updates, new = jax.eval_shape(functools.partial(tx.update, value=1.0), params, state, params)
    assert {u.dtype for u in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}
    shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(s)] for s in (state, new)]
    assert shapes[0] == shapes[1]
    assert {dtype for _, dtype in shapes[0]} <= {jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)}
    low = jax.eval_shape(members(name, mu_dtype=jnp.bfloat16).init, params)
    momenta = [x for x in jax.tree.leaves(low) if x.dtype == jnp.bfloat16]
    # First moments, in the parameters' own layout: three matrices' (SWAN keeps none) and AdamW's of the bias.
    kept = [(6,)] if name == "swan" else [(2, 4, 6), (4, 6), (6, 4), (6,)]
    assert sorted(x.shape for x in momenta) == sorted(kept)


# Leaves of state beside the momentum, for an (in, out) = (4, 6) kernel: stacks of (out, 1), the kernel's shape, thin.
BEYOND = {"normuon": [(1, 6, 1)], "adamuon": [(4, 6)], "dion": [(1, 2, 4)]}


@every_relative
def test_state_per_matrix_is_what_the_gallery_says(name):
    state = jax.eval_shape(members(name).init, {"up": {"kernel": jnp.ones((4, 6))}})
    expected = BEYOND.get(name, []) + ([] if name == "swan" else [(4, 6)])
    found = [x.shape for x in jax.tree.leaves(state) if x.ndim > 0]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("variant", ["moga-columns", "muon_plus-columns_rows", "normuon", "swan", "dion"])
def test_a_kernel_stored_as_out_in_is_the_same_matrix(variant):
    """Stages walk along the other axis, or keep thin factors the other way round."""
    factory, _, _ = VARIANTS[variant]
    updates = []
    for outputs, turn in ((1, lambda x: x), (0, lambda x: x.T)):
        tx = factory(1.0, weight_decay=0.0, matrix_dims={"w": npo.MatrixDims(inputs=1 - outputs, outputs=outputs)})
        params, state = {"w": turn(numbers()["up"]["kernel"])}, None
        state = tx.init(params)
        for seed in (1, 2):
            new, state = tx.update({"w": turn(numbers(seed)["up"]["kernel"])}, state, params)
        updates.append(turn(new["w"]))
    np.testing.assert_allclose(*updates, atol=1e-5)


@pytest.mark.slow
def test_dion_in_stacks_as_accelerators_run_it(monkeypatch):
    """Its state is wider between its two stages: slices and pools of stacks must bear that, too."""
    paths = []
    for platform, limit in (("cpu", None), ("tpu", 2**31), ("gpu", 2**31), ("gpu", 200)):
        if limit:
            monkeypatch.setattr(batches, "TPU_BYTES" if platform == "tpu" else "GPU_BYTES", limit)
        tx, params = members("dion"), numbers()
        state, update, seen = tx.init(params), on(platform, cases.one_by_one_jit(tx.update)), []
        for seed in (1, 2, 3):
            updates, state = update(numbers(seed), state, params)
            seen.append(updates)
        paths.append((seen, state))
    for other in paths[1:]:
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), paths[0], other)


@pytest.mark.parametrize("factory", [npo.rmnp, npo.muon_plus, npo.swan, npo.dion])
def test_compute_dtype_reaches_the_matrices(factory):
    params, found = {"kernel": numbers(1)["up"]["kernel"]}, []
    for dtype in (None, jnp.bfloat16):
        tx = factory(1.0, compute_dtype=dtype, weight_decay=0.0)
        found.append(np.asarray(tx.update(params, tx.init(params), params)[0]["kernel"]))
    difference = np.linalg.norm(found[0] - found[1]) / np.linalg.norm(found[0])
    assert 1e-4 < difference < 0.1  # bfloat16 rounds to 4e-3


def test_bad_arguments_are_named():
    for factory in (npo.moga, npo.muoneq, npo.muon_plus):
        with pytest.raises(ValueError, match="mode='rc' is not one of"):
            factory(1e-3, mode="rc")
    for make, named in (
        (lambda: npo.normuon(1e-3, b2=1.0), "b2 must lie in"),
        (lambda: npo.dion(1e-3, rank=0), "rank must be at least 1"),
        (lambda: npo.swan(1e-3, whitening_steps=0), "whitening_steps must be at least 1"),
        (lambda: npo.swan(1e-3, rms=0.0), "rms must be positive"),
        (lambda: npo.normalize_rows(-1.0), "eps must not be negative"),
    ):
        with pytest.raises(ValueError, match=named):
            make()
    with pytest.raises(TypeError, match="mu_dtype"):
        npo.dion(1e-3, mu_dtype="int8")


# Where two rules are one.


def test_equal_rows_make_muoneq_muon():
    """A constant gradient with rows of one length: U keeps its direction, and E(U) is U but for its size."""
    gradient = np.random.default_rng(0).standard_normal((6, 4))
    gradient /= np.linalg.norm(gradient, axis=0)  # (in, out): output neurons are columns
    params = {"kernel": jnp.zeros((6, 4))}
    grads = {"kernel": jnp.asarray(gradient, jnp.float32)}
    found = [cases.first_update(f(1.0, weight_decay=0.0), grads, params)["kernel"] for f in (npo.muoneq, npo.muon)]
    np.testing.assert_allclose(*found, atol=1e-5)


def test_dion_of_full_rank_tends_to_exact_muon_under_a_constant_gradient():
    """M keeps the gradient's direction, and the power iteration goes on until P and Q are its singular vectors."""
    random = np.random.default_rng(1)
    u, _ = np.linalg.qr(random.standard_normal((4, 4)))
    v, _ = np.linalg.qr(random.standard_normal((6, 4)))
    grads = {"kernel": jnp.asarray((u * [8.0, 4.0, 2.0, 1.0]) @ v.T, jnp.float32)}  # (in, out) = (4, 6)
    params = {"kernel": jnp.zeros((4, 6))}
    tx = npo.dion(1.0, weight_decay=0.0)
    state, update, errors = tx.init(params), cases.updater(tx), []
    for _ in range(12):
        updates, state = update(grads, state, params)
        errors.append(np.linalg.norm(updates["kernel"] + (6 / 4) ** 0.5 * u @ v.T))
    assert errors[0] > 0.1
    assert errors[-1] < 1e-3  # neighbours part by 1/4 a step


def test_the_gallery_page_runs(capsys):
    page = (Path(__file__).parents[1] / "docs" / "family.md").read_text()
    scope: dict = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "docs/family.md", "exec"), scope)
    said = capsys.readouterr().out
    table = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert set(table) == set(npo.families())
    assert all(f"{name} - " in said for name in table)
    assert said.splitlines()[-2:] == ["2.0e-04", "2.0e-04"]
    # With row moments: one number an output neuron. With Nesterov: NormPre-G at first, U = (1 + mu) G, and not after.
    params, grads = {"kernel": numbers()["up"]["kernel"]}, {"kernel": numbers(1)["up"]["kernel"]}
    shapes = [x.shape for x in jax.tree.leaves(scope["normpre_l_rows"](1.0).init(params))]
    assert (1, 6, 1) in shapes
    found = []
    for tx in (scope["normpre_g_nesterov"](1.0), npo.normpre_g(1.0)):
        first, state = cases.updater(tx)(grads, tx.init(params), params)
        second, _ = cases.updater(tx)({"kernel": numbers(2)["up"]["kernel"]}, state, params)
        found.append((first["kernel"], second["kernel"]))
    np.testing.assert_allclose(found[0][0], found[1][0], atol=1e-5)
    assert np.abs(found[0][1] - found[1][1]).max() > 1e-2
