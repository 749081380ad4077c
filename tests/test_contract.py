# SPDX-License-Identifier: Apache-2.0
"""The contract that every public optimizer keeps with optax and JAX: one table of optimizers, one table of promises.

Most call `update` outside `jit`, where an optimizer compiles itself and a wrapper around it shares the program;
compiled and uncompiled updates are held to be equal once for each.
"""

import functools
import inspect
import json
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import normpre_optax as npo
from normpre_optax import finish
from tests import cases, states

FACTORIES = {
    "normpre_g": npo.normpre_g,
    "normpre_l-sketch": functools.partial(npo.normpre_l, rank=1, oversample=1),
    "normpre_l-warm": functools.partial(npo.normpre_l, rank=2, oversample=1, power_iterations=0, warm_start=True),
    "normpre_l-exact": functools.partial(npo.normpre_l, rank=2, method="exact"),
    "normpre_l-products": functools.partial(npo.normpre_l, rank=1, oversample=1, method="products"),
    "normpre": functools.partial(npo.normpre, precondition=optax.identity()),
    "muon-moonlight": npo.muon,
    "muon-keller": functools.partial(npo.muon, convention="keller"),
    "mano-1": npo.mano,
    "mano-2": functools.partial(npo.mano, version=2),
}
FACTORIES |= {
    "rmnp": npo.rmnp,
    "muoneq": functools.partial(npo.muoneq, mode="both"),
    "muon_plus": npo.muon_plus,
    "normuon": npo.normuon,
    "adamuon": npo.adamuon,
    "moga": functools.partial(npo.moga, mode="columns"),
    "swan": npo.swan,
    "dion": functools.partial(npo.dion, rank=2),
    "braked": functools.partial(npo.muon, norm_control="brake", cautious=True),
    "hyperball": functools.partial(npo.normpre_g, norm_control="hyperball", nesterov=True),
    "row_gains": functools.partial(npo.muoneq, norm_control="row_gains"),
}
every_optimizer = pytest.mark.parametrize("name", FACTORIES)
# All optimizers are one stage in one shell, which three of them put to the test: one whose state is momentum alone, one
# that draws and carries thin bases, one with states of both kinds. Every optimizer keeps the promises that its own
# stage could break, of shapes, dtypes and structure (traced, not compiled); NaN, here, `test_family` and
# `test_robustness`.
REPRESENTATIVES = ("normpre_g", "normpre_l-warm", "adamuon")
representatives = pytest.mark.parametrize("name", REPRESENTATIVES)
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}

every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def bare_factory(name):
    """An optimizer's function, and the options with which it stands in the table."""
    factory = FACTORIES[name]
    return (factory.func, factory.keywords) if isinstance(factory, functools.partial) else (factory, {})


@functools.cache
def optimizer(name):
    return FACTORIES[name](0.01)


def numbers(seed=0, dtype="float32"):
    """Two layers of one shape, a stack, vectors."""
    random = np.random.default_rng(seed)
    shapes = {
        "mlp": {"up": {"kernel": (4, 6), "bias": (6,)}, "down": {"kernel": (4, 6), "bias": (6,)}},
        "layers": {"proj": {"kernel": (2, 4, 6), "bias": (2, 6)}},
        "norm": {"scale": (4,)},
    }
    return jax.tree.map(
        lambda shape: jnp.asarray(random.standard_normal(shape), DTYPES[dtype]),
        shapes,
        is_leaf=lambda x: type(x) is tuple,
    )


def describe(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type), tree)


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


def assert_close(a, b, atol=1e-6):
    """Within the rounding of updates of size lr = 0.01: two programs for the same numbers."""
    assert jax.tree.structure(a) == jax.tree.structure(b)

    def check(x, y):
        # One unit in the last place of bfloat16 where two float32 results fall on different sides of a tie.
        rtol = 2**-7 if x.dtype == jnp.bfloat16 else 0
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), atol=atol, rtol=rtol)

    jax.tree.map(check, a, b)


def two_layers(seed=0, dtype="float32"):
    """The part of them that every optimizer runs in one loop: where kinds of parameters are not what is asked."""
    return {"mlp": numbers(seed, dtype)["mlp"]}


def two_steps(name, dtype="float32", numbers=numbers):
    """Updates and states of the bare optimizer."""
    tx, params = optimizer(name), numbers(dtype=dtype)
    state, out = tx.init(params), []
    for step in range(2):
        updates, state = tx.update(numbers(step + 1, dtype), state, params)
        out.append((updates, state))
    return out


