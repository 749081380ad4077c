# SPDX-License-Identifier: Apache-2.0
"""The schedule, the step, the optimizers by name, evaluation and generation."""

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import examples
import normpre_optax
from examples.pretrain import models, optimizers, train
from examples.pretrain.commands import Trained, continuation
from examples.pretrain.config import Config, ModelConfig, RunError
from examples.pretrain.data import PADDING
from examples.pretrain.evaluate import EVALUATION_BATCH, make_evaluate
from examples.pretrain.mesh import by_name, make_layout
from examples.pretrain.prepare.tokenizer import end_of_text
from tests import cases
from tests.test_imports import imports

MODEL = ModelConfig(layers=1, width=16, heads=2, mlp_width=32, context=8)
VOCABULARY = 32
MATRICES = (
    "attention/key",
    "attention/out",
    "attention/query",
    "attention/value",
    "mlp/down",
    "mlp/gate",
    "mlp/up",
)


@functools.cache
def model_and_params():
    float32 = jnp.dtype("float32")
    model = models.build(MODEL, VOCABULARY, dtype=float32, seed=0)
    graphdef, variables = nnx.split(model)
    return graphdef, nnx.to_pure_dict(variables)


def batch(rows: int, seed: int = 0) -> np.ndarray:
    draw = np.random.default_rng(seed)
    size = (rows, MODEL.context + 1)
    return draw.integers(VOCABULARY, size=size, dtype=np.int32)


def optimizer_of(
    name: str, rate: float, **settings
) -> optax.GradientTransformationExtraArgs:
    config = dataclasses.replace(Config(), optimizer=name, **settings)
    return optimizers.make_optimizer(config, lambda t: rate)


def named(tree) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in by_name(tree).items()}


# A warm-up that would not end before the steps is a tenth of them.
@cases.rows(
    "asked steps warmup",
    (0, 2, 0),
    (10, 101, 10),
    (80, 80, 8),
    (80, 3, 0),
)
def test_schedule(asked, steps, warmup):
    config = dataclasses.replace(
        Config(), learning_rate=2.0, warmup_steps=asked, steps=steps
    )
    rate = train.schedule(config)
    values = np.asarray(rate(np.arange(steps)))
    rising = 2.0 * np.arange(1, warmup + 1) / (warmup + 1)
    done = np.arange(steps - warmup) / (steps - 1 - warmup)
    falling = 0.2 + 0.9 * (1 + np.cos(np.pi * done))
    # float32: a cosine and three products, each within 6e-8 of values up to 2.
    np.testing.assert_allclose(values[:warmup], rising, rtol=1e-6)
    np.testing.assert_allclose(values[warmup], 2.0, rtol=1e-6)
    np.testing.assert_allclose(values[-1], 0.2, rtol=1e-6)
    np.testing.assert_allclose(values[warmup:], falling, rtol=2e-6)
    np.testing.assert_allclose(rate(steps + 50), 0.2, rtol=1e-6)
    assert rate(jnp.int32(0)).dtype == jnp.float32


def test_gains_do_not_decay_and_the_adamw_group_may_have_its_own_learning_rate():
    params = {
        "up": {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)},
        "wte": {"embedding": jnp.ones((5, 3))},
    }
    zero = jax.tree.map(jnp.zeros_like, params)
    settings = {"weight_decay": 0.5, "learning_rate": 1.0, "adam_learning_rate": 0.5}
    for name in ("adamw", "normpre_g"):
        tx = optimizer_of(name, 1.0, **settings)
        updates, _ = tx.update(zero, tx.init(params), params)
        np.testing.assert_allclose(updates["up"]["kernel"], -0.5, err_msg=name)
        np.testing.assert_allclose(updates["up"]["bias"], 0, err_msg=name)
        np.testing.assert_allclose(updates["wte"]["embedding"], -0.25, err_msg=name)


