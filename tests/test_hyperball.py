# SPDX-License-Identifier: Apache-2.0
"""Hyperball against its transcription, alone in a chain and as an option."""

import functools
import re
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import normpre_optax as npo
from tests import cases
from tests import reference_family as oracles

SHAPES = {"wide": (5, 12), "stack": (3, 8, 5)}
DIMS = {name: cases.DIMS[name] for name in SHAPES}
NORMS = {"wide": 0.5, "stack": 2.0}


LAYER = {"layers": [{"up": (4, 8), "down": (8, 4)}], "bias": (3,)}


def after_a_step(tx, grads, params):
    """The parameters after the first update."""
    return optax.apply_updates(params, cases.first_update(tx, grads, params))


@pytest.mark.parametrize("alone", [False, True])
def test_steps_follow_the_published_rule(alone):
    rates = (
        optax.piecewise_constant_schedule(0.1, {2: 0.1}) if alone else lambda step: 0.03
    )

    def direction(matrix_dims):
        return optax.identity()

    more = {"norm_control": "hyperball", "adam_learning_rate": 0.1, "row_norms": NORMS}
    tx = npo.with_adamw(direction, 0.03, matrix_dims=DIMS, **more)
    if alone:
        tx = npo.hyperball(rates, matrix_dims=DIMS, row_norms=lambda params: NORMS)

    def by_rule(name, index, w, *gradients):
        w = np.float64(w)
        for step, gradient in enumerate(gradients):
            w = oracles.hyperball(
                w, np.float64(gradient), float(rates(step)), NORMS[name]
            )
        return w

    gradients = cases.gradients(4, shapes=SHAPES)
    with jax.enable_x64(True):
        got = cases.path(tx, gradients, SHAPES, jnp.float64)
    for name, w in cases.each_matrix(
        by_rule, cases.weights(shapes=SHAPES), *gradients
    ).items():
        # The new norm comes from three sums; a schedule is float32.
        np.testing.assert_allclose(
            got[name], w, rtol=1e-6 if alone else 1e-11, atol=1e-13
        )


@pytest.mark.parametrize("size", [0.0, 1e-12, 1.0, 1e12])
def test_the_initial_norm_has_no_effect(size):
    """A zero matrix takes the direction of its first step; a zero update changes
    nothing, not even the norm.
    """
    tx, start = npo.hyperball(0.1, row_norms=0.5), {"kernel": size * jnp.eye(4)}
    updates = cases.first_update(tx, {"kernel": jnp.ones((4, 4))}, start)
    new = np.float64(start["kernel"]) + np.float64(updates["kernel"])
    direction = np.eye(4) / 2 - 0.1 / 4 if size else -np.ones((4, 4))
    expected = direction / np.linalg.norm(direction)
    np.testing.assert_allclose(
        new, expected, atol=3e-7 * max(1, size)
    )  # float32 cancels 1e12 to 1
    unchanged = cases.first_update(tx, {"kernel": jnp.zeros((4, 4))}, start)["kernel"]
    np.testing.assert_allclose(
        unchanged, 0, atol=1e-7 * size
    )  # the root of a square, rounded


def test_keep_keeps_the_norm_of_every_matrix():
    """With the same directions. Small rates are no reason to warn."""
    params = cases.numbers(LAYER, 0)
    grads = cases.numbers(LAYER, 1)
    params["layers"][0]["down"] *= 3
    with warnings.catch_warnings(action="error"):
        kept = npo.normpre_h(1e-3, 1e-3, row_norms="keep")
        npo.hyperball(1e-3, row_norms="keep")
    with pytest.warns(UserWarning, match="like AdamW's"):
        by_role = npo.normpre_h(1e-3, 1e-3, row_norms=1.0)
    new = after_a_step(kept, grads, params)["layers"][0]
    other = after_a_step(by_role, grads, params)["layers"][0]
    for name, w in params["layers"][0].items():
        norm = np.linalg.norm(new[name])
        np.testing.assert_allclose(norm, np.linalg.norm(w), rtol=1e-6)
        direction = new[name] / norm
        expected = other[name] / np.linalg.norm(other[name])
        np.testing.assert_allclose(direction, expected, atol=1e-6)  # two roundings


