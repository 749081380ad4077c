# SPDX-License-Identifier: Apache-2.0
"""What a step of an optimizer moves, multiplies and needs on a mesh, counted from the
compiled program.

    python -m examples.research.collectives
    python -m examples.research.collectives --target v5e --devices 16 64 --slices 2

Nothing is allocated and nothing runs: parameters are shapes, devices are virtual, or
those of a machine that is not there, by whose compiler. Parameters are sharded over the
axis ``fsdp`` of at most 64 devices (``--fsdp``) of one slice, on their first (or
longest) axis that divides, and replicated over ``data`` beyond. Bytes are output bytes
of the collectives, operations those of matrix products, both per device and step (the
mean of a row-oriented and a column-oriented one); they depend on shapes and on the
compiler's version only.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=512"
)

import jax
import numpy as np
import optax
import tyro
from jax.sharding import AxisType, NamedSharding, PartitionSpec
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
    """The same in optax's words."""
    return jax.tree.map(
        lambda x: optax.contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1), params
    )


def oriented(factory: Callable) -> tuple[Callable, ...]:
    """NormPre in the orientation of even and of odd steps."""
    return tuple(
        functools.partial(factory, 1e-3, orientation=o, matrix_dims=last_two)
        for o in ("rows", "columns")
    )


