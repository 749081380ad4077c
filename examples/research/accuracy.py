# SPDX-License-Identifier: Apache-2.0
"""How far every path of the spectral stage is from float64.

``python -m examples.research.accuracy`` runs each path on one matrix per spectrum, rows
of length one as the stage gets them, and writes relative Frobenius errors as JSON and
Markdown: of the rounding (against the same algorithm in NumPy float64, with the same
draws), and of the algorithm (float64 against the exact result). Spectra are from
harmless to nearly rank one. Products in bfloat16 have rounded operands and float32
sums: what a TPU's usual product does.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console

from examples.research import report
from normpre_optax.linalg import newton_schulz as ns
from normpre_optax.linalg.products import product
from normpre_optax.linalg.sketch import (
    clip_by_sketch,
    clip_exactly,
    sum_of_squares,
    to_threshold,
)

Matrix = np.ndarray
HALF = jnp.dtype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure the accuracy of the spectral stage."""

    rows: int = 384  # Shorter side of the matrices.
    columns: int = 1536  # Longer side.
    rank: int = 32  # Modes that are clipped.
    oversample: int = 8  # Further directions of the sketch.
    out: Path = Path("docs/results")  # Folder for the reports.


def spectra(rows: int, columns: int) -> dict[str, Matrix]:
    """Matrices with rows of length one, float64 numbers that float32 holds exactly."""
    random = np.random.default_rng(0)
    left = np.linalg.qr(random.standard_normal((rows, rows)))[0]
    right = np.linalg.qr(random.standard_normal((columns, rows)))[0].T
    place = np.arange(1, rows + 1)
    noise = random.standard_normal((rows, columns)) / columns**0.5
    found = {
        "gaussian": noise,
        "power law": (left * place**-1.0) @ right,
        "spiked": noise + (left[:, :8] * 10) @ right[:8],
        "near rank 1": (left * np.where(place == 1, 1, 1e-4)) @ right,
    }
    matrices = {}
    for name, x in found.items():
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
        matrices[name] = held_by_float32(x)
    return matrices


def held_by_float32(x: Matrix) -> Matrix:
    """The nearest numbers that float32 holds exactly, in float64."""
    return x.astype(np.float32).astype(np.float64)


# First coefficient from which products that round take the plain form.
FORMS = {"plain": -np.inf, "gram": np.inf}


def newton_schulz(
    x: jax.Array, coefficients: str, form: str, dtype: jnp.dtype | None
) -> jax.Array:
    """Five steps of the library, in one of the two forms that it selects from."""
    table = ns.coefficient_table(coefficients, 5)
    headroom = ns.HEADROOM.get(coefficients, 1.0)
    with mock.patch.multiple(ns, _STEEP=FORMS[form], rounds=lambda dtype: True):
        return ns.newton_schulz(x, table, headroom, dtype)


def kept_in_half(x: jax.Array, coefficients: str) -> jax.Array:
    """Newton-Schulz as Muon's own code has it, with an iterate in bfloat16.

    It is rounded to bfloat16 at every step.
    """
    y = x / jnp.linalg.norm(x) / first_divisor(coefficients)
    y = y.astype(jnp.bfloat16)

    def times(a, b):
        wide = jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32))
        return wide.astype(jnp.bfloat16)

    for a, b, c in ns.coefficient_table(coefficients, 5):
        gram = times(y, y.mT)
        factor = b * gram + c * times(gram, gram)
        y = a * y + times(factor.astype(jnp.bfloat16), y)
        y = y.astype(jnp.bfloat16)
    return y.astype(x.dtype)


def first_divisor(coefficients: str) -> float:
    """By what the normalized matrix is divided: Polar Express leaves some room."""
    if coefficients == "polar_express":
        return 1.02
    return 1


def newton_schulz_64(x: Matrix, coefficients: str) -> Matrix:
    """Five steps as published, in float64."""
    y = x / np.linalg.norm(x) / first_divisor(coefficients)
    for a, b, c in ns.coefficient_table(coefficients, 5):
        gram = y @ y.T
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y


def msign_64(x: Matrix) -> Matrix:
    """``msign``."""
    u, _, vt = np.linalg.svd(x, full_matrices=False)
    return u @ vt


def clip_64(psi: Matrix, vectors: Matrix, values: Matrix) -> Matrix:
    """Modes above one brought to one."""
    change = np.where(values > 1, np.maximum(values, 1) ** -0.5 - 1, 0)
    return psi + (vectors * change) @ (vectors.T @ psi)


def exact_clip_64(psi: Matrix, rank: int) -> Matrix:
    """The ``rank`` leading modes by SVD."""
    u, s, _ = np.linalg.svd(psi, full_matrices=False)
    return clip_64(psi, u[:, :rank], s[:rank] ** 2)


def sketch_clip_64(psi: Matrix, omega: Matrix, rank: int, powers: int) -> Matrix:
    """Algorithm 2 with QR and eigh."""
    q = np.linalg.qr(psi @ omega.T)[0]
    for _ in range(powers):
        q = np.linalg.qr(psi @ (psi.T @ q))[0]
    seen = q.T @ psi
    values, z = np.linalg.eigh(seen @ seen.T)
    return clip_64(psi, q @ z[:, ::-1][:, :rank], values[::-1][:rank])


def relative(found: jax.typing.ArrayLike, truth: Matrix) -> float:
    """``||found - truth|| / ||truth||``."""
    error = np.asarray(found, np.float64) - truth
    return float(np.linalg.norm(error) / np.linalg.norm(truth))