@functools.cache
def plain(name, dtype="float32"):
    """What a wrapper must not change."""
    return two_steps(name, dtype)


@every_dtype
@representatives
def test_does_not_recompile_on_later_updates(name, dtype):
    tx, params = optimizer(name), numbers(dtype=dtype)
    updates, state = tx.update(numbers(1, dtype), tx.init(params), params)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finish, "_update_with", None)  # nothing is traced any more
        for i in (2, 3):
            params = optax.apply_updates(params, updates)
            updates, state = tx.update(numbers(i, dtype), state, params)


@pytest.mark.every_platform
@every_optimizer
def test_keeps_the_dtype_of_the_parameters_and_the_shape_of_its_state(name):
    tx, params = optimizer(name), {**numbers(), "layers": numbers(dtype="bfloat16")["layers"]}
    state = tx.init(params)
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    step = functools.partial(tx.update, value=1.0, grad=params, anything=None)
    updates, new_state = jax.eval_shape(step, params, state, params)
    jax.tree.map(lambda u, p: np.testing.assert_equal((u.shape, u.dtype), (p.shape, p.dtype)), updates, params)
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    for new, old in zip(jax.tree.leaves(new_state), jax.tree.leaves(state), strict=True):
        assert (new.shape, new.dtype) == (old.shape, old.dtype)
        # Accumulators are float32 for bfloat16 parameters too; what else there is, counts.
        assert old.dtype in (jnp.float32, jnp.int32)


@representatives
def test_gradients_may_be_of_another_dtype_than_the_parameters(name):
    tx, params = optimizer(name), numbers()
    updates, _ = jax.eval_shape(tx.update, numbers(dtype="bfloat16"), tx.init(params), params)
    assert {u.dtype for u in jax.tree.leaves(updates)} == {jnp.dtype(jnp.float32)}


@every_optimizer
def test_its_state_is_arrays_and_init_is_traceable(name):
    tx, params = optimizer(name), numbers()
    state = tx.init(params)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    assert describe(state) == describe(jax.eval_shape(tx.init, params))
    # But for the last bit of a draw, where a product and a sum may be contracted.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=3e-7), jax.jit(tx.init)(params), state)
    assert describe(tx.init(jax.tree.map(lambda x: x + 1, params))) == describe(state)


@pytest.mark.every_platform
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in REPRESENTATIVES), ("normpre_l-warm", "bfloat16")]
)
def test_compiled_and_uncompiled_updates_are_equal_and_repeatable(name, dtype):
    compiled = two_steps(name, dtype, two_layers)
    assert_equal(compiled, two_steps(name, dtype, two_layers))
    with jax.disable_jit():
        uncompiled = two_steps(name, dtype, two_layers)
    for (updates, state), (found, found_state) in zip(compiled, uncompiled, strict=True):
        assert_close(found, updates)
        assert_close(found_state, state, atol=1e-5)


@pytest.mark.every_platform
@pytest.mark.parametrize("name", ["normpre_g", "normpre_l-sketch", "normpre_l-exact"])
def test_the_optimised_program_computes_the_same(name):
    tx, params, grads = optimizer(name), two_layers(), two_layers(1)
    updates, _ = cases.users_jit(tx.update)(grads, tx.init(params), params)
    assert_close(updates, cases.first_update(tx, grads, params))


def test_a_constant_schedule_is_a_number():
    tx, params = npo.normpre_g(optax.constant_schedule(0.01)), numbers()
    state = tx.init(params)
    for step, (updates, _) in enumerate(plain("normpre_g")):
        found, state = tx.update(numbers(step + 1), state, params)
        assert_close(found, updates)


@representatives
def test_a_schedule_is_read_at_every_step(name):
    tx, params = FACTORIES[name](lambda count: jnp.where(count == 0, 0.01, 0.02)), numbers()
    state = tx.init(params)
    for step, (updates, _) in enumerate(plain(name)):
        found, state = tx.update(numbers(step + 1), state, params)
        assert_close(found, jax.tree.map(lambda u, k=step: u * (k + 1), updates), atol=2e-6)


