# SPDX-License-Identifier: Apache-2.0
"""The contract of every public optimizer with optax and JAX.

It covers wrappers, hyperparameters, compilation, states and errors. Most tests call
``update`` outside of jit, where compiled parts are shared by all tests.
"""

import contextlib
import functools
import inspect
import json
import warnings
from pathlib import Path

import equinox as eqx
import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict

import normpre_optax as npo
from tests import cases, states

every_family = pytest.mark.parametrize("name", cases.ONE_RATE)
representatives = pytest.mark.parametrize("name", cases.REPRESENTATIVES)


@functools.cache
def optimizer(name):
    return cases.make(name, 0.01)


SHAPES = {  # two kernels of one shape, a stack, vectors
    "mlp": {
        "up": {"kernel": (4, 6), "bias": (6,)},
        "down": {"kernel": (4, 6), "bias": (6,)},
    },
    "layers": {"proj": {"kernel": (2, 4, 6), "bias": (2, 6)}},
    "norm": {"scale": (4,)},
}
numbers = functools.partial(cases.numbers, SHAPES)
# Two programs for the same numbers: rounding of updates of size 0.01.
assert_close = functools.partial(cases.assert_close, atol=1e-6)


def describe(tree):
    """Shapes, dtypes and weak types."""

    def of_array(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type)

    return jax.tree.map(of_array, tree)


def assert_equal(a, b):
    """Compare two trees of one structure, bit for bit."""
    jax.tree.map(np.testing.assert_array_equal, a, b)


def run(tx, params, gradients, state=None):
    """Updates of some steps, and the last state."""
    return cases.steps(tx.update, state or tx.init(params), params, gradients)


def inject(factory, **options):
    """``inject_hyperparams`` with the static arguments of an optimizer."""
    static = npo.static_args(factory)
    return optax.inject_hyperparams(factory, static_args=static, **options)


@functools.cache
def plain(name):
    """Two updates of the bare optimizer, which a wrapper must not change."""
    return run(optimizer(name), numbers(), [numbers(1), numbers(2)])[0]


# Compilation.

_lowered = []


def _count_programs(event, _, **__):
    if event.endswith("jaxpr_to_mlir_module_duration"):
        _lowered.append(event)


jax.monitoring.register_event_duration_secs_listener(_count_programs)


@pytest.mark.every_platform
@representatives
def test_later_eager_updates_compile_nothing(name):
    tx = optimizer(name)
    params = numbers()
    _, state = run(tx, params, [numbers(1)])
    before = len(_lowered)
    assert before
    run(tx, params, [numbers(1)] * 2, state)
    assert len(_lowered) == before


@pytest.mark.every_platform
def test_eager_updates_with_injected_schedules_compile_once():
    """``inject_hyperparams`` constructs a new optimizer at every step.

    Their numbers are operands, not constants.
    """
    rate = optax.linear_schedule(0.01, 0.0, 10)
    params = numbers()
    tx = inject(npo.normpre_l)(rate, rank=2)
    # The dtypes of hyperparameters settle in the first step.
    _, state = run(tx, params, [numbers(1)] * 2)
    before = len(_lowered)
    (updates,), _ = run(tx, params, [numbers(2)], state)
    assert len(_lowered) == before
    bare = npo.normpre_l(rate, rank=2)
    expected, _ = run(bare, params, [numbers(1), numbers(1), numbers(2)])
    assert_close(updates, expected[-1])


@representatives
def test_a_jitted_update_compiles_once(name):
    """Shapes, dtypes and weak types of the state never change.

    Also where gradients have another dtype.
    """
    tx = optimizer(name)
    params = numbers()
    state = tx.init(params)
    for gradients in (params, numbers(dtype=jnp.bfloat16)):
        found = jax.eval_shape(tx.update, gradients, state, params)
        assert describe(found) == describe((params, state))


