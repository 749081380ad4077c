# SPDX-License-Identifier: Apache-2.0
"""Norm control against literal transcriptions of its rules, at its edges, alone in a chain and as an option."""

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import normpre_optax as npo
from tests import cases
from tests import reference_family as oracles

SHAPES = {name: cases.SHAPES[name] for name in ("wide", "stack")}
DIMS = {name: cases.DIMS[name] for name in SHAPES}
STEPS, RATE = 5, 0.03
both = pytest.mark.parametrize("per", ["rows", "matrix"])


def half(r):
    return np.full_like(r, 0.5)


def whole(r):
    return np.ones_like(r)


def relaxed(r):
    return 1 - r**2


def run(tx, seed=0):
    """Weights (…, out, in) after some steps in float64."""
    with jax.enable_x64(True):
        update = cases.quick_jit(tx.update)
        params = cases.as_jax(cases.to_layout(cases.weights(seed, SHAPES)), jnp.float64)
        state = tx.init(params)
        for gradient in cases.gradients(STEPS, shapes=SHAPES):
            updates, state = update(cases.as_jax(cases.to_layout(gradient), jnp.float64), state, params)
            params = optax.apply_updates(params, updates)
        return cases.from_layout(params)


def by_rule(start):
    """The same by an oracle: ``start(w) -> step``, and ``step(g) -> w``."""

    def one(name, index, w, *gradients):
        step = start(np.float64(w))
        for gradient in gradients:
            w = step(np.float64(gradient))
        return w

    return cases.each_matrix(one, cases.weights(shapes=SHAPES), *cases.gradients(STEPS, shapes=SHAPES))


def assert_equal(got, expected, rtol=1e-12):
    for name, w in expected.items():
        np.testing.assert_allclose(got[name], w, rtol=rtol, atol=1e-13)


def sgd_then(rule):
    """w and a rule of (w, step) to a step function."""

    def start(w):
        def step(g):
            nonlocal w
            w = rule(w, -RATE * g)
            return w

        return step

    return start


@both
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [((0.5, 1.0), (half, whole)), ((0.0, 0.0), (np.zeros_like,) * 2), ((relaxed, relaxed), (relaxed, relaxed))],
)
def test_the_brake_keeps_a_part_of_the_growth(per, ours, theirs):
    tx = optax.chain(optax.sgd(RATE), npo.brake_radially(*ours, per=per, matrix_dims=DIMS))
    assert_equal(run(tx), by_rule(sgd_then(functools.partial(brake_of, per, *theirs))))


def brake_of(per, outward, inward, w, u):
    return oracles.brake(w, u, outward, inward, per)


@both
def test_held_norms_stay_those_of_the_first_weights(per):
    tx = optax.chain(optax.sgd(RATE), npo.hold_norm(per=per, matrix_dims=DIMS))

    def start(w):
        held = oracles.lengths(w, per)
        return sgd_then(lambda w, u: (w + u) * held / oracles.lengths(w + u, per))(w)

    assert_equal(run(tx), by_rule(start))


@both
def test_a_given_norm_is_reached_at_the_first_step(per):
    tx = npo.hold_norm(lambda rows, columns: 3.0 * rows, per=per, matrix_dims=DIMS)
    params = cases.to_layout(cases.weights(shapes=SHAPES))
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    for w in cases.from_layout(optax.apply_updates(cases.as_jax(params), updates)).values():
        for one in w.reshape(-1, *w.shape[-2:]):
            np.testing.assert_allclose(oracles.lengths(one, per), 3.0 * len(one), rtol=1e-5)


def test_the_option_hyperball_is_the_published_rule():
    tx = npo.hybrid(lambda matrix_dims: optax.identity(), RATE, norm_control="hyperball", matrix_dims=DIMS, **NO_DECAY)

    def start(w0):
        w = w0

        def step(g):
            nonlocal w
            w = oracles.hyperball(w0, w, g, RATE)
            return w

        return step

    assert_equal(run(tx), by_rule(start))


@both
def test_hyperball_in_a_chain_reads_a_schedule_and_holds_rows_too(per):
    rates = optax.piecewise_constant_schedule(0.1, {2: 0.1})
    tx = npo.hyperball(rates, per=per, matrix_dims=DIMS)

    def start(w):
        held, t = oracles.lengths(w, per), 0

        def step(g):
            nonlocal w, t
            w = w - float(rates(t)) * g / oracles.lengths(g, per) * held
            w, t = w / oracles.lengths(w, per) * held, t + 1
            return w

        return step

    assert_equal(run(tx), by_rule(start), rtol=1e-6)  # the schedule is float32