@pytest.mark.parametrize("injected", [False, True])
@pytest.mark.parametrize("cautious", [False, True])
def test_weight_decay_takes_a_schedule(cautious, injected):
    """Zero gradients leave the decay alone: lr wd(step) of matrices, and another of AdamW's part."""
    factory = optax.inject_hyperparams(npo.rmnp, static_args=npo.static_args(npo.rmnp)) if injected else npo.rmnp
    decay = {"weight_decay": lambda step: 0.5 - 0.1 * step, "adam_weight_decay": lambda step: 0.2 + 0.1 * step}
    tx, params = factory(0.01, cautious=cautious, **decay), {"kernel": jnp.ones((4, 6)), "bias": jnp.ones(6)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = tx.init(params)
    for expected in ((0.5, 0.2), (0.4, 0.3)):
        updates, state = tx.update(zeros, state, params)
        for name, wd in zip(("kernel", "bias"), expected, strict=True):
            np.testing.assert_allclose(updates[name], -0.01 * wd, rtol=1e-6)


@pytest.mark.every_platform
@representatives
def test_sharded_parameters_get_sharded_state_and_it_stays(name):
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("fsdp",))

    def place(x):
        # The last axis over both devices; everything here is divisible by two.
        spec = jax.sharding.PartitionSpec(*(None,) * (x.ndim - 1), "fsdp")
        return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))

    tx, params = optimizer(name), jax.tree.map(place, two_layers())
    state = tx.init(params)
    update = cases.quick_jit(tx.update)
    shardings = []
    for step in range(2):
        updates, state = update(jax.tree.map(place, two_layers(step + 1)), state, params)
        shardings.append(jax.tree.map(lambda x: x.sharding, state))
        assert_close(updates["mlp"], plain(name)[step][0]["mlp"], atol=1e-5)
    assert shardings[0] == shardings[1]
    kernels = [x for x in jax.tree.leaves(state) if x.shape == (4, 6)]
    assert kernels or name == "swan"  # which keeps nothing for matrices
    wanted = params["mlp"]["up"]["kernel"].sharding
    assert all(x.sharding.is_equivalent_to(wanted, x.ndim) for x in kernels)


@representatives
def test_works_in_chain(name):
    tx = optax.chain(optax.clip_by_global_norm(1e9), optimizer(name), optax.scale(2.0))
    params = numbers()
    updates, _ = tx.update(numbers(1), tx.init(params), params)
    assert_close(updates, jax.tree.map(lambda u: 2 * u, plain(name)[0][0]), atol=2e-6)


@representatives
def test_works_in_partition(name):
    labels = {"mlp": "matrix", "layers": "matrix", "norm": "frozen"}
    tx = optax.partition({"matrix": optimizer(name), "frozen": optax.set_to_zero()}, labels)
    params = numbers()
    updates, _ = tx.update(numbers(1), tx.init(params), params)
    expected = plain(name)[0][0]
    assert not np.any(updates["norm"]["scale"])
    for part in ("mlp", "layers"):
        assert_close(updates[part], expected[part])


@representatives
def test_works_in_masked(name):
    mask = {"mlp": {"up": True, "down": False}, "layers": True, "norm": False}
    params, grads = numbers(), numbers(1)
    tx = optax.masked(optimizer(name), mask)
    updates, _ = tx.update(grads, tx.init(params), params)
    expected = plain(name)[0][0]
    assert_close(updates["mlp"]["up"], expected["mlp"]["up"])
    assert_close(updates["layers"], expected["layers"])
    assert_equal(updates["mlp"]["down"], grads["mlp"]["down"])  # optax leaves what is masked out as it is


@representatives
def test_apply_if_finite_skips_what_is_not(name):
    tx, params = optax.apply_if_finite(optimizer(name), max_consecutive_errors=5), numbers()
    bad = numbers(1)
    bad["mlp"]["up"]["kernel"] = bad["mlp"]["up"]["kernel"].at[0, 0].set(jnp.nan)
    state = tx.init(params)
    updates, after_bad = tx.update(bad, state, params)
    assert not any(np.any(np.asarray(u)) for u in jax.tree.leaves(updates))
    assert_equal(after_bad.inner_state, state.inner_state)
    updates, _ = tx.update(numbers(1), after_bad, params)
    assert_close(updates, plain(name)[0][0])


