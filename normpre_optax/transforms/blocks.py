# SPDX-License-Identifier: Apache-2.0
"""Outputs that are cut into blocks of given sizes, such as q, k and v where fewer heads have keys and values."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from normpre_optax.meshes.specs import gathered, like_parameters
from normpre_optax.parameters.dims import MatrixDims, block_axis, block_ends
from normpre_optax.parameters.leaves import named_leaves
from normpre_optax.parameters.rules import Choice, Choices, pieces, resolve


def in_blocks(
    matrix_dims, make: Callable[[Choices], optax.GradientTransformation]
) -> optax.GradientTransformationExtraArgs:
    """``make(matrix_dims)``, to which each block of given size is a parameter of its own.

    Args:
        matrix_dims: which parameters are matrices; see ``hybrid``.
        make: what makes the transformation of parameters on which ``matrix_dims`` has been decided.

    Returns:
        The transformation on the parameters as they are. In the trees of its state a tuple of blocks stands where such
        a parameter does.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import MatrixDims, as_matrices, normalize_rows
        >>> qkv = jnp.ones((4, 6))
        >>> tx = as_matrices(MatrixDims(inputs=0, outputs=1, output_blocks=(4, 1, 1)), normalize_rows())
        >>> print(tx.update(qkv, tx.init(qkv))[0][0])
        [0.5 0.5 0.5 0.5 0.5 0.5]
    """

    def init(params):
        tree, found = cut(params, resolve(params, matrix_dims))
        return make(found).init(tree)

    def update(updates, state, params=None, **extra_args):
        decided = resolve(updates if params is None else params, matrix_dims)
        blocks, found = cut(updates, decided)
        weights = None if params is None else cut(params, decided)[0]
        new, state = optax.with_extra_args_support(make(found)).update(blocks, state, weights, **extra_args)
        return (new if blocks is updates else _whole(new, decided, updates)), state

    return optax.GradientTransformationExtraArgs(init, update)


def cut(tree: Any, found: Choices) -> tuple[Any, Choices]:
    """Blocks of given sizes as tuples in place of the parameters they are of, and what was decided for each of them.

    Args:
        tree: like the parameters, or a part of it.
        found: what was decided for every parameter.

    Example:
        >>> from normpre_optax.parameters.dims import MatrixDims
        >>> from normpre_optax.parameters.rules import resolve
        >>> params = {"qkv": jnp.ones((4, 6)), "up": jnp.ones((4, 8))}
        >>> dims = {"qkv": MatrixDims(inputs=0, outputs=1, output_blocks=(4, 1, 1)), "up": MatrixDims(0, 1)}
        >>> jax.tree.map(jnp.shape, cut(params, resolve(params, dims))[0])
        {'qkv': ((4, 4), (4, 1), (4, 1)), 'up': (4, 8)}
    """
    paths = ["/".join(names) for names, *_ in named_leaves(tree)]
    if not any(map(_ends, map(found.__getitem__, paths))):
        return tree, Choices({path: found[path] for path in paths})
    leaves, treedef = jax.tree.flatten(tree)
    parts = [blocks_of(x, found[path].dims) for x, path in zip(leaves, paths, strict=True)]
    blocks = treedef.unflatten([x if x[1:] else x[0] for x in parts])
    names = ["/".join(names) for names, *_ in named_leaves(blocks)]
    decided = [piece for path in paths for piece in pieces(found[path])]
    return blocks, Choices(zip(names, decided, strict=True))


def blocks_of(x: jax.Array, dims: MatrixDims | None) -> tuple[jax.Array, ...]:
    """The blocks of given sizes of a parameter, or of what is like it; itself if there are none.

    Example:
        >>> qkv = MatrixDims(inputs=0, outputs=1, output_blocks=(4, 1, 1))
        >>> [block.shape for block in blocks_of(jnp.ones((4, 6)), qkv)]
        [(4, 4), (4, 1), (4, 1)]
    """
    ends = [] if dims is None else block_ends(x.shape, dims)
    if dims is None or not ends:
        return (x,)
    axis = block_axis(x.ndim, dims)
    return tuple(jnp.split(gathered(x, axis), ends[:-1], axis))


def _ends(one: Choice) -> list[int]:
    return [] if one.dims is None else block_ends(one.shape, one.dims)


def _whole(blocks: Any, found: Choices, like: Any) -> Any:
    """What ``cut`` has cut, in one again."""
    leaves, treedef = jax.tree.flatten(like)
    paths = ["/".join(names) for names, *_ in named_leaves(like)]

    def join(parts: Any, one: Choice, leaf: jax.Array) -> Any:
        if one.dims is None or not _ends(one):
            return parts
        axis = block_axis(leaf.ndim, one.dims)
        return jax.tree.map(lambda *pieces: like_parameters(jnp.concatenate(pieces, axis), leaf), *parts)

    return treedef.unflatten(map(join, treedef.flatten_up_to(blocks), map(found.__getitem__, paths), leaves))