NO_DECAY = {"weight_decay": 0.0}


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_the_option_row_gains_is_muown(decay):
    tx = npo.muon(RATE, norm_control="row_gains", weight_decay=decay, matrix_dims=DIMS)

    def start(w):
        signal = oracles.signal(w.shape)

        def direction(g):
            return oracles.moonlight_scale(w.shape) * oracles.newton_schulz(signal(g))

        return oracles.muown(w, direction, RATE, decay)

    assert_equal(run(tx), by_rule(start), rtol=1e-6)  # the authors guard Newton-Schulz by an epsilon


def test_cautious_decay_spares_what_the_update_lengthens():
    tx = npo.hybrid(lambda matrix_dims: optax.identity(), RATE, weight_decay=0.5, cautious=True, matrix_dims=DIMS)

    def start(w):
        def step(g):
            nonlocal w
            w = oracles.cautious_step(w, g, RATE, 0.5)
            return w

        return step

    assert_equal(run(tx), by_rule(start))


CONTROLS = ["brake", "brake_matrix", "relax", "hold", "hold_rows", "hyperball", "row_gains"]
every_control = pytest.mark.parametrize("control", CONTROLS)


def numbers(seed=0, dtype=jnp.float32):
    random = np.random.default_rng(seed)
    shapes = {"qkv": (4, 18), "layers": (2, 4, 6), "bias": (6,), "heads": (4, 2, 3)}
    return {name: jnp.asarray(random.standard_normal(shape), dtype) for name, shape in shapes.items()}


AXES = {
    "qkv": npo.MatrixDims(0, 1, output_blocks=3),
    "layers": npo.MatrixDims(1, 2),
    "bias": None,
    "heads": npo.MatrixDims(0, (1, 2)),
}


def matrices(params):
    """(out, in), blocks and layers apart."""
    blocks = np.split(np.asarray(params["qkv"], np.float64).T, 3)
    return [*blocks, *np.asarray(params["layers"]).swapaxes(1, 2), np.asarray(params["heads"]).reshape(4, 6).T]


@functools.cache
def of_two_dtypes(control):
    """Parameters, state before and after a step, and updates; layers are bfloat16."""
    params, grads = ({**numbers(seed), "layers": numbers(seed, jnp.bfloat16)["layers"]} for seed in (0, 1))
    tx = npo.muoneq(0.01, norm_control=control, matrix_dims=AXES, **NO_DECAY)
    state = tx.init(params)
    updates, after = tx.update(grads, state, params)
    return params, state, after, updates


@every_control
def test_every_optimizer_takes_it(control):
    params, state, after, updates = of_two_dtypes(control)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(lambda x: (x.shape, x.dtype), after)
    assert jax.tree.map(jnp.result_type, updates) == jax.tree.map(jnp.result_type, params)
    *_, plain = of_two_dtypes("none")
    np.testing.assert_array_equal(updates["bias"], plain["bias"])
    assert all(np.abs(updates[name] - plain[name]).max() > 0 for name in ("qkv", "layers", "heads"))


@both
def test_blocks_layers_and_several_axes_are_matrices_of_their_own(per):
    tx, params = npo.hold_norm(per=per, matrix_dims=AXES), numbers()
    updates, _ = tx.update(numbers(1), tx.init(params), params)
    for before, after in zip(matrices(params), matrices(optax.apply_updates(params, updates)), strict=True):
        np.testing.assert_allclose(oracles.lengths(after, per), oracles.lengths(before, per), rtol=2e-6)
    np.testing.assert_array_equal(updates["bias"], numbers(1)["bias"])


@pytest.mark.filterwarnings("ignore:norm control.*begin at zero")
@every_control
def test_zeros_and_nan(control):
    """Rows of zeros stay finite and learn, but under the rules that would have to know a length."""
    tx = npo.muon(0.01, norm_control=control, **NO_DECAY)
    params = {"kernel": jnp.zeros((3, 4)).at[:, 0].set(1.0)}  # row 0 is there, the others are zero
    state = tx.init(params)
    grads = {"kernel": jax.random.normal(jax.random.key(0), (3, 4))}
    updates, _ = tx.update(grads, state, params)
    assert np.isfinite(updates["kernel"]).all()
    moves = np.abs(updates["kernel"]).max(axis=0) > 0
    assert moves.all()
    still, _ = tx.update(jax.tree.map(jnp.zeros_like, grads), state, params)
    np.testing.assert_allclose(still["kernel"], 0, atol=1e-7)
    broken, _ = tx.update({"kernel": grads["kernel"].at[0, 0].set(jnp.nan)}, state, params)
    assert np.isnan(broken["kernel"]).any()