@every_dtype
@representatives
def test_nan_gradients_stay_visible_and_stay_where_they_are(name, dtype):
    tx, params = optimizer(name), numbers(dtype=dtype)
    bad = numbers(1, dtype)
    bad["mlp"]["up"]["kernel"] = bad["mlp"]["up"]["kernel"].at[0, 0].set(jnp.nan)
    bad["layers"]["proj"]["kernel"] = bad["layers"]["proj"]["kernel"].at[1, 0, 0].set(jnp.nan)
    updates, _ = tx.update(bad, tx.init(params), params)
    expected = plain(name, dtype)[0][0]
    assert np.isnan(np.asarray(updates["mlp"]["up"]["kernel"], np.float32)).any()
    assert np.isnan(np.asarray(updates["layers"]["proj"]["kernel"][1], np.float32)).any()
    # The sound layer of the stack and every other leaf do not notice.
    assert_close(updates["layers"]["proj"]["kernel"][0], expected["layers"]["proj"]["kernel"][0])
    assert_close(updates["mlp"]["down"], expected["mlp"]["down"])
    assert_close(updates["norm"], expected["norm"])


@representatives
def test_multisteps_averages_before_the_optimizer(name):
    multi, params = optax.MultiSteps(optimizer(name), every_k_schedule=2), numbers()
    state = multi.init(params)
    updates, state = multi.update(numbers(1), state, params)
    assert not any(np.any(np.asarray(u)) for u in jax.tree.leaves(updates))
    updates, state = multi.update(numbers(1), state, params)  # the mean of two equal ones
    assert_close(updates, plain(name)[0][0])
    assert int(state.gradient_step) == 1


@representatives
def test_hyperparameters_can_be_injected(name):
    factory, fixed = bare_factory(name)
    # optax keeps hyperparameters in the parameters' dtype unless told otherwise; 0.01 in bfloat16 is off by 0.2 %.
    inject = optax.inject_hyperparams(
        factory, static_args=npo.static_args(factory), hyperparam_dtype=jnp.dtype(jnp.float32)
    )
    tx, params = inject(learning_rate=0.01, **fixed), numbers()
    state = tx.init(params)
    wanted = {"learning_rate", "momentum", "weight_decay", "adam_b1"} & inspect.signature(factory).parameters.keys()
    assert wanted <= set(state.hyperparams)
    updates, state = tx.update(numbers(1), state, params)
    (expected, _), (second, _) = plain(name)
    assert_close(updates, expected)
    state.hyperparams["learning_rate"] = jnp.asarray(0.02)
    updates, _ = tx.update(numbers(2), state, params)
    assert_close(updates, jax.tree.map(lambda u: 2 * u, second), atol=2e-6)


def test_eager_updates_with_injected_hyperparameters_compile_once():
    """`inject_hyperparams` makes a new optimizer on every step: those that differ in arrays share what is compiled."""
    inject = optax.inject_hyperparams(npo.rmnp, static_args=npo.static_args(npo.rmnp))
    tx, params = inject(optax.linear_schedule(0.01, 0.0, 10)), numbers()
    state = tx.init(params)
    _, state = tx.update(numbers(1), state, params)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finish, "_update_with", None)  # nothing is traced any more
        updates, state = tx.update(numbers(2), state, params)
    bare = npo.rmnp(optax.linear_schedule(0.01, 0.0, 10))
    _, seen = bare.update(numbers(1), bare.init(params), params)
    assert_close(updates, bare.update(numbers(2), seen, params)[0])


def test_optimizers_share_nothing_that_could_have_changed():
    """A function may close over what has changed since another optimizer was compiled with it."""
    rate, params = {"now": 0.01}, {"w": jnp.eye(2)}

    def first_update():
        tx = npo.rmnp(lambda count: rate["now"], weight_decay=0.0)
        return tx.update(params, tx.init(params), params)[0]["w"]

    before = first_update()
    rate["now"] = 0.02
    np.testing.assert_allclose(first_update(), 2 * before)


def test_extra_arguments_of_any_name_reach_a_compiled_update():
    tx, params = npo.rmnp(0.01), {"w": jnp.eye(2)}
    extra = {"learning_rate": jnp.ones(()), "direction": jnp.ones(3), "options": {}, "value": jnp.zeros(())}
    updates, _ = tx.update(params, tx.init(params), params, **extra)
    plain_updates, _ = tx.update(params, tx.init(params), params)
    np.testing.assert_array_equal(updates["w"], plain_updates["w"])
    for name in ("matrix_layout", "matrix_ids"):
        with pytest.raises(TypeError, match=f"{name} is what as_matrices tells its stages"):
            tx.update(params, tx.init(params), params, **{name: 1})


def test_stages_may_be_given_by_keyword():
    direction = functools.partial(npo.orthogonalized_momentum, before=[npo.normalize_rows()])
    tx, params = npo.hybrid(direction, 0.01), {"w": jnp.eye(2)}
    assert jax.eval_shape(tx.update, params, tx.init(params), params)[0]["w"].shape == (2, 2)


