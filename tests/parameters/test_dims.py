# SPDX-License-Identifier: Apache-2.0
"""What MatrixDims accepts, and that a stack of matrices and back is the identity."""

import itertools
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st

from normpre_optax.parameters.dims import (
    MatrixDims,
    as_matrix_dims,
    blocks_of,
    check_dims,
    from_matrices,
    matrix_shape,
    to_matrices,
)
from tests import cases


@st.composite
def layouts(draw):
    """A shape, axes that fit it (some counted from the end), and output_blocks that
    divide the first output axis.
    """
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=2, max_size=5)))
    axes = draw(st.permutations(range(len(shape))))
    first = draw(st.integers(1, len(shape) - 1))
    second = draw(st.integers(first + 1, len(shape)))
    signed = [axis - len(shape) * draw(st.booleans()) for axis in axes]
    size = shape[axes[first]]
    blocks = draw(st.sampled_from([b for b in range(1, size + 1) if size % b == 0]))
    return shape, MatrixDims(tuple(signed[:first]), tuple(signed[first:second]), blocks)


def stack_by_loops(x, dims):
    """The definition: one matrix per batch index, entry (o, i) read where the axes
    point.
    """
    inputs = [axis % x.ndim for axis in np.atleast_1d(dims.inputs)]
    outputs = [axis % x.ndim for axis in np.atleast_1d(dims.outputs)]
    batch = [axis for axis in range(x.ndim) if axis not in inputs + outputs]

    def indices(axes):
        return [
            dict(zip(axes, index, strict=True))
            for index in itertools.product(*(range(x.shape[a]) for a in axes))
        ]

    def entry(place):
        return x[tuple(place[axis] for axis in range(x.ndim))]

    return np.array(
        [
            [[entry(b | o | i) for i in indices(inputs)] for o in indices(outputs)]
            for b in indices(batch)
        ]
    )


@hypothesis.given(layouts())
@hypothesis.example(
    ((2, 3), MatrixDims(inputs=0, outputs=1))
)  # Flax's y = x @ kernel: a row is a column of the kernel
@hypothesis.example(((2, 6), MatrixDims(inputs=0, outputs=1, output_blocks=(6,))))
@hypothesis.example(((2, 6), MatrixDims(inputs=0, outputs=1, output_blocks=(4, 2))))
def test_stack_is_the_definition_and_has_an_exact_inverse(layout):
    shape, dims = layout
    x = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    check_dims("x", shape, dims)
    stack = stack_by_loops(x, dims)
    np.testing.assert_array_equal(to_matrices(jnp.asarray(x), dims), stack)
    np.testing.assert_array_equal(from_matrices(jnp.asarray(stack), dims, shape), x)
    assert stack.shape == matrix_shape(shape, dims)
    axis, rows = np.atleast_1d(dims.outputs)[0], []
    for at, one, block in blocks_of(
        shape, dims
    ):  # blocks divide the rows of each matrix
        part = x[(slice(None),) * (axis % x.ndim) + (at,)]
        assert part.shape == block
        rows.append(stack_by_loops(part, one))
    np.testing.assert_array_equal(np.concatenate(rows, axis=1), stack)


def test_dims_are_leaves_and_hashable_and_muons_are_accepted():
    assert jax.tree.leaves({"a": MatrixDims(0, 1)}) == [MatrixDims(0, 1)]
    assert (
        len(
            {
                MatrixDims(0, 1),
                MatrixDims(np.int64(0), (1,)),
                MatrixDims(1, 0),
                MatrixDims([0], 1, 1),
            }
        )
        == 2
    )
    assert MatrixDims([0, 1], 2, [4, 2]) == MatrixDims((0, 1), 2, (4, 2))
    numbers = optax.contrib.MuonDimensionNumbers(reduction_axis=(0, 1), output_axis=2)
    assert as_matrix_dims("w", numbers) == MatrixDims(inputs=(0, 1), outputs=2)
    assert as_matrix_dims("w", None) is None
    with pytest.raises(
        TypeError, match=r"parameter 'w' must be MatrixDims, .* or None, got 'matrix'"
    ):
        as_matrix_dims("w", "matrix")


@cases.rows(
    "arguments error message",
    ((0.5, 1), TypeError, "inputs must be an int or a tuple of ints, got 0.5"),
    ((0, "1"), TypeError, "outputs must be an int or a tuple of ints, got '1'"),
    ((0, (1, True)), TypeError, "outputs must be an int"),
    (((), 1), ValueError, "inputs is empty"),
    (((0, 1), 1), ValueError, "name an axis twice"),
    ((0, 1, 1.0), TypeError, "output_blocks must be an int"),
    ((0, 1, (4, 0)), ValueError, "output_blocks must be at least 1"),
)
def test_wrong_dims_are_refused_at_construction(arguments, error, message):
    with pytest.raises(error, match=message):
        MatrixDims(*arguments)


@cases.rows(
    "shape dims message",
    ((3, 4), MatrixDims(0, 2), "outputs=2 is out of range for 2 axes"),
    ((3, 4), MatrixDims(-3, 1), "inputs=-3 is out of range"),
    (
        (3, 4, 5),
        MatrixDims((0, -3), 1),
        r"inputs=\(0, -3\) and outputs=1 name an axis twice",
    ),
    (
        (3, 2, 4),
        MatrixDims(0, (1, 2), 4),
        "output_blocks=4 does not divide axis 1 of size 2",
    ),
    ((0, 4), MatrixDims(0, 1), "no elements: return None"),
    (
        (3, 4),
        MatrixDims(0, 1, (2, 1)),
        r"output_blocks=\(2, 1\) must add up to its 4 outputs",
    ),
    (
        (3, 4),
        MatrixDims(0, 1, (2,)),
        r"output_blocks=\(2,\) must add up to its 4 outputs",
    ),
    (
        (3, 2, 4),
        MatrixDims(0, (1, 2), (6, 2)),
        "must add up to its 8 outputs, in multiples of 4",
    ),
)
def test_dims_that_do_not_fit_a_shape_name_the_parameter(shape, dims, message):
    with pytest.raises(
        ValueError, match=f"parameter 'blocks/0/up/kernel' of shape .*{message}"
    ):
        check_dims("blocks/0/up/kernel", shape, dims)