def measure(options: Options) -> list[dict]:
    """One row for every path, one column for every spectrum."""
    rows = Rows(spectra(options.rows, options.columns))
    for coefficients in ("muon", "you", "polar_express"):
        measure_newton_schulz(rows, coefficients)
    rows.rounding("msign by SVD, float32", "msign in float64", ns.exact_msign, msign_64)
    measure_clipping(rows, options)
    return rows.found


class Rows:
    """Rows of the report, each with an error on every matrix."""

    def __init__(self, matrices: dict[str, Matrix]) -> None:
        self.matrices = matrices
        self.found: list[dict] = []

    def add(self, path: str, against: str, error: Callable[[Matrix], float]) -> None:
        """Add the errors that a function of a matrix returns."""
        row: dict[str, Any] = {"path": path, "against": against}
        for name, x in self.matrices.items():
            row[name] = error(x)
        self.found.append(row)

    def rounding(
        self,
        path: str,
        against: str,
        f: Callable[[jax.Array], jax.Array],
        truth: Callable[[Matrix], Matrix],
    ) -> None:
        """Add the distance of ``f`` in float32 from its value in float64."""
        compiled = jax.jit(f)

        def error(x):
            return relative(compiled(jnp.asarray(x, jnp.float32)), truth(x))

        self.add(path, against, error)


def dtype_name(dtype: jnp.dtype | None) -> str:
    """Of the products; None stands for the matrix's own."""
    if dtype is None:
        return "float32"
    return "bfloat16"


def measure_newton_schulz(rows: Rows, coefficients: str) -> None:
    """Add the paths of one set of coefficients."""
    same = "same steps in float64"
    truth = functools.partial(newton_schulz_64, coefficients=coefficients)
    for dtype in (None, HALF):
        for form in FORMS:
            steps = functools.partial(
                newton_schulz, coefficients=coefficients, form=form, dtype=dtype
            )
            path = f"Newton-Schulz, {coefficients}, {form}, {dtype_name(dtype)}"
            rows.rounding(path, same, steps, truth)
    steps = functools.partial(kept_in_half, coefficients=coefficients)
    path = f"Newton-Schulz, {coefficients}, kept in bfloat16"
    rows.rounding(path, same, steps, truth)

    def error(x):
        return relative(truth(x), msign_64(x))

    rows.add(f"Newton-Schulz, {coefficients}, float64", "msign", error)


def measure_clipping(rows: Rows, options: Options) -> None:
    """Add the paths that clip modes: sketches with more and more passes, and exact."""
    rank = options.rank
    width = rank + options.oversample
    draws = np.random.default_rng(1).standard_normal((width, options.columns))
    sketch = Sketch(rank, held_by_float32(draws))
    same = "same draws in float64"
    for powers in (0, 1, 2):
        truth = functools.partial(
            sketch_clip_64, omega=sketch.omega, rank=rank, powers=powers
        )
        for dtype in (None, HALF):
            clip = functools.partial(sketch.clip, powers=powers, dtype=dtype)
            path = f"sketch, p = {powers}, {dtype_name(dtype)}"
            rows.rounding(path, same, clip, truth)
        rows.rounding(
            f"sketch, p = {powers}, float32, by products, all {width} modes",
            same,
            functools.partial(sketch.clip, powers=powers, dtype=None, products=True),
            functools.partial(truth, rank=width),
        )
        error = functools.partial(_error_of_sketch, clip=truth, rank=rank)
        rows.add(f"sketch, p = {powers}, float64", "exact clipping", error)
    rows.rounding(
        "exact clipping, float32",
        "exact clipping in float64",
        sketch.clip_exactly,
        functools.partial(exact_clip_64, rank=rank),
    )


class Sketch(NamedTuple):
    """The library's clipping with these draws."""

    rank: int
    omega: Matrix

    def clip(
        self,
        psi: jax.Array,
        powers: int,
        dtype: jnp.dtype | None,
        products: bool = False,
    ) -> jax.Array:
        """By a sketch, in one of the two ways that the library selects from."""
        draws = jnp.asarray(self.omega, jnp.float32)
        to_one = to_threshold(sum_of_squares(psi), self.rank)
        ((left, right, _),) = clip_by_sketch(
            [psi], [draws], [to_one], powers, products, dtype
        )
        return psi + product(left.T, right, dtype)

    def clip_exactly(self, psi: jax.Array) -> jax.Array:
        """By an eigendecomposition."""
        to_one = to_threshold(sum_of_squares(psi), self.rank)
        left, right, _ = clip_exactly(psi, to_one)
        return psi + product(left.T, right)


def _error_of_sketch(x: Matrix, clip: Callable[[Matrix], Matrix], rank: int) -> float:
    """Distance of a sketch in float64 from exact clipping."""
    return relative(clip(x), exact_clip_64(x, rank))


def markdown(result: dict) -> str:
    """The report as a table."""
    machine = result["machine"]
    versions = result["versions"]
    titles = list(result["rows"][0])
    rows = []
    for row in result["rows"]:
        errors = [f"{row[title]:.1e}" for title in titles[2:]]
        rows.append([row["path"], row["against"], *errors])
    return (
        f"`{result['command']}`, {result['date']}, {machine['device']}, jax"
        f" {versions['jax']}. Relative Frobenius errors on {result['shape'][0]} x"
        f" {result['shape'][1]} matrices.\n\n" + report.markdown_table(titles, rows)
    )


def main(options: Options) -> None:
    """Measure, print and write."""
    device = jax.devices()[0]
    result = report.header(report.command("accuracy", options), device) | {
        "shape": [options.rows, options.columns],
        "rank": options.rank,
        "rows": measure(options),
    }
    page = markdown(result)
    report.write(options.out, f"accuracy_{device.platform}", result, page)
    Console(highlight=False).print(page, soft_wrap=True)


if __name__ == "__main__":
    main(tyro.cli(Options, prog="python -m examples.research.accuracy"))