@pytest.mark.parametrize("name", npo.families())
def test_its_direction_stands_alone(name):
    """`scale_by_<name>` is the optimizer without decay, learning rate and AdamW, traced."""
    params = {"up": {"kernel": jnp.zeros((4, 6))}, "layers": {"kernel": jnp.zeros((2, 4, 6), jnp.bfloat16)}}
    tx = optax.chain(getattr(npo, f"scale_by_{name}")(), optax.scale(-1.0))
    state = tx.init(params)
    updates, new_state = jax.eval_shape(tx.update, params, state, params)
    assert describe(updates) == describe(params)
    assert describe(new_state) == describe(state)
    with pytest.raises(ValueError, match=r"'norm/scale'.*optax\.masked"):
        tx.init({"norm": {"scale": jnp.ones(4)}})


@representatives
def test_the_optimizer_is_its_direction_completed(name):
    _, fixed = bare_factory(name)
    direction = getattr(npo, f"scale_by_{name.removesuffix('-warm')}")
    tx, params = npo.hybrid(functools.partial(direction, **fixed), 0.01), numbers()
    assert_equal(tx.update(numbers(1), tx.init(params), params), plain(name)[0])


@every_optimizer
def test_injected_schedules_compile_once(name):
    factory, fixed = bare_factory(name)
    inject = optax.inject_hyperparams(factory, static_args=npo.static_args(factory))
    tx, params = inject(learning_rate=optax.linear_schedule(0.01, 0.0, 10), **fixed), numbers()
    state = tx.init(params)
    updates, new_state = jax.eval_shape(tx.update, params, state, params)
    assert describe(state) == describe(new_state)
    assert describe(updates) == describe(params)


@pytest.mark.parametrize(
    ("factory", "argument", "value"),
    [
        (npo.normpre_l, "rank", 4),
        (npo.normpre_l, "oversample", 4),
        (npo.normpre_l, "power_iterations", 1),
        (npo.normpre_l, "seed", 1),
        (npo.normpre_g, "ns_steps", 5),
        (npo.muon, "ns_steps", 5),
        (npo.mano, "version", 1),
        (npo.muoneq, "ns_steps", 5),
        (npo.swan, "whitening_steps", 6),
        (npo.dion, "rank", 4),
        (npo.dion, "seed", 1),
    ],
)
def test_a_traced_argument_that_shapes_the_computation_is_named(factory, argument, value):
    tx = optax.inject_hyperparams(factory, static_args=npo.static_args(factory) - {argument})
    with pytest.raises((TypeError, ValueError), match=argument):
        tx(learning_rate=0.01, **{argument: value}).init(numbers())


def stacked(*trees):
    return jax.tree.map(lambda *xs: jnp.stack(xs), *trees)


@pytest.mark.every_platform
@representatives
def test_vmap_runs_independent_optimizers(name):
    tx, both = optimizer(name), stacked(two_layers(0), two_layers(5))
    state = jax.vmap(tx.init)(both)
    updates, _ = cases.quick_jit(jax.vmap(tx.update))(stacked(two_layers(1), two_layers(6)), state, both)
    for i, (p, g) in enumerate(((0, 1), (5, 6))):
        alone, _ = tx.update(two_layers(g), tx.init(two_layers()), two_layers(p))
        assert_close(jax.tree.map(lambda u, i=i: u[i], updates), alone)


def scan(tx, params):
    def step(state, gradient):
        updates, state = tx.update(gradient, state, params)
        return state, updates

    return lambda state, gradients: jax.lax.scan(step, state, gradients)


@pytest.mark.every_platform
@representatives
def test_scan_over_steps_is_the_loop(name):
    tx, params = optimizer(name), numbers()
    _, updates = cases.quick_jit(scan(tx, params))(tx.init(params), stacked(numbers(1), numbers(2)))
    for i, (expected, _) in enumerate(plain(name)):
        assert_close(jax.tree.map(lambda u, i=i: u[i], updates), expected)


@representatives
def test_vmap_and_scan_keep_bfloat16(name):
    """Traced only: a state or an update whose dtype drifted would be refused by scan, or seen in the result."""
    tx, params = optimizer(name), numbers(dtype="bfloat16")
    gradients = stacked(params, params)
    _, updates = jax.eval_shape(scan(tx, params), tx.init(params), gradients)
    assert describe(updates) == describe(gradients)
    state = jax.vmap(tx.init)(gradients)
    updates, new_state = jax.eval_shape(jax.vmap(tx.update), gradients, state, gradients)
    assert describe(updates) == describe(gradients)
    assert describe(new_state) == describe(state)


