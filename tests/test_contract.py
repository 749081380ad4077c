# SPDX-License-Identifier: Apache-2.0
"""The contract of every public optimizer with optax and JAX: wrappers, hyperparameters,
compilation, states, errors.

Most tests call ``update`` outside of jit, where compiled parts are shared by all tests.
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
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type), tree
    )


def run(tx, params, gradients, state=None):
    return cases.steps(tx.update, state or tx.init(params), params, gradients)


def inject(factory, **options):
    return optax.inject_hyperparams(
        factory, static_args=npo.static_args(factory), **options
    )


@functools.cache
def plain(name):
    """Two updates of the bare optimizer, which a wrapper must not change."""
    return run(optimizer(name), numbers(), [numbers(1), numbers(2)])[0]


# Compilation.

_lowered = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **__: (
        _lowered.append(event)
        if event.endswith("jaxpr_to_mlir_module_duration")
        else None
    )
)


@pytest.mark.every_platform
@representatives
def test_later_eager_updates_compile_nothing(name):
    tx, params = optimizer(name), numbers()
    _, state = run(tx, params, [numbers(1)])
    before = len(_lowered)
    assert before
    run(tx, params, [numbers(1)] * 2, state)
    assert len(_lowered) == before


@pytest.mark.every_platform
def test_eager_updates_with_injected_schedules_compile_once():
    """``inject_hyperparams`` constructs a new optimizer at every step; their numbers
    are operands, not constants.
    """
    rate, params = optax.linear_schedule(0.01, 0.0, 10), numbers()
    tx = inject(npo.normpre_l)(rate, rank=2)
    _, state = run(
        tx, params, [numbers(1)] * 2
    )  # dtypes of hyperparameters settle in the first
    before = len(_lowered)
    (updates,), _ = run(tx, params, [numbers(2)], state)
    assert len(_lowered) == before
    expected, _ = run(
        npo.normpre_l(rate, rank=2), params, [numbers(1), numbers(1), numbers(2)]
    )
    assert_close(updates, expected[-1])


@representatives
def test_a_jitted_update_compiles_once(name):
    """Shapes, dtypes and weak types of the state never change, also where gradients
    have another dtype.
    """
    tx, params = optimizer(name), numbers()
    state = tx.init(params)
    for gradients in (params, numbers(dtype=jnp.bfloat16)):
        assert describe(
            jax.eval_shape(tx.update, gradients, state, params)
        ) == describe((params, state))


def test_optimizers_share_nothing_that_may_change():
    """A function may close over what has changed since another optimizer was compiled
    with it.
    """
    rate, params = {"now": 0.01}, {"w": jnp.eye(2)}

    def first_update():
        return cases.first_update(
            npo.rmnp(lambda count: rate["now"], weight_decay=0.0), params, params
        )["w"]

    before = first_update()
    rate["now"] = 0.02
    np.testing.assert_allclose(first_update(), 2 * before)


# State and dtypes.


@pytest.mark.parametrize("name", cases.FACTORIES)
def test_init_is_traceable_and_does_not_depend_on_values(name):
    tx, params = optimizer(name), numbers()
    state = tx.init(params)
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    assert describe(state) == describe(jax.eval_shape(tx.init, params))


STATES = Path(__file__).parent.glob("states_*.json")
SAVED = {
    file.stem.removeprefix("states_"): json.loads(file.read_text())
    for file in sorted(STATES)
}


@pytest.mark.parametrize(
    ("version", "name"),
    [(version, name) for version, saved in SAVED.items() for name in saved],
)
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
        assert bool(jnp.all(new == 7)) == (
            old.ndim > 0
        )  # every array is a parameter's; scalars count steps


@every_family
def test_a_direction_stands_alone_and_mixes_no_dtypes(name):
    """``scale_by_<name>`` is the optimizer without decay, learning rate and AdamW
    (whose optax code mixes dtypes).
    """
    params = {
        "up": {"kernel": jnp.zeros((4, 6))},
        "layers": {"kernel": jnp.zeros((2, 4, 6), jnp.bfloat16)},
    }
    tx = getattr(npo, f"scale_by_{name}")()
    with jax.numpy_dtype_promotion("strict"):
        state = jax.eval_shape(tx.init, params)
        assert describe(jax.eval_shape(tx.update, params, state, params)) == describe(
            (params, state)
        )
    with pytest.raises(ValueError, match=r"'norm/scale'.*optax\.masked"):
        tx.init({"norm": {"scale": jnp.ones(4)}})


# optax's wrappers.


def test_chain():
    """And extra arguments pass."""
    tx = optax.chain(
        optax.clip_by_global_norm(1e9), optimizer("normpre_g"), optax.scale(2.0)
    )
    params, extra = (
        numbers(),
        {"learning_rate": jnp.ones(()), "direction": jnp.ones(3), "loss": None},
    )
    updates, _ = tx.update(numbers(1), tx.init(params), params, **extra)
    assert_close(
        updates, jax.tree.map(lambda u: 2 * u, plain("normpre_g")[0]), atol=2e-6
    )


@representatives
def test_partition_and_masked(name):
    params, grads, expected = numbers(), numbers(1), plain(name)[0]
    labels = {"mlp": "matrix", "layers": "matrix", "norm": "frozen"}
    tx = optax.partition(
        {"matrix": optimizer(name), "frozen": optax.set_to_zero()}, labels
    )
    updates = cases.first_update(tx, grads, params)
    assert not np.any(updates["norm"]["scale"])
    for part in ("mlp", "layers"):
        assert_close(updates[part], expected[part])
    tx = optax.masked(
        optimizer(name),
        {"mlp": {"up": True, "down": False}, "layers": True, "norm": False},
    )
    updates = cases.first_update(tx, grads, params)
    assert_close(updates["mlp"]["up"], expected["mlp"]["up"])
    assert_close(updates["layers"], expected["layers"])
    jax.tree.map(
        np.testing.assert_array_equal, updates["mlp"]["down"], grads["mlp"]["down"]
    )  # optax leaves it


def test_apply_if_finite_and_multisteps():
    bare, params, bad = optimizer("normuon"), numbers(), numbers(1)
    bad["mlp"]["up"]["kernel"] = bad["mlp"]["up"]["kernel"].at[0, 0].set(jnp.nan)
    tx = optax.apply_if_finite(bare, max_consecutive_errors=5)
    state = tx.init(params)
    (skipped, updates), after = run(tx, params, [bad, numbers(1)])
    assert not any(np.any(u) for u in jax.tree.leaves(skipped))
    assert_close(updates, plain("normuon")[0])
    jax.tree.map(
        np.testing.assert_array_equal,
        tx.update(bad, state, params)[1].inner_state,
        state.inner_state,
    )
    (skipped, updates), after = run(
        optax.MultiSteps(bare, every_k_schedule=2), params, [numbers(1)] * 2
    )
    assert not any(np.any(u) for u in jax.tree.leaves(skipped))
    assert_close(updates, plain("normuon")[0])  # the mean of two equal ones
    assert int(after.gradient_step) == 1


# Hyperparameters.


@pytest.mark.parametrize("injected", [False, True])
def test_learning_rate_and_weight_decay_may_be_schedules(injected):
    """Zero gradients leave the decay alone: lr(step) wd(step) of matrices, and another
    of the AdamW group.
    """
    factory = inject(npo.rmnp) if injected else npo.rmnp
    decay = {
        "weight_decay": lambda step: 0.5 - 0.1 * step,
        "adam_weight_decay": lambda step: 0.2 + 0.1 * step,
    }
    params, zeros = (
        {"kernel": jnp.full((4, 6), x), "bias": jnp.full(6, x)} for x in (1.0, 0.0)
    )
    found, _ = run(
        factory(lambda step: 0.01 + 0.01 * step, **decay), params, [zeros] * 2
    )
    for updates, kernel, bias in zip(found, (0.5, 0.8), (0.2, 0.6), strict=True):
        np.testing.assert_allclose(updates["kernel"], -0.01 * kernel, rtol=1e-6)
        np.testing.assert_allclose(updates["bias"], -0.01 * bias, rtol=1e-6)


@pytest.mark.parametrize("name", ["normpre_g", "normpre_l-small"])
def test_hyperparameters_can_be_injected(name):
    factory, fixed = cases.FACTORIES[name]
    # optax keeps hyperparameters in the parameters' dtype by default; 0.01 in bfloat16
    # is off by 0.2 %.
    tx = inject(factory, hyperparam_dtype=jnp.dtype(jnp.float32))(
        learning_rate=0.01, **fixed
    )
    params = numbers()
    (updates,), state = run(tx, params, [numbers(1)])
    assert {"learning_rate", "momentum", "weight_decay", "adam_b1"} <= set(
        state.hyperparams
    )
    assert_close(updates, plain(name)[0])
    state.hyperparams["learning_rate"] = jnp.asarray(0.02)
    (updates,), _ = run(tx, params, [numbers(2)], state)
    assert_close(updates, jax.tree.map(lambda u: 2 * u, plain(name)[1]), atol=2e-6)


@every_family
def test_injected_schedules_keep_the_state_and_the_updates(name):
    tx, params = (
        inject(cases.ONE_RATE[name])(optax.linear_schedule(0.01, 0.0, 10)),
        numbers(),
    )
    state = tx.init(params)
    assert describe(jax.eval_shape(tx.update, params, state, params)) == describe(
        (params, state)
    )


@cases.rows(
    "factory argument value",
    *(
        (npo.normpre_l, name, 4)
        for name in ("rank", "oversample", "power_iterations", "seed")
    ),
    (npo.muon, "ns_steps", 5),
    (npo.mano, "version", 1),
)
def test_a_traced_argument_that_must_be_static_is_named_with_the_fix(
    factory, argument, value
):
    tx = optax.inject_hyperparams(
        factory, static_args=npo.static_args(factory) - {argument}
    )
    with pytest.raises((TypeError, ValueError), match=f"(?s){argument}.*static_args"):
        tx(learning_rate=0.01, **{argument: value}).init(numbers())


@every_family
def test_dtypes_reach_the_products_and_the_momentum(name):
    factory, params = cases.ONE_RATE[name], numbers()["mlp"]["up"]
    options = inspect.signature(factory).parameters
    for option in {"compute_dtype", "mu_dtype"} & options.keys():
        tx = factory(0.01, **{option: jnp.bfloat16})
        state = jax.eval_shape(tx.init, params)
        assert "bf16[" in str(jax.make_jaxpr(tx.update)(params, state, params))
        assert {x.shape for x in jax.tree.leaves(state) if x.dtype == jnp.bfloat16} == (
            {(6,), (4, 6)} if option == "mu_dtype" else set()
        )


# Programs.


@pytest.mark.parametrize(
    ("name", "decomposes"), [("normpre_g", False), ("normpre_l-exact", True)]
)
def test_reverse_mode_goes_through_an_update(name, decomposes):
    """Traced, through every loop over matrices; LAPACK calls, one at a time on a CPU,
    have no reverse mode.
    """
    tx, params = optimizer(name), numbers()

    def size(grads):
        return optax.tree.norm(cases.first_update(tx, grads, params))

    if decomposes:
        jax.eval_shape(lambda grads: jax.jvp(size, (grads,), (grads,)), params)
    else:
        assert describe(jax.eval_shape(jax.grad(size), params)) == describe(params)


@representatives
def test_step_counters_end_at_the_largest_int32(name):
    """They stay there, and updates stay finite."""
    tx, params, most = optimizer(name), numbers(), 2**31 - 1
    state = jax.tree.map(
        lambda x: x if x.ndim else jnp.full_like(x, most - 1), tx.init(params)
    )
    updates, state = run(tx, params, [numbers(1)] * 2, state)
    assert {int(x) for x in jax.tree.leaves(state) if not x.ndim} == {most}
    assert all(np.all(np.isfinite(u)) for u in jax.tree.leaves(updates))


def test_a_resumed_run_draws_what_the_uninterrupted_one_would_have_drawn():
    tx, again = (cases.make("normpre_l-small", 0.01) for _ in range(2))
    params, gradients = (
        numbers()["layers"],
        [numbers(step)["layers"] for step in range(1, 5)],
    )
    expected, _ = run(tx, params, gradients)
    _, state = run(tx, params, gradients[:2])
    restored = jax.tree.map(
        lambda x: jnp.asarray(np.asarray(x)), state
    )  # as a checkpoint would give it back
    jax.tree.map(
        np.testing.assert_array_equal,
        run(again, params, gradients[2:], restored)[0],
        expected[2:],
    )


# Trees.


@pytest.mark.parametrize("name", ["normpre_l-small", "muon-hyperball"])
def test_holes_and_empty_trees(name):
    tx = optimizer(name)
    params, grads = (
        {**numbers(seed), "hole": None, "holes": {"a": None}, "number": 1.0}
        for seed in (0, 1)
    )
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
        assert describe(
            jax.eval_shape(lambda p: cases.first_update(tx, p, p), part)
        ) == describe(part)


@pytest.mark.parametrize("name", ["normpre_g", "muon-hyperball"])
def test_a_callable_tree_of_parameters_is_a_tree(name):
    """Equinox filters a model into a model: its parameters, and masks of them, are
    callable.
    """
    params = eqx.filter(
        eqx.nn.MLP(4, 2, width_size=0, depth=0, key=jax.random.key(0)),
        eqx.is_inexact_array,
    )
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
    for params in (
        {"norm": {"scale": jnp.ones(4)}},
        {"up": pair},
        {"wte": jnp.ones((9, 4)), "hole": None},
    ):
        with pytest.warns(
            UserWarning, match=r"no parameter is a matrix.*explain\(params\)"
        ) as seen:
            optimizer(name).init(params)
        assert [warning.filename for warning in seen] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for params in (
            numbers(),
            {},
            {"hole": None},
            {"up": jnp.ones((4, 2))},
            {"weight": jnp.ones((4, 2))},
        ):
            optimizer(name).init(params)


@pytest.mark.parametrize("name", cases.FACTORIES)
def test_shapes_without_arrays_are_named_with_eval_shape(name):
    shapes = jax.eval_shape(numbers)
    matrices = {"up": shapes["mlp"]["up"]["kernel"]}
    for init, params in (
        (optimizer(name).init, shapes),
        (npo.scale_by_muon().init, matrices),
    ):
        with pytest.raises(
            TypeError, match=r"ShapeDtypeStruct.* jax\.eval_shape\(tx\.init, params\)"
        ):
            init(params)
        assert jax.tree.leaves(jax.eval_shape(init, params))


INTEGERS = (
    r"'ids' has dtype int32, which has no gradient.*eqx\.filter\(model,"
    r" eqx\.is_inexact_array\)"
)


@every_family
def test_integers_are_named_also_with_gradients_of_float0(name):
    """At init, and at an update whose state comes from elsewhere. AdamW's weight decay
    would change them.
    """
    params = {"up": {"kernel": jnp.ones((4, 6))}, "ids": jnp.arange(3)}
    grads = jax.grad(lambda p: jnp.sum(p["up"]["kernel"]) ** 2, allow_int=True)(params)
    assert grads["ids"].dtype == jax.dtypes.float0
    tx = cases.make(name, 0.01)
    with pytest.raises(TypeError, match=INTEGERS):
        tx.init(params)
    with pytest.raises(TypeError, match=INTEGERS):
        tx.update(grads, {}, params)
    frozen = optax.partition(
        {"train": tx, "none": optax.set_to_zero()}, {"up": "train", "ids": "none"}
    )
    assert jax.eval_shape(frozen.init, params)


class Indexed(eqx.Module):
    linear: eqx.nn.Linear
    ids: jax.Array
    activation: object = jax.nn.relu


@representatives
def test_an_equinox_model_with_integers_or_functions_is_named(name):
    """For parameters that are the arrays of a model, or the whole model, at init and at
    update.
    """
    tx, model = (
        cases.make(name, 0.01),
        Indexed(eqx.nn.Linear(4, 6, key=jax.random.key(0)), jnp.arange(3)),
    )
    grads = eqx.filter_grad(lambda model: jnp.sum(model.linear(jnp.ones(4))))(model)
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    for params in (eqx.filter(model, eqx.is_array), model):
        with pytest.raises(
            TypeError, match=r"eqx\.filter\(model, eqx\.is_inexact_array\)"
        ):
            tx.init(params)
        for given in (
            grads,
            eqx.tree_at(
                lambda model: model.ids,
                grads,
                jnp.zeros(3),
                is_leaf=lambda x: x is None,
            ),
        ):
            with pytest.raises(
                (TypeError, ValueError),
                match=r"eqx\.filter\(model, eqx\.is_inexact_array\)",
            ):
                tx.update(given, state, params)


CALL = r"update\(grads, state, params\)"


def test_gradients_that_do_not_fit_are_named():
    params = {"up": {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}}
    tx, bias = optimizer("normpre_g"), {"bias": jnp.ones(4)}
    state = jax.eval_shape(tx.init, params)
    for grads, said in (
        (
            {"up": {"kernel": jnp.ones((4, 3)), **bias}},
            r"gradients: 'up/kernel' has shape \(4, 3\), expected \S+ \(3, 4\)",
        ),
        (
            {"up": {"kernel": jnp.ones((1, 4)), **bias}},
            r"'up/kernel' has shape \(1, 4\), expected shape \(3, 4\)",
        ),
        (
            {"up": {"kernel": jnp.ones((3, 4))}},
            rf"'up/bias' has nothing, expected shape \(4,\)\. .*{CALL}",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            tx.update(grads, state, params)
    with pytest.raises(ValueError, match=CALL):
        tx.update(state, params, params)


@cases.rows(
    "tx said",
    (npo.normpre_g(0.1), f"(?s){CALL}.*Equinox.*brax"),
    (npo.hyperball(0.1), f"hyperball needs the parameters: call {CALL}"),
    *(
        (stage(), f"(?s){CALL}.*tangent='none'")
        for stage in (npo.scale_by_normpre_g, npo.scale_by_mano)
    ),
    *(
        (stage(), f"(?s){CALL}.*tangent='none'")
        for stage in (npo.project_to_tangent, npo.normalize_tangent)
    ),
    (npo.scale_by_normpre_g(tangent="none"), None),
)
def test_missing_params_are_named(tx, said):
    params = {"kernel": jnp.ones((3, 4))}
    state = tx.init(params)
    with pytest.raises(ValueError, match=said) if said else contextlib.nullcontext():
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
    plain, more = (
        cases.make(name, 0.01, **kwargs).init(numbers()) for kwargs in ({}, options)
    )
    assert jax.tree.structure(plain) == jax.tree.structure(more)


def test_a_state_of_other_parameters_is_named():
    tx, params = npo.muon(0.1), {"dense": jnp.ones((3, 4))}
    with pytest.raises(
        ValueError, match=r"dense' has shape \(3, 5\), expected shape \(3, 4\)"
    ):
        tx.update(params, tx.init({"dense": jnp.ones((3, 5))}), params)


def with_lists(tree):
    """Tuples and named tuples as lists and dicts, as checkpoints without a target
    restore them.
    """
    tree = tree._asdict() if hasattr(tree, "_asdict") else tree
    if isinstance(tree, tuple):
        return [with_lists(x) for x in tree]
    return (
        {key: with_lists(x) for key, x in tree.items()}
        if isinstance(tree, dict)
        else tree
    )


def test_a_state_may_have_other_containers_of_the_same_names():
    """As a checkpoint has that is restored without a target; and gradients and
    parameters of two kinds of dict.
    """
    tx, params = npo.normpre_g(0.1), numbers()
    state = tx.init(params)

    def is_tuple(x):
        return type(x) is tuple

    without_tuples = jax.tree.map(
        lambda x: list(x) if is_tuple(x) else x, state, is_leaf=is_tuple
    )
    expected = tx.update(params, state, params)
    for changed in (with_lists(state), without_tuples):
        assert_close(tx.update(params, changed, params), expected)
        assert jax.tree.structure(
            tx.update(params, changed, params)
        ) == jax.tree.structure(expected)
    frozen = FrozenDict(params)
    for grads, like in ((params, frozen), (frozen, params), (frozen, frozen)):
        updates, _ = tx.update(grads, tx.init(like), like)
        assert jax.tree.structure(updates) == jax.tree.structure(like)


@representatives
@pytest.mark.parametrize("empty", [None, (), {}], ids=str)
def test_empty_places_of_a_state_and_of_gradients_may_be_other_empty_nodes(name, empty):
    """Checkpoints restored without a target have None, flax.serialization has {},
    instead of optax's empty nodes.
    """
    tx, params = optimizer(name), {**numbers(), "hole": None}

    def is_empty(x):
        return isinstance(x, optax.MaskedNode | optax.EmptyState)

    state = jax.tree.map(
        lambda x: empty if is_empty(x) else x, tx.init(params), is_leaf=is_empty
    )
    assert empty is not None or "MaskedNode" not in str(jax.tree.structure(state))
    updates, after = tx.update({**numbers(1), "hole": empty}, state, params)
    assert jax.tree.structure((updates, after)) == jax.tree.structure(
        (params, tx.init(params))
    )
    assert_close({k: updates[k] for k in numbers()}, plain(name)[0])
