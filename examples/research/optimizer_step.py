# SPDX-License-Identifier: Apache-2.0
"""Time, compile time and memory of one optimizer step, side by side, on the hidden matrices of a real model.

``python -m examples.research.optimizer_step --model gpt2_small`` measures AdamW, optax's Muon, a clean Muon and the
optimizers of this library in turns (A B C ..., A B C ...) in one process, so that a machine whose speed drifts treats
all alike, and writes medians and ratios as JSON, Markdown and a plot. Every step is update and application, jitted,
with gradients, state and parameters donated: in a training step the gradients are consumed too, and XLA makes copies
of state and parameters where they are not. Fresh gradients are laid out between the steps, outside the clock.

``torch_muon`` is ``torch.optim.Muon``, where torch is installed. ``--compile-only`` runs nothing and needs no memory
for the parameters: compile times and temporaries of models that do not fit on the machine.
"""

import dataclasses
import functools
import importlib
import inspect
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import tyro
from rich.console import Console

from examples.research import report
from examples.research.shapes import MODELS, matrices
from normpre_optax import families, mano, muon, muoneq, normpre_g, normpre_l

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RATE = 1e-3
BASELINE = "optax_muon"


def clean_muon(dtype: jnp.dtype | None) -> optax.GradientTransformation:
    """Muon written plainly: on each leaf five Newton-Schulz iterations of whole products, without a batch axis."""

    def orthogonalize(x: jax.Array) -> jax.Array:
        tall = x.shape[0] > x.shape[1]
        y = (x.T if tall else x).astype(dtype or x.dtype)
        y = y / jnp.linalg.norm(y)
        for _ in range(5):
            gram = y @ y.T
            y = 3.4445 * y + (-4.7750 * gram + 2.0315 * gram @ gram) @ y
        return (y.T if tall else y).astype(x.dtype)

    return optax.chain(
        optax.trace(0.95, nesterov=True),
        optax.stateless(lambda updates, params=None: jax.tree.map(orthogonalize, updates)),
        optax.add_decayed_weights(0.1),
        optax.scale_by_learning_rate(RATE),
    )


OPTIMIZERS: dict[str, Callable[[jnp.dtype | None], optax.GradientTransformation]] = {
    "adamw": lambda dtype: optax.adamw(RATE, b2=0.95, weight_decay=0.1),
    BASELINE: lambda dtype: optax.contrib.muon(RATE, weight_decay=0.1),
    "clean_muon": clean_muon,
    "muon": lambda dtype: muon(RATE, compute_dtype=dtype),
    "mano": lambda dtype: mano(RATE),
    "normpre_g": lambda dtype: normpre_g(RATE, compute_dtype=dtype),
    "normpre_l": lambda dtype: normpre_l(RATE, compute_dtype=dtype),
}
TORCH = "torch_muon"


def relative(factory: Callable) -> Callable[[jnp.dtype | None], optax.GradientTransformation]:
    """``factory`` as ``OPTIMIZERS`` has it."""
    has_choice = "compute_dtype" in inspect.signature(factory).parameters
    return lambda dtype: factory(RATE, compute_dtype=dtype) if has_choice else factory(RATE)