def test_optimizers_share_nothing_that_may_change():
    """A function may close over what changes between two optimizers."""
    rate = {"now": 0.01}
    params = {"w": jnp.eye(2)}

    def first_update():
        tx = npo.rmnp(lambda count: rate["now"], weight_decay=0.0)
        return cases.first_update(tx, params, params)["w"]

    before = first_update()
    rate["now"] = 0.02
    np.testing.assert_allclose(first_update(), 2 * before)


# State and dtypes.


@pytest.mark.parametrize("name", cases.FACTORIES)
def test_init_is_traceable_and_does_not_depend_on_values(name):
    tx = optimizer(name)
    params = numbers()
    state = tx.init(params)
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    assert describe(state) == describe(jax.eval_shape(tx.init, params))


STATES = Path(__file__).parent.glob("states_*.json")
SAVED = {
    file.stem.removeprefix("states_"): json.loads(file.read_text())
    for file in sorted(STATES)
}


SAVED_STATES = [(version, name) for version in SAVED for name in SAVED[version]]


@pytest.mark.parametrize(("version", "name"), SAVED_STATES)
def test_a_state_that_a_version_has_saved_fits(version, name):
    """The same arrays under the same paths, by which checkpoints are restored."""
    assert states.leaves(name) == SAVED[version][name]


@every_family
def test_map_params_finds_the_accumulators(name):
    tx = optimizer(name)
    state = tx.init(numbers())
    marked = optax.tree.map_params(tx, lambda leaf: jnp.full_like(leaf, 7), state)
    assert describe(marked) == describe(state)
    for new, old in zip(jax.tree.leaves(marked), jax.tree.leaves(state), strict=True):
        # Every array is a parameter's; scalars count steps.
        is_marked = bool(jnp.all(new == 7))
        assert is_marked == (old.ndim > 0)


@every_family
def test_a_direction_stands_alone_and_mixes_no_dtypes(name):
    """``scale_by_<name>`` is the optimizer without decay, learning rate and AdamW.

    The code of AdamW, which is optax's, mixes dtypes.
    """
    params = {
        "up": {"kernel": jnp.zeros((4, 6))},
        "layers": {"kernel": jnp.zeros((2, 4, 6), jnp.bfloat16)},
    }
    tx = getattr(npo, f"scale_by_{name}")()
    with jax.numpy_dtype_promotion("strict"):
        state = jax.eval_shape(tx.init, params)
        found = jax.eval_shape(tx.update, params, state, params)
        assert describe(found) == describe((params, state))
    with pytest.raises(ValueError, match=r"'norm/scale'.*optax\.masked"):
        tx.init({"norm": {"scale": jnp.ones(4)}})


# optax's wrappers.


def test_chain():
    """And extra arguments pass."""
    clip = optax.clip_by_global_norm(1e9)
    tx = optax.chain(clip, optimizer("normpre_g"), optax.scale(2.0))
    params = numbers()
    extra = {"learning_rate": jnp.ones(()), "direction": jnp.ones(3), "loss": None}
    updates, _ = tx.update(numbers(1), tx.init(params), params, **extra)
    assert_close(updates, optax.tree.scale(2, plain("normpre_g")[0]), atol=2e-6)


@representatives
def test_partition_and_masked(name):
    params = numbers()
    grads = numbers(1)
    expected = plain(name)[0]
    labels = {"mlp": "matrix", "layers": "matrix", "norm": "frozen"}
    parts = {"matrix": optimizer(name), "frozen": optax.set_to_zero()}
    tx = optax.partition(parts, labels)
    updates = cases.first_update(tx, grads, params)
    assert not np.any(updates["norm"]["scale"])
    for part in ("mlp", "layers"):
        assert_close(updates[part], expected[part])
    mask = {"mlp": {"up": True, "down": False}, "layers": True, "norm": False}
    tx = optax.masked(optimizer(name), mask)
    updates = cases.first_update(tx, grads, params)
    assert_close(updates["mlp"]["up"], expected["mlp"]["up"])
    assert_close(updates["layers"], expected["layers"])
    # optax leaves what is masked.
    assert_equal(updates["mlp"]["down"], grads["mlp"]["down"])


