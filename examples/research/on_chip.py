# SPDX-License-Identifier: Apache-2.0
"""What there is to measure on an accelerator, in one command, for a given number of
minutes and without network.

    python -m examples.research.on_chip --minutes 8 --out on_chip

1. ``numerics``: every optimizer's update on the device, against the same in float64 on
   the CPU.
2. ``steps``: the optimizer's step for the hidden matrices of real models, in turns with
   optax's Muon and AdamW.
3. ``training``: GPT-2 Small on the Python source that is installed, for the time that
   is left.

Each part is a process of its own, so that it has the device's memory, and a part that
fails does not stop the others. ``README.md`` in the folder has the tables, with the
compiler's estimate next to a measured time where there is one.
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


def numerics(options: Options) -> dict[str, Any]:
    """Relative errors of two updates of every optimizer, with its usual products and
    with float32 products.
    """
    import inspect

    import jax
    import numpy as np

    from examples.research.optimizer_step import RATE
    from normpre_optax import normpre_h, optimizers

    random = np.random.default_rng(0)
    shapes = {"up": (256, 640), "square": (256, 256), "down": (640, 256)}
    trees = [
        {n: {"kernel": random.standard_normal(s)} for n, s in shapes.items()}
        for _ in range(3)
    ]

    def second_update(factory: Any, dtype: Any, **given: Any) -> list[np.ndarray]:
        weights, one, two = (
            jax.tree.map(lambda x: jax.numpy.asarray(0.05 * x, dtype), tree)
            for tree in trees
        )
        tx = factory(RATE, **given)
        update = jax.jit(tx.update)
        updates, _ = update(two, update(one, tx.init(weights), weights)[1], weights)
        return [np.asarray(x, np.float64) for x in jax.tree.leaves(updates)]

    rows: dict[str, dict] = {}
    result = {"device": jax.devices()[0].device_kind, "rows": rows}
    factories = {
        name: functools.partial(found.factory, weight_decay=0.0)
        for name, found in optimizers().items()
    }
    factories["normpre_h"] = functools.partial(normpre_h, adam_learning_rate=RATE)
    for name, factory in factories.items():
        with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
            truth = second_update(factory, np.float64)
        rows[name] = {}
        for column, given in (
            ("usual products", {}),
            ("float32 products", {"compute_dtype": np.float32}),
        ):
            if (
                column == "usual products"
                or "compute_dtype" in inspect.signature(factory).parameters
            ):
                found = second_update(factory, np.float32, **given)
                errors = [
                    np.linalg.norm(a - b) / np.linalg.norm(b)
                    for a, b in zip(found, truth, strict=True)
                ]
                rows[name][column] = max(errors)
        write(options, "numerics", result)  # what there is, should the time be up
    return result


def steps(options: Options) -> dict[str, Any]:
    """Median milliseconds of a step by model and optimizer, and the ratio to optax's
    Muon in the same round.
    """
    import jax

    from examples.research import optimizer_step

    found, console = {}, Console(stderr=True, highlight=False)
    for model in options.models:
        for count in range(len(options.optimizers), 0, -1):
            one = optimizer_step.Options(
                model=model, optimizers=options.optimizers[:count], out=options.out
            )
            try:
                found[model] = optimizer_step.summary(
                    one, optimizer_step.measure(one, console)
                )
                break
            except jax.errors.JaxRuntimeError as error:
                console.print(
                    f"{model} with {count} optimizers: {str(error).splitlines()[0]}"
                )
        write(options, "steps", found)
    return found


def write(options: Options, name: str, result: Any) -> None:
    """Write a part's result."""
    (options.out / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")


def estimate(device: str, model: str, optimizer: str) -> str:
    """Return the compiler's estimate in ms for this kind of device, from the reports;
    "" if there is none.
    """
    target = next(
        (
            short
            for short in ("h100", "v5e", "v6e")
            if short in device.lower().replace("v5 lite", "v5e")
        ),
        "",
    )
    report = ESTIMATES / f"ahead_{target}_{model}.md"
    lines = report.read_text().splitlines() if target and report.exists() else []
    return next(
        (
            line.split("|")[2].strip()
            for line in lines
            if line.startswith(f"| {optimizer} |")
        ),
        "",
    )


def page(options: Options) -> str:
    """Return the report of all parts that have a result."""
    from examples.research.report import table

    def read(name: str) -> Any:
        path = options.out / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    parts = []
    if result := read("numerics"):
        columns = {
            c: lambda row, c=c: f"{row[c]:.1e}"
            for c in ("usual products", "float32 products")
        }
        parts += [
            f"## Distance from float64\n\n{result['device']}.\n\n"
            + table("optimizer", columns, result["rows"])
        ]
    for model, result in (read("steps") or {}).items():
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
        parts += [
            f"## Step of {model}\n\n{device}, {result['date']}.\n\n"
            + table("optimizer", columns, result["rows"])
        ]
    if result := read("efficiency"):
        columns = {
            "step, ms": lambda row: f"{row['step_ms']:.4g}",
            "optimizer alone, ms": lambda row: f"{row['optimizer_ms']:.3g}",
            "peak memory, GiB (compiler)": lambda row: f"{row['peak_gib']:.3g}",
        }
        parts += [
            f"## A training step of {options.config}\n\n"
            + table("optimizer", columns, result["rows"])
        ]
    if (report := options.out / "training" / "report" / "README.md").exists():
        parts += [
            f"## Training\n\n{report.relative_to(options.out)}:"
            f" `{options.config}`\n\n{report.read_text()}"
        ]
    return "\n".join(["# Measured on an accelerator\n", *parts])


def main(options: Options) -> int:
    """Run all parts and write the page; return how many failed."""
    console, end, failed = (
        Console(highlight=False, soft_wrap=True),
        time.monotonic() + 60 * options.minutes,
        0,
    )
    options.out.mkdir(parents=True, exist_ok=True)
    if options.part:
        write(
            options,
            options.part,
            {"numerics": numerics, "steps": steps}[options.part](options),
        )
        return 0

    def run(name: str, *words: str, share: float = 1.0) -> bool:
        nonlocal failed
        limit = share * (end - time.monotonic())
        console.print(f"{name}: at most {limit:.0f} s")
        try:
            done = subprocess.run(
                [sys.executable, "-m", *words], check=False, timeout=max(limit, 1)
            )
        except subprocess.TimeoutExpired:
            console.print(f"{name}: the time is up")
            return False
        failed += done.returncode != 0
        return done.returncode == 0

    own = ["examples.research.on_chip", "--out", str(options.out), "--part"]
    run("numerics", *own, "numerics", share=0.3)
    run(
        "steps",
        *own,
        "steps",
        "--models",
        *options.models,
        "--optimizers",
        *options.optimizers,
        share=0.55,
    )
    timed = options.out / "efficiency.json"
    words = [
        "--config",
        options.config,
        "--optimizers",
        ",".join(TRAINED),
        "--steps",
        "5",
        "--output",
        str(timed),
    ]
    if run(
        "time of a training step", "examples.research.efficiency", *words, share=0.35
    ):
        rows = json.loads(timed.read_text())["rows"]
        each = sum(row["step_ms"] for row in rows.values()) / 1e3
        # Half of the time is for starting, compiling and evaluating.
        count = options.steps or max(10, int(0.5 * (end - time.monotonic()) / each))
        words = (
            f"compare --config {options.config} --optimizers {','.join(TRAINED)}"
            f" --steps {count} --name training"
        )
        words += (
            f" --warmup-steps {count // 10} --evaluate-every {max(1, count // 5)}"
            f" --checkpoint-every {count}"
        )
        run(
            "training",
            "examples.research.train",
            *words.split(),
            "--runs-folder",
            str(options.out),
        )
    (options.out / "README.md").write_text(page(options))
    console.print(f"Report: {options.out / 'README.md'}")
    return failed


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, prog="python -m examples.research.on_chip")))
