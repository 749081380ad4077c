# SPDX-License-Identifier: Apache-2.0
"""Which axes of a parameter are its inputs and its outputs: a leaf as a stack of matrices, and back.

`MatrixDims` names the axes, `check_dims` holds them against a shape, `matrix_shape` says what comes out, and
`to_matrices` / `from_matrices` carry the numbers there and back. The stack is (batch, out, in): rows are output
neurons, whatever the layout of the parameter; or (batch, in, out) for who asks for it, because most parameters are
stored that way (`stored_transposed`) and turning them costs time.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from optax.contrib import MuonDimensionNumbers


def _axes(name: str, value: int | Iterable[int]) -> int | tuple[int, ...]:
    """Returns `value` as an int or a tuple of ints, or raises a TypeError."""
    try:
        if isinstance(value, bool):
            raise TypeError
        if not isinstance(value, Iterable):
            return operator.index(value)
        if isinstance(value, str) or any(isinstance(axis, bool) for axis in value):
            raise TypeError
        return tuple(operator.index(axis) for axis in value)
    except TypeError:
        raise TypeError(f"MatrixDims: {name} must be an axis (int) or a tuple of axes, got {value!r}") from None


@dataclasses.dataclass(frozen=True)
class MatrixDims:
    """The axes that make a parameter a matrix, or a stack of matrices.

    Every axis named in neither `inputs` nor `outputs` is a batch axis: one matrix per index. Several axes on one side
    are flattened into one, in the order given.

    Args:
        inputs: axis or axes that the layer sums over (columns of the matrix). Negative axes count from the end.
        outputs: axis or axes of the layer's result (rows of the matrix).
        output_blocks: cuts the flattened output axis into this many equal matrices, or into matrices of these sizes:
            3 makes q, k and v of a fused qkv; (2048, 512, 512) where fewer heads have keys and values; the number of
            heads makes each a matrix of its own.

    Raises:
        TypeError: an axis is not an integer.
        ValueError: a side names no axis, an axis twice, or `output_blocks` is below 1.

    Example:
        A Flax attention's query kernel is (d, heads, head size):

        >>> query = MatrixDims(inputs=0, outputs=(1, 2))
        >>> matrix_shape((768, 12, 64), query)
        (1, 768, 768)

        A stack of 24 fused qkv kernels (layer, d, 3 d), as one matrix each or as three:

        >>> matrix_shape((24, 768, 2304), MatrixDims(inputs=1, outputs=2))
        (24, 2304, 768)
        >>> matrix_shape((24, 768, 2304), MatrixDims(inputs=1, outputs=2, output_blocks=3))
        (72, 768, 768)
    """

    inputs: int | tuple[int, ...]
    outputs: int | tuple[int, ...]
    output_blocks: int | tuple[int, ...] = 1

    def __post_init__(self) -> None:
        for name in ("inputs", "outputs"):
            object.__setattr__(self, name, _axes(name, getattr(self, name)))
            axes = _as_tuple(getattr(self, name))
            if not axes:
                raise ValueError(f"MatrixDims: {name} names no axis; a matrix needs at least one on each side")
            if len(set(axes)) < len(axes):
                raise ValueError(f"MatrixDims: {name}={axes} names an axis twice")
        blocks = self.output_blocks
        sizes = tuple(blocks) if isinstance(blocks, tuple | list) else (blocks,)
        if not sizes or any(isinstance(size, bool) or not isinstance(size, int) for size in sizes):
            raise TypeError(f"MatrixDims: output_blocks must be an int or a tuple of sizes, got {blocks!r}")
        if min(sizes) < 1:
            raise ValueError(f"MatrixDims: output_blocks must be at least 1, got {blocks}")
        object.__setattr__(self, "output_blocks", blocks if isinstance(blocks, int) else sizes if sizes[1:] else 1)
        shared = set(_as_tuple(self.inputs)) & set(_as_tuple(self.outputs))
        if shared:
            raise ValueError(f"MatrixDims: axes {sorted(shared)} stand in both inputs and outputs")


def _as_tuple(axes: int | tuple[int, ...]) -> tuple[int, ...]:
    return (axes,) if isinstance(axes, int) else axes


def as_matrix_dims(value: object) -> MatrixDims | None:
    """Reads one entry of `matrix_dims`.

    Args:
        value: a `MatrixDims`, an `optax.contrib.MuonDimensionNumbers`, or None (AdamW).

    Returns:
        The same as `MatrixDims`, or None.

    Raises:
        TypeError: for anything else.

    Example:
        >>> import optax
        >>> as_matrix_dims(optax.contrib.MuonDimensionNumbers(reduction_axis=0, output_axis=1))
        MatrixDims(inputs=0, outputs=1, output_blocks=1)
    """
    if value is None or isinstance(value, MatrixDims):
        return value
    if isinstance(value, MuonDimensionNumbers):
        return MatrixDims(inputs=value.reduction_axis, outputs=value.output_axis)  # pyright: ignore[reportArgumentType]
    raise TypeError(f"expected MatrixDims, optax.contrib.MuonDimensionNumbers or None, got {value!r}")


def check_dims(path: str, shape: tuple[int, ...], dims: MatrixDims) -> None:
    """Holds `dims` against the shape of the parameter at `path`.

    Args:
        path: the parameter's name, for the message.
        shape: its shape.
        dims: the axes chosen for it.

    Raises:
        ValueError: an axis out of range, an axis on both sides, or outputs that `output_blocks` does not divide.

    Example:
        >>> check_dims("up/kernel", (8, 32), MatrixDims(inputs=0, outputs=2))
        Traceback (most recent call last):
        ...
        ValueError: parameter 'up/kernel' of shape (8, 32): outputs=2 is out of range, its axes are 0 to 1
    """
    where = f"parameter {path!r} of shape {tuple(shape)}"
    for name, axes in (("inputs", dims.inputs), ("outputs", dims.outputs)):
        if any(not -len(shape) <= axis < len(shape) for axis in _as_tuple(axes)):
            allowed = f"its axes are 0 to {len(shape) - 1}" if shape else "it has no axes"
            raise ValueError(f"{where}: {name}={axes} is out of range, {allowed}")
    _, outputs, inputs = split_axes(len(shape), dims)
    if len(set(outputs + inputs)) < len(outputs + inputs):
        raise ValueError(f"{where}: inputs={dims.inputs} and outputs={dims.outputs} name an axis twice")
    rows, blocks = math.prod(shape[axis] for axis in outputs), dims.output_blocks
    if isinstance(blocks, int):
        if rows % blocks:
            raise ValueError(f"{where}: output_blocks={blocks} does not divide its {rows} outputs")
        return
    if sum(blocks) != rows:
        raise ValueError(f"{where}: output_blocks={blocks} are {sum(blocks)}, its outputs {rows}")
    unit = rows // shape[outputs[0]]
    if any(size % unit for size in blocks):
        raise ValueError(f"{where}: output_blocks={blocks} cut through axis {outputs[0]}, of {unit} outputs an index")


def block_ends(shape: tuple[int, ...], dims: MatrixDims) -> list[int]:
    """Where outputs that are cut into blocks of given sizes end, along the first output axis; nothing for others.

    Example:
        >>> block_ends((768, 24, 128), MatrixDims(inputs=0, outputs=(1, 2), output_blocks=(2048, 512, 512)))
        [16, 20, 24]
    """
    if isinstance(dims.output_blocks, int):
        return []
    _, (_, *others), _ = split_axes(len(shape), dims)
    unit = math.prod(shape[axis] for axis in others)
    return [end // unit for end in itertools.accumulate(dims.output_blocks)]


def block_axis(ndim: int, dims: MatrixDims) -> int:
    """The first output axis, along which blocks of given sizes are cut.

    Example:
        >>> block_axis(3, MatrixDims(inputs=0, outputs=(1, 2), output_blocks=(2048, 512, 512)))
        1
    """
    return split_axes(ndim, dims)[1][0]


def equal_blocks(dims: MatrixDims) -> int:
    """How many equal matrices the outputs are cut into.

    Raises:
        ValueError: they are cut into blocks of given sizes, of which each is a parameter of its own (`pieces`).

    Example:
        >>> equal_blocks(MatrixDims(0, 1, output_blocks=3))
        3
    """
    if isinstance(dims.output_blocks, int):
        return dims.output_blocks
    raise ValueError(f"output_blocks={dims.output_blocks} make matrices of several shapes: look at one block at a time")


def split_axes(ndim: int, dims: MatrixDims) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Returns the (batch, output, input) axes, all counted from the front."""
    inputs = tuple(axis % ndim for axis in _as_tuple(dims.inputs))
    outputs = tuple(axis % ndim for axis in _as_tuple(dims.outputs))
    batch = tuple(axis for axis in range(ndim) if axis not in inputs + outputs)
    return batch, outputs, inputs