def test_apply_if_finite_and_multisteps():
    bare = optimizer("normuon")
    params = numbers()
    bad = numbers(1)
    kernel = bad["mlp"]["up"]["kernel"]
    bad["mlp"]["up"]["kernel"] = kernel.at[0, 0].set(jnp.nan)
    tx = optax.apply_if_finite(bare, max_consecutive_errors=5)
    state = tx.init(params)
    (skipped, updates), after = run(tx, params, [bad, numbers(1)])
    assert not any(np.any(u) for u in jax.tree.leaves(skipped))
    assert_close(updates, plain("normuon")[0])
    _, after = tx.update(bad, state, params)
    assert_equal(after.inner_state, state.inner_state)

    tx = optax.MultiSteps(bare, every_k_schedule=2)
    (skipped, updates), after = run(tx, params, [numbers(1)] * 2)
    assert not any(np.any(u) for u in jax.tree.leaves(skipped))
    assert_close(updates, plain("normuon")[0])  # the mean of two equal ones
    assert int(after.gradient_step) == 1


# Hyperparameters.


@pytest.mark.parametrize("injected", [False, True])
def test_learning_rate_and_weight_decay_may_be_schedules(injected):
    """Zero gradients leave the decay alone.

    That is lr(step) wd(step) of matrices, and another of the AdamW group.
    """
    factory = npo.rmnp
    if injected:
        factory = inject(npo.rmnp)
    decay = {
        "weight_decay": lambda step: 0.5 - 0.1 * step,
        "adam_weight_decay": lambda step: 0.2 + 0.1 * step,
    }
    params = {"kernel": jnp.ones((4, 6)), "bias": jnp.ones(6)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    tx = factory(lambda step: 0.01 + 0.01 * step, **decay)
    found, _ = run(tx, params, [zeros] * 2)
    for updates, kernel, bias in zip(found, (0.5, 0.8), (0.2, 0.6), strict=True):
        np.testing.assert_allclose(updates["kernel"], -0.01 * kernel, rtol=1e-6)
        np.testing.assert_allclose(updates["bias"], -0.01 * bias, rtol=1e-6)


@pytest.mark.parametrize("name", ["normpre_g", "normpre_l-small"])
def test_hyperparameters_can_be_injected(name):
    factory, fixed = cases.FACTORIES[name]
    # optax keeps hyperparameters in the parameters' dtype by default; 0.01 in bfloat16
    # is off by 0.2 %.
    injected = inject(factory, hyperparam_dtype=jnp.dtype(jnp.float32))
    tx = injected(learning_rate=0.01, **fixed)
    params = numbers()
    (updates,), state = run(tx, params, [numbers(1)])
    expected = {"learning_rate", "momentum", "weight_decay", "adam_b1"}
    assert expected <= set(state.hyperparams)
    assert_close(updates, plain(name)[0])
    state.hyperparams["learning_rate"] = jnp.asarray(0.02)
    (updates,), _ = run(tx, params, [numbers(2)], state)
    assert_close(updates, optax.tree.scale(2, plain(name)[1]), atol=2e-6)


@every_family
def test_injected_schedules_keep_the_state_and_the_updates(name):
    schedule = optax.linear_schedule(0.01, 0.0, 10)
    tx = inject(cases.ONE_RATE[name])(schedule)
    params = numbers()
    state = tx.init(params)
    found = jax.eval_shape(tx.update, params, state, params)
    assert describe(found) == describe((params, state))


@cases.rows(
    "factory argument value",
    (npo.normpre_l, "rank", 4),
    (npo.normpre_l, "oversample", 4),
    (npo.normpre_l, "power_iterations", 4),
    (npo.normpre_l, "seed", 4),
    (npo.muon, "ns_steps", 5),
    (npo.mano, "version", 1),
)
def test_a_traced_argument_that_must_be_static_is_named_with_the_fix(
    factory, argument, value
):
    static = npo.static_args(factory) - {argument}
    tx = optax.inject_hyperparams(factory, static_args=static)
    with pytest.raises((TypeError, ValueError), match=f"(?s){argument}.*static_args"):
        tx(learning_rate=0.01, **{argument: value}).init(numbers())


@cases.rows(
    "factory argument value",
    (npo.normpre_h, "matrix_dims", lambda path, leaf: None),
    (npo.muon, "matrix_dims", npo.default_matrix_dims),
    (npo.muon, "weight_decay_mask", npo.decay_matrices_only),
    (npo.normpre_h, "row_norms", lambda params: jax.tree.map(lambda _: 1.0, params)),
    (npo.normpre_l, "shardings", lambda params: None),
    (npo.hyperball, "matrix_dims", npo.presets.maxtext),
)
def test_a_function_that_is_no_schedule_is_named_with_the_fix(factory, argument, value):
    """Without ``static_args``, optax takes it for a schedule."""
    options = {"learning_rate": 0.01, argument: value}
    if factory is npo.normpre_h:
        options["adam_learning_rate"] = 0.01
    tx = optax.inject_hyperparams(factory)(**options)
    with pytest.raises(TypeError, match=f"{argument} is not a schedule.*static_args"):
        tx.init(numbers())
    inject(factory)(**options).init({"dense": {"kernel": jnp.ones((4, 4))}})


@every_family
def test_dtypes_reach_the_products_and_the_momentum(name):
    factory = cases.ONE_RATE[name]
    params = numbers()["mlp"]["up"]
    options = inspect.signature(factory).parameters
    momenta = {(6,)}  # AdamW's, of the bias
    if "momentum" in options:
        momenta.add((4, 6))
    narrow_shapes = {"compute_dtype": set(), "mu_dtype": momenta}
    for option in narrow_shapes.keys() & options.keys():
        tx = factory(0.01, **{option: jnp.bfloat16})
        state = jax.eval_shape(tx.init, params)
        assert "bf16[" in str(jax.make_jaxpr(tx.update)(params, state, params))
        narrow = [x for x in jax.tree.leaves(state) if x.dtype == jnp.bfloat16]
        assert {x.shape for x in narrow} == narrow_shapes[option]


# Programs.


@pytest.mark.parametrize(
    ("name", "decomposes"), [("normpre_g", False), ("normpre_l-exact", True)]
)
def test_reverse_mode_goes_through_an_update(name, decomposes):
    """Traced, through every loop over matrices.

    LAPACK calls, one at a time on a CPU, have no reverse mode.
    """
    tx = optimizer(name)
    params = numbers()

    def size(grads):
        return optax.tree.norm(cases.first_update(tx, grads, params))

    if decomposes:
        jax.eval_shape(lambda grads: jax.jvp(size, (grads,), (grads,)), params)
    else:
        assert describe(jax.eval_shape(jax.grad(size), params)) == describe(params)


@representatives
def test_step_counters_end_at_the_largest_int32(name):
    """They stay there, and updates stay finite."""
    tx = optimizer(name)
    params = numbers()
    most = 2**31 - 1

    def near_the_end(x):
        return x if x.ndim else jnp.full_like(x, most - 1)

    state = jax.tree.map(near_the_end, tx.init(params))
    updates, state = run(tx, params, [numbers(1)] * 2, state)
    assert {int(x) for x in jax.tree.leaves(state) if not x.ndim} == {most}
    assert all(np.all(np.isfinite(u)) for u in jax.tree.leaves(updates))


def test_a_resumed_run_draws_what_the_uninterrupted_one_would_have_drawn():
    tx = cases.make("normpre_l-small", 0.01)
    again = cases.make("normpre_l-small", 0.01)
    params = numbers()["layers"]
    gradients = [numbers(step)["layers"] for step in range(1, 5)]
    expected, _ = run(tx, params, gradients)
    _, state = run(tx, params, gradients[:2])
    # As a checkpoint would give it back.
    restored = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), state)
    resumed, _ = run(again, params, gradients[2:], restored)
    assert_equal(resumed, expected[2:])


