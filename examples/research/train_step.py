# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""A whole train step of ours against nanoGPT-style PyTorch: the same weights, tokens, shapes and type of arithmetic.

``python -m examples.research.train_step --config gpt2_10m`` measures, in turns and in one process,

- the whole step: tokens to the device, forward, backward, clipping, update; ours with AdamW, NormPre-G and NormPre-L,
  torch's with fused AdamW;
- its parts, each by itself: forward, forward with backward, clipping with update.

Before that it makes sure that the work is the same: in float32, loss and gradient of both agree on the same weights to
rounding. Any flag of ``examples.pretrain`` may follow, such as ``--model.layers 2``. On a GPU the arithmetic is
bfloat16: ``--config gpt2_small --batch-size 32``.
"""

import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import tyro
from flax import nnx
from rich.console import Console
from torch.nn.attention import SDPBackend, sdpa_kernel

from examples.pretrain import configs, models
from examples.pretrain.config import Config, ModelConfig, check
from examples.pretrain.evaluate import predictions, token_losses
from examples.pretrain.optimizers import make_optimizer
from examples.pretrain.train import TrainState, compute_dtype, flops_per_token, make_train_step, peak_flops, schedule
from examples.research import report
from examples.research.torch_gpt2 import Trainer

OPTIMIZERS = ("adamw", "normpre_g", "normpre_l")
TORCH = "torch_adamw"

# In float32 (6e-8) a sum of a thousand products is off by a few 1e-6 at worst; a mean over tokens and a norm over all
# parameters average that, and come out within 1e-6. The other form of GELU, by erf, moves the gradient's norm by 2e-5
# even in a tiny model.
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 2e-6, 1e-5
WIDENED = 4  # Weights at initialisation are so small that a wrong layer would hardly change the loss.


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure train steps of ours and of PyTorch's in turns. Any flag of ``examples.pretrain`` may follow."""

    config: str = "gpt2_10m"  # Named configuration, of the family gpt2.
    batch_size: int | None = None  # Sequences a step, all at once; the configuration's where none is given.
    repeats: int = 10  # Counted rounds; each runs every whole step and every part once.
    warmup: int = 2  # Rounds before them that are not counted.
    torch_compile: bool = True  # Whether torch compiles its model, if that works on this machine.
    out: Path = Path("docs/results")  # Folder for the reports.


class Ours:
    """A train step of ``examples.pretrain`` and its parts."""

    def __init__(self, config: Config, graphdef: nnx.GraphDef, params: dict):
        optimizer = make_optimizer(config, schedule(config))
        params = jax.tree.map(jnp.copy, params)  # the step gives its state up
        self.state = TrainState(params, jax.jit(optimizer.init)(params))
        self.train_step = make_train_step(graphdef, optimizer)
        self.grads: Any = None

        def loss_of(params: optax.Params, tokens_BxS: jax.Array) -> jax.Array:
            return token_losses(graphdef, params, tokens_BxS).sum() / predictions(tokens_BxS)

        def apply(grads: optax.Updates, state: TrainState) -> TrainState:
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            return TrainState(optax.apply_updates(state.params, updates), opt_state)

        self.loss_of, self.loss_and_grads = jax.jit(loss_of), jax.jit(jax.value_and_grad(loss_of))
        self.apply = jax.jit(apply, donate_argnums=1)

    def forward(self, tokens: np.ndarray) -> jax.Array:
        """The loss."""
        return jax.block_until_ready(self.loss_of(self.state.params, tokens))

    def backward(self, tokens: np.ndarray) -> jax.Array:
        """The loss; the gradients are kept for ``update``."""
        loss, self.grads = jax.block_until_ready(self.loss_and_grads(self.state.params, tokens))
        return loss

    def update(self, grads: Any) -> None:
        """Clipping and the optimizer's step."""
        self.state = jax.block_until_ready(self.apply(grads, self.state))

    def step(self, tokens: np.ndarray) -> jax.Array:
        """The whole step; the loss before it."""
        self.state, metrics = jax.block_until_ready(self.train_step(self.state, tokens))
        return metrics.loss


def settings(options: Options, overrides: Sequence[str]) -> Config:
    """The configuration that is measured.

    Raises:
        SystemExit: where PyTorch's model has no counterpart of it.
    """
    config = configs.parse(["--config", options.config, *overrides])
    config = dataclasses.replace(config, batch_size=options.batch_size or config.batch_size, micro_batch=None)
    check(config)
    model = config.model
    if model.family != "gpt2" or model.bias or not model.tied_head or model.scan_layers or config.clip != "global":
        raise SystemExit("PyTorch's model is gpt2 with a tied head, no biases, no scan over layers, and --clip global")
    return config