@cases.rows(
    "name control rate form",
    ("adamw", "none", 0.25, {}),
    (
        "normpre_g",
        "none",
        0.5,
        {"family": "gpt2", "bias": True, "scan_layers": True, "layers": 2},
    ),
    ("muon", "hyperball", 1.0, {}),
    ("normuon", "none", 1.0, {}),
)
def test_learning_rates_by_width(name, control, rate, form):
    model = dataclasses.replace(MODEL, **form)
    name = f"{name},norm_control={control}"
    config = dataclasses.replace(
        Config(), optimizer=name, base_width=MODEL.width // 4, model=model
    )
    params = models.shapes(model, VOCABULARY)
    optimizer = optimizers.make_optimizer(config, lambda t: 1.0)
    jax.eval_shape(lambda p: optimizer.update(p, optimizer.init(p), p), params)
    multipliers = optimizers.learning_rate_multipliers(config)(params)
    for path, value in by_name(multipliers).items():
        expected = 1.0
        if path.startswith("blocks/") and path.endswith("/kernel"):
            expected = rate
        np.testing.assert_allclose(value, expected, err_msg=path)


# Values of options that the name of an optimizer may set.
SETTINGS = {
    "momentum": 0.5,
    "ns_steps": 3,
    "rank": 7,
    "tangent": "none",
    "rms": 0.3,
    "method": "products",
    "convention": "keller",
    "compute_dtype": "bfloat16",
    "nesterov": True,
}
# Values of options that have flags of their own.
SHARED = {"seed": 4, "adam_b2": 0.9, "weight_decay": 0.2}
every_optimizer = pytest.mark.parametrize("name", sorted(optimizers.OPTIMIZERS))


def accepted(name: str) -> Mapping[str, inspect.Parameter]:
    """The options of an optimizer."""
    return inspect.signature(optimizers.OPTIMIZERS[name]).parameters


MODES = [name for name in sorted(optimizers.OPTIMIZERS) if "mode" in accepted(name)]


def settings_of(name: str) -> dict:
    """The ``SETTINGS`` that an optimizer has, and its last mode."""
    options = accepted(name)
    found = {key: value for key, value in SETTINGS.items() if key in options}
    if "mode" in options:
        found["mode"] = get_args(options["mode"].annotation)[-1]
    return found


@pytest.fixture
def given(name, monkeypatch) -> dict:
    """What the optimizer ``name`` was last called with."""
    factory = optimizers.OPTIMIZERS[name]
    given = {}

    @functools.wraps(factory)
    def recorded(learning_rate, **settings):
        given.clear()
        given.update(settings, learning_rate=learning_rate)
        return factory(learning_rate, **settings)

    monkeypatch.setitem(optimizers.OPTIMIZERS, name, recorded)
    return given


@every_optimizer
def test_settings_reach_the_optimizer_that_has_them(name, given):
    settings = settings_of(name)
    words = [f"{key}={value}" for key, value in settings.items()]
    text = ",".join([name, *words])
    optimizer_of(text, 2.0, learning_rate=2.0, adam_learning_rate=1.0, **SHARED)
    shared = {key: value for key, value in SHARED.items() if key in accepted(name)}
    expected = settings | shared
    assert {key: given[key] for key in expected} == expected
    assert given.keys() <= accepted(name).keys()
    assert given["learning_rate"](0) == 2.0
    assert given["adam_learning_rate"](0) == 1.0


@every_optimizer
def test_without_settings_an_optimizer_has_its_defaults(name, given):
    optimizer_of(name, 1.0)
    for key in settings_of(name):
        assert given[key] == accepted(name)[key].default


@pytest.mark.parametrize("name", MODES)
def test_a_mode_that_an_optimizer_does_not_have_is_refused(name):
    text = f"{name},mode=rows_first"
    message = f"--optimizer {text}: mode='rows_first' is not one of"
    with pytest.raises(RunError, match=message):
        optimizer_of(text, 1.0)


@pytest.mark.parametrize(("largest", "norm"), [(0.25, 0.25), (1e9, 1e3 * 12**0.5)])
def test_gradients_are_clipped_before_the_optimizer(largest, norm):
    gradient = {"w": jnp.full((3, 4), 1e3)}
    optimizer = optimizer_of("adamw", 1.0, weight_decay=0.0, clip_norm=largest)
    _, state = optimizer.update(gradient, optimizer.init(gradient), gradient)
    # AdamW's first moment is 0.1 of the gradient it has seen; two float32 roundings of
    # 6e-8.
    moment = optax.tree.get(state[1].inner_states["matrix"], "mu")["w"]
    np.testing.assert_allclose(np.linalg.norm(moment), 0.1 * norm, rtol=1e-6)