# Trees.


@pytest.mark.parametrize("name", ["normpre_l-small", "muon-hyperball"])
def test_holes_and_empty_trees(name):
    tx = optimizer(name)
    others = {"hole": None, "holes": {"a": None}, "number": 1.0}
    params = numbers(0) | others
    grads = numbers(1) | others
    updates = cases.first_update(tx, grads, params)
    assert updates["hole"] is None
    assert updates["number"].shape == ()  # numbers of Python are parameters too
    assert_close({k: updates[k] for k in numbers()}, plain(name)[0])
    for empty in ({}, {"only": None}):
        assert cases.first_update(tx, empty, empty) == empty
    for part in (
        {"mlp": {"up": {"kernel": jnp.ones((3, 4))}}},
        {"norm": {"scale": jnp.ones(4)}},
    ):
        updates = jax.eval_shape(lambda p: cases.first_update(tx, p, p), part)
        assert describe(updates) == describe(part)


@pytest.mark.parametrize("name", ["normpre_g", "muon-hyperball"])
def test_a_callable_tree_of_parameters_is_a_tree(name):
    """Equinox filters a model into a model.

    So its parameters, and masks of them, are callable.
    """
    model = eqx.nn.MLP(4, 2, width_size=0, depth=0, key=jax.random.key(0))
    params = eqx.filter(model, eqx.is_inexact_array)
    assert callable(params)

    def layer(decay, mask):
        tx = cases.make(name, 0.1, weight_decay=decay, weight_decay_mask=mask)
        return cases.first_update(tx, params, params).layers[0]

    def decays(tree):
        return jax.tree.map(lambda x: x.ndim < 2, tree)

    still = layer(0.0, None)
    for mask in (decays, decays(params)):
        decayed = layer(0.5, mask)
        np.testing.assert_array_equal(decayed.weight, still.weight)
        assert jnp.any(decayed.bias != still.bias)