def initialise(model: ModelConfig, config: Config, dtype: jnp.dtype) -> tuple[nnx.GraphDef, dict]:
    """Structure and parameters of our model."""
    vocabulary = model.vocabulary or config.vocabulary
    graphdef, variables = nnx.split(models.build(model, vocabulary, dtype=dtype, seed=config.seed))
    return graphdef, nnx.to_pure_dict(variables)


def same_work(config: Config, device: str, tokens: np.ndarray) -> dict[str, float]:
    """Relative differences between loss and gradient norm of ours and torch's, in float32, on the same wide weights.

    Raises:
        AssertionError: where they are more than rounding.
    """
    with jax.default_matmul_precision("highest"):
        graphdef, params = initialise(dataclasses.replace(config.model, attention="xla"), config, jnp.dtype("float32"))
        params = jax.tree.map(lambda p: WIDENED * p if p.ndim > 1 else p, params)
        ours = Ours(dataclasses.replace(config, optimizer="adamw"), graphdef, params)
        loss, norm = float(ours.backward(tokens)), norm_of(jax.tree.leaves(ours.grads))
    trainer = Trainer(config, params, device=device, bfloat16=False, compiled=False)
    with sdpa_kernel(SDPBackend.MATH):  # a fused kernel's float32 may be less than that
        torch_loss = float(trainer.backward(tokens))
    torch_norm = norm_of([p.grad.cpu() for p in trainer.model.parameters() if p.grad is not None])
    found = {"loss": abs(loss / torch_loss - 1), "gradient_norm": abs(norm / torch_norm - 1)}
    assert found["loss"] < LOSS_TOLERANCE, f"not the same model: loss {loss}, {torch_loss} in torch"
    assert found["gradient_norm"] < GRADIENT_TOLERANCE, f"not the same gradient: norm {norm}, {torch_norm} in torch"
    return found


def norm_of(leaves: Sequence[Any]) -> float:
    """Euclidean norm of all leaves together, summed in float64: float32 sums of millions of squares differ by 2e-5."""
    return float(np.sqrt(sum(np.square(np.asarray(leaf, np.float64)).sum() for leaf in leaves)))


def torch_trainer(options: Options, config: Config, params: dict, tokens: np.ndarray) -> tuple[Trainer, str]:
    """PyTorch's side, and in words how it runs."""
    device, how = torch_device(), "eager"
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
    build = functools.partial(Trainer, config, params, device=device, bfloat16=compute_dtype(config) == jnp.bfloat16)
    if options.torch_compile:
        trainer = build(compiled=True)
        try:
            trainer.backward(tokens)
            return trainer, "compiled"
        except Exception as error:  # no compiler, no headers, no backend: each has a class of its own
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            how = f"eager, as torch.compile does not work here ({reason})"
    return build(compiled=False), how


def torch_device() -> str:
    """What torch calls JAX's device."""
    return "cuda" if jax.default_backend() == "gpu" else "cpu"


def parts(ours: dict[str, Ours], trainer: Trainer, rates: np.ndarray) -> dict[tuple[str, str], Callable]:
    """What is timed, by row and part: functions of the round and its tokens that wait for the device.

    Forward with backward leaves the gradients that the update after it takes; so the three parts are a train step, too,
    and both sides have made the same number of updates at any time.
    """

    def waiting(f: Callable) -> Callable:
        def run(i: int, tokens: np.ndarray) -> Any:
            result = f(i, tokens)
            trainer.wait()
            return result

        return run

    return {
        ("adamw", "forward"): lambda i, tokens: ours["adamw"].forward(tokens),
        (TORCH, "forward"): waiting(torch.no_grad()(lambda i, tokens: trainer.forward(tokens))),
        ("adamw", "forward_backward"): lambda i, tokens: ours["adamw"].backward(tokens),
        (TORCH, "forward_backward"): waiting(lambda i, tokens: trainer.backward(tokens)),
        (TORCH, "update"): waiting(lambda i, tokens: trainer.update(float(rates[2 * i]))),
        **{(name, "update"): lambda i, tokens, arm=arm: arm.update(ours["adamw"].grads) for name, arm in ours.items()},
        (TORCH, "step"): waiting(lambda i, tokens: trainer.step(tokens, float(rates[2 * i + 1]))),
        **{(name, "step"): lambda i, tokens, arm=arm: arm.step(tokens) for name, arm in ours.items()},
    }


