# SPDX-License-Identifier: Apache-2.0
"""What there is to measure on an accelerator, in one command and without network.

    python -m examples.research.on_chip --minutes 8 --out on_chip

1. ``numerics``: every optimizer's update on the device, against the same in float64 on
   the CPU.
2. ``steps``: the optimizer's step for the hidden matrices of real models, in turns with
   optax's Muon and AdamW.
3. ``training``: GPT-2 Small on the Python source that is installed, for the time that
   is left.

It takes a given number of minutes. Each part is a process of its own, so that it has
the device's memory, and a part that fails does not stop the others. ``README.md`` in
the folder has the tables, with the compiler's estimate next to a measured time where
there is one.
"""

import dataclasses
import functools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

ESTIMATES = Path(__file__).parents[2] / "docs" / "results"
TRAINED = ("adamw", "optax_muon", "muon,norm_control=hyperball", "normpre_h")


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure on this machine's accelerator."""

    minutes: float = 8.0  # Time for all parts. What has begun is stopped at the end.
    # Models of the steps, names in ``shapes.MODELS``.
    models: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = (
        "gpt2_small",
        "llama_1p3b",
        "qwen3_1p7b",
    )
    # Optimizers of the steps. Where memory does not suffice, the last ones are left
    # out.
    optimizers: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = (
        *("optax_muon", "adamw", "normpre_h", "normpre_l", "normpre_g", "muon"),
    )
    config: str = "gpt2_small_python"  # Named configuration of the training.
    steps: int = 0  # Training steps of each optimizer; 0: as many as fit into the time.
    out: Path = Path("on_chip")  # Folder for the results.
    part: str = ""  # Only this part: "numerics" or "steps".


# --- Parts that run in a process of their own, which alone loads JAX
# ------------------------------------------------------------------------------------


def numerics(options: Options) -> dict[str, Any]:
    """Relative errors of two updates of every optimizer.

    With its usual products, and with float32 products where it has a choice.
    """
    import inspect

    import jax
    import numpy as np

    rows: dict[str, dict] = {}
    result = {"device": jax.devices()[0].device_kind, "rows": rows}
    trees = random_trees()
    for name, factory in factories_without_decay().items():
        with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
            truth = second_update(factory(), trees, np.float64)
        found = {"usual products": factory()}
        if "compute_dtype" in inspect.signature(factory).parameters:
            found["float32 products"] = factory(compute_dtype=np.float32)
        rows[name] = {}
        for column, tx in found.items():
            arrays = second_update(tx, trees, np.float32)
            errors = [
                np.linalg.norm(a - b) / np.linalg.norm(b)
                for a, b in zip(arrays, truth, strict=True)
            ]
            rows[name][column] = max(errors)
        write(options, "numerics", result)  # what there is, should the time be up
    return result


def random_trees() -> list[dict]:
    """Weights and two gradients, before their scale and type."""
    import numpy as np

    random = np.random.default_rng(0)
    shapes = {"up": (256, 640), "square": (256, 256), "down": (640, 256)}
    trees = []
    for _ in range(3):
        tree = {}
        for name, shape in shapes.items():
            tree[name] = {"kernel": random.standard_normal(shape)}
        trees.append(tree)
    return trees


def factories_without_decay() -> dict[str, Any]:
    """The library's optimizers at one learning rate, by name."""
    from examples.research.optimizer_step import RATE
    from normpre_optax import normpre_h, optimizers

    factories = {}
    for name, found in optimizers().items():
        factories[name] = functools.partial(found.factory, RATE, weight_decay=0.0)
    factories["normpre_h"] = functools.partial(normpre_h, RATE, adam_learning_rate=RATE)
    return factories


def second_update(tx: Any, trees: list[dict], dtype: Any) -> list[Any]:
    """Arrays of an optimizer's second update, which also depends on its state."""
    import jax
    import numpy as np

    weights, one, two = (
        jax.tree.map(lambda x: jax.numpy.asarray(0.05 * x, dtype), tree)
        for tree in trees
    )
    update = jax.jit(tx.update)
    _, state = update(one, tx.init(weights), weights)
    updates, _ = update(two, state, weights)
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(updates)]


def steps(options: Options) -> dict[str, Any]:
    """Times of a step by model and optimizer.

    Median milliseconds, and the ratio to optax's Muon in the same round.
    """
    import jax

    from examples.research import optimizer_step

    found = {}
    console = Console(stderr=True, highlight=False)
    for model in options.models:
        for count in range(len(options.optimizers), 0, -1):
            one = optimizer_step.Options(
                model=model, optimizers=options.optimizers[:count], out=options.out
            )
            try:
                arms = optimizer_step.measure(one, console)
                found[model] = optimizer_step.summary(one, arms)
                break
            except jax.errors.JaxRuntimeError as error:
                said = str(error).splitlines()[0]
                console.print(f"{model} with {count} optimizers: {said}")
        write(options, "steps", found)
    return found


