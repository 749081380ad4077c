# SPDX-License-Identifier: Apache-2.0
"""Layouts: what MatrixDims accepts, and that a stack of matrices and back is the identity."""

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
    check_dims,
    from_matrices,
    matrix_shape,
    to_matrices,
)


@st.composite
def layouts(draw):
    """A shape, axes that fit it (some counted from the end), and an output_blocks that divides."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=2, max_size=5)))
    axes = draw(st.permutations(range(len(shape))))
    first = draw(st.integers(1, len(shape) - 1))
    second = draw(st.integers(first + 1, len(shape)))
    signed = [axis - len(shape) * draw(st.booleans()) for axis in axes]
    rows = math.prod(shape[axis] for axis in axes[first:second])
    blocks = draw(st.sampled_from([b for b in range(1, rows + 1) if rows % b == 0]))
    return shape, MatrixDims(tuple(signed[:first]), tuple(signed[first:second]), blocks)


def stack_by_loops(x, dims):
    """The definition: one matrix per batch index and block, entry (o, i) read where the axes point."""
    inputs = [axis % x.ndim for axis in np.atleast_1d(dims.inputs)]
    outputs = [axis % x.ndim for axis in np.atleast_1d(dims.outputs)]
    batch = [axis for axis in range(x.ndim) if axis not in inputs + outputs]

    def indices(axes):
        return list(itertools.product(*(range(x.shape[axis]) for axis in axes)))

    matrices = []
    for b in indices(batch):
        rows = []
        for o in indices(outputs):
            places = [dict(zip(batch + outputs + inputs, b + o + i, strict=True)) for i in indices(inputs)]
            rows.append([x[tuple(place[axis] for axis in range(x.ndim))] for place in places])
        matrices += np.split(np.array(rows), dims.output_blocks)
    return np.stack(matrices)


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(layouts())
def test_stack_is_the_definition_and_has_an_exact_inverse(layout):
    shape, dims = layout
    x = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    check_dims("x", shape, dims)

    @jax.jit
    def there_and_back(x):
        stack, turned = to_matrices(x, dims), to_matrices(x, dims, transposed=True)
        return stack, turned, from_matrices(stack, dims, shape), from_matrices(turned, dims, shape, transposed=True)

    stack, turned, *back = there_and_back(x)
    np.testing.assert_array_equal(stack, stack_by_loops(x, dims))
    assert stack.shape == matrix_shape(shape, dims)
    np.testing.assert_array_equal(turned, np.swapaxes(stack, 1, 2))
    for again in back:
        np.testing.assert_array_equal(again, x)


def test_matrix_rows_are_output_neurons():
    kernel = jnp.arange(6.0).reshape(2, 3)  # Flax: y = x @ kernel, so output neuron j has weights kernel[:, j]
    np.testing.assert_array_equal(to_matrices(kernel, MatrixDims(0, 1))[0], kernel.T)
    np.testing.assert_array_equal(to_matrices(kernel, MatrixDims(1, 0))[0], kernel)


def test_output_blocks_cut_a_fused_qkv_into_q_k_and_v():
    q, k, v = (jax.random.normal(jax.random.key(i), (8, 4)) for i in range(3))
    fused = jnp.concatenate([q, k, v], axis=1)  # (in, 3 out)
    dims = MatrixDims(inputs=0, outputs=1, output_blocks=3)
    np.testing.assert_array_equal(to_matrices(fused, dims), jnp.stack([q.T, k.T, v.T]))
    layers = jnp.stack([fused, 2 * fused])
    stacked = to_matrices(layers, MatrixDims(1, 2, output_blocks=3))
    np.testing.assert_array_equal(stacked, jnp.stack([q.T, k.T, v.T, 2 * q.T, 2 * k.T, 2 * v.T]))


@pytest.mark.parametrize(
    ("shape", "dims", "transposes", "reshapes"),
    [
        ((5, 4, 3), MatrixDims(inputs=2, outputs=1), 0, 0),
        ((4, 3), MatrixDims(inputs=1, outputs=0), 0, 1),
        ((5, 3, 4), MatrixDims(inputs=1, outputs=2), 1, 0),
        ((5, 2, 4, 3), MatrixDims(inputs=3, outputs=2), 0, 1),
        ((3, 4), MatrixDims(inputs=0, outputs=1), 1, 1),
    ],
)
def test_no_needless_transpose_or_reshape(shape, dims, transposes, reshapes):
    def count(f, x):
        names = [str(equation.primitive) for equation in jax.make_jaxpr(f)(x).eqns]
        return names.count("transpose"), len(names) - names.count("transpose")

    x = jnp.zeros(shape)
    assert count(lambda a: to_matrices(a, dims), x) == (transposes, reshapes)
    assert count(lambda a: from_matrices(a, dims, shape), to_matrices(x, dims)) == (transposes, reshapes)


def test_dims_are_leaves_and_hashable():
    tree = {"a": MatrixDims(0, 1), "b": MatrixDims([0, 1], 2)}
    assert jax.tree.leaves(tree) == [MatrixDims(0, 1), MatrixDims((0, 1), 2)]
    assert len({MatrixDims(0, 1), MatrixDims(np.int64(0), 1), MatrixDims(1, 0)}) == 2


def test_muon_dimension_numbers_read_as_matrix_dims():
    numbers = optax.contrib.MuonDimensionNumbers(reduction_axis=(0, 1), output_axis=2)
    assert as_matrix_dims(numbers) == MatrixDims(inputs=(0, 1), outputs=2)
    assert as_matrix_dims(optax.contrib.MuonDimensionNumbers()) == MatrixDims(inputs=0, outputs=1)
    assert as_matrix_dims(None) is None
    assert as_matrix_dims(MatrixDims(1, 0, 2)) == MatrixDims(1, 0, 2)
    with pytest.raises(TypeError, match=r"expected MatrixDims, .* or None, got 'matrix'"):
        as_matrix_dims("matrix")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"inputs": 0.5, "outputs": 1}, TypeError, "inputs must be an axis .* got 0.5"),
        ({"inputs": 0, "outputs": "1"}, TypeError, "outputs must be an axis .* got '1'"),
        ({"inputs": (0, None), "outputs": 1}, TypeError, "inputs must be an axis"),
        ({"inputs": True, "outputs": 1}, TypeError, "inputs must be an axis"),
        ({"inputs": 0, "outputs": (1, True)}, TypeError, "outputs must be an axis"),
        ({"inputs": (), "outputs": 1}, ValueError, "inputs names no axis"),
        ({"inputs": 0, "outputs": (1, 1)}, ValueError, "outputs=\\(1, 1\\) names an axis twice"),
        ({"inputs": (0, 1), "outputs": 1}, ValueError, "axes \\[1\\] stand in both"),
        ({"inputs": 0, "outputs": 1, "output_blocks": 1.0}, TypeError, "output_blocks must be an int"),
        ({"inputs": 0, "outputs": 1, "output_blocks": 0}, ValueError, "output_blocks must be at least 1"),
        ({"inputs": 0, "outputs": 1, "output_blocks": (4, 0)}, ValueError, "output_blocks must be at least 1"),
        ({"inputs": 0, "outputs": 1, "output_blocks": ()}, TypeError, "an int or a tuple of sizes, got \\(\\)"),
        ({"inputs": 0, "outputs": 1, "output_blocks": (4, 0.5)}, TypeError, "an int or a tuple of sizes"),
    ],
)
def test_wrong_dims_are_refused_at_construction(arguments, error, message):
    with pytest.raises(error, match=message):
        MatrixDims(**arguments)


@pytest.mark.parametrize(
    ("shape", "dims", "message"),
    [
        ((3, 4), MatrixDims(0, 2), "outputs=2 is out of range, its axes are 0 to 1"),
        ((3, 4), MatrixDims(-3, 1), "inputs=-3 is out of range"),
        ((), MatrixDims(0, 1), "it has no axes"),
        ((3, 4), MatrixDims(0, -2), "inputs=0 and outputs=-2 name an axis twice"),
        ((3, 4, 5), MatrixDims((0, -3), 1), "name an axis twice"),
        ((3, 4), MatrixDims(0, 1, output_blocks=3), "output_blocks=3 does not divide its 4 outputs"),
        ((3, 4), MatrixDims(0, 1, output_blocks=(2, 1)), r"output_blocks=\(2, 1\) are 3, its outputs 4"),
        ((3, 2, 4), MatrixDims(0, (1, 2), (6, 2)), r"output_blocks=\(6, 2\) cut through axis 1, of 4 outputs an index"),
    ],
)
def test_dims_that_do_not_fit_a_shape_name_the_parameter(shape, dims, message):
    with pytest.raises(ValueError, match=message) as caught:
        check_dims("blocks/0/up/kernel", shape, dims)
    assert "parameter 'blocks/0/up/kernel' of shape" in str(caught.value)


def test_blocks_of_given_sizes_are_no_single_stack():
    dims = MatrixDims(0, 1, output_blocks=[4, 2])
    assert dims == MatrixDims(0, 1, output_blocks=(4, 2))
    assert MatrixDims(0, 1, output_blocks=(6,)) == MatrixDims(0, 1)
    with pytest.raises(ValueError, match="make matrices of several shapes: look at one block at a time"):
        to_matrices(jnp.ones((3, 6)), dims)
