# SPDX-License-Identifier: Apache-2.0
"""What an optimizer step costs on TPUs and GPUs, estimated without having any.

    python -m examples.research.ahead --target v5e h100 --model gpt2_small --layers 12
    python -m examples.research.ahead --target v5e --train-step gpt2_small --optimizers
    adamw normpre_g

The compilers of TPUs (``pip install ".[tpu-compile]"``) and NVIDIA's GPUs
(``".[gpu-compile]"``) run anywhere. They get the step that ``optimizer_step`` measures:
update and application, with gradients, state and parameters donated. From the compiled
program ``machine_cost`` estimates its time; the compiler itself says how much memory it
needs. Next to the optimizers stand AdamW and a matrix product of 4096 x 4096 in
bfloat16, whose times are known, to compare the estimates with. ``--train-step`` does
the same with a whole step of the pretraining program. Nothing is allocated, nothing
runs.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import itertools
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

# The version check of JAX's CUDA plugin asks the driver. Read when JAX looks for its
# backends.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.progress import track

from examples.pretrain import configs, models
from examples.pretrain.optimizers import OPTIMIZERS as TRAINED
from examples.pretrain.optimizers import make_optimizer
from examples.pretrain.train import TrainState, make_train_step, micro_batches, schedule
from examples.research import machine_cost, optimizer_step, report, shapes
from examples.research.machine_cost import MACHINES

BASELINE = "optax_muon"
PRODUCT = "matmul"
SIDE = 4096  # of the matrices of that product
# How often loops turn whose bounds are data. No optimizer of the library has one left;
# others, or a model, may.
TURNS = 1.5
TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Estimate optimizer steps on TPUs and GPUs that are not there."""

    target: tuple[str, ...] = ("v5e",)  # Chips: v5e, v5p, v6e, tpu7x, a100, h100, b200.
    model: str = "gpt2_small"  # Shapes: a name in ``shapes.MODELS``.
    layers: int | None = None  # Only so many layers; None: all.
    # Which, in which order; others are those of ``optimizer_step --help``.
    optimizers: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = (
        *(PRODUCT, "adamw", BASELINE),
        *("muon", "mano", "normpre_g", "normpre_l", "normpre_h"),
    )
    # A configuration of examples.pretrain, such as gpt2_small: its whole step instead
    # of the optimizer's.
    train_step: str = ""
    # Sequences whose gradients are taken at once in that step, as fit into memory;
    # None: as configured.
    micro_batch: int | None = None
    out: Path = Path("docs/results")  # Folder for the reports.


def missing(target: str) -> str:
    """The extra to install to compile for ``target``; empty where one can already."""
    if isinstance(MACHINES[target], machine_cost.Tpu):
        if importlib.util.find_spec("libtpu"):
            return ""
        return "tpu-compile"
    # A submodule can only be looked for where its package is.
    if importlib.util.find_spec("jax_plugins"):
        for version in (12, 13):
            if importlib.util.find_spec(f"jax_plugins.xla_cuda{version}"):
                return ""
    return "gpu-compile"


@functools.cache
def devices(target: str, count: int | None = None, slices: int = 1) -> list[Any]:
    """All devices of a machine that is not there.

    Args:
        target: a name in ``MACHINES``.
        count: how many; None: a few.
        slices: TPUs: how many groups they make, each with its own fast network.

    Raises:
        SystemExit: where its compiler is not installed, or knows no such machine.
    """
    if missing(target):
        raise SystemExit(
            f'no compiler for {target} here: pip install ".[{missing(target)}]"'
        )
    machine = MACHINES[target]
    if isinstance(machine, machine_cost.Tpu):
        return _tpu_devices(target, machine, count, slices)
    many = count or 8
    shape = f"1x{max(many // 8, 1)}x{min(many, 8)}"  # nodes of eight
    cuda = topologies.get_topology_desc(
        platform="cuda",
        topology_name=shape,
        topology=shape,
        target_config=machine.config,
    )
    return cuda.devices


def _tpu_devices(
    target: str, machine: machine_cost.Tpu, count: int | None, slices: int
) -> list[Any]:
    """All devices of TPUs that are not there, in one slice or several."""
    for name, value in TPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    topology = machine.topology
    if count is not None:
        topology = _square(target, topology, count, slices)
    split = {}
    if slices > 1:
        split["num_slices"] = slices
    found = topologies.get_topology_desc(
        platform="tpu", topology_name=topology, **split
    )
    return found.devices