def test_norms_see_output_neurons_as_rows():
    kernel = jnp.ones((4, 2)).at[:, 1].set(0.25)
    params = {
        "blocks": {"0": {"mlp": {"up": {"kernel": kernel}}}},
        "tokens": {"embedding": 9 * jnp.ones((3, 4))},
    }
    norms = optimizers.norms(params)
    found = {name: round(float(value), 6) for name, value in norms.items()}
    column = round(17**0.5 / 4, 6)
    assert found == {
        "row_norm": 1.25,
        "rows_beyond_1": 0.5,
        "row_norm/mlp/up": 1.25,
        "column_norm": column,
        "columns_beyond_1": 1.0,
        "column_norm/mlp/up": column,
    }


def test_accumulated_gradients_are_those_of_the_whole_batch():
    graphdef, params = model_and_params()
    optimizer = optax.with_extra_args_support(optax.sgd(1.0))
    # Sequences of different lengths: every prediction counts the same.
    tokens = batch(8)
    tokens[1, 3:] = PADDING
    tokens[6, 1:] = PADDING

    def after_a_step(parts):
        """The state, loss and gradient norm, and the step itself."""
        step = train.make_train_step(graphdef, optimizer, parts)
        copy = jax.tree.map(jnp.copy, params)
        given = train.TrainState(copy, optimizer.init(params))
        state, metrics = step(given, tokens)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(copy))
        return state, float(metrics.loss), float(metrics.grad_norm), step

    whole, loss, norm, _ = after_a_step(parts=1)
    summed, summed_loss, summed_norm, step = after_a_step(parts=4)
    found = named(summed.params)
    # Sums of some 50 float32 terms in another order; gradients are below 1.
    assert summed_loss == pytest.approx(loss, rel=1e-6)
    assert summed_norm == pytest.approx(norm, rel=1e-5)
    for path, leaf in named(whole.params).items():
        np.testing.assert_allclose(found[path], leaf, atol=1e-6, err_msg=path)
    step(summed, tokens)
    assert step._cache_size() == 1


@pytest.mark.parametrize("count", [1, EVALUATION_BATCH + 5])
def test_evaluate_is_the_mean_over_every_prediction(count):
    graphdef, params = model_and_params()
    sequences = batch(count, seed=count)
    sequences[0, 4:] = PADDING
    lengths = np.random.default_rng(0).integers(1, 9, size=VOCABULARY)
    score = make_evaluate(graphdef, sequences, lengths, make_layout())(params)

    @jax.jit
    def logits_of(tokens):
        return nnx.merge(graphdef, params)(tokens)

    inputs = np.maximum(sequences[:, :-1], 0)
    targets = sequences[:, 1:]
    counted = targets >= 0
    logits = np.asarray(logits_of(inputs), np.float64)[counted]
    predicted = targets[counted]
    of_targets = logits[np.arange(len(predicted)), predicted]
    losses = np.log(np.exp(logits).sum(-1)) - of_targets
    # float32 logits of size 0.1 and losses near 3.5: some 6e-8 x 3.5 each, less in the
    # mean.
    assert score.loss == pytest.approx(losses.mean(), rel=1e-6)
    bits = losses.sum() / np.log(2)
    text_bytes = lengths[predicted].sum()
    assert score.bits_per_byte == pytest.approx(bits / text_bytes, rel=1e-6)


def table_of(optimizer: str) -> tuple[list[str], str]:
    """The matrices of the table of parameters, and the line of totals."""
    _, params = model_and_params()
    config = dataclasses.replace(Config(), optimizer=optimizer)
    table, totals = optimizers.parameter_table(params, config)
    rows = [line.split() for line in table.splitlines() if "  matrix  " in line]
    return [path for path, *_ in rows], totals


def kernels(*names: str) -> list[str]:
    return [f"blocks/0/{name}/kernel" for name in names]