def matrix_shape(shape: tuple[int, ...], dims: MatrixDims) -> tuple[int, int, int]:
    """Returns (batch, out, in): how many matrices a parameter of this shape holds, and their shape.

    Args:
        shape: the parameter's shape.
        dims: axes that fit it (`check_dims`).

    Returns:
        Number of matrices, rows (outputs) and columns (inputs) of each.

    Example:
        >>> matrix_shape((12, 64, 768), MatrixDims(inputs=(0, 1), outputs=2))
        (1, 768, 768)
    """
    batch, outputs, inputs = (math.prod(shape[axis] for axis in axes) for axes in split_axes(len(shape), dims))
    blocks = equal_blocks(dims)
    return batch * blocks, outputs // blocks, inputs


def stored_transposed(ndim: int, dims: MatrixDims) -> bool:
    """Tells whether a parameter lies in memory as (batch, in, out), as Flax kernels do.

    Args:
        ndim: number of the parameter's axes.
        dims: axes that fit it.

    Returns:
        True if `to_matrices(..., transposed=True)` moves no number.

    Example:
        >>> [stored_transposed(2, dims) for dims in (MatrixDims(inputs=0, outputs=1), MatrixDims(inputs=1, outputs=0))]
        [True, False]
    """
    batch, outputs, inputs = split_axes(ndim, dims)
    return dims.output_blocks == 1 and batch + inputs + outputs == tuple(range(ndim))


