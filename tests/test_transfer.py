# SPDX-License-Identifier: Apache-2.0
"""Rates by width: the spectral condition itself, and the option that applies them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import normpre_optax as npo
from tests import cases

SHAPES = {"up": (1, 4), "down": (4, 1), "square": (1, 1)}  # in, out over the width


def kernels(width, seed=0):
    random = np.random.default_rng(seed)
    made = {name: random.standard_normal((a * width, b * width)) for name, (a, b) in SHAPES.items()}
    return {name: {"kernel": jnp.asarray(x / np.sqrt(len(x)), jnp.float32)} for name, x in made.items()}


def spectral(step):
    """Largest singular value over sqrt(out / in), of every matrix."""
    return {
        name: np.linalg.norm(x["kernel"], 2) / np.divide(*x["kernel"].shape[::-1]) ** 0.5 for name, x in step.items()
    }


@pytest.mark.parametrize(
    ("factory", "update"),
    [
        (npo.muoneq, "orthogonal"),
        (lambda lr, **options: npo.normpre_g(lr, tangent="none", **options), "orthogonal"),
        (lambda lr, **options: npo.muon(lr, norm_control="hyperball", **options), "relative"),
        (lambda lr, **options: npo.hybrid(coherent, lr, **options), "elementwise"),
    ],
)
def test_a_step_is_as_large_at_every_width(factory, update):
    base, wide = kernels(16), kernels(64)
    found = []
    for params in (base, wide):
        rates = npo.rates_by_width(params, base, update=update)
        tx = factory(1.0, weight_decay=0.0, rate_multipliers=rates)
        found.append(spectral(cases.first_update(tx, kernels(len(params["square"]["kernel"]), 1), params)))
    for name in SHAPES:
        # Newton-Schulz brings the largest singular value to 1.1 to 1.2, Gaussian weights have theirs within a tenth.
        np.testing.assert_allclose(found[1][name], found[0][name], rtol=0.2, err_msg=name)


def coherent(matrix_dims):
    """Signs of a matrix of rank one, as of a gradient whose samples agree."""
    del matrix_dims
    return optax.stateless(lambda updates, params: jax.tree.map(jnp.ones_like, updates))


def test_what_no_matrix_is_keeps_its_rate_but_for_the_head():
    def model(d):
        kernels = {"mlp": {"kernel": jnp.zeros((d, 4 * d)), "bias": jnp.zeros(4 * d)}, "norm": {"scale": jnp.zeros(d)}}
        return {**kernels, "wte": {"embedding": jnp.zeros((9, d))}, "lm_head": {"kernel": jnp.zeros((d, 9))}}

    found = npo.rates_by_width(model(64), model(16), update="elementwise")
    assert found == {
        "mlp": {"kernel": 0.25, "bias": 1.0},
        "norm": {"scale": 1.0},
        "wte": {"embedding": 1.0},
        "lm_head": {"kernel": 0.25},
    }


@pytest.mark.parametrize("control", ["none", "row_gains"])
def test_multipliers_are_of_the_update_and_not_of_decay(control):
    params = {"up": {"kernel": jnp.eye(4), "bias": jnp.ones(4)}}
    grads = {"up": {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}}
    twice = lambda params: jax.tree.map(lambda _: 2.0, params)  # noqa: E731
    options = {"weight_decay": 0.0, "norm_control": control}
    plain = cases.first_update(npo.muon(1e-4, **options), grads, params)
    double = cases.first_update(npo.muon(1e-4, rate_multipliers=twice, **options), grads, params)
    np.testing.assert_allclose(double["up"]["bias"], 2 * plain["up"]["bias"])
    if control == "none":
        np.testing.assert_allclose(double["up"]["kernel"], 2 * plain["up"]["kernel"])
    zero = jax.tree.map(jnp.zeros_like, params)
    decays = [npo.muon(0.1, weight_decay=0.5, rate_multipliers=m).update for m in (None, twice)]
    states = [npo.muon(0.1, weight_decay=0.5, rate_multipliers=m).init(params) for m in (None, twice)]
    a, b = (update(zero, state, params)[0] for update, state in zip(decays, states, strict=True))
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_hyperball_s_steps_have_rates_of_their_own():
    params = {"up": {"kernel": jnp.eye(4), "bias": jnp.ones(4)}, "down": {"kernel": jnp.eye(4)}}
    times = {"up": {"kernel": 2.0, "bias": 3.0}, "down": {"kernel": jnp.float32(1.0)}}
    options = {"weight_decay": 0.0, "norm_control": "hyperball"}
    grads = kernels(4)
    grads = {"up": {"kernel": grads["square"]["kernel"], "bias": jnp.ones(4)}, "down": grads["square"]}
    single, double = (cases.first_update(npo.muon(rate, **options), grads, params) for rate in (1e-3, 2e-3))
    found = cases.first_update(npo.muon(1e-3, rate_multipliers=times, **options), grads, params)
    np.testing.assert_allclose(found["up"]["kernel"], double["up"]["kernel"], rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(found["down"]["kernel"], single["down"]["kernel"], rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(found["up"]["bias"], 3 * single["up"]["bias"], rtol=1e-6)


def test_what_it_refuses():
    with pytest.raises(ValueError, match="different trees"):
        npo.rates_by_width({"a": jnp.zeros(3)}, {"b": jnp.zeros(3)}, update="relative")
    with pytest.raises(ValueError, match="update"):
        npo.rates_by_width({}, {}, update="spectral")
    with pytest.raises(ValueError, match="parameter 'a' has shape"):
        npo.rates_by_width({"a": jnp.zeros((6, 5))}, {"a": jnp.zeros(3)}, update="relative")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("x", "rate_multipliers must be a tree of numbers"),
        ({"first": 5.0, "second": 1.0}, "rate_multipliers must be a tree like the parameters'"),
        ([5.0, 1.0], "rate_multipliers must be a tree like the parameters'"),
        (lambda params: None, "rate_multipliers must be a tree like the parameters'"),
        ({"a": {"kernel": -1.0}, "b": 1.0}, "rate_multipliers of 'a/kernel' must be at least 0"),
        ({"a": {"kernel": float("nan")}, "b": 1.0}, "rate_multipliers of 'a/kernel'"),
        ({"a": {"kernel": jnp.ones(3)}, "b": 1.0}, "rate_multipliers of 'a/kernel' must be a number"),
    ],
)
def test_multipliers_that_do_not_fit(given, message):
    params = {"a": {"kernel": jnp.eye(3)}, "b": {"kernel": jnp.eye(3)}}
    with pytest.raises((TypeError, ValueError), match=message):
        npo.muon(1e-3, rate_multipliers=given).init(params)


def test_multipliers_may_be_traced():
    params = {"kernel": jnp.eye(3)}
    tx = optax.inject_hyperparams(lambda times: npo.muon(1e-3, rate_multipliers={"kernel": times}))(times=2.0)
    found, _ = jax.eval_shape(tx.update, params, tx.init(params), params)
    assert found["kernel"].shape == (3, 3)


def test_heads_are_known_by_their_inputs_whatever_names_them():
    """By a word among others, with another vocabulary, as torch stores them, or given to AdamW by a rule."""

    def model(d, vocabulary):
        shapes = {"vocab_head": (d, vocabulary), "Dense_1": (d, 10), "Dense_0": (d, d), "wte": (vocabulary, d)}
        arrays = {name: {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32)} for name, shape in shapes.items()}
        return arrays | {"lm_head": {"weight": jax.ShapeDtypeStruct((vocabulary, d), jnp.float32)}}

    rule = lambda path, leaf: None if "Dense_1" in path else npo.default_matrix_dims(path, leaf)  # noqa: E731
    found = npo.rates_by_width(model(256, 100), model(64, 50), update="relative", matrix_dims=rule)
    rates = {name: rate for name, one in found.items() for rate in one.values()}
    assert rates == {"vocab_head": 0.25, "Dense_1": 0.25, "Dense_0": 1.0, "wte": 1.0, "lm_head": 0.25}


def test_a_multiplier_is_of_all_below_it():
    params = {"a": {"kernel": jnp.eye(3)}, "b": {"kernel": jnp.eye(3)}}
    grads = jax.tree.map(jnp.ones_like, params)
    options = {"weight_decay": 0.0, "norm_control": "hyperball"}
    found = cases.first_update(npo.muon(1e-3, rate_multipliers={"a": 2.0, "b": 1.0}, **options), grads, params)
    whole = {"a": {"kernel": 2.0}, "b": {"kernel": 1.0}}
    expected = cases.first_update(npo.muon(1e-3, rate_multipliers=whole, **options), grads, params)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_of_blocks_of_given_sizes_the_largest_decides():
    def rate(outputs, blocks):
        wide, base = ({"qkv": jnp.zeros((d, outputs(d)))} for d in (64, 16))
        dims = lambda params: {"qkv": npo.MatrixDims(0, 1, blocks(len(params["qkv"])))}  # noqa: E731
        return npo.rates_by_width(wide, base, update="orthogonal", matrix_dims=dims)

    assert rate(lambda d: 2 * d + 16, lambda d: (2 * d, 8, 8)) == rate(lambda d: 2 * d, lambda d: 1)


# The classical iteration to convergence: the five steps of Muon leave singular values between 0.7 and 1.2.
EXACT = {"ns_coeffs": ((1.875, -1.25, 0.375),) * 12, "ns_steps": 12}


@pytest.mark.parametrize(
    ("consistent_rms", "convention"),
    [(None, "keller"), (None, "original"), (0.2, "moonlight"), (0.2, "match_rms_adamw"), (0.5, 0.5)],
)
def test_rates_of_other_muons_become_ours(consistent_rms, convention):
    """One step of optax's Muon, and of ours at the rate that is made of its own, with the decay that goes with it."""
    with jax.disable_jit():
        for shape, given in (((8, 3), 0.03), ((3, 8), lambda step: 0.03)):
            params = {"kernel": jnp.full(shape[::-1], 0.5)}  # (in, out)
            grads = {"kernel": jnp.eye(*shape[::-1])}
            before = optax.contrib.muon(0.03, **EXACT, weight_decay=0.4, consistent_rms=consistent_rms)
            rate, decay = npo.learning_rate_from_muon(given, 0.4, convention=convention, shape=shape)
            after = npo.muon(rate, ns_steps=None, weight_decay=decay)
            found, expected = (tx.update(grads, tx.init(params), params)[0]["kernel"] for tx in (after, before))
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"convention": "kimi"}, "convention='kimi' is not one of"),
        ({"convention": "keller"}, r"convention='keller' depends on the shape .*shape=\(outputs, inputs\)"),
        ({"convention": None}, "convention must be a number"),
        ({"convention": "moonlight", "rms": 0.0}, "rms must be at least"),
        ({"convention": "keller", "shape": (0, 4)}, r"shape\[0\] must be at least 1"),
        ({"convention": "keller", "shape": (4, True)}, r"shape\[1\] must be an int"),
        ({"convention": "keller", "shape": 4}, "shape must be two positive ints"),
    ],
)
def test_a_rate_is_not_made_of(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        npo.learning_rate_from_muon(0.02, 0.1, **options)
    with pytest.raises(ValueError, match="learning_rate must be at least 0"):
        npo.learning_rate_from_muon(-0.02, 0.1, convention=0.2)