@pytest.mark.parametrize(
    ("name", "decomposes"),
    [
        ("normpre_g", False),
        pytest.param("normpre_l-products", False, marks=pytest.mark.slow),
        ("muon-moonlight", False),
        ("normpre_l-exact", True),
    ],
)
def test_reverse_mode_goes_through_an_update_that_decomposes_nothing(name, decomposes):
    """Traced, through every loop that runs matrices in turn; forward mode, a part of it, goes through all."""
    tx, params = optimizer(name), numbers()

    def size(grads):
        return sum(jnp.sum(u**2) for u in jax.tree.leaves(tx.update(grads, tx.init(params), params)[0]))

    if decomposes:
        jax.eval_shape(lambda grads: jax.jvp(size, (grads,), (grads,)), numbers(1))
        with pytest.raises(ValueError, match="reverse-mode"):
            jax.eval_shape(jax.grad(size), numbers(1))
    else:
        assert describe(jax.eval_shape(jax.grad(size), numbers(1))) == describe(params)


@representatives
def test_parameters_and_state_can_be_donated(name):
    tx = optimizer(name)

    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    kept, donated = cases.quick_jit(step), cases.quick_jit(step, donate_argnums=(1, 2))
    params, other = two_layers(), two_layers()
    state, other_state = tx.init(params), tx.init(other)
    for i in range(3):
        given = jax.tree.leaves((other, other_state))
        params, state = kept(two_layers(i + 1), state, params)
        other, other_state = donated(two_layers(i + 1), other_state, other)
        assert all(x.is_deleted() for x in given if x.ndim)
    assert_equal(params, other)


@pytest.mark.parametrize("name", states.OPTIONS)
@pytest.mark.parametrize("version", ["0.1.0"])
def test_a_state_that_a_version_has_saved_fits(name, version):
    """The same arrays under the same paths; checkpoints are restored by them."""
    saved = json.loads((Path(__file__).parent / f"states_{version}.json").read_text())
    assert states.leaves(name) == saved[name]


@every_optimizer
def test_map_params_finds_the_accumulators(name):
    tx, params = optimizer(name), numbers()
    state = tx.init(params)
    marked = optax.tree.map_params(
        tx, lambda leaf: jnp.full_like(leaf, 7), state, transform_non_params=lambda leaf: leaf
    )
    assert jax.tree.structure(marked) == jax.tree.structure(state)
    for new, old in zip(jax.tree.leaves(marked), jax.tree.leaves(state), strict=True):
        assert (new.shape, new.dtype) == (old.shape, old.dtype)
        assert bool(jnp.all(new == 7)) == (old.ndim > 0)  # every array is a parameter's; scalars count steps


@every_optimizer
def test_missing_parameters_are_named_with_the_way_out(name):
    tx, params = optimizer(name), numbers()
    with pytest.raises(ValueError, match=r"(?s)update\(grads, state, params\).*Equinox.*brax"):
        tx.update(params, tx.init(params))


def test_the_direction_alone_names_missing_parameters_too():
    tx = npo.scale_by_normpre(npo.precondition_globally())
    params = {"kernel": jnp.ones((3, 4))}
    with pytest.raises(ValueError, match=r"(?s)update\(grads, state, params\).*tangent='none'"):
        tx.update(params, tx.init(params))
    free = npo.scale_by_normpre(npo.precondition_globally(), tangent="none")
    assert jax.eval_shape(free.update, params, free.init(params))[0]["kernel"].shape == (3, 4)


@representatives
def test_trees_with_holes_and_empty_trees(name):
    tx = optimizer(name)
    params = {**numbers(), "hole": None, "holes": {"a": None}}
    grads = {**numbers(1), "hole": None, "holes": {"a": None}}
    updates, _ = tx.update(grads, tx.init(params), params)
    assert updates["hole"] is None
    assert_close({k: updates[k] for k in numbers()}, plain(name)[0][0])
    for empty in ({}, {"only": None}):
        updates, _ = tx.update(empty, tx.init(empty), empty)
        assert updates == empty


