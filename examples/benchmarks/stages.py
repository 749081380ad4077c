# SPDX-License-Identifier: Apache-2.0
"""Where an optimizer step's time goes: each stage on one matrix, against the floor of its bytes and operations.

``python -m examples.benchmarks.stages`` runs every stage alone, in turns, and compares it with the larger of two
times: the bytes it must move over the bandwidth of an addition of large arrays in place, and the operations it must do
over the rate of a large product, both measured in the same run.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console

from examples.benchmarks import report
from normpre_optax import normalize_rows, project_to_tangent, scale_to_rms
from normpre_optax.linalg.eigenspace import leading_modes_sketch
from normpre_optax.linalg.lapack import eigh
from normpre_optax.linalg.newton_schulz import newton_schulz
from normpre_optax.linalg.orthonormal import orthonormal_rows
from normpre_optax.linalg.precision import product
from normpre_optax.linalg.spectrum import clip_modes
from normpre_optax.transforms.draws import sketch_draws
from normpre_optax.transforms.oriented import MatrixLayout, chain

RANK, WIDTH = 32, 40


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure the stages of an optimizer step."""

    rows: int = 768
    """Rows of the matrix as it is stored, (in, out)."""
    columns: int = 3072
    """Its columns."""
    repeats: int = 30
    """Counted rounds, after two that are not counted."""
    bfloat16: bool = False
    """Operands of the large products in bfloat16."""
    device: str = ""
    """JAX platform (cpu, gpu, tpu); the default one if empty."""
    out: Path = Path("docs/results")
    """Folder for the reports."""


@dataclasses.dataclass
class Stage:
    """A compiled piece of the step, the bytes and operations it cannot do without, and how long it took."""

    run: Callable
    arguments: tuple
    matrices_moved: float
    operations: float
    seconds: list[float] = dataclasses.field(default_factory=list)


def stages(options: Options) -> dict[str, Stage]:
    """Every stage with arguments of its own."""
    shape = (options.rows, options.columns)
    short, long = sorted(shape)
    size = short * long
    dtype = jnp.dtype(jnp.bfloat16) if options.bfloat16 else None
    keys = iter(jax.random.split(jax.random.key(0), 8))
    g, m, w = (jax.random.normal(key, shape) * scale for key, scale in zip(keys, (1, 1, 0.02), strict=False))
    normalized = chain(project_to_tangent(), normalize_rows())
    state = normalized.init(m)
    psi = jnp.asarray(normalized.update(m, state, w)[0])
    columns = options.rows > options.columns
    wide = psi.T if columns else psi
    omega = jax.random.normal(next(keys), (WIDTH, long))
    y = product(omega, wide.T)
    modes = leading_modes_sketch(wide, omega, RANK)
    small = product(y, y.T)
    rms = scale_to_rms(0.2)

    def stage(f: Callable, *arguments, matrices: float = 0, operations: float = 0) -> Stage:
        return Stage(jax.jit(f), arguments, matrices, operations)

    skinny = 2 * WIDTH * size
    # Newton-Schulz by its cheaper form; products with symmetric results at half their price.
    square, aspect = 2 * short**3, long / short
    gram = 3 * aspect + 7
    plain = 5 * (1.5 * aspect + 0.5)
    return {
        "momentum": stage(lambda g, m: 0.95 * m + g, g, m, matrices=3),
        "tangent and norm, stored rows": stage(
            lambda m, w: normalized.update(m, state, w)[0], m, w, matrices=3, operations=8 * size
        ),
        "tangent and norm, stored columns": stage(
            lambda m, w: normalized.update(m, state, w, matrix_layout=MatrixLayout(transposed=True))[0],
            m,
            w,
            matrices=3,
            operations=8 * size,
        ),
        "G: Newton-Schulz": stage(
            lambda x: newton_schulz(x, compute_dtype=dtype), psi, matrices=2, operations=min(gram, plain) * square
        ),
        "L: draws": stage(lambda step: sketch_draws(0, step, 1, 0, (WIDTH, long)), jnp.int32(0)),
        "L: one product with the draws": stage(
            lambda o, x: product(o, x.T if not columns else x, dtype), omega, psi, matrices=1, operations=skinny
        ),
        "L: orthonormal basis": stage(orthonormal_rows, y, operations=3 * 4 * WIDTH**2 * short),
        "L: eigh of the small matrix": stage(eigh, small),
        "L: all of the sketch": stage(
            lambda x, o: leading_modes_sketch(x.T if columns else x, o, RANK, 1, dtype),
            psi,
            omega,
            matrices=1,
            operations=4 * skinny,
        ),
        "L: clip": stage(
            lambda x, modes: clip_modes(x, modes, dtype, columns),
            psi,
            modes,
            matrices=2,
            operations=2 * RANK * size,
        ),
        "scale to RMS": stage(lambda x: rms.update(x, rms.init(x))[0], psi, matrices=2, operations=3 * size),
        "apply": stage(lambda w, u: w - 1e-3 * (u + 0.1 * w), w, psi, matrices=3, operations=4 * size),
    }


