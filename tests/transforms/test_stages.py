# SPDX-License-Identifier: Apache-2.0
"""The stages alone, on plain leaves whose last two axes are (rows, columns): ordinary optax transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import normpre_optax as npo
from normpre_optax.transforms import draws
from tests import cases, reference
from tests.cases import EPS32

STAGES = {
    "tangent": npo.project_to_tangent(),
    "normalize": npo.normalize_rows(),
    "global": npo.precondition_globally(),
    "local": npo.precondition_locally(rank=2, oversample=1),
    "warm": npo.precondition_locally(rank=2, oversample=1, warm_start=True),
    "products": npo.precondition_locally(rank=2, oversample=1, method="products"),
    "scale": npo.scale_to_rms(0.2),
}


def gaussian(shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def tree(seed=0, dtype=jnp.float32):
    return {"tall": gaussian((6, 4), seed, dtype), "stack": gaussian((2, 3, 5), seed + 1, dtype)}


def expected(step):
    """Reference matrix by matrix: rows are the next to last axis here, as everywhere inside."""
    return lambda updates, params: cases.each_matrix(
        lambda name, i, m, w: step(np.float64(m), np.float64(w)), updates, params
    )


ORACLES = {
    "tangent": expected(lambda m, w: reference.tangent_rows(m, w, eps=EPS32)),
    "normalize": expected(lambda m, w: reference.unit_rows(m)),
    "global": expected(lambda m, w: reference.newton_schulz(m)),
    "scale": expected(lambda m, w: reference.scale_to_rms(m)),
}


@pytest.mark.parametrize("stage", ORACLES)
def test_alone_it_is_the_reference(stage):
    updates, params = tree(0), tree(7)
    found = cases.first_update(STAGES[stage], updates, params)
    for name, x in ORACLES[stage](updates, params).items():
        # A few eps32, times the slope of Newton-Schulz or the (1 + ||w||^2) of the tangent: both below 100 here.
        np.testing.assert_allclose(found[name], x, atol=200 * EPS32, err_msg=name)


def test_the_sketch_alone_is_the_reference():
    updates = tree()
    found = cases.first_update(STAGES["local"], updates, None)

    def one(name, index, psi):
        omega = cases.omega(0, 0, name, index, psi.shape, 3)
        return reference.precondition_sketch(np.float64(psi), omega, 2, 1)

    for name, x in cases.each_matrix(one, updates).items():
        np.testing.assert_allclose(found[name], x, atol=1e-5, err_msg=name)


def test_draws_are_the_same_for_ever():
    """Not touched by the user's choice of generator, nor by a later version: a resumed run draws what it would have."""
    with jax.default_prng_impl("rbg"):
        found = draws.sketch_draws(seed=3, step=5, identity=17, slice_index=2, shape=(2, 3))
    expected = [[-0.5771456, -1.5907036, -0.41013402], [1.1442941, -1.3229197, 0.6540548]]
    np.testing.assert_allclose(found, expected, rtol=4 * EPS32)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("stage", STAGES)
def test_keeps_the_dtype_and_takes_extra_arguments(stage, dtype):
    tx, updates = STAGES[stage], tree(dtype=dtype)
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    new, state = jax.eval_shape(lambda u: tx.update(u, tx.init(u), u, value=1.0), updates)
    assert {x.dtype for x in jax.tree.leaves(new)} == {jnp.dtype(dtype)}
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(updates))


def test_half_precision_is_computed_in_float32_and_rounded_once():
    updates = tree(dtype=jnp.bfloat16)
    exact = cases.first_update(STAGES["normalize"], jax.tree.map(lambda x: x.astype(jnp.float32), updates), None)
    found = cases.first_update(STAGES["normalize"], updates, None)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.bfloat16)), found, exact)


