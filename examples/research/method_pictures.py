# SPDX-License-Identifier: Apache-2.0
"""Pictures of the method: what each stage of NormPre does to small matrices.

``python -m examples.research.method_pictures`` draws five figures into
``docs/pictures``, with the library's own functions: six rows in the plane from stage to
stage, the singular values of a larger matrix, the entries of one whose rows and columns
are normalized in turn, what the tangent modes leave of a row, and what the metric of
``normpre_h`` changes. ``docs/method.md`` explains them.
"""

from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax

from examples.research import diagnostics
from normpre_optax import precondition_globally, precondition_locally, with_metric

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse

ROWS = "#1f5fa8"
SECOND = "#b5541c"
MODES = "#f2b25c"
QUIET = "#8a8a8a"
RANK = 2  # Modes that NormPre-L clips in the second picture.
Array = np.ndarray


def planar() -> tuple[Array, Array]:
    """Six rows in the plane, and the rows of a weight.

    They are very unequal and mostly along one direction.

    Returns:
        Momentum and weight, (6, 2) both.

    Example:
        >>> momentum, weight = planar()
        >>> np.linalg.norm(momentum, axis=1).round(2).tolist()
        [2.2, 0.15, 0.6, 0.06, 1.1, 0.4]
    """
    momentum = _polar([2.2, 0.15, 0.6, 0.06, 1.1, 0.4], [30, 40, 50, 70, 214, 94])
    weight = _polar([0.6, 0.4, 0.5, 0.3, 1.2, 0.5], [100, 80, 10, 150, 228, 130])
    return momentum, weight


def _polar(lengths: list[float], degrees: list[float]) -> Array:
    """Points in the plane from their polar coordinates."""
    angles = np.radians(degrees)
    directions = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    return np.array(lengths)[:, None] * directions


def correlated(rows: int, columns: int, modes: int = 3) -> Array:
    """A matrix as gradients are: a few strong directions, and noise.

    Its rows and columns are of very unequal size.

    Args:
        rows: m.
        columns: n.
        modes: how many directions all rows share.

    Returns:
        (m, n), the same on every call.
    """
    draws = np.random.default_rng(0)
    shared = draws.normal(size=(rows, modes)) @ draws.normal(size=(modes, columns))
    row_scales = np.exp(draws.normal(scale=0.8, size=rows))
    column_scales = np.exp(draws.normal(scale=0.8, size=columns))
    noise = 0.7 * draws.normal(size=(rows, columns))
    return row_scales[:, None] * (shared + noise) * column_scales


