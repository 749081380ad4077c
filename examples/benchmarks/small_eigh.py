# SPDX-License-Identifier: Apache-2.0
"""Solvers for the small eigenproblems at the end of the sketch: time and error, on a stack of them.

``python -m examples.benchmarks.small_eigh`` gives every solver the same symmetric matrices ``G`` and asks for
``Z diag(s) Z^T`` with ``s_i = lambda_i^-1/2 - 1`` for the ``rank`` largest eigenvalues where they exceed one, else 0:
all that clipping needs. They are timed in turns, and compared with NumPy in float64 on several spectra.
The solvers are in ``small_solvers``. On a GPU: ``--sizes 32 40 72 136 --shifts 15``.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.lax.linalg import EighImplementation
from rich.console import Console

from examples.benchmarks import report
from examples.benchmarks.small_solvers import (
    Clip,
    clip_by_eigh,
    clip_by_filter,
    clip_by_jacobi,
    clip_by_jax,
    positive_by_pivots,
    positive_by_sign,
)

LIBRARY = "eigh of the library"


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure solvers for many small symmetric eigenproblems."""

    sizes: tuple[int, ...] = (40, 72, 136)
    """Sides of the matrices; the rank is 8 less."""
    batch: int = 48
    """Matrices in a stack."""
    repeats: int = 9
    """Counted rounds, after one that is not counted."""
    shifts: int = 1
    """Thresholds that the filter tries at once: 1 is bisection, more suit an accelerator."""
    sweeps: int = 9
    """Jacobi's sweeps."""
    device: str = ""
    """JAX platform (cpu, gpu, tpu); the default one if empty."""
    out: Path = Path("docs/results")
    """Folder for the reports."""


def solvers(rank: int, options: Options) -> dict[str, Callable[[jax.Array], Clip]]:
    """All of them, the library's first."""
    found: dict[str, Callable] = {LIBRARY: functools.partial(clip_by_eigh, rank=rank)}
    for implementation in (None, *EighImplementation):
        name = f"one call of eigh, {implementation.name if implementation else 'chosen by jax'}"
        found[name] = functools.partial(clip_by_jax, rank=rank, implementation=implementation)
    found["Jacobi in array operations"] = functools.partial(clip_by_jacobi, rank=rank, sweeps=options.sweeps)
    for name, positive in (("sign function", positive_by_sign), ("pivots", positive_by_pivots)):
        found[f"filter, counts by {name}"] = functools.partial(
            clip_by_filter, rank=rank, positive=positive, shifts=options.shifts
        )
    return found


def spectra(size: int, rank: int) -> dict[str, np.ndarray]:
    """Eigenvalues, largest first."""
    place = np.arange(1, size + 1)
    decaying = 2 * (place / rank) ** -1.5
    few = rank // 2
    near = np.abs(place - rank - 0.5) < 4
    return {
        "decaying": decaying,
        "all above 1": np.linspace(2.25, 1.5, size),
        "gap": np.where(place <= rank, 4.0, 2.0) * np.linspace(1.2, 1, size),
        "few above 1": np.r_[np.geomspace(50, 1.2, few), np.geomspace(0.8, 0.02, size - few)],
        "near rank 1": np.where(place == 1, 700, 1e-4),
        "cluster": np.where(near, 2 + 2e-3 * (rank + 0.5 - place), decaying + (place < rank) * 0.1),
        "tie": np.where(np.abs(place - rank - 0.5) < 1, 2, decaying),
    }


