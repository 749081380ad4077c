# SPDX-License-Identifier: Apache-2.0
"""What a step of an optimizer communicates, multiplies and stores on a mesh.

    python -m examples.research.collectives
    python -m examples.research.collectives --target v5e --devices 16 64 --slices 2

It is counted from the compiled program. Nothing is allocated and nothing runs:
parameters are shapes, devices are virtual, or those of a machine that is not there, for
which its compiler compiles. Parameters are sharded over the axis ``fsdp`` of at most 64
devices (``--fsdp``) of one slice, on their first (or longest) axis that divides, and
replicated over ``data`` beyond. Bytes are output bytes of the collectives, operations
those of matrix products, both per device and step (the mean of a row-oriented and a
column-oriented one); they depend on shapes and on the compiler's version only.
"""

import dataclasses
import functools
import operator
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

# Read when JAX looks for its backends.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=512"
)

import jax
import numpy as np
import optax
import tyro
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track

from examples.research import ahead, hlo, report, shapes
from examples.research.machine_cost import MACHINES, meter
from normpre_optax import MatrixDims, muon, normpre_g, normpre_h, normpre_l

NODE = 8  # GPUs that share a fast network
BASELINE = "optax_muon"


def last_two(path: str, leaf: Any) -> MatrixDims:
    """All parameters are (..., in, out)."""
    return MatrixDims(inputs=-2, outputs=-1)


def optax_dims(params: Any) -> Any:
    """The same in optax's words, for a tree of parameters."""

    def last_two_axes(x):
        return optax.contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1)

    return jax.tree.map(last_two_axes, params)


def oriented(factory: Callable) -> tuple[Callable, ...]:
    """NormPre in the orientation of even and of odd steps."""
    return tuple(
        functools.partial(factory, 1e-3, orientation=orientation, matrix_dims=last_two)
        for orientation in ("rows", "columns")
    )


