# SPDX-License-Identifier: Apache-2.0
"""Where width, heads and head size stand among the three axes of an attention projection.

Flax has (d, heads, size) for the query, key and value and (heads, size, d) for the output; others put the heads first.
Names do not tell. The query and the output beside each other do, which have one width and the same heads, and biases.
"""

from __future__ import annotations

from collections.abc import Iterator

from normpre_optax.parameters.dims import MatrixDims
from normpre_optax.parameters.leaves import Leaf, container, fits_bias, module_depth
from normpre_optax.parameters.roles import OUTPUTS, is_output, is_query, is_weight

_Layout = tuple[int, int, int]  # which axes are the width, the heads and their size
_TO_HEADS, _FROM_HEADS = (0, 1, 2), (2, 0, 1)
_LAYOUTS = (_TO_HEADS, (1, 0, 2), _FROM_HEADS)
_QUERY = {"q", "query", "q_proj", "query_proj", "query_projection", "wq", "w_q", "to_q", "q_einsum"}


def usual(path: str, leaf: Leaf, rest: tuple[int, ...]) -> MatrixDims | None:
    """Flax's layout of attention's three axes `rest`, by the parameter's name; None for other parameters.

    Example:
        >>> usual("attn/out/kernel", Leaf((12, 64, 768), "float32"), (0, 1, 2))
        MatrixDims(inputs=(0, 1), outputs=2, output_blocks=1)
    """
    parts = path.split("/")
    if len(rest) != 3 or is_weight(parts) or not (is_query(parts, leaf) or is_output(parts, leaf)):
        return None
    return _as_dims(_FROM_HEADS if is_output(parts, leaf) else _TO_HEADS, rest, is_output(parts, leaf))


def doubt(path: str, leaf: Leaf, rest: tuple[int, ...]) -> str:
    """Why the query's and the output's shapes contradict the usual layout, or ""."""
    query, out = _pair(path, leaf, rest) if usual(path, leaf, rest) else ([], [])
    fitting = _beside_a_matrix(path, leaf, query)
    if not out and fitting and _TO_HEADS not in fitting:
        return f"as (d, heads, size) a query would have {query[0]} inputs, which the output beside it contradicts"
    if not query or not out or query[0] == out[2] or query[1:] == out[:2]:
        return ""
    if possible(path, leaf, rest) == [usual(path, leaf, rest)]:
        return ""
    return f"as (d, heads, size) a query would have {query[0]} inputs, as (heads, size, d) the output {out[2]} outputs"


def possible(path: str, leaf: Leaf, rest: tuple[int, ...]) -> list[MatrixDims]:
    """The layouts of axes `rest` that a projection's bias and the query and output beside it allow."""
    parts = path.split("/")
    output = is_output(parts, leaf)
    query, out = _pair(path, leaf, rest)
    fitting = set() if out else _beside_a_matrix(path, leaf, query)
    told: set[_Layout] = set(_LAYOUTS)
    if query and out and (output or is_query(parts, leaf)):
        pairs = [(a, b) for a in _LAYOUTS for b in _LAYOUTS if _sizes(query, a)[:2] == _sizes(out, b)[:2]]
        told = {pair[output] for pair in pairs if pair[0] == _TO_HEADS or pair[1] == _FROM_HEADS}
    elif fitting:
        told = fitting
    elif out:  # a projection of another kind, such as from a latent: it has the output's heads, or its width, too
        own = [leaf.shape[axis] for axis in rest]
        told = {a for a in _LAYOUTS if _sizes(own, a)[1] == out[0]}
        told = {a for a in told if _sizes(own, a)[0] == out[2]} or told
    found = [_as_dims(layout, rest, output) for layout in _LAYOUTS if layout in told]
    return [dims for dims in found if fits_bias(path, leaf, dims)]


def _beside_a_matrix(path: str, leaf: Leaf, query: list[int]) -> set[_Layout]:
    """The layouts of a query that an output of two axes beside it allows, (heads x size, d) or turned; none if none."""
    matrix = next((shape for _, shape in _beside(path, leaf, OUTPUTS) if len(shape) == leaf.ndim - 1), None)
    if not query or matrix is None:
        return set()
    sizes = {layout: _sizes(query, layout) for layout in _LAYOUTS[:2]}
    return {a for a, (d, heads, size) in sizes.items() if sorted((d, heads * size)) == sorted(matrix[-2:])}


def _as_dims(layout: _Layout, rest: tuple[int, ...], output: bool) -> MatrixDims:
    d, *heads = (rest[axis] for axis in layout)
    return MatrixDims(tuple(heads), d) if output else MatrixDims(d, tuple(heads))


def _sizes(shape: list[int], layout: _Layout) -> list[int]:
    return [shape[axis] for axis in layout]


def _pair(path: str, leaf: Leaf, rest: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Sizes of the query and of the output in the parameter's attention, along its axes `rest`; [] where unknown."""

    def sizes(names: set[str]) -> list[int]:
        found = (shape for parts, shape in _beside(path, leaf, names) if not is_weight(parts))
        return next(([shape[axis] for axis in rest] for shape in found if len(shape) == leaf.ndim), [])

    return sizes(_QUERY), sizes(OUTPUTS)


def _beside(path: str, leaf: Leaf, names: set[str]) -> Iterator[tuple[list[str], tuple[int, ...]]]:
    """Path and shape of what stands in the parameter's attention under one of these names."""
    for other, shape in leaf.near.items():
        parts = other.split("/")
        if parts[module_depth(parts) - 1].lower() in names and container(other) == container(path):
            yield parts, shape