def _square(target: str, topology: str, count: int, slices: int) -> str:
    """The name of a slice as square as a power of two allows.

    Args:
        target: for the error.
        topology: that of a slice of usual size, such as "v5e:2x2".
        count: devices of all slices.
        slices: their number.

    Raises:
        SystemExit: where there is no such slice.
    """
    chip, _, usual = topology.partition(":")
    short = 2 ** (int(math.log2(count // slices)) // 2)
    if usual.count("x") != 1 or short < 2 or count % (slices * short):
        raise SystemExit(
            f"{count} devices of {target}: only powers of two, and of v5e and"
            " v6e, are known here"
        )
    return f"{chip}:{short}x{count // slices // short}"


def compiled(target: str, function: Any, arguments: tuple) -> tuple[Any, float]:
    """A jitted function compiled for ``target`` on these shapes.

    Returns:
        The compiled program, and the seconds that tracing and compiling took.

    Raises:
        SystemExit: with the compiler's words where the program does not fit into the
            chip's memory.
    """
    machine = MACHINES[target]
    mesh = Mesh(np.array(devices(target)[:1]), ("device",))
    sharding = NamedSharding(mesh, PartitionSpec())

    def place(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    flags: Any = {}
    if machine.platform == "cuda":  # without a GPU there is nothing to time kernels on
        flags["xla_gpu_autotune_level"] = 0
    start = time.perf_counter()
    with warnings.catch_warnings():
        # There are three donated trees for two results.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        # Programs for devices that are not there cannot be read from a cache.
        warnings.filterwarnings(
            "ignore", "Error reading persistent compilation cache entry"
        )
        traced = function.trace(*jax.tree.map(place, arguments))
        lowered = traced.lower(lowering_platforms=(machine.platform,))
        try:
            program = lowered.compile(compiler_options=flags)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            said = str(error).partition(": ")[2].partition("\n")[0]
            raise SystemExit(
                f"{target}: {said} --layers takes fewer layers, --micro-batch fewer"
                " sequences"
            ) from None
    return program, time.perf_counter() - start


def row_of(
    target: str, function: Any, arguments: tuple, weights: Any, state: Any
) -> dict[str, Any]:
    """Compile, and estimate time and memory.

    Args:
        target: a name in ``MACHINES``.
        function: a jitted function.
        arguments: its arguments, or their shapes.
        weights: tree of the parameters; bytes are also given per byte of it.
        state: tree of the optimizer's state.

    Returns:
        What ``estimate`` returns.
    """
    program, seconds = compiled(target, function, arguments)
    memory = program.memory_analysis()
    size = _bytes(weights)
    count = sum(x.size for x in jax.tree.leaves(weights))
    row = machine_cost.meter(program.as_text(), MACHINES[target], TURNS)
    return row | {
        "compile_s": seconds,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        # Donated arguments hold the results.
        "peak_bytes": (
            memory.argument_size_in_bytes
            + memory.temp_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
        ),
        "temporaries_per_weight_byte": memory.temp_size_in_bytes / size,
        "state_per_weight_byte": _bytes(state) / size,
        "hbm_bytes_per_weight": row["hbm_bytes"] / count,
    }


def _bytes(tree: Any) -> int:
    """Size of all arrays of a tree, or of their shapes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@functools.cache
def estimate(
    target: str, model: str, layers: int | None, optimizer_name: str
) -> dict[str, Any]:
    """One row: an optimizer's step on the matrices of a model, estimated for a chip.

    Args:
        target: a name in ``machine_cost.MACHINES``.
        model: a name in ``shapes.MODELS``.
        layers: how many layers of it, None for all.
        optimizer_name: a name in ``optimizer_step.KNOWN``, or ``"matmul"``: a product
            of 4096 x 4096 in bfloat16.

    Returns:
        What ``machine_cost.meter`` returns, and ``compile_s``, ``argument_bytes``,
        ``temporary_bytes``, ``peak_bytes``, ``temporaries_per_weight_byte``,
        ``state_per_weight_byte``, ``hbm_bytes_per_weight``.

    Raises:
        SystemExit: where the compiler for ``target`` is not installed.
    """
    if optimizer_name == PRODUCT:
        square = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.bfloat16)
        factors = (square, square)
        return row_of(target, jax.jit(jnp.matmul), factors, factors, ())
    params = jax.eval_shape(lambda: shapes.matrices(model, layers=layers))
    optimizer = optimizer_step.KNOWN[optimizer_name](1e-3)
    step, arguments = optimizer_step.jitted(optimizer, params)
    _, state, _ = arguments
    return row_of(target, step, arguments, params, state)


@functools.cache
def estimate_train_step(
    target: str,
    config_name: str,
    layers: int | None,
    optimizer_name: str,
    *,
    micro_batch: int | None = None,
) -> dict[str, Any]:
    """One row: a whole step of ``examples.pretrain`` on one device.

    The model computes in bfloat16, with XLA's attention. Arguments and result are
    ``estimate``'s; ``config_name`` is a file of ``examples.pretrain.configs``, and
    ``micro_batch`` the number of sequences whose gradients are computed at once, None
    for as many as it says.
    """
    config = configs.load(config_name)
    model = dataclasses.replace(
        config.model, layers=layers or config.model.layers, attention="xla"
    )
    config = dataclasses.replace(
        config,
        model=model,
        optimizer=optimizer_name,
        micro_batch=micro_batch or config.micro_batch,
        replicas=1,
        fsdp=1,
    )
    vocabulary = model.vocabulary or config.vocabulary

    def build():
        return models.build(model, vocabulary, dtype=jnp.dtype(jnp.bfloat16), seed=0)

    graphdef, variables = nnx.split(nnx.eval_shape(build))
    params: Any = nnx.to_pure_dict(variables)
    optimizer = make_optimizer(config, schedule(config))
    state = TrainState(params, jax.eval_shape(optimizer.init, params))
    tokens = jax.ShapeDtypeStruct((config.batch_size, model.context + 1), jnp.int32)
    step = make_train_step(graphdef, optimizer, micro_batches(config))
    return row_of(target, step, (state, tokens), params, state.opt_state)


def with_ratios(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Rows with their ratios to AdamW and to optax's Muon, where these are there."""
    found = {}
    for name, row in rows.items():
        over = {}
        for other in ("adamw", BASELINE):
            if other in rows:
                over[f"over_{other}"] = row["ms"] / rows[other]["ms"]
        if BASELINE in rows:
            ratio = row["compile_s"] / rows[BASELINE]["compile_s"]
            over[f"compile_over_{BASELINE}"] = ratio
        found[name] = row
        if name != PRODUCT:
            found[name] = row | over
    return found


def result_of(
    options: Options, target: str, rows: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """What is written as JSON."""
    machine = MACHINES[target]
    command = report.command("ahead", dataclasses.replace(options, target=(target,)))
    result = report.header(command, devices(target)[0])
    result["versions"] |= compiler_versions(machine)
    return result | {
        "what": "estimated by the compiler; nothing was run",
        "target": target,
        "chip": machine.name,
        "model": options.train_step or options.model,
        "layers": options.layers,
        "whole_train_step": bool(options.train_step),
        "assumptions": (
            f"{machine.assumptions} Loops whose bounds are data turn {TURNS} times."
            " Collectives cost nothing here."
        ),
        "rows": with_ratios(rows),
    }


def compiler_versions(machine: machine_cost.Machine) -> dict[str, str]:
    """Versions of the packages with the compiler for a machine that are installed."""
    packages = ("jax-cuda12-plugin", "jax-cuda13-plugin")
    if machine.platform == "tpu":
        packages = ("libtpu",)
    versions = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def markdown(result: dict[str, Any]) -> str:
    """The report as a table."""
    gpu = MACHINES[result["target"]].platform == "cuda"
    compilers = ", ".join(
        f"{name} {version}"
        for name, version in result["versions"].items()
        if name not in ("python", "numpy")
    )
    step = "An optimizer step"
    if result["whole_train_step"]:
        step = "A whole train step"
    model = result["model"]
    if result["layers"]:
        model = f"layers of {model}: {result['layers']}"
    hidden = _hidden(result)
    shown = {title: f for title, f in columns(gpu).items() if title not in hidden}
    return (
        f"`{result['command']}`, {result['date']}, {compilers}.\n\n{step} on one"
        f" {result['chip']}, {model}: **{result['what']}.**"
        f" {result['assumptions']}\n\n"
        + report.table("", shown, result["rows"])
        + unpriced_note(result["rows"], gpu)
    )


def unpriced_note(rows: dict[str, dict[str, Any]], gpu: bool) -> str:
    """What an estimate leaves out: the instructions that no time is known for."""
    unpriced = []
    for name, row in rows.items():
        if row["unpriced"]:
            calls = [f"{what} x {times:g}" for what, times in row["unpriced"].items()]
            unpriced.append(f"{name}: {', '.join(calls)}")
    if not unpriced:
        return ""
    known = "beyond their bytes"
    if gpu:
        known = "beyond their bytes and their launch"
    return (
        f"\nNo time is known for, and none is counted {known}: {'; '.join(unpriced)}.\n"
    )


def columns(gpu: bool) -> dict[str, Callable[[dict], str]]:
    """Titles of the table, and functions of a row for the cells below them."""
    number = report.number

    def figure(key):
        return lambda row: number(row[key])

    def gigabytes(key):
        return lambda row: number(row[key] / 1e9)

    def two_digits(key):
        return lambda row: f"{row[key]:.2f}"

    def teraflops(row):
        kinds = [f"{number(n / 1e12)} {kind}" for kind, n in row["flops"].items()]
        return ", ".join(kinds)

    compute = "cycles ms"
    launches = {}
    if gpu:
        compute = "kernels ms"
        launches["kernels"] = lambda row: f"{row['kernels']:,.0f}"
    return {
        "ms": figure("ms"),
        compute: figure("compute_ms"),
        "HBM ms": figure("hbm_ms"),
        "eigh ms": figure("eigh_ms"),
        **launches,
        "/ AdamW": figure("over_adamw"),
        "/ optax Muon": figure(f"over_{BASELINE}"),
        "TFLOP": teraflops,
        "bytes / weight": figure("hbm_bytes_per_weight"),
        "peak GB": gigabytes("peak_bytes"),
        "arguments GB": gigabytes("argument_bytes"),
        "temporaries GB": gigabytes("temporary_bytes"),
        "temporaries / weights": two_digits("temporaries_per_weight_byte"),
        "state / weights": two_digits("state_per_weight_byte"),
        "compile s": lambda row: f"{row['compile_s']:.1f}",
        "compile / optax Muon": figure(f"compile_over_{BASELINE}"),
    }


def _hidden(result: dict[str, Any]) -> set[str]:
    """Columns that are left out of a table of whole train steps, or of optimizers."""
    if result["whole_train_step"]:
        return {"temporaries / weights", "state / weights", "bytes / weight"}
    return {"peak GB", "arguments GB", "temporaries GB"}


def chosen_names(options: Options) -> list[str]:
    """The optimizers to estimate.

    Raises:
        SystemExit: where a target, model, configuration or optimizer is not known, or
            there are no such layers.
    """
    known = [*optimizer_step.KNOWN, PRODUCT]
    if options.train_step:
        known = [*TRAINED]
    names = list(options.optimizers)
    # Of the default, optax's for one is not among those of the pretraining program.
    if options.optimizers == Options.optimizers:
        names = [name for name in names if name in known]
    _among("--target", options.target, MACHINES)
    _among("--optimizers", names, known)
    if options.train_step:
        _among("--train-step", [options.train_step], configs.CONFIGS)
        depth = configs.load(options.train_step).model.layers
    else:
        _among("--model", [options.model], shapes.MODELS)
        depth = shapes.MODELS[options.model][0]
    if options.layers is not None and not 1 <= options.layers <= depth:
        raise SystemExit(f"--layers {options.layers} is none of 1 to {depth}")
    return names


def _among(option: str, given: Sequence[str], known: Iterable[str]) -> None:
    """Refuse names that are not known, and an option without any."""
    for name in given or [""]:
        if name not in known:
            raise SystemExit(
                f"{option} {name or 'without a name'}: it takes {', '.join(known)}"
            )


def main(options: Options) -> None:
    """Compile, estimate, print, write: a report for every target.

    Raises:
        SystemExit: at the end, where something did not fit into a chip; the rest has
            its rows.
    """
    console = Console(highlight=False)
    names = chosen_names(options)
    options.out.mkdir(parents=True, exist_ok=True)
    for target in options.target:
        devices(target)  # fails before any work where a compiler is not installed
    rows: dict[str, dict[str, dict]] = {target: {} for target in options.target}
    too_large = []
    work = list(itertools.product(options.target, names))
    for target, name in track(work, "compiling", console=console):
        try:
            rows[target][name] = _estimated(options, target, name)
        except SystemExit as error:
            too_large.append(f"{name} on {error}")
    for target, estimated in rows.items():
        if estimated:
            result = result_of(options, target, estimated)
            page = markdown(result)
            report.write(options.out, _report_name(options, target), result, page)
            console.print(page, soft_wrap=True)
    if too_large:
        raise SystemExit("\n".join(too_large))


def _estimated(options: Options, target: str, name: str) -> dict[str, Any]:
    """One row: that of the train step where one is asked for."""
    if not options.train_step:
        return estimate(target, options.model, options.layers, name)
    return estimate_train_step(
        target,
        options.train_step,
        options.layers,
        name,
        micro_batch=options.micro_batch,
    )


def _report_name(options: Options, target: str) -> str:
    """Name of the files of a report."""
    what = options.model
    if options.train_step:
        what = f"train_step_{options.train_step}"
    name = f"ahead_{target}_{what}"
    if options.layers:
        name += f"_{options.layers}layers"
    return name


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # whatever else there is: nothing runs
    main(tyro.cli(Options, prog="python -m examples.research.ahead"))