@pytest.mark.parametrize("stacked", [False, True])
def test_keep_lets_zeros_grow_to_the_size_of_one_step(stacked):
    """A new layer, alone or beside others in a stack, stays small. Its norm is kept."""
    zero = jnp.zeros((4, 8))  # (in, out)
    if stacked:
        zero = jnp.stack([jnp.ones((4, 8)), zero])
    params = {"layers": {"up": zero}}
    grads = jax.tree.map(jnp.ones_like, params)
    for rate in (lambda step: 0.0, 0.02):
        tx = npo.normpre_h(rate, 1e-3, row_norms="keep")
        new = after_a_step(tx, grads, params)["layers"]["up"]
        one_step = 0.0 if callable(rate) else rate * 8**0.5
        np.testing.assert_allclose(
            np.linalg.norm(new.reshape(-1, 4, 8)[-1]), one_step, rtol=1e-5
        )
        if stacked:
            np.testing.assert_allclose(np.linalg.norm(new[0]), 32**0.5, rtol=1e-5)
    later = after_a_step(tx, grads, {"layers": {"up": new}})["layers"]["up"]
    np.testing.assert_allclose(
        np.linalg.norm(later.reshape(-1, 4, 8)[-1]), 0.02 * 8**0.5, rtol=1e-4
    )


@pytest.mark.parametrize("rate", [1e7, 1e30, lambda step: 1e30])
def test_a_rate_that_leaves_nothing_of_the_weights_is_an_error(rate):
    with pytest.raises(ValueError, match="every step would replace the weights"):
        npo.normpre_h(rate, 1e-3)
    with pytest.raises(ValueError, match="every step would replace the weights"):
        npo.hyperball(rate)


@pytest.mark.parametrize("rate", [1e7, 1e30])
def test_a_rate_that_was_not_seen_sets_no_matrix_to_zero(rate):
    """Rates of ``inject_hyperparams`` and of multipliers are known only later."""
    params = {"kernel": jnp.eye(4)}
    grads = {"kernel": jnp.ones((4, 4))}
    injected = npo.hyperball(jnp.float32(rate))
    times = npo.normpre_h(0.01, 1e-3, learning_rate_multipliers={"kernel": rate})
    for tx in (injected, times):
        new = after_a_step(tx, grads, params)["kernel"]
        np.testing.assert_allclose(np.linalg.norm(new), 2.0, rtol=1e-6)


@pytest.mark.parametrize("make", [npo.normpre_h, npo.muon])
def test_a_schedule_is_called_at_most_four_times_at_construction(make):
    """It may print, or count. Calls: step 0, by both functions, a trace, the peak."""
    steps = []

    def schedule(step):
        steps.append(step)
        return 0.01

    make(schedule, adam_learning_rate=1e-3)
    assert 0 < len(steps) <= 4


AFTER = {
    "apply_every": optax.apply_every(4),
    "ema": optax.ema(0.9),
    "trace": optax.trace(0.9),
    "scale": optax.scale(0.5),
    "clip": optax.clip(0.01),
}


@pytest.mark.parametrize("name", AFTER)
def test_what_must_not_follow_hyperball(name):
    """As docs/family.md says: norms are not those that were set."""
    params = {"kernel": 3 * jnp.eye(4)}
    grads = {"kernel": jnp.ones((4, 4))}
    tx = optax.chain(npo.hyperball(0.1), AFTER[name])
    state = tx.init(params)
    norms = []
    for _ in range(8):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        norms.append(np.linalg.norm(params["kernel"]))
    assert max(abs(norm - 2.0) for norm in norms) > 0.1


AROUND = {
    "clip": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "ema before": lambda tx: optax.chain(optax.ema(0.9), tx),
    "noise before": lambda tx: optax.chain(optax.add_noise(0.01, 0.5, 0), tx),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
    "masked": lambda tx: optax.masked(tx, {"kernel": True}),
}


@pytest.mark.parametrize("name", AROUND)
def test_what_may_be_around_hyperball(name):
    params = {"kernel": 3 * jnp.eye(4)}
    grads = {"kernel": jnp.ones((4, 4))}
    tx = AROUND[name](npo.hyperball(0.1))
    state = tx.init(params)
    for _ in range(4):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(np.linalg.norm(params["kernel"]), 2.0, rtol=1e-5)


def test_matrices_do_not_decay_but_the_adamw_group_does():
    params = {"kernel": jnp.eye(3), "bias": jnp.ones(3)}
    free = npo.rmnp(0.01, weight_decay=0.0, **cases.HYPERBALL)
    free = cases.first_update(free, params, params)
    decayed = npo.rmnp(0.01, weight_decay=0.5, **cases.HYPERBALL)
    decayed = cases.first_update(decayed, params, params)
    np.testing.assert_array_equal(free["kernel"], decayed["kernel"])
    np.testing.assert_allclose(free["bias"] - decayed["bias"], 0.05, rtol=1e-5)