def test_the_stages_chain_into_algorithm_1():
    """The page's promise: the parts in a plain `optax.chain` are the direction, on leaves that are (out, in)."""
    parts = optax.chain(
        optax.trace(0.95),
        npo.alternate_orientation(optax.chain(npo.project_to_tangent(), npo.normalize_rows())),
        npo.precondition_globally(),
        npo.scale_to_rms(0.2),
    )
    whole = npo.scale_by_normpre(
        npo.precondition_globally(),
        matrix_dims=lambda path, leaf: npo.MatrixDims(inputs=leaf.ndim - 1, outputs=leaf.ndim - 2),
    )
    params = tree(3)
    states = {"parts": parts.init(params), "whole": whole.init(params)}
    for step in range(3):
        found = {}
        for name, tx in (("parts", parts), ("whole", whole)):
            found[name], states[name] = cases.updater(tx)(tree(step), states[name], params)
        # The same numbers by two programs: rounding times the slope of Newton-Schulz.
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found["parts"], found["whole"])


def test_missing_parameters_matter_to_the_tangent_only():
    updates = tree()
    with pytest.raises(ValueError, match=r"(?s)update\(grads, state, params\).*Equinox.*brax.*tangent='none'"):
        STAGES["tangent"].update(updates, STAGES["tangent"].init(updates))
    free = npo.project_to_tangent("none")
    jax.tree.map(np.testing.assert_array_equal, free.update(updates, free.init(updates))[0], updates)


def test_rms_none_and_zero_matrices():
    updates = {"a": jnp.zeros((3, 4)), "b": jnp.ones((3, 4))}
    keep = npo.scale_to_rms(None)
    jax.tree.map(np.testing.assert_array_equal, keep.update(updates, keep.init(updates))[0], updates)
    out = cases.first_update(npo.scale_to_rms(0.2), updates, None)
    assert not out["a"].any()
    np.testing.assert_allclose(out["b"], 0.2, rtol=4 * EPS32)


def test_global_preconditioning_with_no_steps_to_count_is_exact():
    x = gaussian((4, 7))
    out = cases.first_update(npo.precondition_globally(ns_steps=None), x, None)
    np.testing.assert_allclose(np.linalg.svd(out, compute_uv=False), 1.0, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: npo.project_to_tangent("tangential"), "tangent="),
        (lambda: npo.project_to_tangent(radius=0.0), "radius"),
        (lambda: npo.precondition_globally(ns_steps=-1), "ns_steps"),
        (lambda: npo.precondition_globally(ns_steps=2.5), "ns_steps"),
        (lambda: npo.precondition_globally(ns_coefficients="muno"), "coefficients"),
        (lambda: npo.precondition_locally(rank=0), "rank"),
        (lambda: npo.precondition_locally(rank=2.0), "rank"),
        (lambda: npo.precondition_locally(rank=float("nan")), "rank"),
        (lambda: npo.precondition_locally(rank=True), "rank"),
        (lambda: npo.precondition_locally(oversample=-1), "oversample"),
        (lambda: npo.precondition_locally(power_iterations=-1), "power_iterations"),
        (lambda: npo.precondition_locally(seed=-1), "seed"),
        (lambda: npo.precondition_locally(method="exactly"), "method"),
        (lambda: npo.precondition_locally(warm_start=1), "warm_start"),
        (lambda: npo.precondition_locally(warm_start=True, method="exact"), "warm_start"),
        (lambda: npo.precondition_locally(warm_start=True, method="products"), "warm_start"),
        (lambda: npo.precondition_locally(warm_start=True, oversample=0), "warm_start"),
        (lambda: npo.scale_to_rms(0.0), "rms"),
        (lambda: npo.scale_to_rms(-0.2), "rms"),
        (lambda: npo.alternate_orientation(optax.identity(), first="row"), "first"),
        (lambda: npo.normpre_g(1e-3, orientation="row"), "orientation"),
        (lambda: npo.normpre_g(1e-3, tangent="relax"), "tangent"),
        (lambda: npo.normpre_g(1e-3, tangent_radius=-1.0), "tangent_radius"),
        (lambda: npo.normpre_g(1e-3, momentum=1.0), "momentum"),
        (lambda: npo.normpre_g(1e-3, rms=-0.1), "rms"),
        (lambda: npo.normpre_l(1e-3, method="exactly"), "method"),
    ],
)
def test_bad_options_are_named_at_once(make, named):
    with pytest.raises((ValueError, TypeError), match=named):
        make()