SOME = "attention/out+mlp"
SOME_KERNELS = kernels("attention/out", "mlp/down", "mlp/gate", "mlp/up")


def test_the_table_of_parameters():
    matrices, totals = table_of(Config().optimizer)
    assert matrices == kernels(*MATRICES)
    assert "\n" not in totals
    assert "7 matrices" in totals
    _, totals = table_of("adamw")
    assert "every parameter" in totals
    matrices, _ = table_of(f"normpre_g,layers={SOME}")
    assert matrices == SOME_KERNELS


def test_updates_of_some_layers_only():
    _, params = model_and_params()
    grads = jax.tree.map(jnp.ones_like, params)

    def updates_of(name: str) -> dict[str, np.ndarray]:
        tx = optimizer_of(name, 0.1, clip_norm=1e9)
        updates, _ = tx.update(grads, tx.init(params), params)
        return named(updates)

    some = updates_of(f"mano,layers={SOME}")
    matrix = updates_of("mano")
    expected = updates_of("adamw")
    for name in SOME_KERNELS:
        expected[name] = matrix[name]
    for name, update in some.items():
        # In a smaller stack, or the same formula in two programs: a few roundings of
        # numbers up to 0.1.
        np.testing.assert_allclose(update, expected[name], atol=1e-6)


def test_layers_that_no_path_has_are_refused():
    _, params = model_and_params()
    with pytest.raises(RunError, match=r"layers=mlpp is in no hidden matrix's path"):
        optimizer_of("normpre_g,layers=mlpp", 0.1).init(params)


class Successor(nnx.Module):
    """Predicts token + 1, from the third position on token ``end`` if there is one."""

    def __init__(self, end: int | None = None):
        self.end = end

    def __call__(self, tokens):
        following = tokens + 1
        if self.end is not None:
            first_two = jnp.arange(tokens.shape[1]) < 2
            following = jnp.where(first_two, following, self.end)
        return 50.0 * jax.nn.one_hot(following, 512)


# A window that fills up on the way, a prompt longer than it, greedy and drawn.
@pytest.mark.parametrize(
    ("prompt", "temperature"),
    [("x", 0.7), ("a longer prompt than the context holds", 0.0)],
)
def test_generate_feeds_the_model_its_own_tokens(dataset, prompt, temperature):
    tokenizer = dataset.tokenizer
    graphdef, _ = nnx.split(Successor())
    model = Trained(Config(model=MODEL), dataset, graphdef, {}, 0)
    start = tokenizer.encode(prompt).ids[-1]
    text = continuation(model, prompt, new_tokens=20, temperature=temperature, seed=0)
    assert text == prompt + tokenizer.decode(list(range(start + 1, start + 21)))


@pytest.mark.parametrize("name", [None, "<|endoftext|>", "q"])
def test_generate_stops_at_the_end_of_a_text(dataset, name):
    """The token that ends it is the manifest's; older ones have none."""
    tokenizer = dataset.tokenizer
    graphdef, _ = nnx.split(Successor(end_of_text(tokenizer, name)))
    manifest = dataset.manifest | {"end_token": name}
    dataset = dataclasses.replace(dataset, manifest=manifest)
    start = tokenizer.encode("x").ids[-1]
    model = Trained(Config(model=MODEL), dataset, graphdef, {}, 0)
    text = continuation(model, "x", new_tokens=6, temperature=0.0, seed=0)
    assert text == "x" + tokenizer.decode([start + 1, start + 2])


def test_only_one_file_imports_the_library_and_none_imports_research():
    """The one that does imports public names."""
    root = Path(examples.__file__).parent / "pretrain"
    knowing = set()
    for path in root.rglob("*.py"):
        names = {name for name, _ in imports(path.read_text())}
        assert not any(name.startswith("examples.research") for name in names), path
        ours = {name for name in names if name.split(".")[0] == "normpre_optax"}
        assert ours <= {f"normpre_optax.{name}" for name in normpre_optax.__all__}
        if ours:
            knowing.add(path.relative_to(root).as_posix())
    assert knowing == {"optimizers.py"}