def batch_sizes(shape: tuple[int, ...], dims: MatrixDims) -> tuple[int, ...]:
    """Sizes of the batch axes, and how many blocks the outputs are cut into, if any; (1,) for a single matrix.

    Example:
        >>> batch_sizes((24, 8, 768, 2304), MatrixDims(inputs=2, outputs=3, output_blocks=3))
        (24, 8, 3)
    """
    blocks = equal_blocks(dims)
    sizes = [shape[axis] for axis in split_axes(len(shape), dims)[0]]
    return (*sizes, *[blocks] * (blocks > 1)) or (1,)


def stacked(x: jax.Array, sizes: tuple[int, ...], lead: int = 0) -> jax.Array:
    """What there is of every matrix, ``(*sizes, ...)``, along one axis; see ``to_matrices``.

    Example:
        >>> stacked(jnp.arange(6).reshape(2, 3), (2, 3), lead=1).tolist()
        [0, 3, 1, 4, 2, 5]
    """
    return _reshape(jnp.moveaxis(x, lead, 0), (math.prod(sizes), *x.shape[len(sizes) :]))


def unstacked(x: jax.Array, sizes: tuple[int, ...], lead: int = 0) -> jax.Array:
    """Undoes `stacked`.

    Example:
        >>> unstacked(jnp.array([0, 3, 1, 4, 2, 5]), (2, 3), lead=1).tolist()
        [[0, 1, 2], [3, 4, 5]]
    """
    first = (sizes[lead], *sizes[:lead], *sizes[lead + 1 :])
    return jnp.moveaxis(_reshape(x, (*first, *x.shape[1:])), 0, lead)


def _order(ndim: int, dims: MatrixDims, transposed: bool, lead: int) -> tuple[int, ...]:
    """The parameter's axes in the order in which the stack has them."""
    batch, outputs, inputs = split_axes(ndim, dims)
    batch = batch[lead : lead + 1] + batch[:lead] + batch[lead + 1 :]
    return batch + inputs + outputs if transposed else batch + outputs + inputs


def to_matrices(x: jax.Array, dims: MatrixDims, transposed: bool = False, lead: int = 0) -> jax.Array:
    """Lays a parameter out as a stack of matrices with output neurons as rows.

    Args:
        x: the parameter (or its gradient), any layout.
        dims: axes that fit it.
        transposed: with output neurons as columns instead.
        lead: which of the batch axes comes first: of axes that are flattened into one only the first can stay sharded.

    Returns:
        Array (batch, out, in), or (batch, in, out) if transposed; batch and block indices in row-major order, blocks
        last.

    Example:
        >>> to_matrices(jnp.arange(6.0).reshape(2, 3), MatrixDims(inputs=0, outputs=1)).tolist()
        [[[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]]
    """
    if transposed and equal_blocks(dims) > 1:  # they are cut from (out, in)
        return jnp.matrix_transpose(to_matrices(x, dims, lead=lead))
    order = _order(x.ndim, dims, transposed, lead)
    batch, rows, columns = matrix_shape(x.shape, dims)
    shape = (batch, columns, rows) if transposed else (batch, rows, columns)
    if order != tuple(range(x.ndim)):
        x = jnp.transpose(x, order)
    return _reshape(x, shape)


def from_matrices(
    stack: jax.Array, dims: MatrixDims, shape: tuple[int, ...], transposed: bool = False, lead: int = 0
) -> jax.Array:
    """Undoes `to_matrices`.

    Args:
        stack: array (batch, out, in), or (batch, in, out) if transposed.
        dims: the axes `to_matrices` was given.
        shape: the parameter's shape.
        transposed: as `to_matrices` was given it.
        lead: likewise.

    Returns:
        Array of that shape, in the parameter's own layout.

    Example:
        >>> x, dims = jnp.arange(24).reshape(2, 3, 4), MatrixDims(inputs=(0, 2), outputs=1)
        >>> bool((from_matrices(to_matrices(x, dims), dims, x.shape) == x).all())
        True
    """
    if transposed and equal_blocks(dims) > 1:
        return from_matrices(jnp.matrix_transpose(stack), dims, shape, lead=lead)
    order = _order(len(shape), dims, transposed, lead)
    x = _reshape(stack, tuple(shape[axis] for axis in order))
    if order == tuple(range(len(shape))):
        return x
    return jnp.transpose(x, tuple(order.index(axis) for axis in range(len(shape))))


def _reshape(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return x if x.shape == shape else jnp.reshape(x, shape)
