# SPDX-License-Identifier: Apache-2.0
"""What a step of an optimizer moves, multiplies and needs on a mesh, counted from the compiled program.

    python -m examples.benchmarks.collectives

Nothing is allocated and nothing runs: parameters are shapes, devices are virtual. Parameters are sharded over the axis
``fsdp`` of up to 64 devices, on their first (or longest) axis that divides, and replicated over ``data`` beyond. Bytes
are output bytes of the collectives, operations those of matrix products, both per device and step (the mean of a
row-oriented and a column-oriented one); they depend on shapes and on XLA's version only.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=512"

import jax
import matplotlib.pyplot as plt
import optax
import tyro
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rich.console import Console
from rich.progress import track

from examples.benchmarks import hlo, report, shapes
from normpre_optax import muon, normpre_g, normpre_l

LARGEST_FSDP = 64
BASELINE = "optax_muon"


def oriented(factory: Callable, **options) -> tuple[Callable, ...]:
    """NormPre in the orientation of even and of odd steps."""
    return tuple(functools.partial(factory, 1e-3, orientation=o, **options) for o in ("rows", "columns"))


OPTIMIZERS = {
    "adamw": (functools.partial(optax.adamw, 1e-3),),
    BASELINE: (functools.partial(optax.contrib.muon, 1e-3),),
    "muon": (functools.partial(muon, 1e-3),),
    "normpre_g": oriented(normpre_g),
    "normpre_g, divide=False": oriented(normpre_g, divide=False),
    "normpre_l": oriented(normpre_l),
    "normpre_l, warm_start": oriented(normpre_l, warm_start=True, power_iterations=0),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Count what optimizers move on meshes."""

    models: tuple[str, ...] = ("gpt2_small", "llama_1p3b", "qwen3_1p7b")
    """Names in ``shapes.MODELS``: their hidden matrices."""
    devices: tuple[int, ...] = (1, 8, 64, 512)
    """Numbers of devices."""
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)
    """Which of them."""
    axis: Literal["first", "longest"] = "first"
    """Which axis of a parameter is sharded, of those that divide."""
    out: Path = Path("docs/results")
    """Folder for the report."""


def spec_of(x, fsdp: int, longest: bool) -> PartitionSpec:
    """The first or the longest axis that divides, over ``fsdp``; vectors and scalars are replicated."""
    order = sorted(range(x.ndim), key=lambda a: -x.shape[a] if longest else a)
    axis = next((a for a in order if x.ndim > 1 and x.shape[a] % fsdp == 0), None)
    return PartitionSpec(*("fsdp" if a == axis else None for a in range(x.ndim)))


def count(model: str, tx: optax.GradientTransformation, devices: int, axis_type: AxisType, longest: bool) -> dict:
    """Compile one step and count it."""
    fsdp = min(devices, LARGEST_FSDP)
    mesh = jax.make_mesh(
        (devices // fsdp, fsdp), ("data", "fsdp"), axis_types=(axis_type,) * 2, devices=jax.devices()[:devices]
    )

    def placed(tree, spec=lambda x: spec_of(x, fsdp, longest)):
        def place(x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec(x)))

        return jax.tree.map(place, tree)

    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = placed(jax.eval_shape(lambda: shapes.matrices(model)))
    state = jax.eval_shape(tx.init, params)
    # With Explicit axes the state says itself where it lies.
    if axis_type == AxisType.Auto:
        state = placed(state)
    else:
        state = placed(state, lambda x: x.sharding.spec if x.sharding else PartitionSpec())
    out = jax.tree.map(lambda x: x.sharding, (params, state))
    lowered = jax.jit(step, donate_argnums=(1, 2), out_shardings=out).lower(params, state, params)
    # The machine's code is not needed: only what the partitioner made of the program.
    compiled = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})  # pyright: ignore[reportArgumentType]
    cost, memory = hlo.cost(compiled.as_text() or ""), compiled.memory_analysis()
    temporary = memory.temp_size_in_bytes if memory else 0
    return {"bytes": cost.bytes, "collectives": cost.collectives, "flops": cost.flops, "temporary_bytes": temporary}


