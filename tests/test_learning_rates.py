# SPDX-License-Identifier: Apache-2.0
"""Learning rates by width, the option that applies them, and learning rates from other Muons."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import normpre_optax as npo
from tests import cases

SHAPES = {"up": (1, 4), "down": (4, 1), "square": (1, 1)}  # (in, out) over the width


def kernels(width, seed=0):
    random = np.random.default_rng(seed)
    drawn = {name: random.standard_normal((a * width, b * width)) for name, (a, b) in SHAPES.items()}
    return {name: {"kernel": jnp.asarray(x / np.sqrt(len(x)), jnp.float32)} for name, x in drawn.items()}


def spectral(step):
    """Largest singular value over sqrt(out / in), of every matrix."""
    return {
        name: np.linalg.norm(x["kernel"], 2) / np.divide(*x["kernel"].shape[::-1]) ** 0.5 for name, x in step.items()
    }


def coherent(matrix_dims):
    """Signs of a matrix of rank one, as of a gradient whose samples agree."""
    del matrix_dims
    return optax.stateless(lambda updates, params: jax.tree.map(jnp.ones_like, updates))


@pytest.mark.parametrize(
    ("factory", "update"),
    [
        (npo.muoneq, "orthogonal"),
        (lambda lr, **options: npo.normpre_g(lr, tangent="none", **options), "orthogonal"),
        (lambda lr, **options: npo.muon(lr, norm_control="hyperball", **options), "relative"),
        (lambda lr, **options: npo.with_adamw(coherent, lr, **options), "elementwise"),
    ],
)
def test_a_step_has_the_same_size_at_every_width(factory, update):
    base, wide, found = kernels(16), kernels(64), []
    for params in (base, wide):
        multipliers = npo.multipliers_by_width(params, base, update=update)
        tx = factory(1.0, weight_decay=0.0, learning_rate_multipliers=multipliers)
        found.append(spectral(cases.first_update(tx, kernels(len(params["square"]["kernel"]), 1), params)))
    for name in SHAPES:
        # Newton-Schulz brings the largest singular value to 1.1 to 1.2, that of Gaussian weights varies by a tenth.
        np.testing.assert_allclose(found[1][name], found[0][name], rtol=0.2, err_msg=name)


def test_the_adamw_group_keeps_its_learning_rate_but_for_heads():
    """Heads are recognized by their inputs: with other words, as torch stores them, or passed to AdamW by a rule."""

    def model(d, vocabulary):
        kernels = {"vocab_head": (d, vocabulary), "Dense_1": (d, 10), "Dense_0": (d, 4 * d), "lm_head": (d, vocabulary)}
        arrays = {name: {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32)} for name, shape in kernels.items()}
        arrays |= {"logits": {"weight": jax.ShapeDtypeStruct((vocabulary, d), jnp.float32)}}
        vectors = {"norm": {"scale": (d,)}, "Dense_0": {"bias": (4 * d,)}, "wte": {"embedding": (vocabulary, d)}}
        for module, leaves in vectors.items():
            for name, shape in leaves.items():
                arrays.setdefault(module, {})[name] = jax.ShapeDtypeStruct(shape, jnp.float32)
        return arrays

    rule = lambda path, leaf: None if "Dense_1" in path else npo.default_matrix_dims(path, leaf)  # noqa: E731
    found = npo.multipliers_by_width(model(256, 100), model(64, 50), update="elementwise", matrix_dims=rule)
    assert found == {
        "vocab_head": {"kernel": 0.25},
        "Dense_1": {"kernel": 0.25},
        "Dense_0": {"kernel": 0.25, "bias": 1.0},
        "lm_head": {"kernel": 0.25},
        "logits": {"weight": 0.25},
        "norm": {"scale": 1.0},
        "wte": {"embedding": 1.0},
    }


@pytest.mark.parametrize(
    ("update", "wider"), [("orthogonal", (0.25, 1.0)), ("relative", (1.0, 1.0)), ("elementwise", (0.25, 1.0))]
)
def test_dimensions_that_grow_alone(update, wider):
    """``sqrt(m / (n t))``, t = max(m, n): one matrix gets four times the inputs, the other four times the outputs."""
    shapes = (
        {"inputs": {"kernel": (64, 32)}, "outputs": {"kernel": (16, 64)}},
        {"inputs": {"kernel": (256, 32)}, "outputs": {"kernel": (16, 256)}},
    )
    base, wide = (jax.tree.map(jnp.zeros, s, is_leaf=lambda x: isinstance(x, tuple)) for s in shapes)
    found = npo.multipliers_by_width(wide, base, update=update)
    np.testing.assert_allclose((found["inputs"]["kernel"], found["outputs"]["kernel"]), wider)


def test_of_unequal_blocks_the_largest_decides():
    def multiplier(outputs, blocks):
        wide, base = ({"qkv": jnp.zeros((d, outputs(d)))} for d in (64, 16))
        dims = lambda params: {"qkv": npo.MatrixDims(0, 1, blocks(len(params["qkv"])))}  # noqa: E731
        return npo.multipliers_by_width(wide, base, update="orthogonal", matrix_dims=dims)

    assert multiplier(lambda d: 2 * d + 16, lambda d: (2 * d, 8, 8)) == multiplier(lambda d: 2 * d, lambda d: 1)


PARAMS = {"up": {"kernel": jnp.eye(4), "bias": jnp.ones(4)}, "down": {"kernel": jnp.eye(4)}}
GRADS = jax.tree.map(lambda x: jnp.asarray(cases.gaussian(x.shape), jnp.float32), PARAMS)


@pytest.mark.parametrize("control", ["none", "hyperball"])
def test_multipliers_apply_to_updates_and_not_to_weight_decay(control):
    options = {"weight_decay": 0.0, "norm_control": control}
    times = {"up": {"kernel": 2.0, "bias": 3.0}, "down": {"kernel": jnp.float32(1.0)}}
    single, double = (cases.first_update(npo.muon(rate, **options), GRADS, PARAMS) for rate in (1e-3, 2e-3))
    for given in (times, lambda params: times):
        found = cases.first_update(npo.muon(1e-3, learning_rate_multipliers=given, **options), GRADS, PARAMS)
        np.testing.assert_allclose(found["up"]["kernel"], double["up"]["kernel"], rtol=1e-5, atol=1e-9)
        np.testing.assert_allclose(found["down"]["kernel"], single["down"]["kernel"], rtol=1e-5, atol=1e-9)
        np.testing.assert_allclose(found["up"]["bias"], 3 * single["up"]["bias"], rtol=1e-6)
    zero, decay = jax.tree.map(jnp.zeros_like, GRADS), {"weight_decay": 0.5, "norm_control": control}
    pair = (npo.muon(0.1, learning_rate_multipliers=given, **decay) for given in (None, times))
    jax.tree.map(np.testing.assert_array_equal, *(cases.first_update(tx, zero, PARAMS) for tx in pair))


def test_a_prefix_is_a_tree_of_multipliers():
    prefix, whole = {"up": 2.0, "down": 1.0}, {"up": {"kernel": 2.0, "bias": 2.0}, "down": {"kernel": 1.0}}
    found = [
        cases.first_update(npo.muon(1e-3, learning_rate_multipliers=x, norm_control="hyperball"), GRADS, PARAMS)
        for x in (prefix, whole)
    ]
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_multipliers_may_be_traced():
    params = {"kernel": jnp.eye(3)}
    factory = lambda times: npo.muon(1e-3, learning_rate_multipliers={"kernel": times})  # noqa: E731
    tx = optax.inject_hyperparams(factory)(times=2.0)
    found = jax.eval_shape(lambda p: cases.first_update(tx, p, p), params)
    assert found["kernel"].shape == (3, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: npo.multipliers_by_width({"a": jnp.zeros(3)}, {"b": jnp.zeros(3)}, update="relative"),
            "different trees",
        ),
        (lambda: npo.multipliers_by_width({}, {}, update="spectral"), "update='spectral' is not one of"),
        (
            lambda: npo.multipliers_by_width({"a": jnp.zeros((6, 5))}, {"a": jnp.zeros(3)}, update="relative"),
            r"parameter 'a' has shape \(6, 5\), in base \(3,\)",
        ),
        *(
            (
                lambda x=x: npo.muon(1e-3, learning_rate_multipliers=x).init(PARAMS),
                f"learning_rate_multipliers must be {say}",
            )
            for x, say in (
                ("x", "a tree of numbers"),
                ({"first": 5.0, "second": 1.0}, "a tree like the parameters"),
                ([5.0, 1.0], "a tree like the parameters"),
                (lambda params: None, "a tree like the parameters"),
            )
        ),
        (lambda: npo.muon(1e-3, weight_decay_mask="x").init(PARAMS), "weight_decay_mask must be a tree of bools"),
        (lambda: npo.muon(1e-3, weight_decay_mask={"up": True}).init(PARAMS), "weight_decay_mask must be a tree like"),
        *(
            (lambda o=o: npo.learning_rate_from_muon(0.02, 0.1, **o), say)
            for o, say in (
                ({"convention": "kimi"}, "convention='kimi' is not"),
                ({"convention": "keller"}, r"convention='keller' depends on the shape .*shape=\(outputs, inputs\)"),
            )
        ),
    ],
)
def test_what_does_not_fit_is_named(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


# The classical iteration to convergence: the five steps of Muon leave singular values between 0.7 and 1.2.
EXACT = {"ns_coeffs": ((1.875, -1.25, 0.375),) * 12, "ns_steps": 12}


@pytest.mark.parametrize(
    ("consistent_rms", "convention"),
    [(None, "keller"), (None, "original"), (0.2, "moonlight"), (0.2, "match_rms_adamw"), (0.5, 0.5)],
)
def test_converted_learning_rates_take_the_same_step(consistent_rms, convention):
    """One step of optax's Muon, and of ours at the converted learning rate and weight decay."""
    for shape, given in (((8, 3), 0.03), ((3, 8), lambda step: 0.03)):
        params, grads = {"kernel": jnp.full(shape[::-1], 0.5)}, {"kernel": jnp.eye(*shape[::-1])}  # (in, out)
        before = optax.contrib.muon(0.03, **EXACT, weight_decay=0.4, consistent_rms=consistent_rms)
        rate, decay = npo.learning_rate_from_muon(given, 0.4, convention=convention, shape=shape)
        after = npo.muon(rate, ns_steps=None, weight_decay=decay)
        found, expected = (cases.first_update(tx, grads, params)["kernel"] for tx in (after, before))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_multipliers_out_of_range_are_named(wrong):
    params = {"up": {"kernel": jnp.ones((4, 8)), "bias": jnp.ones(8)}}
    tx = npo.muon(0.1, learning_rate_multipliers={"up": {"kernel": wrong, "bias": 1.0}})
    with pytest.raises(ValueError, match=r"learning_rate_multipliers of 'up/kernel' must be in \[0, inf\)"):
        tx.init(params)