def problem(values: np.ndarray, rank: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Matrices that float32 holds exactly, and the results in float64."""
    size = len(values)
    z = np.linalg.qr(np.random.default_rng(0).standard_normal((batch, size, size)))[0]
    g = ((z * values) @ z.mT).astype(np.float32).astype(np.float64)
    found, z = np.linalg.eigh((g + g.mT) / 2)
    s = np.where(np.arange(size) >= size - rank, np.maximum(found, 1) ** -0.5 - 1, 0)
    return (g + g.mT) / 2, (z * s[:, None, :]) @ z.mT


def judged(found: np.ndarray, truth: np.ndarray) -> dict:
    """The largest relative error of the stack, and in how many matrices another number of modes was clipped."""
    error = np.linalg.norm(found - truth, axis=(1, 2)) / np.linalg.norm(truth, axis=(1, 2))
    should, does = (-np.linalg.eigvalsh((x + x.mT) / 2) for x in (truth, np.nan_to_num(found)))
    small = np.min(should, axis=1, keepdims=True, where=should > 1e-6, initial=1) / 2
    wrong = np.sum(does > small, axis=1) != np.sum(should > small, axis=1)
    return {"error": float(error.max()), "wrong": int(wrong.sum())}


def measure(size: int, options: Options) -> list[dict]:
    """One row for every solver: refused, or errors on every spectrum and times on the first."""
    rank = size - 8
    problems = {name: problem(x, rank, options.batch) for name, x in spectra(size, rank).items()}
    stacks = {name: jnp.asarray(g, jnp.float32) for name, (g, _) in problems.items()}
    timed = next(iter(stacks.values()))
    rows, runs = [], {}
    for name, f in solvers(rank, options).items():
        row: dict = {"size": size, "solver": name}
        rows.append(row)
        try:
            start = time.perf_counter()
            run = jax.jit(f).lower(timed).compile()
            row["compile_s"] = time.perf_counter() - start
            results = {spectrum: run(g) for spectrum, g in stacks.items()}
        except (NotImplementedError, ValueError, RuntimeError) as error:
            row["refused"] = str(error).partition("\n")[0]
            continue
        runs[name] = run
        for spectrum, (clip, rounds) in results.items():
            row[spectrum] = judged(np.asarray(clip, np.float64), problems[spectrum][1])
            row[spectrum] |= {} if rounds is None else {"rounds": int(rounds)}
    seconds = in_turns(runs, timed, options.repeats)
    for row in rows:
        own = seconds.get(row["solver"])
        if own:
            row |= {"median_ms": 1e3 * statistics.median(own), "range_ms": [1e3 * min(own), 1e3 * max(own)]}
            row["over_library"] = statistics.median(a / b for a, b in zip(own, seconds[LIBRARY], strict=True))
    return rows


def in_turns(runs: dict[str, Callable], g: jax.Array, repeats: int) -> dict[str, list[float]]:
    """Seconds of every counted round."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run(g))
            if i:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def markdown(result: dict) -> str:
    """The report as tables, one for every size."""
    lines = [
        f"`{result['command']}`, {result['date']}, {result['machine']['device']}, jax {result['versions']['jax']}. "
        f"Stacks of {result['batch']} matrices; times on the first spectrum; relative errors (largest of the stack), "
        "with the matrices that had another number of modes clipped, and the rounds of the filter's search."
    ]
    for size in result["sizes"]:
        rows = [row for row in result["rows"] if row["size"] == size]
        names = list(spectra(size, size - 8))
        lines += ["", f"{size} x {size}, rank {size - 8}:", ""]
        heads = ["solver", "ms", "fastest to slowest", "/ library", "compile s", *names]
        lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        for row in rows:
            if "refused" in row:
                lines.append(f"| {row['solver']} | refused: {row['refused']} |" + " |" * (len(heads) - 2))
                continue
            low, high = row["range_ms"]
            cells = [row["solver"], f"{row['median_ms']:.2f}", f"{low:.2f} to {high:.2f}"]
            cells += [f"{row['over_library']:.2f}", f"{row['compile_s']:.2f}"]
            lines.append(f"| {' | '.join(cells + [cell(row[name]) for name in names])} |")
    return "\n".join(lines) + "\n"


def cell(judgement: dict) -> str:
    """Error, wrong counts if any, rounds if any."""
    parts = [f"{judgement['error']:.0e}"]
    parts += [f"{judgement['wrong']} wrong"] if judgement["wrong"] else []
    parts += [f"{judgement['rounds']} rounds"] if "rounds" in judgement else []
    return ", ".join(parts)


def main(options: Options) -> None:
    """Measure, print, write."""
    device = jax.devices(options.device or None)[0]
    with jax.default_device(device):
        rows = [row for size in options.sizes for row in measure(size, options)]
    command = "python -m examples.benchmarks.small_eigh --sizes " + " ".join(map(str, options.sizes))
    command += f" --batch {options.batch} --shifts {options.shifts}"
    result = report.header(command, device) | {"sizes": options.sizes, "batch": options.batch, "rows": rows}
    report.write(options.out, f"small_eigh_{device.platform}", result, markdown(result))
    Console(highlight=False).print(markdown(result), soft_wrap=True)


if __name__ == "__main__":
    main(tyro.cli(Options, prog="python -m examples.benchmarks.small_eigh"))