def timed(stage: Stage) -> float:
    """Seconds of one run."""
    start = time.perf_counter()
    jax.block_until_ready(stage.run(*stage.arguments))
    return time.perf_counter() - start


def product_rate(options: Options, side: int = 2048) -> float:
    """Operations a second of a large product."""
    dtype = jnp.bfloat16 if options.bfloat16 else jnp.float32
    a = jax.random.normal(jax.random.key(1), (side, side)).astype(dtype)
    one = Stage(jax.jit(lambda a: product(a, a)), (a,), 0, 2 * side**3)
    return one.operations / statistics.median([timed(one) for _ in range(options.repeats)][1:])


def addition_bandwidth(options: Options, size: int = 2**26) -> float:
    """Bytes a second of ``x + y`` written over ``x``."""
    add = jax.jit(lambda x, y: x + y, donate_argnums=0)
    x, y = jnp.ones(size), jnp.ones(size)
    seconds = []
    for _ in range(options.repeats):
        jax.block_until_ready(y)
        start = time.perf_counter()
        x = jax.block_until_ready(add(x, y))
        seconds.append(time.perf_counter() - start)
    return 3 * y.nbytes / statistics.median(seconds[1:])


def measure(options: Options, console: Console) -> dict:
    """All stages in turns, and the two rates."""
    found = stages(options)
    for i in range(options.repeats + 2):
        for one in found.values():
            seconds = timed(one)
            if i >= 2:
                one.seconds.append(seconds)
    rate, bandwidth = product_rate(options), addition_bandwidth(options)
    matrix_bytes = 4 * options.rows * options.columns
    rows = {}
    for name, one in found.items():
        bytes_moved = one.matrices_moved * matrix_bytes
        floor = max(bytes_moved / bandwidth, one.operations / rate)
        median = statistics.median(one.seconds)
        rows[name] = {
            "median_ms": 1e3 * median,
            "floor_ms": 1e3 * floor,
            "over_floor": median / floor if floor else None,
        }
    device = jax.devices()[0]
    console.print(f"{rate / 1e9:,.0f} GFLOP/s, {bandwidth / 1e9:,.1f} GB/s")
    command = f"python -m examples.benchmarks.stages --rows {options.rows} --columns {options.columns}"
    return report.header(command + (" --bfloat16" if options.bfloat16 else ""), device) | {
        "gflop_per_s": rate / 1e9,
        "gb_per_s": bandwidth / 1e9,
        "rows": rows,
    }


def markdown(result: dict) -> str:
    """The report as a table."""
    lines = [
        f"`{result['command']}`, {result['date']}, {result['machine']['device']}, jax {result['versions']['jax']}; "
        f"{result['gflop_per_s']:,.0f} GFLOP/s and {result['gb_per_s']:,.1f} GB/s in the same run.",
        "",
        "| stage | ms | floor, ms | ratio |",
        "|---|---|---|---|",
    ]
    for name, row in result["rows"].items():
        ratio = f"{row['over_floor']:.1f}" if row["over_floor"] else ""
        lines.append(f"| {name} | {row['median_ms']:.2f} | {row['floor_ms']:.2f} | {ratio} |")
    return "\n".join(lines) + "\n"


def main(options: Options) -> None:
    """Measure, print, write."""
    console = Console(highlight=False)
    with jax.default_device(jax.devices(options.device or None)[0]):
        result = measure(options, console)
    name = f"stages_{options.rows}x{options.columns}_{result['machine']['platform']}"
    report.write(options.out, name + ("_bf16" if options.bfloat16 else ""), result, markdown(result))
    console.print(markdown(result), soft_wrap=True)


if __name__ == "__main__":
    main(tyro.cli(Options, prog="python -m examples.benchmarks.stages"))