def measure(model: str, name: str, devices: int, longest: bool = False) -> dict:
    """Mean over the orientations; the larger of their temporaries. optax knows Auto axes only."""
    axis_type = AxisType.Auto if name == BASELINE else AxisType.Explicit
    counts = [count(model, build(), devices, axis_type, longest) for build in OPTIMIZERS[name]]
    kinds = {kind for c in counts for kind in c["collectives"]}
    mean = lambda values: sum(values) / len(counts)  # noqa: E731
    return {
        "model": model,
        "optimizer": name,
        "devices": devices,
        "bytes": mean([c["bytes"] for c in counts]),
        "collectives": {kind: mean([c["collectives"].get(kind, 0) for c in counts]) for kind in sorted(kinds)},
        "flops": mean([c["flops"] for c in counts]),
        "temporary_bytes": max(c["temporary_bytes"] for c in counts),
    }


def markdown(result: dict) -> str:
    """One table a model."""
    rows = {(r["model"], r["optimizer"], r["devices"]): r for r in result["rows"]}
    lines = [
        f"`{result['command']}`, {result['date']}, jax {result['versions']['jax']}, optax "
        f"{result['versions']['optax']}. Per device and step: output bytes of collectives, operations of products, "
        "temporaries of the compiled step."
    ]
    for model in dict.fromkeys(r["model"] for r in result["rows"]):
        heads = [
            "devices",
            "optimizer",
            "MB moved",
            "optax Muon / this",
            "GFLOP",
            "x devices / alone",
            "temporaries MB",
        ]
        lines += ["", f"{model}:", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        for (of, name, devices), r in sorted(rows.items(), key=lambda item: item[0][2]):
            if of != model:
                continue
            peer, alone = rows.get((model, BASELINE, devices)), rows.get((model, name, 1))
            ratio = f"{peer['bytes'] / r['bytes']:.1f}" if peer and r["bytes"] else ""
            share = f"{r['flops'] * devices / alone['flops']:.2f}" if alone and alone["flops"] else ""
            lines.append(
                f"| {devices} | {name} | {r['bytes'] / 1e6:.1f} | {ratio} | {r['flops'] / 1e9:.1f} | {share} |"
                f" {r['temporary_bytes'] / 1e6:.0f} |"
            )
    return "\n".join(lines) + "\n"


def draw(result: dict, path: Path) -> None:
    """Bytes and operations by number of devices, a column for every model."""
    models = list(dict.fromkeys(r["model"] for r in result["rows"]))
    names = list(dict.fromkeys(r["optimizer"] for r in result["rows"]))
    figure, axes = plt.subplots(2, len(models), figsize=(4 * len(models), 6.5), squeeze=False, layout="constrained")
    marks = "osv^D<>PX"
    for column, model in enumerate(models):
        for name, mark, color in zip(names, marks, plt.get_cmap("tab10").colors, strict=False):  # pyright: ignore[reportAttributeAccessIssue]
            rows = [r for r in result["rows"] if (r["model"], r["optimizer"]) == (model, name)]
            for row, key in enumerate(("bytes", "flops")):
                points = [(r["devices"], r[key]) for r in rows if r[key]]
                if points:
                    axes[row, column].loglog(*zip(*points, strict=True), marker=mark, color=color, label=name)
        axes[0, column].set(title=model, ylabel="bytes moved" if column == 0 else "")
        axes[1, column].set(xlabel="devices", ylabel="operations of products" if column == 0 else "")
    for ax in axes.flat:
        ax.grid(alpha=0.3)
    handles, labels = axes[1, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(options: Options) -> None:
    """Count, print, write."""
    work = [(m, o, n) for n in options.devices for m in options.models for o in options.optimizers]
    longest = options.axis == "longest"
    rows = [measure(*one, longest) for one in track(work, "compiling")]
    command = "python -m examples.benchmarks.collectives"
    for name in ("models", "devices"):
        if getattr(options, name) != getattr(Options, name):
            command += f" --{name} " + " ".join(map(str, getattr(options, name)))
    command += " --axis longest" if longest else ""
    result = report.header(command, jax.devices()[0]) | {"rows": rows}
    path = report.write(options.out, "collectives" + "_longest" * longest, result, markdown(result))
    draw(result, path.with_suffix(".png"))
    Console(highlight=False).print(markdown(result), soft_wrap=True)


if __name__ == "__main__":
    main(tyro.cli(Options, prog="python -m examples.benchmarks.collectives"))