@representatives
@pytest.mark.parametrize("leaves", ["matrices", "vectors"])
def test_trees_of_one_kind_of_leaf(name, leaves):
    tx = optimizer(name)
    if leaves == "matrices":
        params = {"mlp": {"up": {"kernel": numbers()["mlp"]["up"]["kernel"]}}}
    else:
        params = {"norm": numbers()["norm"]}
    updates, _ = tx.update(params, tx.init(params), params)
    assert all(np.isfinite(u).all() for u in jax.tree.leaves(updates))
    assert jax.tree.structure(updates) == jax.tree.structure(params)


TARGET = {"w": {"kernel": jnp.array([[1.0, 0.0], [-1.0, 1.0]]), "bias": jnp.array([0.5, -0.5])}}


def minimise(tx, start, target, steps=300):
    def distance(params):
        return sum(jnp.sum((a - b) ** 2) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(target), strict=True))

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(jax.grad(distance)(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = cases.quick_jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), length=steps))(start)
    return params


# MANO's projection and SWAN's centred rows keep them from this optimum.
CONVERGENT = [name for name in FACTORIES if not name.startswith(("mano", "swan", "hyperball"))]


@pytest.mark.parametrize("name", CONVERGENT)
def test_converges_on_a_quadratic(name):
    """optax's own contract problem. Its optimum has rows longer than one, which the published tangent cannot fit."""
    kwargs = {"tangent": "none"} if name.startswith("normpre") else {}
    tx = FACTORIES[name](optax.cosine_decay_schedule(0.1, 300), weight_decay=0.0, momentum=0.9, **kwargs)
    got = minimise(tx, jax.tree.map(lambda x: 0.5 * jnp.ones_like(x), TARGET), TARGET)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.02), got, TARGET)


@pytest.mark.parametrize("name", ["normpre_g", "normpre"])
def test_the_published_tangent_stops_at_unit_rows(name):
    """What the documentation says of the paper's method: a row whose optimum is longer than one stops at one."""
    target = {"kernel": jnp.array([[1.0, 0.0], [-1.0, 0.5]])}  # output neurons are columns: (1, -1) and (0, 0.5)
    tx = FACTORIES[name](optax.cosine_decay_schedule(0.1, 300), weight_decay=0.0, orientation="rows", momentum=0.9)
    got = minimise(tx, {"kernel": 0.5 * jnp.ones((2, 2))}, target)["kernel"]
    np.testing.assert_allclose(got[:, 0], [0.7071, -0.7071], atol=0.03)
    np.testing.assert_allclose(got[:, 1], [0.0, 0.5], atol=0.03)