RELATIVES = {name: relative(factory) for name, factory in families().items() if name not in OPTIMIZERS}
CONTROLS = {"muoneq_hyperball": relative(functools.partial(muoneq, norm_control="hyperball"))}
QUARTER = {"rank": 0.25, "threshold": 0.125}
CLIPPED = {
    "normpre_l_products": relative(functools.partial(normpre_l, method="products")),
    "normpre_l_quarter": relative(functools.partial(normpre_l, **QUARTER)),
    "normpre_l_quarter_products": relative(functools.partial(normpre_l, method="products", **QUARTER)),
}
KNOWN = OPTIMIZERS | RELATIVES | CONTROLS | CLIPPED


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure one optimizer step."""

    model: str = "gpt2_small"
    """Shapes: one of tiny, gpt2_small, llama_130m, llama_350m, llama_1p3b, llama_1p3b_layer, qwen3_0p6b, qwen3_1p7b."""
    optimizers: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = tuple(OPTIMIZERS)
    """Which to measure, in which order; others are torch_muon, the rest of normpre_optax.families(), muoneq_hyperball,
    normpre_l_products, normpre_l_quarter and normpre_l_quarter_products."""
    compile_only: bool = False
    """Compile, and run nothing."""
    repeats: int = 5
    """Counted rounds, after one that is not counted. Each round runs every optimizer once."""
    device: str = ""
    """JAX platform (cpu, gpu, tpu); the default one if empty."""
    bfloat16: bool = False
    """Products in bfloat16 with float32 sums, where an optimizer has the choice."""
    out: Path = Path("docs/results")
    """Folder for the reports."""


@dataclasses.dataclass
class Arm:
    """One optimizer, compiled, with its state."""

    step: Callable
    params: dict
    state: optax.OptState | None
    compile_s: float
    temporaries: int
    seconds: list[float] = dataclasses.field(default_factory=list)

    def run(self, grads: dict) -> float:
        """One step; returns its seconds."""
        grads = jax.block_until_ready(jax.tree.map(jnp.copy, grads))
        start = time.perf_counter()
        self.params, self.state = self.step(grads, self.state, self.params)
        jax.block_until_ready(self.params)
        return time.perf_counter() - start


class TorchArm:
    """``torch.optim.Muon`` on the same shapes, stored as torch does, (out, in); it counts as compiled."""

    compile_s, temporaries, state = 0.0, 0, None

    def __init__(self, params: dict, device: str):
        torch = importlib.import_module("torch")  # no dependency of this project
        self.torch, self.seconds, leaves = torch, [], jax.tree.leaves(params)
        self.device = "cuda" if device == "gpu" else "cpu"
        weights = [torch.tensor(np.asarray(x).T.copy(), device=self.device) for x in leaves]
        self.weights = [torch.nn.Parameter(x) for x in weights]
        self.optimizer = torch.optim.Muon(self.weights, lr=RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")

    def run(self, grads: dict) -> float:
        """One step; returns its seconds."""
        for weight, g in zip(self.weights, jax.tree.leaves(grads), strict=True):
            weight.grad = self.torch.tensor(np.asarray(g).T.copy(), device=self.device)
        self._wait()
        start = time.perf_counter()
        self.optimizer.step()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()


def jitted(tx: optax.GradientTransformation, params: dict) -> tuple[Any, tuple]:
    """The step as a jitted function of gradients, state and parameters, all donated, and the shapes it is called on."""

    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, donate_argnums=(0, 1, 2)), (params, jax.eval_shape(tx.init, params), params)


def compiled(tx: optax.GradientTransformation, params: dict) -> tuple[Callable, float, int]:
    """The step compiled ahead of time for parameters (or their shapes): with its seconds and its temporary bytes."""
    step, arguments = jitted(tx, params)
    start = time.perf_counter()
    with warnings.catch_warnings():  # There are three donated trees for two results.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        found = step.lower(*arguments).compile()
    seconds = time.perf_counter() - start
    memory = found.memory_analysis()
    return found, seconds, memory.temp_size_in_bytes if memory else 0


def prepare(tx: optax.GradientTransformation, params: dict) -> Arm:
    """One optimizer, compiled, with parameters and state of its own."""
    step, seconds, temporaries = compiled(tx, params)
    params = jax.tree.map(jnp.copy, params)
    return Arm(step, params, jax.jit(tx.init)(params), seconds, temporaries)


def measure(options: Options, console: Console) -> dict[str, Any]:
    """Compile all, then run them in turns."""
    dtype = jnp.dtype(jnp.bfloat16) if options.bfloat16 else None
    arms: dict[str, Any] = {}
    if options.compile_only:
        shapes = jax.eval_shape(lambda: matrices(options.model))
        for name in options.optimizers:
            step, seconds, temporaries = compiled(KNOWN[name](dtype), shapes)
            arms[name] = Arm(step, {}, None, seconds, temporaries)
            console.print(f"{name}: compiled in {seconds:.1f} s")
        return arms
    params = matrices(options.model)
    grads = jax.tree.map(lambda p: p / 2, matrices(options.model, seed=1))
    for name in options.optimizers:
        if name == TORCH:
            arms[name] = TorchArm(params, jax.devices(options.device or None)[0].platform)
            continue
        arms[name] = prepare(KNOWN[name](dtype), params)
        console.print(f"{name}: compiled in {arms[name].compile_s:.1f} s")
    for i in range(options.repeats + 1):
        for arm in arms.values():
            seconds = arm.run(grads)
            if i:
                arm.seconds.append(seconds)
        console.print(f"round {i} of {options.repeats}" + ("" if i else " (not counted)"))
    return arms


def summary(options: Options, arms: dict[str, Any]) -> dict:
    """Medians and ratios, with what is needed to measure them again."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda: matrices(options.model)))
    size = sum(4 * x.size for x in leaves)
    rows = {}
    for name, arm in arms.items():
        row = {"compile_s": arm.compile_s, "temporaries_per_parameter_byte": arm.temporaries / size}
        if arm.state is not None:
            row["state_per_parameter_byte"] = sum(x.nbytes for x in jax.tree.leaves(arm.state)) / size
        if BASELINE in arms:
            row["compile_over_optax_muon"] = arm.compile_s / arms[BASELINE].compile_s
        if arm.seconds:
            row |= {
                "median_ms": 1e3 * statistics.median(arm.seconds),
                "min_ms": 1e3 * min(arm.seconds),
                "max_ms": 1e3 * max(arm.seconds),
            }
        for other in ("adamw", BASELINE, "clean_muon"):
            if other in arms and arm.seconds:
                pairs = zip(arm.seconds, arms[other].seconds, strict=True)
                row[f"over_{other}"] = statistics.median(a / b for a, b in pairs)
        rows[name] = row
    command = (
        f"python -m examples.research.optimizer_step --model {options.model}"
        + (" --compile-only" if options.compile_only else f" --repeats {options.repeats}")
        + (" --bfloat16" if options.bfloat16 else "")
        + ("" if options.optimizers == tuple(OPTIMIZERS) else f" --optimizers {' '.join(options.optimizers)}")
    )
    return report.header(command, jax.devices()[0]) | {
        "matrices": len(leaves),
        "parameter_bytes": size,
        "rows": rows,
    }


