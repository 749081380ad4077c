# SPDX-License-Identifier: Apache-2.0
"""What an optimizer step costs on TPUs and GPUs, estimated from programs compiled for
them: none is needed.

    python -m examples.research.ahead --target v5e h100 --model gpt2_small --layers 12
    python -m examples.research.ahead --target v5e --train-step gpt2_small --optimizers
    adamw normpre_g

The compilers of TPUs (``pip install ".[tpu-compile]"``) and NVIDIA's GPUs
(``".[gpu-compile]"``) run anywhere. They get the step that ``optimizer_step`` measures:
update and application, with gradients, state and parameters donated. From the compiled
program ``machine_cost`` estimates its time; the compiler itself says how much memory it
needs. Next to the optimizers stand AdamW and a matrix product of 4096 x 4096 in
bfloat16, on which an estimate can be held against what is known. ``--train-step`` does
the same with a whole step of the pretraining program. Nothing is allocated, nothing
runs.
"""

import dataclasses
import functools
import importlib.metadata
import importlib.util
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

BASELINE, PRODUCT = "optax_muon", "matmul"
SIDE = 4096
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
    """Which extra has to be installed to compile for ``target``, empty where it can be
    compiled for.
    """
    if isinstance(MACHINES[target], machine_cost.Tpu):
        return "" if importlib.util.find_spec("libtpu") else "tpu-compile"
    plugins = importlib.util.find_spec("jax_plugins")
    found = plugins and any(
        importlib.util.find_spec(f"jax_plugins.xla_cuda{n}") for n in (12, 13)
    )
    return "" if found else "gpu-compile"


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
        os.environ.update(
            {
                name: os.environ.get(name, value)
                for name, value in TPU_ENVIRONMENT.items()
            }
        )
        name = machine.topology
        if count is not None:  # as square as a power of two allows
            chip, _, usual = name.partition(":")
            short = 2 ** (int(math.log2(count // slices)) // 2)
            if usual.count("x") != 1 or short < 2 or count % (slices * short):
                raise SystemExit(
                    f"{count} devices of {target}: only powers of two, and of v5e and"
                    " v6e, are known here"
                )
            name = f"{chip}:{short}x{count // slices // short}"
        split = {"num_slices": slices} if slices > 1 else {}
        return topologies.get_topology_desc(
            platform="tpu", topology_name=name, **split
        ).devices
    shape = f"1x{max((count or 8) // 8, 1)}x{min(count or 8, 8)}"
    cuda = topologies.get_topology_desc(
        platform="cuda",
        topology_name=shape,
        topology=shape,
        target_config=machine.config,
    )
    return cuda.devices


def compiled(target: str, function: Any, arguments: tuple) -> tuple[Any, float]:
    """A jitted function compiled for ``target`` on these shapes, and the seconds that
    took.

    Raises:
        SystemExit: with the compiler's words where the program does not fit into the
            chip's memory.
    """
    machine = MACHINES[target]
    sharding = NamedSharding(
        Mesh(np.array(devices(target)[:1]), ("device",)), PartitionSpec()
    )

    def place(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    # Without a GPU there is nothing to time kernels on.
    flags: Any = {"xla_gpu_autotune_level": 0} if machine.platform == "cuda" else {}
    start = time.perf_counter()
    with (
        warnings.catch_warnings()
    ):  # There are three donated trees for two results; a cache cannot give these back.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        warnings.filterwarnings(
            "ignore", "Error reading persistent compilation cache entry"
        )
        lowered = function.trace(*jax.tree.map(place, arguments)).lower(
            lowering_platforms=(machine.platform,)
        )
        try:
            return lowered.compile(compiler_options=flags), time.perf_counter() - start
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            said = str(error).partition(": ")[2].partition("\n")[0]
            raise SystemExit(
                f"{target}: {said} --layers takes fewer layers, --micro-batch fewer"
                " sequences"
            ) from None


def row_of(
    target: str, function: Any, arguments: tuple, weights: Any, state: Any
) -> dict[str, Any]:
    """Compile, and estimate time and memory; ``weights`` and ``state`` are what sizes
    are compared with.
    """
    program, seconds = compiled(target, function, arguments)
    memory = program.memory_analysis()
    size, count = _bytes(weights), sum(x.size for x in jax.tree.leaves(weights))
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
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@functools.cache
def estimate(
    target: str, model: str, layers: int | None, optimizer_name: str
) -> dict[str, Any]:
    """One row: an optimizer's step on the matrices of a model, compiled for and priced
    on a chip.

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
        return row_of(
            target, jax.jit(jnp.matmul), (square, square), (square, square), ()
        )
    params = jax.eval_shape(lambda: shapes.matrices(model, layers=layers))
    step, arguments = optimizer_step.jitted(
        optimizer_step.KNOWN[optimizer_name](1e-3), params
    )
    return row_of(target, step, arguments, params, arguments[1])


@functools.cache
def estimate_train_step(
    target: str,
    config_name: str,
    layers: int | None,
    optimizer_name: str,
    *,
    micro_batch: int | None = None,
) -> dict[str, Any]:
    """One row: a whole step of ``examples.pretrain`` on one device, model arithmetic in
    bfloat16, attention XLA's.

    Arguments and result are ``estimate``'s; ``config_name`` is a file of
    ``examples.pretrain.configs``, and ``micro_batch`` the number of sequences whose
    gradients are taken at once, None for as many as it says.
    """
    config = configs.load(config_name)
    model = dataclasses.replace(
        config.model, layers=layers or config.model.layers, attention="xla"
    )
    micro_batch = micro_batch or config.micro_batch
    config = dataclasses.replace(
        config,
        model=model,
        optimizer=optimizer_name,
        micro_batch=micro_batch,
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
    """Rows, each over those of AdamW and of optax's Muon, where they are there."""
    found = {}
    for name, row in rows.items():
        over = {
            f"over_{other}": row["ms"] / rows[other]["ms"]
            for other in ("adamw", BASELINE)
            if other in rows
        }
        if BASELINE in rows:
            over[f"compile_over_{BASELINE}"] = (
                row["compile_s"] / rows[BASELINE]["compile_s"]
            )
        found[name] = row if name == PRODUCT else row | over
    return found


def result_of(
    options: Options, target: str, rows: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """What is written as JSON."""
    machine = MACHINES[target]
    result = report.header(
        report.command("ahead", dataclasses.replace(options, target=(target,))),
        devices(target)[0],
    )
    for package in (
        ("libtpu",)
        if machine.platform == "tpu"
        else ("jax-cuda12-plugin", "jax-cuda13-plugin")
    ):
        try:
            result["versions"][package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
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


def markdown(result: dict[str, Any]) -> str:
    """The report as a table."""
    versions, gpu = result["versions"], MACHINES[result["target"]].platform == "cuda"
    compilers = ", ".join(
        f"{name} {version}"
        for name, version in versions.items()
        if name not in ("python", "numpy")
    )
    layers = (
        f"layers of {result['model']}: {result['layers']}"
        if result["layers"]
        else result["model"]
    )
    step = "A whole train step" if result["whole_train_step"] else "An optimizer step"
    shown = {
        title: f for title, f in columns(gpu).items() if title not in _hidden(result)
    }
    page = (
        f"`{result['command']}`, {result['date']}, {compilers}.\n\n{step} on one"
        f" {result['chip']}, {layers}: **{result['what']}.**"
        f" {result['assumptions']}\n\n" + report.table("", shown, result["rows"])
    )
    unpriced = [
        f"{name}: "
        + ", ".join(f"{what} x {times:g}" for what, times in row["unpriced"].items())
        for name, row in result["rows"].items()
        if row["unpriced"]
    ]
    known = "beyond their bytes and their launch" if gpu else "beyond their bytes"
    return page + (
        f"\nNo time is known for, and none is counted {known}: {'; '.join(unpriced)}.\n"
        if unpriced
        else ""
    )


def columns(gpu: bool) -> dict[str, Callable[[dict], str]]:
    """Titles of the first table, and what stands under them."""
    number = report.number

    def figure(key):
        return lambda row: number(row[key])

    def scaled(key, unit):
        return lambda row: number(row[key] / unit)

    return {
        "ms": figure("ms"),
        "kernels ms" if gpu else "cycles ms": figure("compute_ms"),
        "HBM ms": figure("hbm_ms"),
        "eigh ms": figure("eigh_ms"),
        **({"kernels": lambda row: f"{row['kernels']:,.0f}"} if gpu else {}),
        "/ AdamW": figure("over_adamw"),
        "/ optax Muon": figure(f"over_{BASELINE}"),
        "TFLOP": lambda row: ", ".join(
            f"{number(n / 1e12)} {kind}" for kind, n in row["flops"].items()
        ),
        "bytes / weight": figure("hbm_bytes_per_weight"),
        "peak GB": scaled("peak_bytes", 1e9),
        "arguments GB": scaled("argument_bytes", 1e9),
        "temporaries GB": scaled("temporary_bytes", 1e9),
        "temporaries / weights": lambda row: (
            f"{row['temporaries_per_weight_byte']:.2f}"
        ),
        "state / weights": lambda row: f"{row['state_per_weight_byte']:.2f}",
        "compile s": lambda row: f"{row['compile_s']:.1f}",
        "compile / optax Muon": figure(f"compile_over_{BASELINE}"),
    }


def _hidden(result: dict[str, Any]) -> set[str]:
    if result["whole_train_step"]:
        return {"temporaries / weights", "state / weights", "bytes / weight"}
    return {"peak GB", "arguments GB", "temporaries GB"}


def chosen_names(options: Options) -> list[str]:
    """The optimizers to estimate.

    Raises:
        SystemExit: where a target, model, configuration or optimizer is not known, or
            there are no such layers.
    """
    known = [*TRAINED] if options.train_step else [*optimizer_step.KNOWN, PRODUCT]
    names = list(options.optimizers)
    if (
        options.optimizers == Options.optimizers
    ):  # optax's, for one, is not among those of the pretraining program
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
        devices(target)
    rows: dict[str, dict[str, dict]] = {target: {} for target in options.target}
    too_large = []
    of, one = options.model, estimate
    if options.train_step:
        of, one = (
            options.train_step,
            functools.partial(estimate_train_step, micro_batch=options.micro_batch),
        )
    work = [(target, name) for target in options.target for name in names]
    for target, name in track(work, "compiling", console=console):
        try:
            rows[target][name] = one(target, of, options.layers, name)
        except SystemExit as error:
            too_large.append(f"{name} on {error}")
    what = f"train_step_{of}" if options.train_step else of
    for target, estimated in rows.items():
        report_name = f"ahead_{target}_{what}" + (
            f"_{options.layers}layers" if options.layers else ""
        )
        if estimated:
            result = result_of(options, target, estimated)
            report.write(options.out, report_name, result, markdown(result))
            console.print(markdown(result), soft_wrap=True)
    if too_large:
        raise SystemExit("\n".join(too_large))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # whatever else there is: nothing runs
    main(tyro.cli(Options, prog="python -m examples.research.ahead"))