# Warnings and errors.


@pytest.mark.parametrize("name", cases.FACTORIES)
def test_init_warns_if_no_parameter_is_a_matrix(name):
    pair = {
        "lora_a": {"kernel": jnp.ones((4, 2))},
        "lora_b": {"kernel": jnp.ones((2, 4))},
    }
    without_matrix = (
        {"norm": {"scale": jnp.ones(4)}},
        {"up": pair},
        {"wte": jnp.ones((9, 4)), "hole": None},
    )
    said = r"no parameter is a matrix.*explain\(params\)"
    for params in without_matrix:
        with pytest.warns(UserWarning, match=said) as seen:
            optimizer(name).init(params)
        assert [warning.filename for warning in seen] == [__file__]
    with_matrix_or_empty = (
        numbers(),
        {},
        {"hole": None},
        {"up": jnp.ones((4, 2))},
        {"weight": jnp.ones((4, 2))},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for params in with_matrix_or_empty:
            optimizer(name).init(params)


@pytest.mark.parametrize("name", cases.FACTORIES)
def test_shapes_without_arrays_are_named_with_eval_shape(name):
    shapes = jax.eval_shape(numbers)
    matrices = {"up": shapes["mlp"]["up"]["kernel"]}
    said = r"ShapeDtypeStruct.* jax\.eval_shape\(tx\.init, params\)"
    for init, params in (
        (optimizer(name).init, shapes),
        (npo.scale_by_muon().init, matrices),
    ):
        with pytest.raises(TypeError, match=said):
            init(params)
        assert jax.tree.leaves(jax.eval_shape(init, params))


INTEGERS = (
    r"'ids' has dtype int32, which has no gradient.*eqx\.filter\(model,"
    r" eqx\.is_inexact_array\)"
)


@every_family
def test_integers_are_named_also_with_gradients_of_float0(name):
    """At init, and at an update whose state comes from elsewhere.

    AdamW's weight decay would change them.
    """
    params = {"up": {"kernel": jnp.ones((4, 6))}, "ids": jnp.arange(3)}
    grads = jax.grad(lambda p: jnp.sum(p["up"]["kernel"]) ** 2, allow_int=True)(params)
    assert grads["ids"].dtype == jax.dtypes.float0
    tx = cases.make(name, 0.01)
    with pytest.raises(TypeError, match=INTEGERS):
        tx.init(params)
    with pytest.raises(TypeError, match=INTEGERS):
        tx.update(grads, {}, params)
    parts = {"train": tx, "none": optax.set_to_zero()}
    frozen = optax.partition(parts, {"up": "train", "ids": "none"})
    assert jax.eval_shape(frozen.init, params)


class Indexed(eqx.Module):
    linear: eqx.nn.Linear
    ids: jax.Array
    activation: object = jax.nn.relu


@representatives
def test_an_equinox_model_with_integers_or_functions_is_named(name):
    """For parameters that are the arrays of a model, or the whole model.

    At init and at update.
    """
    tx = cases.make(name, 0.01)
    model = Indexed(eqx.nn.Linear(4, 6, key=jax.random.key(0)), jnp.arange(3))
    grads = eqx.filter_grad(lambda model: jnp.sum(model.linear(jnp.ones(4))))(model)
    with_ids = eqx.tree_at(
        lambda model: model.ids, grads, jnp.zeros(3), is_leaf=lambda x: x is None
    )
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    said = r"eqx\.filter\(model, eqx\.is_inexact_array\)"
    for params in (eqx.filter(model, eqx.is_array), model):
        with pytest.raises(TypeError, match=said):
            tx.init(params)
        for given in (grads, with_ids):
            with pytest.raises((TypeError, ValueError), match=said):
                tx.update(given, state, params)


CALL = r"update\(grads, state, params\)"


def test_gradients_that_do_not_fit_are_named():
    params = {"up": {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}}
    tx = optimizer("normpre_g")
    state = jax.eval_shape(tx.init, params)
    bias = {"bias": jnp.ones(4)}
    transposed = {"up": {"kernel": jnp.ones((4, 3)), **bias}}
    broadcast = {"up": {"kernel": jnp.ones((1, 4)), **bias}}
    without_bias = {"up": {"kernel": jnp.ones((3, 4))}}
    for grads, said in (
        (
            transposed,
            r"gradients: 'up/kernel' has shape \(4, 3\), expected \S+ \(3, 4\)",
        ),
        (broadcast, r"'up/kernel' has shape \(1, 4\), expected shape \(3, 4\)"),
        (without_bias, rf"'up/bias' has nothing, expected shape \(4,\)\. .*{CALL}"),
    ):
        with pytest.raises(ValueError, match=said):
            tx.update(grads, state, params)
    with pytest.raises(ValueError, match=CALL):
        tx.update(state, params, params)


WITHOUT_TANGENT = f"(?s){CALL}.*tangent='none'"


@cases.rows(
    "tx said",
    (npo.normpre_g(0.1), f"(?s){CALL}.*Equinox.*brax"),
    (npo.hyperball(0.1), f"hyperball needs the parameters: call {CALL}"),
    (npo.scale_by_normpre_g(), WITHOUT_TANGENT),
    (npo.scale_by_mano(), WITHOUT_TANGENT),
    (npo.project_to_tangent(), f"(?s){CALL}.*mode='none'"),
    (npo.normalize_tangent(), WITHOUT_TANGENT),
    (npo.scale_by_normpre_g(tangent="none"), None),
)
def test_missing_params_are_named(tx, said):
    params = {"kernel": jnp.ones((3, 4))}
    state = tx.init(params)
    raises_or_not = contextlib.nullcontext()
    if said:
        raises_or_not = pytest.raises(ValueError, match=said)
    with raises_or_not:
        jax.eval_shape(lambda: tx.update(params, state))


@cases.rows(
    "given tx said",
    (npo.normpre_h(0.1, 0.1), npo.muon(0.1), r"count' has shape \(\)"),
    (npo.normpre_l(0.1), npo.muon(0.1), r"state: \S+ has shape \(\), expected nothing"),
    (optax.sgd(0.1, momentum=0.9), npo.muon(0.1), "nothing"),
    (npo.muon(0.1), npo.normpre_g(0.1), r"has nothing, expected shape"),
    (npo.muon(lambda step: 0.1), npo.muon(0.1), "count"),
    (npo.muon(0.1), npo.muon(0.1, weight_decay=lambda step: 0.1), "count"),
    (npo.normuon(0.1), npo.muoneq(0.1), "state"),
)
def test_a_state_of_another_optimizer_is_named(given, tx, said):
    params = {"dense": jnp.ones((3, 5)), "bias": jnp.ones(5)}
    with pytest.raises(ValueError, match=f"(?s){said}.*new state, init\\(params\\)"):
        jax.eval_shape(tx.update, params, given.init(params), params)


@representatives
def test_a_mask_and_multipliers_may_be_added_to_a_state(name):
    """Also after a restart: they are in no state."""
    options = {
        "weight_decay_mask": npo.decay_matrices_only,
        "learning_rate_multipliers": 0.5,
    }
    plain = cases.make(name, 0.01).init(numbers())
    more = cases.make(name, 0.01, **options).init(numbers())
    assert jax.tree.structure(plain) == jax.tree.structure(more)


def test_a_state_of_other_parameters_is_named():
    tx = npo.muon(0.1)
    params = {"dense": jnp.ones((3, 4))}
    state = tx.init({"dense": jnp.ones((3, 5))})
    said = r"dense' has shape \(3, 5\), expected shape \(3, 4\)"
    with pytest.raises(ValueError, match=said):
        tx.update(params, state, params)


def with_lists(tree):
    """Tuples as lists and named tuples as dicts.

    Checkpoints without a target restore them so.
    """
    if hasattr(tree, "_asdict"):
        tree = tree._asdict()
    if isinstance(tree, tuple):
        return [with_lists(x) for x in tree]
    if isinstance(tree, dict):
        return {key: with_lists(x) for key, x in tree.items()}
    return tree


def test_a_state_may_have_other_containers_of_the_same_names():
    """As a checkpoint has that is restored without a target.

    And gradients and parameters of two kinds of dict.
    """
    tx = npo.normpre_g(0.1)
    params = numbers()
    state = tx.init(params)

    def is_tuple(x):
        return type(x) is tuple

    def as_list(x):
        return list(x) if is_tuple(x) else x

    without_tuples = jax.tree.map(as_list, state, is_leaf=is_tuple)
    expected = tx.update(params, state, params)
    for changed in (with_lists(state), without_tuples):
        found = tx.update(params, changed, params)
        assert_close(found, expected)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
    frozen = FrozenDict(params)
    for grads, like in ((params, frozen), (frozen, params), (frozen, frozen)):
        updates, _ = tx.update(grads, tx.init(like), like)
        assert jax.tree.structure(updates) == jax.tree.structure(like)


@representatives
@pytest.mark.parametrize("empty", [None, (), {}], ids=str)
def test_empty_places_of_a_state_and_of_gradients_may_be_other_empty_nodes(name, empty):
    """Instead of optax's empty nodes.

    Checkpoints restored without a target have None, flax.serialization has {}.
    """
    tx = optimizer(name)
    params = numbers() | {"hole": None}

    def is_empty(x):
        return isinstance(x, optax.MaskedNode | optax.EmptyState)

    def with_other_nodes(x):
        return empty if is_empty(x) else x

    state = jax.tree.map(with_other_nodes, tx.init(params), is_leaf=is_empty)
    assert empty is not None or "MaskedNode" not in str(jax.tree.structure(state))
    found = tx.update(numbers(1) | {"hole": empty}, state, params)
    updates, _ = found
    expected = (params, tx.init(params))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert_close({k: updates[k] for k in numbers()}, plain(name)[0])