def applied(stage: optax.GradientTransformation, x: Array) -> Array:
    """What a stateless stage makes of a matrix.

    Args:
        stage: of the library.
        x: (m, n).

    Returns:
        (m, n).

    Example:
        >>> applied(precondition_globally(ns_steps=None), np.diag([3.0, 0.5])).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    given = jnp.asarray(x)
    update, _ = stage.update(given, stage.init(given))
    return np.asarray(update)


def stages(momentum: Array, weight: Array, rank: int) -> Mapping[str, Array]:
    """Algorithm 1 in the row orientation, stage by stage, and Muon beside it.

    With both spectral stages.

    Args:
        momentum: (m, n).
        weight: (m, n).
        rank: modes that NormPre-L clips.

    Returns:
        ``M``, ``X``, ``Psi``, ``G`` and ``L`` (both ``T``), and ``Muon``, which is
        ``msign(M)``.

    Example:
        >>> found = stages(*planar(), rank=1)
        >>> np.linalg.norm(found["Psi"], axis=1).round(4).tolist()
        [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    signal = diagnostics.normalized(jnp.asarray(momentum), jnp.asarray(weight))
    psi = np.asarray(signal.psi)
    return {
        "M": momentum,
        "X": np.asarray(signal.x),
        "Psi": psi,
        "G": applied(precondition_globally(ns_steps=None), psi),
        "L": applied(precondition_locally(rank, method="exact"), psi),
        "Muon": applied(precondition_globally(ns_steps=None), momentum),
    }


def draw_plane() -> Figure:
    """Six rows in the plane, from the momentum to the update."""
    momentum, weight = planar()
    found = stages(momentum, weight, rank=1)
    titles = {
        "M": "M: momentum",
        "X": "X: relaxed tangent",
        "Psi": r"$\Psi$: every row to norm one",
        "G": r"NormPre-G: all of $\Psi$'s modes to one",
        "L": "NormPre-L, rank 1: the leading mode to one",
        "Muon": "for comparison, Muon: all of M's modes to one",
    }
    figure, axes = plt.subplots(2, 3, figsize=(10.5, 7.4))
    for ax, (name, title) in zip(axes.flat, titles.items(), strict=True):
        _plane(ax, found[name], title)
        if name in ("M", "X"):
            _weights(ax, weight)
    figure.tight_layout()
    return figure


def _plane(ax: Axes, rows: Array, title: str) -> None:
    """Rows as arrows, and the image of the unit sphere under them as an ellipse.

    The unit circle is dotted.
    """
    _, values, directions = np.linalg.svd(rows, full_matrices=False)
    side = 1.15 * max(values[0], 1.1)
    angle = float(np.degrees(np.arctan2(directions[0, 1], directions[0, 0])))
    shape = {"angle": angle, "facecolor": MODES, "alpha": 0.25, "edgecolor": "none"}
    ax.add_patch(Ellipse((0, 0), 2 * values[0], 2 * values[1], **shape))
    circle = {"fill": False, "edgecolor": QUIET, "linestyle": ":", "linewidth": 1}
    ax.add_patch(Ellipse((0, 0), 2, 2, **circle))
    arrow = {"arrowstyle": "-|>", "color": ROWS, "shrinkA": 0, "shrinkB": 0}
    number_style = {"ha": "center", "va": "center", "fontsize": 8, "color": ROWS}
    for number, (x, y) in enumerate(rows, 1):
        ax.annotate("", (x, y), (0, 0), arrowprops=arrow)
        beyond = 1 + 0.07 * side / max(np.hypot(x, y), 1e-3)
        ax.text(x * beyond, y * beyond, str(number), **number_style)
    ax.set_title(title, fontsize=10)
    ax.text(
        0.03,
        0.03,
        f"singular values {values[0]:.2f}, {values[1]:.2f}",
        transform=ax.transAxes,
        fontsize=8,
    )
    ax.set(xlim=(-side, side), ylim=(-side, side), aspect="equal", xticks=[], yticks=[])
    for line in ax.spines.values():
        line.set_color("#d0d0d0")


def _weights(ax: Axes, weight: Array) -> None:
    """Rows of a weight as thin lines."""
    for x, y in weight:
        ax.plot([0, x], [0, y], color=QUIET, linewidth=1.2, zorder=2)
    ax.plot([], [], color=QUIET, linewidth=1.2, label="rows of W")
    ax.legend(loc="lower right", frameon=False, fontsize=8)


def spectra() -> Mapping[str, Array]:
    """Singular values of a 16 x 24 matrix through the stages, largest first.

    Those of M are scaled to Psi's norm.

    Returns:
        Name of the stage to (16,).

    Example:
        >>> found = spectra()
        >>> bool((found["L"][RANK:] == found["Psi"][RANK:]).all())
        True
        >>> found["L"][:RANK].round(3).tolist()
        [1.0, 1.0]
    """
    momentum = correlated(16, 24)
    psi = _psi(momentum)
    global_update = applied(precondition_globally(), psi)
    local_update = applied(precondition_locally(RANK, method="exact"), psi)
    values = np.linalg.svd(psi, compute_uv=False)
    # The modes of NormPre-L are those of Psi: clipping them needs no second
    # decomposition.
    order = np.where(np.arange(len(values)) < RANK, np.minimum(values, 1), values)
    clipped = np.linalg.svd(local_update, compute_uv=False)
    np.testing.assert_allclose(np.sort(clipped), np.sort(order), rtol=1e-4)
    before = np.linalg.svd(momentum, compute_uv=False)
    return {
        "M": before * np.linalg.norm(values) / np.linalg.norm(before),
        "Psi": values,
        "G": np.linalg.svd(global_update, compute_uv=False),
        "L": order,
    }


def _psi(momentum: Array) -> Array:
    """A momentum with its rows normalized, for a weight of zeros."""
    weight = jnp.zeros(momentum.shape)
    return np.asarray(diagnostics.normalized(jnp.asarray(momentum), weight).psi)


def draw_spectra() -> Figure:
    """Singular values of a 16 x 24 matrix, from stage to stage."""
    titles = {
        "M": r"M, scaled to $\Psi$'s size",
        "Psi": r"$\Psi$",
        "G": "NormPre-G, five steps",
        "L": f"NormPre-L, rank {RANK}",
    }
    figure, axes = plt.subplots(1, 4, figsize=(11, 2.8), sharey=True)
    for ax, (name, values) in zip(axes, spectra().items(), strict=True):
        colors = [ROWS] * len(values)
        if name == "L":
            colors[:RANK] = [SECOND] * RANK
        ax.bar(np.arange(1, len(values) + 1), values, color=colors, width=0.75)
        ax.axhline(1, color=QUIET, linestyle=":", linewidth=1)
        ax.set_title(titles[name], fontsize=10)
        ax.set_xlabel("mode", fontsize=9)
        ax.set_xticks([1, 4, 8, 12, 16])
        ax.tick_params(labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("singular value", fontsize=9)
    figure.tight_layout()
    return figure


def alternation() -> Mapping[str, Array]:
    """A 10 x 14 matrix, normalized along its rows and along its columns.

    The rows are normalized on even steps, the columns on odd ones.

    Returns:
        Name to (10, 14).

    Example:
        >>> found = alternation()
        >>> bool(np.allclose(np.linalg.norm(found["columns"], axis=0), 1))
        True
    """
    momentum = correlated(10, 14)
    return {
        "momentum": momentum,
        "rows": _psi(momentum),
        "columns": _psi(momentum.T).T,
    }


def draw_alternation() -> Figure:
    """Sizes of entries, with the norms of rows and columns at the sides."""
    titles = {
        "momentum": "M",
        "rows": r"$\Psi$ on steps 0, 2, 4, ...: rows",
        "columns": r"$\Psi$ on steps 1, 3, 5, ...: columns",
    }
    figure = plt.figure(figsize=(11, 3.6))
    outer = figure.add_gridspec(1, 3, wspace=0.18)
    for column, (name, x) in enumerate(alternation().items()):
        inner = outer[column].subgridspec(
            2, 2, width_ratios=(5, 1), height_ratios=(1, 4), wspace=0.05, hspace=0.08
        )
        over = figure.add_subplot(inner[0, 0])
        entries = figure.add_subplot(inner[1, 0])
        beside = figure.add_subplot(inner[1, 1])
        rows, columns = x.shape
        sizes = np.abs(x)[::-1]  # the first row above
        entries.pcolormesh(sizes, cmap="Blues", edgecolors="white", linewidth=0.5)
        of_columns = np.linalg.norm(x, axis=0)
        of_rows = np.linalg.norm(x, axis=1)[::-1]
        over.bar(np.arange(columns) + 0.5, of_columns, color=ROWS, width=0.8)
        beside.barh(np.arange(rows) + 0.5, of_rows, color=SECOND, height=0.8)
        over.set(xlim=(0, columns), ylim=(0, None))
        beside.set(ylim=(0, rows), xlim=(0, None))
        for ax in (over, entries, beside):
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set_visible(False)
        over.set_title(titles[name], fontsize=10)
        entries.set_xlabel("inputs", fontsize=9)
        entries.set_ylabel("output neurons", fontsize=9)
    return figure


def radial_factors(lengths: Array) -> Mapping[str, Array]:
    """What is left of a momentum along its row of W, in every tangent mode.

    Args:
        lengths: norms of the rows, positive.

    Returns:
        Name of the mode to factors like ``lengths``.

    Example:
        >>> for name, factor in radial_factors(np.array([0.5, 2.0])).items():
        ...     print(name, factor)
        relaxed [ 0.75 -3.  ]
        strict [0. 0.]
        none [1. 1.]
    """
    weight = jnp.asarray(lengths)[:, None] * jnp.array([[1.0, 0.0]])
    momentum = jnp.broadcast_to(jnp.array([1.0, 0.0]), weight.shape)
    factors = {}
    for mode in ("relaxed", "strict", "none"):
        x = diagnostics.normalized(momentum, weight, mode).x
        factors[mode] = np.asarray(x[:, 0])
    return factors


def draw_radial() -> Figure:
    """The radial factor over the length of a row."""
    lengths = np.linspace(0.01, 2.2, 200)
    styles = {"relaxed": (ROWS, "-"), "strict": (QUIET, "-"), "none": (QUIET, "--")}
    figure, ax = plt.subplots(figsize=(6.4, 3.2))
    for name, factor in radial_factors(lengths).items():
        color, line = styles[name]
        ax.plot(lengths, factor, color=color, linestyle=line, linewidth=1.5, label=name)
    ax.axvline(1, color=QUIET, linewidth=0.6, linestyle=":")
    ax.set(
        xlabel="norm of the row of W", ylabel="factor", xlim=(0, 2.2), ylim=(-2, 1.2)
    )
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8, loc="lower left")
    figure.tight_layout()
    return figure


def metric() -> Mapping[str, Array]:
    """A 16 x 24 gradient and two updates of it.

    They are Muon's, and that in the metric of ``normpre_h`` after one like it.

    Returns:
        Name to (16, 24).

    Example:
        >>> np.linalg.norm(metric()["Muon"], axis=1).round(3).tolist() == 16 * [1.0]
        True
    """
    gradient = correlated(16, 24)
    exact = precondition_globally(ns_steps=None)
    tx = with_metric(exact)
    given = jnp.asarray(gradient)
    _, state = tx.update(given, tx.init(given))
    update, _ = tx.update(given, state)
    return {
        "gradient": gradient,
        "Muon": applied(exact, gradient),
        "normpre_h": np.asarray(update),
    }


def draw_metric() -> Figure:
    """Size of the update of every row and column over the size of its gradient."""
    found = metric()
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.2), sharey=True)
    for ax, (name, along) in zip(axes, {"rows": 1, "columns": 0}.items(), strict=True):
        sizes = {}
        for key, x in found.items():
            norms = np.linalg.norm(x, axis=along)
            sizes[key] = norms / np.sqrt(np.mean(norms**2))
        for key, color in (("Muon", QUIET), ("normpre_h", ROWS)):
            ax.scatter(sizes["gradient"], sizes[key], color=color, s=18, label=key)
        ax.set(xscale="log", xlabel=f"size of the gradient, {name}", ylim=(0, 1.8))
        ax.set_xticks([0.2, 0.5, 1, 2], ["0.2", "0.5", "1", "2"])
        ax.minorticks_off()
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("size of the update")
    axes[0].legend(frameon=False, fontsize=8, loc="lower left")
    figure.tight_layout()
    return figure


PICTURES = {
    "rows_in_the_plane": draw_plane,
    "singular_values": draw_spectra,
    "alternation": draw_alternation,
    "radial_factor": draw_radial,
    "metric": draw_metric,
}


def draw(folder: Path) -> list[Path]:
    """Draw all pictures.

    Args:
        folder: where to; it is made.

    Returns:
        The files, SVG.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    with plt.rc_context({"svg.hashsalt": "normpre_optax"}):
        for name, make in PICTURES.items():
            figure = make()
            files.append(folder / f"{name}.svg")
            figure.savefig(
                files[-1],
                bbox_inches="tight",
                facecolor="white",
                metadata={"Date": None},
            )
            plt.close(figure)
    return files


if __name__ == "__main__":
    with jax.default_matmul_precision("highest"):
        print(*draw(Path("docs/pictures")), sep="\n")