@pytest.mark.parametrize("version", [1, 2])
def test_mano_goes_downhill(version):
    """Its projection keeps it from most optima; half of the loss must go all the same."""
    target = jax.tree.map(lambda x: 0.5 * x, TARGET)
    tx = npo.mano(optax.cosine_decay_schedule(0.1, 300), version=version, weight_decay=0.0)
    start = jax.tree.map(lambda x: 0.5 * jnp.ones_like(x), TARGET)
    got = minimise(tx, start, target)

    def distance(params):
        return float(jnp.sum((params["w"]["kernel"] - target["w"]["kernel"]) ** 2))

    assert distance(got) < 0.5 * distance(start)
    np.testing.assert_allclose(got["w"]["bias"], target["w"]["bias"], atol=0.02)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: npo.normpre_g(None), "learning_rate"),
        (lambda: npo.normpre_g("1e-3"), "learning_rate"),
        (lambda: npo.normpre_g(1e-3, adam_learning_rate="1e-3"), "adam_learning_rate"),
        (lambda: npo.muon(1e-3, weight_decay=None), "weight_decay"),
        (lambda: npo.normpre_g(1e-3, mu_dtype="int8"), "mu_dtype"),
        (lambda: npo.mano(1e-3, mu_dtype="bf16"), "mu_dtype"),
        (lambda: npo.normpre_l(1e-3, compute_dtype="bf16"), "compute_dtype"),
        (lambda: npo.normpre_g(1e-3, compute_dtype=jnp.int32), "compute_dtype"),
        (lambda: npo.mano(1e-3, compute_dtype="bf16"), "compute_dtype"),
        (lambda: npo.normpre(1e-3, lambda x: x), "precondition"),
        (lambda: npo.scale_by_normpre(None), "precondition"),
        (lambda: npo.scale_by_normpre(npo.precondition_globally(), mu_dtype="int8"), "mu_dtype"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_named_at_construction(make, named):
    with pytest.raises(TypeError, match=f"^{named} must be"):
        make()


@every_optimizer
def test_gradients_that_do_not_fit_the_parameters_are_named(name):
    tx, params = optimizer(name), {"up": {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}}
    state = tx.init(params)
    for shape in ((4, 3), (1, 4)):  # transposed, and one that would broadcast
        grads = {"up": {"kernel": jnp.ones(shape), "bias": jnp.ones(4)}}
        with pytest.raises(ValueError, match=r"'up/kernel' has shape \(., .\), the parameter \(3, 4\)"):
            tx.update(grads, state, params)
    with pytest.raises(ValueError, match=r"'up/bias'.*update\(grads, state, params\)"):
        tx.update({"up": {"kernel": jnp.ones((3, 4))}}, state, params)
    with pytest.raises(ValueError, match=r"update\(grads, state, params\)"):
        tx.update(state, params, params)


@representatives
def test_numbers_of_python_are_parameters_too(name):
    tx, params = optimizer(name), {"kernel": jnp.ones((3, 4)), "scale": 1.0}
    updates, _ = cases.quick_jit(tx.update)(params, tx.init(params), params)
    assert updates["scale"].shape == ()


@pytest.mark.parametrize(
    ("dtype", "orientation"),
    [
        (jnp.bfloat16, "alternating"),
        (jnp.float16, "rows"),
        pytest.param(jnp.bfloat16, "rows", marks=pytest.mark.thorough),
        pytest.param(jnp.float16, "alternating", marks=pytest.mark.thorough),
    ],
)
def test_the_sketch_in_half_precision_runs_everywhere_a_product_may_stand(dtype, orientation):
    params = {"kernel": jnp.asarray(np.random.default_rng(0).standard_normal((24, 16)), jnp.float32)}
    updates = {}
    for compute_dtype in (dtype, None):
        tx = npo.normpre_l(1.0, rank=4, compute_dtype=compute_dtype, orientation=orientation, weight_decay=0.0)
        updates[compute_dtype] = tx.update(params, tx.init(params), params)[0]["kernel"]
    error = jnp.linalg.norm(updates[dtype] - updates[None]) / jnp.linalg.norm(updates[None])
    # bfloat16 rounds to 2^-9 and float16 to 2^-12, a handful of times, before a basis of condition ten or so.
    assert 1e-5 < error < 0.05


@representatives
def test_a_tree_of_parameters_that_can_be_called_is_no_function(name):
    """Equinox filters a model into a model: its parameters, and masks made of them, are callable."""
    model = eqx.nn.MLP(4, 2, width_size=0, depth=0, key=jax.random.key(0))
    params = eqx.filter(model, eqx.is_inexact_array)
    assert callable(params)

    def layer(decay, mask):
        tx = FACTORIES[name](0.1, weight_decay=decay, weight_decay_mask=mask)
        return cases.first_update(tx, params, params).layers[0]

    decays = lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)  # noqa: E731
    still = layer(0.0, None)
    for mask in (decays, decays(params)):
        decayed = layer(0.5, mask)
        np.testing.assert_array_equal(decayed.bias, still.bias)
        assert jnp.any(decayed.weight != still.weight)


@pytest.mark.parametrize("factory", [npo.normpre_g, npo.normpre_l, npo.muon, npo.mano])
def test_compute_dtype_reaches_the_matrices(factory):
    params, grads = numbers(0)["mlp"]["up"], numbers(1)["mlp"]["up"]
    found = []
    for dtype in (None, jnp.bfloat16):
        tx = factory(1.0, compute_dtype=dtype, weight_decay=0.0)
        found.append(np.asarray(tx.update(grads, tx.init(params), params)[0]["kernel"]))
    difference = np.linalg.norm(found[0] - found[1]) / np.linalg.norm(found[0])
    assert 1e-4 < difference < 0.1  # bfloat16 rounds to 4e-3


def test_compute_dtype_reaches_a_stage_of_ones_own():
    seen = []
    stage = optax.stateless(lambda updates, params=None: jax.tree.map(lambda x: seen.append(x.dtype) or x, updates))
    params = {"kernel": jnp.ones((2, 3))}
    tx = npo.scale_by_normpre(stage, compute_dtype=jnp.bfloat16)
    updates, _ = jax.eval_shape(tx.update, params, tx.init(params), params)
    assert set(seen) == {jnp.dtype(jnp.bfloat16)}
    assert updates["kernel"].dtype == jnp.float32