OPTAX_MUON = functools.partial(
    optax.contrib.muon, 1e-3, muon_weight_dimension_numbers=optax_dims
)
NORMPRE_H = functools.partial(
    normpre_h, 1.6e-2, adam_learning_rate=1e-3, matrix_dims=last_two
)
# Each as the optimizers whose mean is taken: one, or one for each orientation.
OPTIMIZERS = {
    "adamw": (functools.partial(optax.adamw, 1e-3),),
    BASELINE: (OPTAX_MUON,),
    "muon": (functools.partial(muon, 1e-3, matrix_dims=last_two),),
    "normpre_h": (NORMPRE_H,),
    "normpre_g": oriented(normpre_g),
    "normpre_l": oriented(normpre_l),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Count what optimizers move on meshes."""

    # Names in ``shapes.MODELS``: their hidden matrices.
    models: tuple[str, ...] = ("gpt2_small", "llama_1p3b", "qwen3_1p7b")
    devices: tuple[int, ...] = (1, 8, 64, 512)  # Numbers of devices.
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)  # Which of them.
    # Machine whose compiler is asked: v5e, v6e, h100, ...; empty: virtual devices on
    # the CPU.
    target: str = ""
    # TPUs: groups with a fast network each, between which parameters are replicated.
    slices: int = 1
    fsdp: int = 64  # Over how many devices parameters are sharded at most.
    # Over how many more devices the experts of a mixture are, on an axis of their own.
    expert: int = 1
    # Which axis of a parameter is sharded, of those that divide.
    axis: Literal["first", "longest"] = "first"
    out: Path = Path("docs/results")  # Folder for the report.


# --- Counting
# ------------------------------------------------------------------------------------


def spec_of(x: jax.Array, mesh: jax.sharding.Mesh, longest: bool) -> PartitionSpec:
    """How a parameter is sharded.

    The first or the longest axis that divides is sharded over ``fsdp``; vectors and
    scalars are replicated. Experts, the second of four axes, are over ``expert``; of
    what has layers in front the inputs come first.
    """
    if x.ndim < 2:
        return PartitionSpec(*[None] * x.ndim)
    axes = [*range(x.ndim - 2, x.ndim), *range(x.ndim - 2)]
    if longest:
        axes = sorted(range(x.ndim), key=lambda axis: -x.shape[axis])
    names: list[str | None] = [None] * x.ndim
    if x.ndim == 4:
        names[1] = "expert"
    sharded = next((a for a in axes if x.shape[a] % mesh.shape["fsdp"] == 0), None)
    if sharded is not None and names[sharded] is None:
        names[sharded] = "fsdp"
    return PartitionSpec(*names)


def mesh_of(devices: int, axis_type: AxisType, options: Options) -> jax.sharding.Mesh:
    """A mesh of ``data``, ``expert`` and ``fsdp``.

    ``data`` are the slices, and what is beyond so many devices.
    """
    fsdp = min(devices // options.slices // options.expert, options.fsdp)
    if not options.target:
        found = jax.devices()
    elif devices > 1:
        found = ahead.devices(options.target, devices, options.slices)
    else:  # a slice of one device is not known
        found = ahead.devices(options.target, None, options.slices)
    grid = np.array(found[:devices]).reshape(-1, options.expert, fsdp)
    return jax.sharding.Mesh(
        grid, ("data", "expert", "fsdp"), axis_types=(axis_type,) * 3
    )


def count(
    model: str,
    tx: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    options: Options,
) -> dict:
    """Compile one step and count it."""
    platform = "cpu"
    # Without a machine its code is not needed: only what the partitioner made of the
    # program.
    flags: Any = {"xla_backend_optimization_level": 0}
    machine = None
    turns = None
    if options.target:
        machine = MACHINES[options.target]
        platform = machine.platform
        flags = {}
        turns = ahead.TURNS
    lowered = traced(model, tx, mesh, options).lower(lowering_platforms=(platform,))
    compiled = lowered.compile(compiler_options=flags)
    text = compiled.as_text() or ""
    near = mesh.size // options.slices
    if platform == "cuda":
        near = NODE
    cost = hlo.cost(text, turns, near)
    milliseconds = 0.0
    if machine:
        milliseconds = meter(text, machine, turns)["ms"]
    temporaries = 0
    if memory := compiled.memory_analysis():
        temporaries = memory.temp_size_in_bytes
    return {
        "bytes": cost.bytes,
        "far_bytes": cost.far,
        "overlapped_bytes": cost.overlapped,
        "collectives": cost.collectives,
        "flops": cost.flops,
        "ms": milliseconds,
        "temporary_bytes": temporaries,
    }


def traced(
    model: str,
    tx: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    options: Options,
) -> Any:
    """One step on the sharded matrices of a model, ready to be lowered."""

    def as_parameter(x):
        return spec_of(x, mesh, options.axis == "longest")

    def as_it_says(x):
        if x.sharding:
            return x.sharding.spec
        return PartitionSpec()

    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    shape = jax.eval_shape(lambda: shapes.matrices(model))
    params = placed(shape, mesh, as_parameter)
    state = jax.eval_shape(tx.init, params)
    # With Explicit axes the state knows its sharding.
    spec = as_it_says
    if AxisType.Auto in mesh.axis_types:
        spec = as_parameter
    state = placed(state, mesh, spec)
    out = jax.tree.map(lambda x: x.sharding, (params, state))
    jitted = jax.jit(step, donate_argnums=(1, 2), out_shardings=out)
    return jitted.trace(params, state, params)


def placed(
    tree: Any, mesh: jax.sharding.Mesh, spec: Callable[[Any], PartitionSpec]
) -> Any:
    """Shapes of a tree's arrays, sharded as ``spec`` says."""

    def place(x):
        sharding = NamedSharding(mesh, spec(x))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(place, tree)


def measure(model: str, name: str, devices: int, options: Options) -> dict:
    """Mean over the orientations; the larger of their temporaries."""
    axis_type = AxisType.Explicit
    if name == BASELINE:  # optax knows Auto axes only
        axis_type = AxisType.Auto
    mesh = mesh_of(devices, axis_type, options)
    counts = [count(model, build(), mesh, options) for build in OPTIMIZERS[name]]

    def mean(values):
        return sum(values) / len(counts)

    row: dict[str, Any] = {"model": model, "optimizer": name, "devices": devices}
    for what in ("bytes", "far_bytes", "overlapped_bytes", "flops", "ms"):
        row[what] = mean([one[what] for one in counts])
    by_kind = [one["collectives"] for one in counts]
    row["collectives"] = {}
    for kind in sorted(set().union(*by_kind)):
        row["collectives"][kind] = mean([one.get(kind, 0) for one in by_kind])
    row["temporary_bytes"] = max(one["temporary_bytes"] for one in counts)
    return row


# --- The report
# ------------------------------------------------------------------------------------


def markdown(result: dict) -> str:
    """One table a model."""
    rows = result["rows"]
    timed = any(row["ms"] for row in rows)
    page = (
        f"`{result['command']}`, {result['date']}, jax {result['versions']['jax']},"
        f" optax {result['versions']['optax']}. Per device and step: output bytes of"
        " collectives, operations of products, temporaries of the compiled step."
    )
    if timed:
        page += (
            " Bytes to other slices or nodes, bytes communicated during computation,"
            " and ms, the time without the network, are estimates of the compiler and"
            " our model: nothing was run."
        )
    columns = columns_of(rows, timed)
    for model in distinct(rows, "model"):
        of_model = [row for row in rows if row["model"] == model]
        of_model.sort(key=operator.itemgetter("devices"))
        table = report.table("devices", columns, of_model)
        page += f"\n\n{model}:\n\n{table.rstrip()}"
    return page + "\n"


def columns_of(rows: list[dict], timed: bool) -> dict[str, Callable[[dict], str]]:
    """Titles of a table, and functions of a row for the cells below them.

    ``report.table`` leaves a cell empty where its function raises a KeyError, and a
    column without any.
    """
    known = {(row["model"], row["optimizer"], row["devices"]): row for row in rows}

    def megabytes(what):
        return lambda row: f"{row[what] / 1e6:.1f}"

    def times_alone(row):
        alone = known[row["model"], row["optimizer"], 1]["flops"]
        if not row["flops"]:
            return ""
        return f"{row['flops'] * row['devices'] / alone:.2f}"

    def times_less(row):
        if not row["bytes"]:
            return ""
        peer = known[row["model"], BASELINE, row["devices"]]["bytes"]
        return f"{peer / row['bytes']:.1f}"

    estimated = {}
    if timed:
        estimated = {
            "of it far": megabytes("far_bytes"),
            "of it overlapped": megabytes("overlapped_bytes"),
            "ms": lambda row: f"{row['ms']:.2f}",
        }
    return {
        "optimizer": lambda row: row["optimizer"],
        "MB moved": megabytes("bytes"),
        **estimated,
        "optax Muon / this": times_less,
        "GFLOP": lambda row: f"{row['flops'] / 1e9:.1f}",
        "x devices / alone": times_alone,
        "temporaries MB": lambda row: f"{row['temporary_bytes'] / 1e6:.0f}",
    }


def distinct(rows: list[dict], key: str) -> list:
    """The values of ``key``, each once, in the order of the rows."""
    return list(dict.fromkeys(row[key] for row in rows))


def draw(result: dict) -> Figure:
    """Bytes and operations by number of devices, a column for every model."""
    rows = result["rows"]
    models = distinct(rows, "model")
    counts = sorted(distinct(rows, "devices"))
    figure = Figure(figsize=(max(5.5, 4 * len(models)), 6.5), layout="constrained")
    axes = figure.subplots(2, len(models), squeeze=False, sharex=True)
    names = distinct(rows, "optimizer")
    for column, model in enumerate(models):
        for place, name in enumerate(names):
            look = {
                "marker": "osv^DP"[place % 6],
                "color": f"C{place}",
                "label": name,
            }
            drawn = [
                row
                for row in rows
                if row["model"] == model and row["optimizer"] == name
            ]
            draw_curve(axes[0, column], drawn, "bytes", look)
            draw_curve(axes[1, column], drawn, "flops", look)
        axes[0, column].set_title(model)
        axes[1, column].set_xlabel("devices")
    axes[0, 0].set_ylabel("bytes communicated")
    axes[1, 0].set_ylabel("operations of products")
    for one in axes.flat:
        one.set_xticks(counts, counts)
        one.minorticks_off()
        one.grid(alpha=0.3)
    handles, labels = axes[1, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


def draw_curve(axes: Axes, rows: list[dict], key: str, look: dict[str, Any]) -> None:
    """A line over the numbers of devices, of what is not zero."""
    points = [(row["devices"], row[key]) for row in rows if row[key]]
    if points:
        axes.loglog(*zip(*points, strict=True), **look)


def main(options: Options) -> None:
    """Count, print, write."""
    work: list[tuple[str, str, int]] = []
    for devices in options.devices:
        for model in options.models:
            work += [(model, name, devices) for name in options.optimizers]
    rows = [measure(*one, options) for one in track(work, "compiling")]
    device = jax.devices()[0]
    if options.target:
        device = ahead.devices(options.target)[0]
    result = report.header(report.command("collectives", options), device)
    result["rows"] = rows
    page = markdown(result)
    report.write(options.out, _report_name(options), result, page, draw(result))
    Console(highlight=False).print(page, soft_wrap=True)


def _report_name(options: Options) -> str:
    """Name of the report's files: what differs from the default."""
    parts = ["collectives"]
    if options.target:
        parts.append(options.target)
    if options.slices > 1:
        parts.append(f"{options.slices}_slices")
    if options.fsdp != Options.fsdp:
        parts.append(f"fsdp_{options.fsdp}")
    if options.expert > 1:
        parts.append("experts")
    if options.axis != Options.axis:
        parts.append(options.axis)
    return "_".join(parts)


if __name__ == "__main__":
    main(tyro.cli(Options, prog="python -m examples.research.collectives"))