def markdown(result: dict) -> str:
    """The report as a table."""
    machine, versions = result["machine"], result["versions"]
    lines = [
        f"`{result['command']}`, {result['date']}, {machine['device']} ({machine['cores']} cores), "
        f"jax {versions['jax']}, optax {versions['optax']}, {result['matrices']} matrices of "
        f"{result['parameter_bytes'] / 2**20:.3g} MiB. Times are medians, ratios medians of each round's.",
        "",
    ]
    columns = {
        "ms": lambda row: report.number(row["median_ms"]),
        "fastest to slowest": lambda row: f"{report.number(row['min_ms'])} to {report.number(row['max_ms'])}",
        "/ optax Muon": lambda row: f"{row[f'over_{BASELINE}']:.3g}",
        "/ clean Muon": lambda row: f"{row['over_clean_muon']:.3g}",
        "/ AdamW": lambda row: f"{row['over_adamw']:.3g}",
        "compile s": lambda row: f"{row['compile_s']:.1f}",
        "compile / optax Muon": lambda row: f"{row['compile_over_optax_muon']:.2f}",
        "state / weights": lambda row: f"{row['state_per_parameter_byte']:.2f}",
        "temporaries / weights": lambda row: f"{row['temporaries_per_parameter_byte']:.2f}",
    }
    return "\n".join([*lines, *report.table("optimizer", columns, result["rows"])]) + "\n"


def plot(result: dict, file: Path) -> None:
    """Median milliseconds as bars on a logarithmic axis."""
    names = list(result["rows"])
    medians = [result["rows"][name]["median_ms"] for name in names]
    figure, axes = plt.subplots(figsize=(6, 0.4 * len(names) + 1.2), layout="constrained")
    bars = axes.barh(names, medians, color=["#0072B2" if n.startswith("normpre") else "#999999" for n in names])
    axes.bar_label(bars, labels=[f"{m:,.0f}" for m in medians], padding=3)
    axes.set(xscale="log", xlabel="milliseconds a step (median)", xlim=(min(medians) / 2, max(medians) * 3))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def main(options: Options) -> None:
    """Measure, print, write."""
    console = Console(highlight=False)
    unknown = [name for name in options.optimizers if name not in KNOWN and name != TORCH]
    if options.model not in MODELS or unknown:
        raise SystemExit(f"unknown: {unknown or options.model}; models {sorted(MODELS)}, optimizers {[*KNOWN, TORCH]}")
    with jax.default_device(jax.devices(options.device or None)[0]):
        result = summary(options, measure(options, console))
    name = f"optimizer_step_{options.model}_{result['machine']['platform']}" + ("_bf16" if options.bfloat16 else "")
    name += "_compile" if options.compile_only else ""
    file = report.write(options.out, name, result, markdown(result))
    if not options.compile_only:
        plot(result, file.with_suffix(".png"))
    console.print(markdown(result), soft_wrap=True)


if __name__ == "__main__":
    main(tyro.cli(Options, prog="python -m examples.research.optimizer_step"))