def write(options: Options, name: str, result: Any) -> None:
    """Write a part's result."""
    (options.out / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")


# --- The report
# ------------------------------------------------------------------------------------


def estimate(device: str, model: str, optimizer: str) -> str:
    """The compiler's estimate in ms for this kind of device, from the reports.

    Empty if there is none.
    """
    name = device.lower().replace("v5 lite", "v5e")
    targets = [target for target in ("h100", "v5e", "v6e") if target in name]
    if not targets:
        return ""
    report = ESTIMATES / f"ahead_{targets[0]}_{model}.md"
    if not report.exists():
        return ""
    for line in report.read_text().splitlines():
        if line.startswith(f"| {optimizer} |"):
            return line.split("|")[2].strip()
    return ""


def page(options: Options) -> str:
    """The report of all parts that have a result."""
    parts = ["# Measured on an accelerator\n"]
    if numbers := read(options, "numerics"):
        parts.append(numerics_section(numbers))
    for model, result in (read(options, "steps") or {}).items():
        parts.append(step_section(model, result))
    if times := read(options, "efficiency"):
        parts.append(efficiency_section(options.config, times["rows"]))
    report = options.out / "training" / "report" / "README.md"
    if report.exists():
        parts.append(
            f"## Training\n\n{report.relative_to(options.out)}:"
            f" `{options.config}`\n\n{report.read_text()}"
        )
    return "\n".join(parts)


def read(options: Options, name: str) -> Any:
    """A part's result, None if it has none."""
    path = options.out / f"{name}.json"
    if not path.exists():
        return None
    return json.loads(path.read_text())


def numerics_section(result: dict[str, Any]) -> str:
    """Errors of every optimizer."""
    from examples.research.report import table

    columns = {
        "usual products": lambda row: f"{row['usual products']:.1e}",
        "float32 products": lambda row: f"{row['float32 products']:.1e}",
    }
    rows = table("optimizer", columns, result["rows"])
    return f"## Distance from float64\n\n{result['device']}.\n\n{rows}"


def step_section(model: str, result: dict[str, Any]) -> str:
    """Times of every optimizer's step for a model, next to the estimates."""
    from examples.research.report import table

    device = result["machine"]["device"]
    for name, row in result["rows"].items():
        row["estimate"] = estimate(device, model, name)
    columns = {
        "ms": lambda row: f"{row['median_ms']:.3g}",
        "estimate, ms": lambda row: row["estimate"],
        "/ optax Muon": lambda row: f"{row['over_optax_muon']:.3g}",
        "/ AdamW": lambda row: f"{row['over_adamw']:.3g}",
        "temporaries / weights": lambda row: (
            f"{row['temporaries_per_parameter_byte']:.2f}"
        ),
        "compile s": lambda row: f"{row['compile_s']:.1f}",
    }
    rows = table("optimizer", columns, result["rows"])
    return f"## Step of {model}\n\n{device}, {result['date']}.\n\n{rows}"


def efficiency_section(config: str, rows: dict[str, dict]) -> str:
    """Times of a whole training step."""
    from examples.research.report import table

    columns = {
        "step, ms": lambda row: f"{row['step_ms']:.4g}",
        "optimizer alone, ms": lambda row: f"{row['optimizer_ms']:.3g}",
        "peak memory, GiB (compiler)": lambda row: f"{row['peak_gib']:.3g}",
    }
    shown = table("optimizer", columns, rows)
    return f"## A training step of {config}\n\n{shown}"


# --- The command
# ------------------------------------------------------------------------------------


class _Parts:
    """Processes that share the time."""

    def __init__(self, console: Console, minutes: float) -> None:
        self.console = console
        self.end = time.monotonic() + 60 * minutes
        self.failed = 0

    def seconds_left(self) -> float:
        """Until the end of the time."""
        return self.end - time.monotonic()

    def run(self, name: str, *words: str, share: float = 1.0) -> bool:
        """Run a program for a share of the time that is left; whether it succeeded."""
        limit = share * self.seconds_left()
        self.console.print(f"{name}: at most {limit:.0f} s")
        command = [sys.executable, "-m", *words]
        try:
            done = subprocess.run(command, check=False, timeout=max(limit, 1))
        except subprocess.TimeoutExpired:
            self.console.print(f"{name}: the time is up")
            return False
        if done.returncode:
            self.failed += 1
        return done.returncode == 0


def main(options: Options) -> int:
    """Run all parts and write the page; return how many failed."""
    console = Console(highlight=False, soft_wrap=True)
    parts = _Parts(console, options.minutes)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.part:
        measure = {"numerics": numerics, "steps": steps}[options.part]
        write(options, options.part, measure(options))
        return 0
    own = ["examples.research.on_chip", "--out", str(options.out), "--part"]
    parts.run("numerics", *own, "numerics", share=0.3)
    chosen = ["--models", *options.models, "--optimizers", *options.optimizers]
    parts.run("steps", *own, "steps", *chosen, share=0.55)
    timed = options.out / "efficiency.json"
    words = ["--config", options.config, "--optimizers", ",".join(TRAINED)]
    words += ["--steps", "5", "--output", str(timed)]
    if parts.run(
        "time of a training step", "examples.research.efficiency", *words, share=0.35
    ):
        rows = json.loads(timed.read_text())["rows"]
        each = sum(row["step_ms"] for row in rows.values()) / 1e3
        # Half of the time is for starting, compiling and evaluating.
        affordable = max(10, int(0.5 * parts.seconds_left() / each))
        train(parts, options, options.steps or affordable)
    (options.out / "README.md").write_text(page(options))
    console.print(f"Report: {options.out / 'README.md'}")
    return parts.failed


def train(parts: _Parts, options: Options, count: int) -> None:
    """Train with every optimizer for so many steps."""
    words = (
        f"compare --config {options.config} --optimizers {','.join(TRAINED)}"
        f" --steps {count} --name training"
        f" --warmup-steps {count // 10} --evaluate-every {max(1, count // 5)}"
        f" --checkpoint-every {count}"
    )
    folder = ["--runs-folder", str(options.out)]
    parts.run("training", "examples.research.train", *words.split(), *folder)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, prog="python -m examples.research.on_chip")))