@pytest.mark.parametrize("options", [{"method": "exact"}, {"oversample": 1}, {"oversample": 1, "warm_start": True}])
def test_a_share_is_so_many_modes_of_the_shorter_side(options):
    sizes = {"wide": (8, 12), "tall": (20, 16), "small": (3, 1)}
    x = {name: jax.random.normal(jax.random.key(i), size) for i, (name, size) in enumerate(sizes.items())}
    stage = functools.partial(npo.precondition_locally, power_iterations=0, **options)
    share, of_two, of_four, of_one = (stage(rank=rank) for rank in (0.25, 2, 4, 1))
    got, state = cases.updater(share)(x, share.init(x))
    for name, count in {"wide": of_two, "tall": of_four, "small": of_one}.items():
        expected, other = cases.updater(count)({name: x[name]}, count.init({name: x[name]}))
        np.testing.assert_array_equal(got[name], expected[name])
        if "warm_start" in options:
            assert state.subspace[name].shape == other.subspace[name].shape


@pytest.mark.parametrize(
    ("shape", "threshold", "rms"),
    [((6, 9), 1.0, None), ((6, 9), "mean", 0.2), ((6, 9), 0.25, 0.2), ((12, 5), "mean", None), ((2, 7, 7), 1.0, 0.2)],
)
def test_products_clip_what_eigenvectors_of_the_same_sketch_clip(shape, threshold, rms):
    """As many modes as the sketch sees; the draws are the same for both."""
    x = reference.unit_rows(np.random.default_rng(2).normal(size=shape) * 0.5 ** np.arange(shape[-1]))
    psi = jnp.asarray(x, jnp.float32)
    options = {"power_iterations": 2, "threshold": threshold}
    products = npo.precondition_locally(3, oversample=1, method="products", **options).at_rms(rms)
    sketch = npo.precondition_locally(4, oversample=0, **options).at_rms(rms)
    got, expected = (cases.first_update(tx, psi, None) for tx in (products, sketch))
    # Both are exact but for float32's rounding of Gram matrices 4 x 4, of condition below 1e3.
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_a_vector_is_no_matrix():
    for stage in ("global", "local", "warm"):
        tx = STAGES[stage]
        with pytest.raises(ValueError, match=r"matrices in the last two axes.*\(3,\)"):
            tx.update({"bias": jnp.ones(3)}, tx.init({"bias": jnp.ones(3)}))


@pytest.mark.parametrize(
    "build",
    [
        npo.precondition_globally,
        lambda: npo.precondition_globally(ns_steps=None),
        lambda: npo.precondition_locally(rank=2, oversample=1),
        lambda: npo.precondition_locally(rank=2, method="exact"),
    ],
)
def test_a_result_at_a_given_size_is_the_result_scaled_to_it(build):
    """One pass less than `scale_to_rms` behind the stage, zero matrices and all."""
    rms, stage, updates = 0.5, build(), {**tree(), "zero": jnp.zeros((3, 4))}
    updates = jax.tree.map(lambda x: x / jnp.linalg.norm(x[..., :1, :]) if x.any() else x, updates)
    state = stage.init(updates)
    at_once, after = jax.jit(lambda *given: [tx.update(*given)[0] for tx in (stage.at_rms(rms), stage)])(updates, state)
    for name, x in npo.scale_to_rms(rms).update(after, optax.EmptyState())[0].items():
        # Another sum of squares: twenty roundings, times Newton-Schulz's slope where the size is that of Q R Q.
        np.testing.assert_allclose(at_once[name], x, rtol=0, atol=200 * EPS32 * rms, err_msg=name)