@pytest.mark.parametrize("control", ["hold", "hold_rows", "hyperball", "row_gains"])
def test_what_begins_at_zero_is_named_at_init(control):
    """Nothing holds it; inside jit nothing is known of it."""
    tx = npo.muon(0.01, norm_control=control)
    params = {"up": {"kernel": jnp.ones((3, 4))}, "down": {"kernel": jnp.zeros((4, 3))}, "bias": jnp.zeros(3)}
    with pytest.warns(UserWarning, match="'down/kernel', or some rows of it, begin at zero"):
        tx.init(params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(tx.init, params)
        tx.init({"up": params["up"]})
        npo.muon(0.01).init(params)


def test_alone_in_a_chain_what_is_no_matrix_passes():
    params = {"up": {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}, "wte": {"embedding": jnp.ones((5, 3))}}
    for rule, rest in ((npo.brake_radially(), 1), (npo.hold_norm(), 1), (npo.hyperball(0.5), -0.5)):
        updates, _ = rule.update(params, rule.init(params), params)
        np.testing.assert_array_equal(updates["wte"]["embedding"], rest)
        np.testing.assert_array_equal(updates["up"]["bias"], rest)
    gains = npo.row_gains(optax.sgd(0.1), optax.sgd(0.1))
    updates, _ = gains.update(params, gains.init(params), params)
    np.testing.assert_allclose(updates["wte"]["embedding"], -0.1)
    np.testing.assert_allclose(updates["up"]["kernel"], -0.1, rtol=1e-5)  # along the rows: only their lengths change


def test_a_rule_of_ones_own_is_the_last_of_the_chain():
    seen = []

    def twice(matrix_dims):
        seen.append(matrix_dims)
        return optax.scale(2.0)

    tx = npo.muon(0.01, norm_control=twice, matrix_dims=DIMS)
    params = cases.as_jax(cases.to_layout(cases.weights(shapes=SHAPES)))
    grads = cases.as_jax(cases.to_layout(cases.gradients(1, shapes=SHAPES)[0]))
    plain = npo.muon(0.01, matrix_dims=DIMS)
    a, b = (cases.first_update(one, grads, params) for one in (tx, plain))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, 2 * y, rtol=1e-6), a, b)
    assert seen[-1]["wide"].dims == DIMS["wide"]


@pytest.mark.parametrize("control", ["hold", "hold_rows", "hyperball"])
def test_what_is_held_does_not_decay_but_the_rest_does(control):
    params = {"kernel": jnp.eye(3), "bias": jnp.ones(3)}
    steps = []
    for decay in (0.0, 0.5):
        tx = npo.muon(0.01, norm_control=control, weight_decay=decay)
        steps.append(tx.update(params, tx.init(params), params)[0])
    np.testing.assert_array_equal(steps[0]["kernel"], steps[1]["kernel"])
    np.testing.assert_allclose(steps[0]["bias"] - steps[1]["bias"], 0.005, rtol=1e-5)


def test_a_new_rate_is_read_from_a_schedule_and_an_array():
    tx = optax.inject_hyperparams(npo.muon, static_args=npo.static_args(npo.muon))(
        learning_rate=0.01, norm_control="brake"
    )
    params = {"kernel": jnp.eye(3)}
    updates, _ = tx.update(params, tx.init(params), params)
    assert np.isfinite(updates["kernel"]).all()
    arrays = optax.inject_hyperparams(npo.brake_radially, static_args="per")(outward=0.25)
    updates, _ = arrays.update(params, arrays.init(params), params)
    np.testing.assert_allclose(np.diag(updates["kernel"]), 0.25, rtol=1e-6)


def of_rows(factory):
    """Arguments of an update with the state of a transformation of rows."""
    return jnp.eye(2), factory(per="rows").init(jnp.eye(2)), jnp.eye(2)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (lambda: npo.brake_radially(1.5), "outward"),
        (lambda: npo.brake_radially(np.float32(1.5)), "outward"),
        (lambda: npo.brake_radially(inward=-1), "inward"),
        (lambda: npo.hold_norm(per="column"), "per"),
        (lambda: npo.hyperball(0.1, per=1), "per"),
        (lambda: npo.hyperball(-0.1), "learning_rate"),
        (lambda: npo.muon(1e-3, norm_control="break"), "norm_control"),
        (lambda: npo.muon(1e-3, norm_control=None), "norm_control"),
        (lambda: npo.muon(1e-3, norm_control=optax.scale(2.0)), "norm_control"),
        (lambda: npo.muon(1e-3, norm_control=lambda matrix_dims: 2.0), "norm_control"),
        (lambda: npo.muon(1e-3, norm_control=npo.hyperball), "norm_control.*learning_rate.*'hyperball'"),
        (lambda: npo.hold_norm(lambda rows, columns: 0.0).init(jnp.eye(2)), r"norm\(rows, columns\) must be"),
        (lambda: npo.hold_norm(lambda rows, columns: None).init(jnp.eye(2)), r"norm\(rows, columns\) must be"),
        (lambda: npo.muon(1e-3, cautious="yes"), "cautious"),
        (lambda: npo.row_gains(npo.muon(1e-3), 1e-3), "gains"),
        (lambda: npo.brake_radially().update(jnp.eye(2), optax.EmptyState()), "params"),
        (lambda: npo.hold_norm().update(jnp.eye(2), npo.hold_norm().init(jnp.eye(2))), "params"),
        (lambda: npo.hyperball(0.1).update(jnp.eye(2), npo.hyperball(0.1).init(jnp.eye(2))), "params"),
        (lambda: npo.hold_norm().update(*of_rows(npo.hold_norm)), "another per="),
        (lambda: npo.hyperball(0.1).update(*of_rows(functools.partial(npo.hyperball, 0.1))), "another per="),
        (lambda: npo.add_cautious_decay(0.1).update(jnp.eye(2), optax.EmptyState()), "params"),
    ],
)
def test_what_it_refuses(wrong, what):
    with pytest.raises((ValueError, TypeError), match=what):
        wrong()