def test_normpre_h_is_its_parts():
    """Its direction, Hyperball by roles, AdamW with its own learning rate."""
    params = cases.numbers(LAYER, 0)
    grads = cases.numbers(LAYER, 1)
    more = {
        "norm_control": "hyperball",
        "adam_learning_rate": 1e-3,
        "adam_weight_decay": 0.1,
    }
    by_hand = npo.with_adamw(npo.scale_by_normpre_h, 0.02, **more)
    expected = cases.first_update(by_hand, grads, params)
    for rate in (1e-3, lambda step: 1e-3):
        tx = npo.normpre_h(0.02, adam_learning_rate=rate)
        got = cases.first_update(tx, grads, params)
        cases.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    layer = optax.apply_updates(params, got)["layers"][0]
    np.testing.assert_allclose(jnp.linalg.norm(layer["up"]), 8**0.5, rtol=1e-5)
    # One matrix writes into the residual stream: sqrt(8 / 4) is its row norm.
    norm = 2**0.5 * 2
    np.testing.assert_allclose(jnp.linalg.norm(layer["down"]), norm, rtol=1e-5)


def test_a_learning_rate_of_adamw_is_named():
    """At construction, of a number and of a schedule; not where a traced number is one
    step's.
    """
    warmup, muon = (
        optax.warmup_cosine_decay_schedule,
        functools.partial(npo.muon, **cases.HYPERBALL),
    )
    for rate in (1e-3, 4e-3, warmup(0.0, 6e-4, 80, 800)):
        for make in (
            npo.hyperball,
            muon,
            functools.partial(npo.normpre_h, adam_learning_rate=1e-3),
        ):
            with pytest.warns(
                UserWarning, match=r"the learning rate is at most \S+, like AdamW's"
            ) as seen:
                make(rate)
            assert seen[0].filename == __file__  # the line that a user can change
    with pytest.warns(UserWarning, match=r"at most 1, more than half of the weights"):
        npo.normpre_h(1.0, 1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rate in (
            1e-2,
            0.0,
            warmup(0.0, 1.6e-2, 80, 800),
            lambda step: 1 / 0,
            jnp.float32(1e-4),
        ):
            muon(rate)
        npo.muon(1e-3)


def layers(name, transposed):
    """Two layers, with vectors and an embedding around them."""

    def kernel(*shape):
        return {
            name: jnp.ones(shape[::-1] if transposed else shape),
            "bias": jnp.ones(shape[-1]),
        }

    layer = {
        "out": kernel(8, 8),
        "mlp": {"up": kernel(8, 16), "down": kernel(16, 8)},
        "norm": {"scale": jnp.ones(8)},
    }
    return {
        "blocks": {"0": layer, "1": layer},
        "wte": {"embedding": jnp.ones((32, 8))},
        "norm": {"scale": jnp.ones(8)},
    }


def first_layer(path):
    return path.startswith("blocks/0")


# What is hidden from the optimizer, and whether the row norms of others may depend on
# it.
HIDDEN = (
    (first_layer, True),
    (lambda path: "mlp/down/weight" in path or "mlp/down/kernel" in path, True),
    (lambda path: path.endswith(("bias", "scale", "embedding")), False),
    (lambda path: False, False),
)


@pytest.mark.parametrize(("name", "transposed"), [("kernel", False), ("weight", True)])
@pytest.mark.parametrize(("hidden", "warns"), HIDDEN)
def test_matrices_that_are_masked_are_named(name, transposed, hidden, warns):
    """Where they may change default row norms; by optax.masked, optax.partition, None
    in a layer, in NNX Variables.
    """
    params = layers(name, transposed)

    def seen(path):
        return not hidden(jax.tree_util.keystr(path, simple=True, separator="/"))

    mask = jax.tree.map_with_path(lambda path, x: seen(path), params)
    labels = jax.tree.map(lambda shown: "train" if shown else "freeze", mask)
    matrices = jax.tree.map_with_path(
        lambda path, x: seen(path) and str(path[-1].key) == name, params
    )
    boxed = jax.tree.map(nnx.Param, params)
    mask_of_boxes = jax.tree.structure(boxed).unflatten(jax.tree.leaves(mask))
    tx, alone = npo.normpre_h(1.6e-2, 1e-3), npo.hyperball(1.6e-2)
    programs = {
        "masked": (optax.masked(tx, mask), params),
        "partition": (
            optax.partition({"train": tx, "freeze": optax.set_to_zero()}, labels),
            params,
        ),
        "alone": (
            optax.masked(optax.chain(npo.scale_by_muon(), alone), matrices),
            params,
        ),
        "variables": (optax.masked(tx, mask_of_boxes), boxed),
        "given": (
            optax.masked(npo.normpre_h(1.6e-2, 1e-3, row_norms=1.0), mask),
            params,
        ),
        "not under Hyperball": (optax.masked(npo.muon(1e-3), mask), params),
    }
    if (
        hidden is first_layer
    ):  # where no layer has a matrix, None may be a part that the model does not have
        programs["holes"] = (
            tx,
            jax.tree.map(lambda shown, x: x if shown else None, mask, params),
        )
    for case, (program, given) in programs.items():
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            jax.eval_shape(program.init, given)
        said = [str(warning.message) for warning in found]
        assert len(said) == (warns and case not in ("given", "not under Hyperball")), (
            case,
            said,
        )
        assert all(
            re.search(
                r"masked matrices, such as 'blocks/0/.*row_norms=.*optax\.freeze", text
            )
            for text in said
        )


def test_what_an_equinox_model_lacks_is_not_masked():
    """Functions and missing biases are None too. The warning is at the line that calls
    init.
    """
    mlp = eqx.nn.MLP(8, 8, 32, depth=2, use_bias=False, key=jax.random.key(0))
    norms = {"ln": eqx.nn.LayerNorm(8, use_weight=False), "ln_2": eqx.nn.LayerNorm(8)}
    model = {"blocks": [{"mlp": mlp, **norms} for _ in range(2)]}
    params, tx = eqx.filter(model, eqx.is_inexact_array), npo.normpre_h(1.6e-2, 1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tx.init(params)
    frozen = eqx.tree_at(
        lambda model: model["blocks"][0]["mlp"].layers[0].weight, params, None
    )
    with pytest.warns(
        UserWarning, match="masked matrices, such as 'blocks/0/mlp/layers/0/weight'"
    ) as seen:
        tx.init(frozen)
    assert [warning.filename for warning in seen] == [__file__]


@pytest.mark.parametrize("option", ["row_norms", "learning_rate_multipliers"])
@cases.rows(
    "value said",
    *(
        (x, "of 'kernel' must be in")
        for x in (-1.0, 0, jnp.float32(-1.0), np.float32("nan"))
    ),
    *(
        (x, "of 'kernel' must be a number")
        for x in (jnp.ones(3), np.ones((3, 1)), True, 1j)
    ),  # one per row, too
    ("1", "must be a tree of numbers"),
    ({}, "'kernel' is missing"),
    (lambda params: None, "'kernel' is missing"),
    ({"kernel": 1.0, "bias": 1.0}, "'bias' is unknown"),
)
def test_wrong_numbers_by_parameter_are_named(option, value, said):
    params = {"kernel": jnp.eye(3)}
    if option == "learning_rate_multipliers" and isinstance(value, int) and value == 0:
        return  # does not train a parameter
    if option == "row_norms" and isinstance(value, str):
        said = r"is not one of \('keep',\)"
    with pytest.raises((ValueError, TypeError), match=f"{option}.* {said}"):
        npo.normpre_h(0.01, 1e-3, **{option: value}).init(params)
    if option == "row_norms":
        with pytest.raises((ValueError, TypeError), match=f"{option}.* {said}"):
            npo.hyperball(0.01, row_norms=value).init(params)


def test_map_params_works_with_row_norms_of_parameters():
    """It calls ``init`` with a placeholder that has no parameters."""
    tx = npo.hyperball(
        0.01, row_norms={"kernel": 1.0}, matrix_dims={"kernel": npo.MatrixDims(0, 1)}
    )
    state = tx.init({"kernel": jnp.eye(3)})
    assert optax.tree.map_params(tx, lambda x: x, state) == state


def test_hyperball_is_for_matrices_only():
    params = {"kernel": jnp.eye(3), "bias": jnp.ones(3)}
    tx = npo.hyperball(0.01)
    with pytest.raises(ValueError, match=r"'bias' of shape \(3,\) is not a matrix"):
        tx.update(params, tx.init(params), params)


@pytest.mark.parametrize(
    "make",
    [
        lambda: npo.muon(1e-3, norm_control="hyperball", adam_learning_rate=1e-3),
        lambda: npo.optimizers()["normpre_h"](1e-3, 1e-3),
        lambda: npo.with_adamw(
            npo.scale_by_muon, 1e-3, norm_control="hyperball", adam_learning_rate=1e-3
        ),
        lambda: npo.hyperball(1e-3),
        lambda: npo.learning_rate_by_length(10),
        lambda: npo.normpre_g(1e-3).init({"bias": jnp.zeros(3)}),
    ],
)
def test_warnings_name_the_line_of_the_user(make):
    with pytest.warns(UserWarning, match="measured|learning rate|matrix") as found:
        make()
    assert [warning.filename for warning in found] == [__file__]
