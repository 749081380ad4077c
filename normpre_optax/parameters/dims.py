# SPDX-License-Identifier: Apache-2.0
"""Which axes of a parameter are inputs and outputs.

A row of the matrix holds the weights of one output neuron: it runs along ``inputs``.
``to_matrices`` converts a parameter to a stack ``(batch, out, in)`` for the spectral
stage. All other code uses the layout of the parameter.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from optax.contrib import MuonDimensionNumbers

Axes = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class MatrixDims:
    """Input and output axes of a parameter that is one matrix or several.

    All other axes are batch axes: one matrix per index. Several input or output axes
    are flattened.

    Args:
        inputs: axis or axes that the layer sums over. Negative axes count from the end.
        outputs: axis or axes of the layer's result.
        output_blocks: split the outputs into this many equal matrices, or into matrices
            of these sizes: 3 for a fused qkv, ``(2048, 512, 512)`` for grouped-query
            attention, the number of heads for one matrix per head.

    Raises:
        TypeError: if an axis is not an integer.
        ValueError: if there is no input or no output axis, an axis is named twice, or a
            block size is below 1.

    Example:
        >>> from normpre_optax import MatrixDims
        >>> kernel, weight = (
        ...     MatrixDims(inputs=0, outputs=1),
        ...     MatrixDims(inputs=1, outputs=0),
        ... )  # Flax, PyTorch
        >>> query = MatrixDims(inputs=0, outputs=(1, 2))  # (d, heads, head size)
    """

    inputs: int | Axes
    outputs: int | Axes
    output_blocks: int | tuple[int, ...] = 1

    def __post_init__(self) -> None:
        for name in ("inputs", "outputs", "output_blocks"):
            value: Any = getattr(self, name)
            values: Any = (
                tuple(value)
                if isinstance(value, Iterable) and not isinstance(value, str)
                else (value,)
            )
            try:
                if any(isinstance(x, bool) for x in values):
                    raise TypeError
                values = tuple(operator.index(x) for x in values)
            except TypeError:
                raise TypeError(
                    f"MatrixDims: {name} must be an int or a tuple of ints, got"
                    f" {value!r}"
                ) from None
            sizes = name == "output_blocks" and isinstance(
                value, Iterable
            )  # (6,) is one block of six rows
            object.__setattr__(
                self, name, values if sizes or len(values) != 1 else values[0]
            )
            if not values:
                raise ValueError(
                    f"MatrixDims: {name} is empty; a matrix has at least one input and"
                    " one output axis"
                )
        axes = jax.tree.leaves((self.inputs, self.outputs))
        if len(set(axes)) < len(axes):
            raise ValueError(
                f"MatrixDims: inputs={self.inputs} and outputs={self.outputs} name an"
                " axis twice"
            )
        if min(jax.tree.leaves(self.output_blocks)) < 1:
            raise ValueError(
                "MatrixDims: output_blocks must be at least 1, got"
                f" {self.output_blocks}"
            )


def as_matrix_dims(path: str, value: Any) -> MatrixDims | None:
    """Return an entry of ``matrix_dims`` as ``MatrixDims``, also optax's
    ``MuonDimensionNumbers``; None is AdamW.
    """
    if value is None or isinstance(value, MatrixDims):
        return value
    if isinstance(value, MuonDimensionNumbers):
        inputs: Any = value.reduction_axis
        outputs: Any = value.output_axis
        return MatrixDims(inputs, outputs)
    kinds = "MatrixDims, optax.contrib.MuonDimensionNumbers or None"
    raise TypeError(
        f"matrix_dims for parameter {path!r} must be {kinds}, got {value!r}"
    )


def check_dims(path: str, shape: tuple[int, ...], dims: MatrixDims) -> None:
    """Raise a ValueError that names the parameter if ``dims`` do not fit its shape."""
    where = f"parameter {path!r} of shape {tuple(shape)}"
    for name, axes in (("inputs", dims.inputs), ("outputs", dims.outputs)):
        if any(not -len(shape) <= axis < len(shape) for axis in jax.tree.leaves(axes)):
            raise ValueError(
                f"{where}: {name}={axes} is out of range for {len(shape)} axes"
            )
    _, outputs, inputs = split_axes(len(shape), dims)
    if len(set(outputs + inputs)) < len(outputs + inputs):
        raise ValueError(
            f"{where}: inputs={dims.inputs} and outputs={dims.outputs} name an axis"
            " twice"
        )
    if 0 in shape:
        raise ValueError(f"{where} has no elements: return None for it in a rule")
    blocks, first, rows = (
        dims.output_blocks,
        shape[outputs[0]],
        math.prod(shape[axis] for axis in outputs),
    )
    if isinstance(blocks, int) and first % blocks:
        raise ValueError(
            f"{where}: output_blocks={blocks} does not divide axis {outputs[0]} of size"
            f" {first}"
        )
    if not isinstance(blocks, int) and (
        sum(blocks) != rows or any(size % (rows // first) for size in blocks)
    ):
        multiples = (
            f"must add up to its {rows} outputs, in multiples of {rows // first}"
        )
        raise ValueError(f"{where}: output_blocks={blocks} {multiples}")


def split_axes(ndim: int, dims: MatrixDims) -> tuple[Axes, Axes, Axes]:
    """Return the (batch, output, input) axes, counted from the front."""
    # One axis is stored as an int, several as a tuple.
    outputs, inputs = (
        tuple(axis % ndim for axis in jax.tree.leaves(axes))
        for axes in (dims.outputs, dims.inputs)
    )
    return (
        tuple(axis for axis in range(ndim) if axis not in inputs + outputs),
        outputs,
        inputs,
    )


def matrix_shape(shape: tuple[int, ...], dims: MatrixDims) -> tuple[int, int, int]:
    """Return (batch, out, in): the number of matrices of a parameter without output
    blocks, and their shape.

    Example:
        >>> from normpre_optax.parameters.dims import MatrixDims, matrix_shape
        >>> matrix_shape((24, 768, 12, 64), MatrixDims(inputs=1, outputs=(2, 3)))
        (24, 768, 768)
    """
    batch, outputs, inputs = (
        math.prod(shape[axis] for axis in axes) for axes in split_axes(len(shape), dims)
    )
    return batch, outputs, inputs


def is_stored_transposed(ndim: int, dims: MatrixDims) -> bool:
    """Return whether a parameter is stored as ``(batch, in, out)``, as Flax kernels
    are.
    """
    batch, outputs, inputs = split_axes(ndim, dims)
    return batch + inputs + outputs == tuple(range(ndim))


def to_matrices(
    x: jax.Array, dims: MatrixDims, transposed: bool = False, flat: bool = True
) -> jax.Array:
    """Convert a parameter without output blocks to a stack ``(batch, out, in)``, or
    ``(batch, in, out)``.

    ``flat=False`` keeps several batch axes: flattening them reorders the data if one
    behind the first is sharded.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.parameters.dims import MatrixDims, to_matrices
        >>> to_matrices(
        ...     jnp.arange(6).reshape(2, 3), MatrixDims(inputs=0, outputs=1)
        ... ).tolist()
        [[[0, 3], [1, 4], [2, 5]]]
    """
    batch, *sides = split_axes(x.ndim, dims)
    rows, columns = reversed(sides) if transposed else sides
    lead = [batch] if flat else [(axis,) for axis in batch]
    shape = [
        math.prod(x.shape[axis] for axis in axes) for axes in (*lead, rows, columns)
    ]
    return jnp.transpose(x, batch + rows + columns).reshape(shape)


def from_matrices(
    stack: jax.Array, dims: MatrixDims, shape: tuple[int, ...], transposed: bool = False
) -> jax.Array:
    """Invert ``to_matrices`` for a parameter of this shape."""
    batch, outputs, inputs = split_axes(len(shape), dims)
    order = batch + inputs + outputs if transposed else batch + outputs + inputs
    back = tuple(order.index(axis) for axis in range(len(shape)))
    return jnp.transpose(stack.reshape([shape[axis] for axis in order]), back)


def blocks_of(
    shape: tuple[int, ...], dims: MatrixDims
) -> list[tuple[slice, MatrixDims, tuple[int, ...]]]:
    """Return the slice of each output block on the first output axis, its dims and its
    shape.

    Example:
        >>> from normpre_optax.parameters.dims import MatrixDims, blocks_of
        >>> [
        ...     at
        ...     for at, *_ in blocks_of(
        ...         (4, 6), MatrixDims(inputs=0, outputs=1, output_blocks=(4, 2))
        ...     )
        ... ]
        [slice(0, 4, None), slice(4, 6, None)]
    """
    axis, blocks = split_axes(len(shape), dims)[1][0], dims.output_blocks
    if blocks == 1:
        return [(slice(0, shape[axis]), dims, shape)]
    rows = matrix_shape(shape, dims)[1]
    sizes = [rows // blocks] * blocks if isinstance(blocks, int) else blocks
    ends = [0, *itertools.accumulate(size * shape[axis] // rows for size in sizes)]
    one = dataclasses.replace(dims, output_blocks=1)
    return [
        (slice(a, b), one, (*shape[:axis], b - a, *shape[axis + 1 :]))
        for a, b in itertools.pairwise(ends)
    ]