OPTIMIZERS = {
    "adamw": (functools.partial(optax.adamw, 1e-3),),
    BASELINE: (
        functools.partial(
            optax.contrib.muon, 1e-3, muon_weight_dimension_numbers=optax_dims
        ),
    ),
    "muon": (functools.partial(muon, 1e-3, matrix_dims=last_two),),
    "normpre_h": (
        functools.partial(
            normpre_h, 1.6e-2, adam_learning_rate=1e-3, matrix_dims=last_two
        ),
    ),
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


def spec_of(x, mesh: jax.sharding.Mesh, longest: bool) -> PartitionSpec:
    """The first or the longest axis that divides, over ``fsdp``; vectors and scalars
    are replicated.

    Experts, the second of four axes, are over ``expert``; of what has layers in front
    the inputs come first.
    """
    order = sorted(
        range(x.ndim), key=lambda a: -x.shape[a] if longest else (a < x.ndim - 2, a)
    )
    axis = next(
        (a for a in order if x.ndim > 1 and x.shape[a] % mesh.shape["fsdp"] == 0), None
    )
    names = {axis: "fsdp"} | ({1: "expert"} if x.ndim == 4 else {})
    return PartitionSpec(*(names.get(a) for a in range(x.ndim)))


def mesh_of(devices: int, axis_type: AxisType, options: Options) -> jax.sharding.Mesh:
    """Axes ``data`` (between slices, and beyond so many devices), ``expert`` and
    ``fsdp``.
    """
    fsdp = min(devices // options.slices // options.expert, options.fsdp)
    many = devices if devices > 1 else None
    found = (
        ahead.devices(options.target, many, options.slices)
        if options.target
        else jax.devices()
    )
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
    machine = MACHINES[options.target] if options.target else None

    def placed(tree, spec=lambda x: spec_of(x, mesh, options.axis == "longest")):
        def place(x):
            return jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(mesh, spec(x))
            )

        return jax.tree.map(place, tree)

    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = placed(jax.eval_shape(lambda: shapes.matrices(model)))
    state = jax.eval_shape(tx.init, params)
    # With Explicit axes the state knows its sharding.
    if AxisType.Auto in mesh.axis_types:
        state = placed(state)
    else:
        state = placed(
            state, lambda x: x.sharding.spec if x.sharding else PartitionSpec()
        )
    out = jax.tree.map(lambda x: x.sharding, (params, state))
    traced = jax.jit(step, donate_argnums=(1, 2), out_shardings=out).trace(
        params, state, params
    )
    # Without a machine its code is not needed: only what the partitioner made of the
    # program.
    quick: Any = {} if machine else {"xla_backend_optimization_level": 0}
    lowered = traced.lower(lowering_platforms=(machine.platform if machine else "cpu",))
    compiled = lowered.compile(compiler_options=quick)
    text, memory = compiled.as_text() or "", compiled.memory_analysis()
    near = (
        NODE if machine and machine.platform == "cuda" else mesh.size // options.slices
    )
    cost = hlo.cost(text, ahead.TURNS if machine else None, near)
    return {
        "bytes": cost.bytes,
        "far_bytes": cost.far,
        "overlapped_bytes": cost.overlapped,
        "collectives": cost.collectives,
        "flops": cost.flops,
        "ms": meter(text, machine, ahead.TURNS)["ms"] if machine else 0.0,
        "temporary_bytes": memory.temp_size_in_bytes if memory else 0,
    }


def measure(model: str, name: str, devices: int, options: Options) -> dict:
    """Mean over the orientations; the larger of their temporaries. optax knows Auto
    axes only.
    """
    mesh = mesh_of(
        devices, AxisType.Auto if name == BASELINE else AxisType.Explicit, options
    )
    counts = [count(model, build(), mesh, options) for build in OPTIMIZERS[name]]
    kinds = {kind for c in counts for kind in c["collectives"]}

    def mean(values):
        return sum(values) / len(counts)

    return {
        "model": model,
        "optimizer": name,
        "devices": devices,
        **{
            what: mean([c[what] for c in counts])
            for what in ("bytes", "far_bytes", "overlapped_bytes", "flops", "ms")
        },
        "collectives": {
            kind: mean([c["collectives"].get(kind, 0) for c in counts])
            for kind in sorted(kinds)
        },
        "temporary_bytes": max(c["temporary_bytes"] for c in counts),
    }


def markdown(result: dict) -> str:
    """One table a model."""
    rows = {(r["model"], r["optimizer"], r["devices"]): r for r in result["rows"]}
    timed = any(r["ms"] for r in result["rows"])
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

    def mb(what):
        return lambda r: f"{r[what] / 1e6:.1f}"

    def times_alone(r):
        alone = rows[r["model"], r["optimizer"], 1]["flops"]
        return f"{r['flops'] * r['devices'] / alone:.2f}" if r["flops"] else ""

    columns = {
        "optimizer": lambda r: r["optimizer"],
        "MB moved": mb("bytes"),
        "of it far": lambda r: mb("far_bytes")(r) if timed else "",
        "of it overlapped": lambda r: mb("overlapped_bytes")(r) if timed else "",
        "ms": lambda r: f"{r['ms']:.2f}" if timed else "",
        "optax Muon / this": lambda r: (
            f"{rows[r['model'], BASELINE, r['devices']]['bytes'] / r['bytes']:.1f}"
            if r["bytes"]
            else ""
        ),
        "GFLOP": lambda r: f"{r['flops'] / 1e9:.1f}",
        "x devices / alone": times_alone,
        "temporaries MB": lambda r: f"{r['temporary_bytes'] / 1e6:.0f}",
    }
    for model in dict.fromkeys(r["model"] for r in result["rows"]):
        of_model = sorted(
            (r for r in result["rows"] if r["model"] == model),
            key=lambda r: r["devices"],
        )
        page += (
            f"\n\n{model}:\n\n" + report.table("devices", columns, of_model).rstrip()
        )
    return page + "\n"


def draw(result: dict) -> Figure:
    """Bytes and operations by number of devices, a column for every model."""
    models = list(dict.fromkeys(r["model"] for r in result["rows"]))
    names = list(dict.fromkeys(r["optimizer"] for r in result["rows"]))
    counts = sorted({r["devices"] for r in result["rows"]})
    figure = Figure(figsize=(max(5.5, 4 * len(models)), 6.5), layout="constrained")
    axes = figure.subplots(2, len(models), squeeze=False, sharex=True)
    for column, model in enumerate(models):
        for i, name in enumerate(names):
            rows = [
                r
                for r in result["rows"]
                if (r["model"], r["optimizer"]) == (model, name)
            ]
            for row, key in enumerate(("bytes", "flops")):
                points = [(r["devices"], r[key]) for r in rows if r[key]]
                if points:
                    axes[row, column].loglog(
                        *zip(*points, strict=True),
                        marker="osv^DP"[i % 6],
                        color=f"C{i}",
                        label=name,
                    )
        axes[0, column].set(
            title=model, ylabel="bytes communicated" if column == 0 else ""
        )
        axes[1, column].set(
            xlabel="devices", ylabel="operations of products" if column == 0 else ""
        )
    for ax in axes.flat:
        ax.set_xticks(counts, counts)
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    figure.legend(
        *axes[1, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4
    )
    return figure


def main(options: Options) -> None:
    """Count, print, write."""
    work = [
        (m, o, n)
        for n in options.devices
        for m in options.models
        for o in options.optimizers
    ]
    rows = [measure(*one, options) for one in track(work, "compiling")]
    parts = {
        options.target: options.target,
        f"{options.slices}_slices": options.slices > 1,
        f"fsdp_{options.fsdp}": options.fsdp != Options.fsdp,
        "experts": options.expert > 1,
        options.axis: options.axis != Options.axis,
    }
    name = "_".join(
        ["collectives", *(part for part, is_named in parts.items() if is_named)]
    )
    device = ahead.devices(options.target)[0] if options.target else jax.devices()[0]
    result = report.header(report.command("collectives", options), device) | {
        "rows": rows
    }
    report.write(options.out, name, result, markdown(result), draw(result))
    Console(highlight=False).print(markdown(result), soft_wrap=True)


if __name__ == "__main__":
    main(tyro.cli(Options, prog="python -m examples.research.collectives"))