def test_relax_never_lengthens_what_shrinks():
    """Rows longer than one under decay alone: the factor, negative there, is of growth only."""
    params = {"kernel": 2.0 * jnp.eye(3)}
    tx = npo.muon(1e-2, norm_control="relax", weight_decay=0.5)
    updates, _ = tx.update({"kernel": jnp.zeros((3, 3))}, tx.init(params), params)
    np.testing.assert_allclose(updates["kernel"], -0.005 * params["kernel"], rtol=1e-5)


def test_hyperball_is_of_the_length_at_init_whatever_becomes_of_the_weights():
    tx, w, u = npo.hyperball(0.1), {"kernel": jnp.diag(jnp.array([3.0, 4.0]))}, {"kernel": jnp.ones((2, 2))}
    state = tx.init(w)
    for now in (3 * w["kernel"], jnp.zeros((2, 2)), w["kernel"].mT + 1):
        updates, _ = tx.update(u, state, {"kernel": now})
        turned = now - 0.1 * 5 * u["kernel"] / 2
        expected = turned * 5 / jnp.linalg.norm(turned)
        np.testing.assert_allclose(now + updates["kernel"], expected, rtol=1e-5)


@pytest.mark.parametrize(
    "tx", [npo.brake_radially(), npo.hold_norm(), npo.hyperball(0.1), npo.row_gains(optax.sgd(0.1), optax.sgd(0.1))]
)
@pytest.mark.parametrize("shape", [(1, 6), (6,), (2, 8, 6), (6, 8), ()])
def test_gradients_that_do_not_fit_are_named(tx, shape):
    params = {"up": {"kernel": jnp.ones((8, 6))}}
    with pytest.raises(ValueError, match="gradient of parameter 'up/kernel'"):
        tx.update({"up": {"kernel": jnp.ones(shape)}}, tx.init(params), params)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: npo.hold_norm(3.0), "norm must be a function"),
        (lambda: npo.hyperball("x"), "learning_rate must be a number"),
        (lambda: npo.add_cautious_decay(-1.0), "weight_decay must be at least 0"),
        (lambda: npo.precondition_locally(threshold=float("inf")), "threshold must lie in"),
    ],
)
def test_what_cannot_be_is_told_where_it_is_given(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_multipliers_of_zero_freeze_gains_too():
    params = {"kernel": jnp.eye(3)}
    tx = npo.muon(0.1, norm_control="row_gains", rate_multipliers={"kernel": 0.0}, weight_decay=0.0)
    updates = cases.first_update(tx, {"kernel": jnp.ones((3, 3))}, params)
    np.testing.assert_allclose(updates["kernel"], 0, atol=1e-7)


@pytest.mark.parametrize("control", ["hold", "hyperball", "row_gains"])
def test_lengths_stand_in_no_box(control):
    """A box names the axes of its parameter, and programs make shardings of them; a length has none of those axes."""
    box = nn.Partitioned(jnp.eye(4, 8), names=("embed", "mlp"))
    params, tx = {"up": {"kernel": box}}, npo.muon(1e-3, norm_control=control)
    state = jax.eval_shape(tx.init, params)
    updates, after = jax.eval_shape(tx.update, params, state, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    boxes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nn.Partitioned))
    assert {x.value.shape for x in boxes if isinstance(x, nn.Partitioned) and jax.tree.leaves(x)} == {(4, 8)}


def test_cautious_decay_keeps_shapes_and_dtypes():
    tx, w = npo.add_cautious_decay(jnp.float32(0.5)), jnp.ones((2, 3), jnp.bfloat16)
    assert tx.update(w, tx.init(w), w)[0].dtype == jnp.bfloat16
    with pytest.raises(ValueError, match=r"shape \(3,\), the parameter \(2, 3\)"):
        tx.update(w[0], tx.init(w), w)
