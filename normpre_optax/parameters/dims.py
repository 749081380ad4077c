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
from typing import Any, NamedTuple

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
        >>> kernel = MatrixDims(inputs=0, outputs=1)  # Flax
        >>> weight = MatrixDims(inputs=1, outputs=0)  # PyTorch
        >>> query = MatrixDims(inputs=0, outputs=(1, 2))  # (d, heads, head size)
    """

    inputs: int | Axes
    outputs: int | Axes
    output_blocks: int | tuple[int, ...] = 1

    def __post_init__(self) -> None:
        for name in ("inputs", "outputs", "output_blocks"):
            value: Any = getattr(self, name)
            is_several = isinstance(value, Iterable) and not isinstance(value, str)
            values: list[Any] = [value]
            if is_several:
                values = [*value]
            no_ints = TypeError(
                f"MatrixDims: {name} must be an int or a tuple of ints, got {value!r}"
            )
            # True is an int of Python, but no axis.
            if any(isinstance(x, bool) for x in values):
                raise no_ints
            try:
                values = [operator.index(x) for x in values]
            except TypeError:
                raise no_ints from None
            if not values:
                raise ValueError(
                    f"MatrixDims: {name} is empty; a matrix has at least one input and"
                    " one output axis"
                )
            # output_blocks=(6,) is one block of six rows, 6 are six blocks.
            is_size = is_several and name == "output_blocks"
            # The dataclass is frozen: only `object` can set a field.
            if len(values) > 1 or is_size:
                object.__setattr__(self, name, tuple(values))
            else:
                object.__setattr__(self, name, values[0])
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


class OutputBlock(NamedTuple):
    """An output block: its slice on the first output axis, its dims and its shape."""

    at: slice
    dims: MatrixDims
    shape: tuple[int, ...]


def as_matrix_dims(path: str, value: object) -> MatrixDims | None:
    """Return an entry of ``matrix_dims`` as ``MatrixDims``, or None for AdamW.

    Raises:
        TypeError: if it is something else than these and ``MuonDimensionNumbers``.
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
    _check_blocks(where, shape, dims)


def _check_blocks(where: str, shape: tuple[int, ...], dims: MatrixDims) -> None:
    """Raise a ValueError if output blocks do not split the first output axis."""
    _, outputs, _ = split_axes(len(shape), dims)
    blocks = dims.output_blocks
    first = shape[outputs[0]]
    if isinstance(blocks, int):
        if first % blocks:
            raise ValueError(
                f"{where}: output_blocks={blocks} does not divide axis {outputs[0]} of"
                f" size {first}"
            )
        return
    rows = _size(shape, outputs)
    # Rows for each index of the first output axis, which is not split further.
    multiple = rows // first
    if sum(blocks) != rows or any(size % multiple for size in blocks):
        raise ValueError(
            f"{where}: output_blocks={blocks} must add up to its {rows} outputs, in"
            f" multiples of {multiple}"
        )


def split_axes(ndim: int, dims: MatrixDims) -> tuple[Axes, Axes, Axes]:
    """Return the (batch, output, input) axes, counted from the front."""
    # One axis is stored as an int, several as a tuple.
    # The remainder counts negative axes from the front.
    outputs = tuple(axis % ndim for axis in jax.tree.leaves(dims.outputs))
    inputs = tuple(axis % ndim for axis in jax.tree.leaves(dims.inputs))
    batch = tuple(axis for axis in range(ndim) if axis not in inputs + outputs)
    return batch, outputs, inputs


def matrix_shape(shape: tuple[int, ...], dims: MatrixDims) -> tuple[int, int, int]:
    """Return (batch, out, in) of a parameter without output blocks.

    These are the number of its matrices, and their shape.

    Example:
        >>> from normpre_optax.parameters.dims import MatrixDims, matrix_shape
        >>> matrix_shape((24, 768, 12, 64), MatrixDims(inputs=1, outputs=(2, 3)))
        (24, 768, 768)
    """
    batch, outputs, inputs = split_axes(len(shape), dims)
    return _size(shape, batch), _size(shape, outputs), _size(shape, inputs)


def _size(shape: tuple[int, ...], axes: Axes) -> int:
    return math.prod(shape[axis] for axis in axes)


def is_stored_transposed(ndim: int, dims: MatrixDims) -> bool:
    """Return whether a parameter is stored as ``(batch, in, out)``, as in Flax."""
    batch, outputs, inputs = split_axes(ndim, dims)
    return batch + inputs + outputs == tuple(range(ndim))


def to_matrices(
    x: jax.Array, dims: MatrixDims, transposed: bool = False, flat: bool = True
) -> jax.Array:
    """Convert a parameter without output blocks to a stack ``(batch, out, in)``.

    Args:
        x: the parameter.
        dims: its axes.
        transposed: whether the stack is ``(batch, in, out)``.
        flat: whether there is one batch axis. Flattening several reorders the data if
            one behind the first is sharded.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.parameters.dims import MatrixDims, to_matrices
        >>> kernel = jnp.arange(6).reshape(2, 3)
        >>> to_matrices(kernel, MatrixDims(inputs=0, outputs=1)).tolist()
        [[[0, 3], [1, 4], [2, 5]]]
    """
    batch, rows, columns = split_axes(x.ndim, dims)
    if transposed:
        rows, columns = columns, rows
    sizes = [x.shape[axis] for axis in batch]
    if flat:
        sizes = [math.prod(sizes)]
    ordered = jnp.transpose(x, batch + rows + columns)
    return ordered.reshape(*sizes, _size(x.shape, rows), _size(x.shape, columns))


def from_matrices(
    stack: jax.Array, dims: MatrixDims, shape: tuple[int, ...], transposed: bool = False
) -> jax.Array:
    """Invert ``to_matrices`` for a parameter of this shape."""
    batch, outputs, inputs = split_axes(len(shape), dims)
    order = batch + outputs + inputs
    if transposed:
        order = batch + inputs + outputs
    ordered = stack.reshape([shape[axis] for axis in order])
    # The inverse of the permutation.
    back = tuple(order.index(axis) for axis in range(len(shape)))
    return jnp.transpose(ordered, back)


def blocks_of(shape: tuple[int, ...], dims: MatrixDims) -> list[OutputBlock]:
    """Return the output blocks of a parameter.

    Example:
        >>> from normpre_optax.parameters.dims import MatrixDims, blocks_of
        >>> dims = MatrixDims(inputs=0, outputs=1, output_blocks=(4, 2))
        >>> [block.at for block in blocks_of((4, 6), dims)]
        [slice(0, 4, None), slice(4, 6, None)]
    """
    _, outputs, _ = split_axes(len(shape), dims)
    axis = outputs[0]
    blocks = dims.output_blocks
    if blocks == 1:
        return [OutputBlock(slice(0, shape[axis]), dims, shape)]
    rows = _size(shape, outputs)
    if isinstance(blocks, int):
        blocks = (rows // blocks,) * blocks
    # A block is split off along the first output axis only.
    ends = [0, *itertools.accumulate(size * shape[axis] // rows for size in blocks)]
    dims_of_one = dataclasses.replace(dims, output_blocks=1)
    found = []
    for start, end in itertools.pairwise(ends):
        block_shape = (*shape[:axis], end - start, *shape[axis + 1 :])
        found.append(OutputBlock(slice(start, end), dims_of_one, block_shape))
    return found
