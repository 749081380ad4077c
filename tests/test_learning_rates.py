# SPDX-License-Identifier: Apache-2.0
"""Learning rates by width, the option that applies them, and learning rates from other
Muons.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import normpre_optax as npo
from tests import cases


def test_by_length():
    assert npo.learning_rate_by_length(1500) == 1.6e-2
    found = [npo.learning_rate_by_length(np.int32(x)) for x in (200, 800, 3000)]
    assert found == [0.054, 0.023, 0.011]


def test_by_length_batch_and_width():
    """The law of docs/results/learning_rate."""
    rate = npo.learning_rate_by_length(2000, tokens_per_step=4096, width=128)
    law = 1.2 * 2000**-0.602 * 4096**0.134 * 128**-0.151
    assert rate == pytest.approx(law, rel=0.03)  # it has two digits


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((100,), "steps of 200 to 3,000, and 100 is 2 times below. Try half"),
        ((12_000,), "steps of 200 to 3,000, and 12,000 is 4 times above"),
        ((300, 65_536), "tokens_per_step of 1,024 to 16,384, and 65,536 is 4 times"),
        ((300, 2048, 32), "width of 64 to 768, and 32 is 2 times below"),
        (
            (6_000, 2048, 1536),
            "2 times above; width of 64 to 768, and 1,536 is 2 times",
        ),
    ],
)
def test_a_call_beyond_what_was_measured_is_told_how_far(arguments, message):
    with pytest.warns(UserWarning, match=message):
        npo.learning_rate_by_length(*arguments)


def test_a_very_short_run_has_the_rate_of_200_steps():
    with pytest.warns(UserWarning, match="199 is 1.01 times below"):
        rate = npo.learning_rate_by_length(199)
    assert rate == npo.learning_rate_by_length(200)


@pytest.mark.parametrize("name", ["steps", "tokens_per_step", "width"])
def test_a_size_must_be_a_positive_int(name):
    sizes = {"steps": 300, "tokens_per_step": 1024, "width": 64}
    with pytest.raises(ValueError, match=f"{name} must be at least 1"):
        npo.learning_rate_by_length(**sizes | {name: 0})
    with pytest.raises(TypeError, match=f"{name} must be an int"):
        npo.learning_rate_by_length(**sizes | {name: 1500.0})


@pytest.mark.parametrize("width", [48, 96])
def test_the_width_of_a_model(width):
    layers = [
        {
            "attention": {name: jnp.ones((width, width)) for name in "qkvo"},
            "up": {"kernel": jnp.ones((width, 4 * width))},
            "down": {"kernel": jnp.ones((4 * width, width))},
        }
        for _ in range(2)
    ]
    params = {"wte": jnp.ones((257, width)), "layers": layers}
    assert npo.model_width(params) == width
    shapes = jax.eval_shape(lambda: params)
    assert npo.model_width(shapes) == width


def test_a_model_without_matrices_has_no_width():
    with pytest.raises(ValueError, match="no parameter is a matrix"):
        npo.model_width({"bias": jnp.ones(3)})


def kernels(width, seed=0):
    shapes = {
        "up": (width, 4 * width),
        "down": (4 * width, width),
        "square": (width, width),
    }  # (in, out)
    return {
        name: {"kernel": x / np.sqrt(len(x))}
        for name, x in cases.numbers(shapes, seed).items()
    }


def coherent(matrix_dims):
    """Signs of a matrix of rank one, as of a gradient whose samples agree."""
    return optax.stateless(lambda updates, params: jax.tree.map(jnp.ones_like, updates))


def size(step):
    """The largest singular value over sqrt(out / in), of a step (in, out)."""
    inputs, outputs = step.shape
    return np.linalg.norm(step, 2) * (inputs / outputs) ** 0.5


@cases.rows(
    "factory update",
    (npo.muon, "orthogonal"),
    (functools.partial(npo.normpre_h, adam_learning_rate=1.0), "relative"),
    (functools.partial(npo.with_adamw, coherent), "elementwise"),
)
def test_a_step_has_the_same_size_at_every_width(factory, update):
    base = kernels(16)
    found = []
    for width in (16, 64):
        multipliers = npo.multipliers_by_width(kernels(width), base, update=update)
        tx = factory(1.0, learning_rate_multipliers=multipliers)
        params = kernels(width)
        one = cases.first_update(tx, kernels(width, 1), params)
        other = cases.first_update(tx, kernels(width, 2), params)
        # Without weight decay, and without what sets the norms.
        step = jax.tree.map(jnp.subtract, one, other)
        found.append([size(x) for x in jax.tree.leaves(step)])
    # Newton-Schulz brings the largest singular value to 1.1 to 1.2, that of Gaussian
    # weights varies by a tenth.
    np.testing.assert_allclose(*found, rtol=0.2)


def arrays(shapes):
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32),
        shapes,
        is_leaf=lambda x: type(x) is tuple,
    )


def test_the_adamw_group_keeps_its_learning_rate_but_for_heads():
    """Heads are recognized by their inputs: with other words, as torch stores them, or
    passed to AdamW by a rule.
    """

    def model(d, vocabulary):
        heads = {
            "vocab_head": {"kernel": (d, vocabulary)},
            "logits": {"weight": (vocabulary, d)},
        }
        heads |= {
            "Dense_1": {"kernel": (d, 10)},
            "lm_head": {"kernel": (d, vocabulary)},
        }
        rest = {"norm": {"scale": (d,)}, "wte": {"embedding": (vocabulary, d)}}
        return arrays(
            {**heads, **rest, "Dense_0": {"kernel": (d, 4 * d), "bias": (4 * d,)}}
        )

    def rule(path, leaf):
        return None if "Dense_1" in path else npo.default_matrix_dims(path, leaf)

    found = npo.multipliers_by_width(
        model(256, 100), model(64, 50), update="elementwise", matrix_dims=rule
    )
    assert found == {
        **{name: {"kernel": 0.25} for name in ("vocab_head", "Dense_1", "lm_head")},
        "logits": {"weight": 0.25},
        "Dense_0": {"kernel": 0.25, "bias": 1.0},
        "norm": {"scale": 1.0},
        "wte": {"embedding": 1.0},
    }


def test_dimensions_that_grow_alone():
    """``sqrt(m / (n t))``, t = max(m, n): one matrix gets four times the inputs, the
    other four times the outputs.
    """
    base = arrays({"w": [(64, 32), (16, 64)]})
    wide = arrays({"w": [(256, 32), (16, 256)]})
    for update, expected in (
        ("orthogonal", [0.25, 1.0]),
        ("relative", [1.0, 1.0]),
        ("elementwise", [0.25, 1.0]),
    ):
        found = npo.multipliers_by_width(wide, base, update=update)
        assert found == {"w": pytest.approx(expected)}


def test_of_unequal_blocks_the_largest_decides():
    def multiplier(outputs, blocks):
        wide, base = ({"qkv": jnp.zeros((d, outputs(d)))} for d in (64, 16))

        def dims(params):
            return {"qkv": npo.MatrixDims(0, 1, blocks(len(params["qkv"])))}

        return npo.multipliers_by_width(
            wide, base, update="orthogonal", matrix_dims=dims
        )

    assert multiplier(lambda d: 2 * d + 16, lambda d: (2 * d, 8, 8)) == multiplier(
        lambda d: 2 * d, lambda d: 1
    )


PARAMS = {
    "up": {"kernel": jnp.eye(4) / 2, "bias": jnp.ones(4)},
    "down": {"kernel": jnp.eye(4) / 2},
}
GRADS = cases.numbers(jax.tree.map(jnp.shape, PARAMS))


@pytest.mark.filterwarnings("ignore:hyperball")
@pytest.mark.parametrize("control", ["none", "hyperball"])
def test_multipliers_apply_to_updates_and_not_to_weight_decay(control):
    """A tree, a prefix of one, a function that returns one, or traced."""

    def first_update(grads, times, rate=0.001, decay=0.0):
        more = {}
        if control == "hyperball":
            more = {"norm_control": control, "row_norms": 0.5}
            more["adam_learning_rate"] = rate
        tx = npo.rmnp(rate, weight_decay=decay, learning_rate_multipliers=times, **more)
        return cases.first_update(tx, grads, PARAMS)

    single = first_update(GRADS, None, 1e-3)
    double = first_update(GRADS, None, 2e-3)
    times = {"up": {"kernel": 2.0, "bias": 3.0}, "down": {"kernel": jnp.float32(1.0)}}
    expected = {
        "up": {"kernel": double["up"]["kernel"], "bias": 3 * single["up"]["bias"]},
        "down": single["down"],
    }
    by_prefix = {"up": double["up"], "down": single["down"]}
    for given, wanted in (
        (lambda params: times, expected),
        ({"up": 2.0, "down": 1.0}, by_prefix),
    ):
        cases.assert_close(first_update(GRADS, given), wanted, rtol=1e-5, atol=1e-9)
    zero = jax.tree.map(jnp.zeros_like, GRADS)
    jax.tree.map(
        np.testing.assert_array_equal,
        *(first_update(zero, given, 0.1, 0.5) for given in (None, times)),
    )
    traced = jax.eval_shape(
        lambda two: first_update(GRADS, {"up": two, "down": 1.0}), 2.0
    )
    assert jax.tree.map(jnp.shape, traced) == jax.tree.map(jnp.shape, PARAMS)


LIKE = "must be a tree like the parameters"


@cases.rows(
    "option given message",
    ("learning_rate_multipliers", "x", "must be a tree of numbers"),
    ("learning_rate_multipliers", {"first": 5.0, "second": 1.0}, LIKE),
    ("learning_rate_multipliers", [5.0, 1.0], LIKE),
    ("learning_rate_multipliers", lambda params: None, LIKE),
    (
        "learning_rate_multipliers",
        {"up": -1.0, "down": 1.0},
        r"of 'up/\w+' must be in \[0, inf\)",
    ),
    (
        "learning_rate_multipliers",
        {"up": float("nan"), "down": 1.0},
        r"of 'up/\w+' must be in \[0, inf\)",
    ),
    ("weight_decay_mask", "x", "must be a tree of bools"),
    (
        "weight_decay_mask",
        lambda params: jax.tree.map(lambda x: "False", params),
        "must be a tree of bools",
    ),
    ("weight_decay_mask", {"up": True}, LIKE),
)
def test_an_option_that_is_no_tree_like_the_parameters_is_named(option, given, message):
    with pytest.raises((TypeError, ValueError), match=f"{option} {message}"):
        npo.muon(1e-3, **{option: given}).init(PARAMS)


def test_what_does_not_fit_is_named():
    a, b, matrix = {"a": jnp.zeros(3)}, {"b": jnp.zeros(3)}, {"a": jnp.zeros((6, 5))}
    for call, said in (
        (lambda: npo.multipliers_by_width(a, b, update="relative"), "different trees"),
        (
            lambda: npo.multipliers_by_width({}, {}, update="spectral"),
            "update='spectral' is not one of",
        ),
        (
            lambda: npo.multipliers_by_width(matrix, a, update="relative"),
            r"'a' has shape \(6, 5\), in base \(3,\)",
        ),
        (
            lambda: npo.learning_rate_from_muon(0.02, 0.1, convention="kimi"),
            "convention='kimi' is not",
        ),
        (
            lambda: npo.learning_rate_from_muon(0.02, 0.1, convention=-0.2),
            "convention must be in",
        ),
        (
            lambda: npo.learning_rate_from_muon(
                0.02, 0.1, convention="moonlight", rms=-1.0
            ),
            "rms must be in",
        ),
        (
            lambda: npo.learning_rate_from_muon(
                0.02, 0.1, convention="keller", shape=768
            ),
            r"inputs\), not 768",
        ),
        (
            lambda: npo.learning_rate_from_muon(0.02, 0.1, convention="keller"),
            r"shape .*shape=\(outputs, inputs\)",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            call()


# The classical iteration to convergence: the five steps of Muon leave singular values
# between 0.7 and 1.2.
EXACT = {"ns_coeffs": ((1.875, -1.25, 0.375),) * 12, "ns_steps": 12}


@cases.rows(
    "consistent_rms convention",
    (None, "keller"),
    (None, "original"),
    (0.2, "moonlight"),
    (0.2, "match_rms_adamw"),
    (0.5, 0.5),
)
def test_converted_learning_rates_take_the_same_step(consistent_rms, convention):
    """One step of optax's Muon, and of ours at the converted learning rate and weight
    decay.
    """
    for shape, given in (((8, 3), 0.03), ((3, 8), lambda step: 0.03)):
        params = {"kernel": jnp.full(shape[::-1], 0.5)}  # (in, out)
        grads = {"kernel": jnp.eye(*shape[::-1])}
        before = optax.contrib.muon(
            0.03, **EXACT, weight_decay=0.4, consistent_rms=consistent_rms
        )
        rate, decay = npo.learning_rate_from_muon(
            given, 0.4, convention=convention, shape=shape
        )
        after = npo.muon(rate, ns_steps=None, weight_decay=decay)
        found = cases.first_update(after, grads, params)["kernel"]
        expected = cases.first_update(before, grads, params)["kernel"]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-7)