def measure(options: Options, config: Config, console: Console) -> tuple[dict, dict]:
    """Seconds by row and part, and what was found out on the way."""
    random, device = np.random.default_rng(config.seed), torch_device()
    shape = (options.warmup + options.repeats, config.batch_size, config.model.context + 1)
    # int64 is torch's type of indices; ours become int32 on their way to the device.
    tokens = random.integers(config.model.vocabulary or config.vocabulary, size=shape)
    agreement = same_work(config, device, tokens[0, :2])
    console.print(f"same work: relative difference of loss {agreement['loss']:.1e} in float32")

    graphdef, params = initialise(config.model, config, compute_dtype(config))
    ours = {name: Ours(dataclasses.replace(config, optimizer=name), graphdef, params) for name in OPTIMIZERS}
    trainer, how = torch_trainer(options, config, params, tokens[0])
    console.print(f"torch: {how}")
    runs = parts(ours, trainer, np.asarray(schedule(config)(np.arange(2 * len(tokens)))))
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    losses: dict[tuple[str, str], float] = {}
    for i, batch in enumerate(tokens):
        for key, run in runs.items():
            start = time.perf_counter()
            value = run(i, batch)
            taken = time.perf_counter() - start
            if i >= options.warmup:
                seconds[key].append(taken)
            if key[1] == "step":
                losses[key] = float(value)
        console.print(f"round {i + 1} of {len(tokens)}" + ("" if i >= options.warmup else " (not counted)"))
    found = {
        "torch_is": how,
        "float32_difference": agreement,
        "last_loss": {name: loss for (name, _), loss in losses.items()},
        "flops_per_token": flops_per_token(config.model, params),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
    }
    return seconds, found


def summary(command: str, config: Config, seconds: dict, found: dict) -> dict:
    """Medians, and ratios to torch in the same round."""
    peak = peak_flops(jax.devices()[0].device_kind)
    rows: dict[str, dict[str, float]] = {name: {} for name in (TORCH, *OPTIMIZERS)}
    for (name, part), values in seconds.items():
        pairs = zip(values, seconds[TORCH, part], strict=True)
        rows[name] |= {
            f"{part}_ms": 1e3 * statistics.median(values),
            f"{part}_over_torch": statistics.median(a / b for a, b in pairs),
        }
    for row in rows.values():
        row["tokens_per_second"] = 1e3 * config.batch_size * config.model.context / row["step_ms"]
        if peak:
            row["mfu"] = row["tokens_per_second"] * found["flops_per_token"] / peak
    result = report.header(command, jax.devices()[0])
    result["versions"]["torch"] = torch.__version__
    return result | {
        "model": dataclasses.asdict(config.model),
        "batch_size": config.batch_size,
        "dtype": str(compute_dtype(config)),
        "rounds": len(seconds[TORCH, "step"]),
        **found,
        "rows": rows,
    }


def markdown(result: dict) -> str:
    """The report as a table."""
    model, last = result["model"], result["last_loss"]
    part = lambda name: lambda row: f"{row[f'{name}_ms']:.1f} ({row[f'{name}_over_torch']:.2f})"  # noqa: E731
    columns = {
        "step, ms": part("step"),
        "forward": part("forward"),
        "forward + backward": part("forward_backward"),
        "clip + update": part("update"),
        "tokens / s": lambda row: f"{row['tokens_per_second']:,.0f}",
        "MFU": lambda row: f"{row['mfu']:.1%}",
    }
    return (
        f"`{result['command']}`, {result['date']}, {result['machine']['device']} ({result['machine']['cores']} cores), "
        f"jax {result['versions']['jax']}, torch {result['versions']['torch']} ({result['torch_is']}); "
        f"{result['parameters']:,} parameters, {model['layers']} layers of width {model['width']}, "
        f"{result['batch_size']} x {model['context']} tokens, {result['dtype']}. Times are medians of "
        f"{result['rounds']} rounds, with the median of each round's ratio to torch.\n\n"
        f"On the same weights in float32 the losses differ by {result['float32_difference']['loss']:.0e} and the "
        f"gradients' norms by {result['float32_difference']['gradient_norm']:.0e}, relatively. The last step's loss is "
        f"{last['adamw']:.4f} with our AdamW, {last[TORCH]:.4f} with torch's.\n\n"
        + report.table("", columns, result["rows"])
    )


def main(options: Options, overrides: Sequence[str] = ()) -> None:
    """Measure, print, write."""
    # Both take memory as they need it; JAX alone would reserve most of a GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # the cores that JAX uses
    console = Console(highlight=False, markup=False, soft_wrap=True)
    config = settings(options, overrides)
    command = report.command("train_step", options, overrides)
    result = summary(command, config, *measure(options, config, console))
    report.write(options.out, f"train_step_{options.config}_{result['machine']['platform']}", result, markdown(result))
    console.print(markdown(result))


if __name__ == "__main__":
    main(*tyro.cli(Options, prog="python -m examples.research.train_step", return_unknown_args=True))
