# SPDX-License-Identifier: Apache-2.0
"""How far every path of the spectral stage is from float64, on spectra from harmless to
nearly rank one.

``python -m examples.research.accuracy`` runs each path on one matrix per spectrum, rows
of length one as the stage gets them, and writes relative Frobenius errors as JSON and
Markdown: of the rounding (against the same algorithm in NumPy float64, with the same
draws), and of the algorithm (float64 against the exact result). Products in bfloat16
have rounded operands and float32 sums: what a TPU's usual product does.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
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
    Clipping,
    clip_by_sketch,
    clip_exactly,
    sum_of_squares,
    to_threshold,
)

Matrix = np.ndarray


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
    return {
        name: (
            (x / np.linalg.norm(x, axis=1, keepdims=True))
            .astype(np.float32)
            .astype(np.float64)
        )
        for name, x in found.items()
    }


FORMS = {
    "plain": -np.inf,
    "gram": np.inf,
}  # first coefficient from which products that round take the plain form


def newton_schulz(
    x: jax.Array, coefficients: str, form: str, dtype: jnp.dtype | None
) -> jax.Array:
    """Five steps of the library, in one of the two forms that it selects from."""
    table, headroom = (
        ns.coefficient_table(coefficients, 5),
        ns.HEADROOM.get(coefficients, 1.0),
    )
    with mock.patch.multiple(ns, _STEEP=FORMS[form], rounds=lambda dtype: True):
        return ns.newton_schulz(x, table, headroom, dtype)


def newton_schulz_64(x: Matrix, coefficients: str) -> Matrix:
    """Five steps as published, in float64."""
    y = x / np.linalg.norm(x) / (1.02 if coefficients == "polar_express" else 1)
    for a, b, c in ns.coefficient_table(coefficients, 5):
        gram = y @ y.T
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y


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
    return float(
        np.linalg.norm(np.asarray(found, np.float64) - truth) / np.linalg.norm(truth)
    )


def measure(options: Options) -> list[dict]:
    """One row for every path, one column for every spectrum."""
    matrices = spectra(options.rows, options.columns)
    rank, width = options.rank, options.rank + options.oversample
    omega = np.random.default_rng(1).standard_normal((width, options.columns))
    omega = omega.astype(np.float32).astype(np.float64)
    rows: list[dict] = []

    def row(path: str, against: str, error: Callable[[Matrix], float]) -> None:
        rows.append(
            {
                "path": path,
                "against": against,
                **{name: error(x) for name, x in matrices.items()},
            }
        )

    def rounding(
        path: str,
        against: str,
        f: Callable[[jax.Array], jax.Array],
        truth: Callable[[Matrix], Matrix],
    ):
        compiled = jax.jit(f)
        row(
            path,
            against,
            lambda x: relative(compiled(jnp.asarray(x, jnp.float32)), truth(x)),
        )

    def to_one(psi: jax.Array) -> Clipping:
        return to_threshold(sum_of_squares(psi), rank)

    def clip_sketch(
        psi: jax.Array, powers: int, dtype: jnp.dtype | None, products: bool = False
    ) -> jax.Array:
        draws = jnp.asarray(omega, jnp.float32)
        ((left, right, _),) = clip_by_sketch(
            [psi], [draws], [to_one(psi)], powers, products, dtype
        )
        return psi + product(left.T, right, dtype)

    def clip_exact(psi: jax.Array) -> jax.Array:
        left, right, _ = clip_exactly(psi, to_one(psi))
        return psi + product(left.T, right)

    half = jnp.dtype(jnp.bfloat16)
    for table in ("muon", "you", "polar_express"):

        def truth(x, table=table):
            return newton_schulz_64(x, table)

        same = "same steps in float64"
        for form, dtype in (
            ("plain", None),
            ("gram", None),
            ("plain", half),
            ("gram", half),
        ):
            name = (
                f"Newton-Schulz, {table}, {form}, {'bfloat16' if dtype else 'float32'}"
            )
            rounding(
                name,
                same,
                lambda x, t=table, f=form, d=dtype: newton_schulz(x, t, f, d),
                truth,
            )
        rounding(
            f"Newton-Schulz, {table}, kept in bfloat16",
            same,
            lambda x, t=table: kept_in_half(x, t),
            truth,
        )
        row(
            f"Newton-Schulz, {table}, float64",
            "msign",
            lambda x, truth=truth: relative(truth(x), msign_64(x)),
        )
    rounding("msign by SVD, float32", "msign in float64", ns.exact_msign, msign_64)
    for powers in (0, 1, 2):

        def clipped(x, p=powers):
            return sketch_clip_64(x, omega, rank, p)

        for dtype in (None, half):
            name = f"sketch, p = {powers}, {'bfloat16' if dtype else 'float32'}"
            rounding(
                name,
                "same draws in float64",
                lambda x, p=powers, d=dtype: clip_sketch(x, p, d),
                clipped,
            )
        name = f"sketch, p = {powers}, float32, by products, all {width} modes"

        def every(x, p=powers):
            return sketch_clip_64(x, omega, width, p)

        rounding(
            name,
            "same draws in float64",
            lambda x, p=powers: clip_sketch(x, p, None, True),
            every,
        )

        def error(x, clipped=clipped):
            return relative(clipped(x), exact_clip_64(x, rank))

        row(f"sketch, p = {powers}, float64", "exact clipping", error)
    rounding(
        "exact clipping, float32",
        "exact clipping in float64",
        clip_exact,
        lambda x: exact_clip_64(x, rank),
    )
    return rows


def kept_in_half(x: jax.Array, table: str) -> jax.Array:
    """Newton-Schulz as Muon's own code has it: the iterate itself is rounded to
    bfloat16 at every step.
    """
    y = x / jnp.linalg.norm(x) / (1.02 if table == "polar_express" else 1)
    y = y.astype(jnp.bfloat16)

    def times(a, b):
        return jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32)).astype(
            jnp.bfloat16
        )

    for a, b, c in ns.coefficient_table(table, 5):
        gram = times(y, y.mT)
        y = (
            a * y + times((b * gram + c * times(gram, gram)).astype(jnp.bfloat16), y)
        ).astype(jnp.bfloat16)
    return y.astype(x.dtype)


def msign_64(x: Matrix) -> Matrix:
    """``msign``."""
    u, _, vt = np.linalg.svd(x, full_matrices=False)
    return u @ vt


def markdown(result: dict) -> str:
    """The report as a table."""
    machine, versions = result["machine"], result["versions"]
    titles = list(result["rows"][0])
    rows = [
        [x if isinstance(x, str) else f"{x:.1e}" for x in row.values()]
        for row in result["rows"]
    ]
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
    report.write(options.out, f"accuracy_{device.platform}", result, markdown(result))
    Console(highlight=False).print(markdown(result), soft_wrap=True)


if __name__ == "__main__":
    main(tyro.cli(Options, prog="python -m examples.research.accuracy"))
