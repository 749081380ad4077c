# SPDX-License-Identifier: Apache-2.0
"""Random numbers that depend on the seed, the step, the parameter and the place in its stack, and on nothing else."""

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def sketch_draws(
    seed: int,
    step: jax.typing.ArrayLike,
    identity: jax.typing.ArrayLike,
    slice_index: jax.typing.ArrayLike,
    shape: tuple[int, int],
) -> jax.Array:
    """Standard normal draws of one matrix at one step, the same on every host and for every sharding.

    Args:
        seed: the optimizer's seed.
        step: steps taken before this one.
        identity: of the parameter: crc32 of its path.
        slice_index: place of the matrix in its stack.
        shape: ``(l, longer side)``.

    Returns:
        float32 array of ``shape``: the transpose of ``Omega`` of Algorithm 2.

    Example:
        >>> from normpre_optax.transforms.draws import sketch_draws
        >>> sketch_draws(0, 0, 17, 0, (2, 6)).shape
        (2, 6)
    """
    key = jax.random.key(seed, impl="threefry2x32")  # The one generator whose draws do not depend on the sharding.
    for part in (step, identity, slice_index):
        key = jax.random.fold_in(key, part)
    return jax.random.normal(key, shape, jnp.float32)


def for_each_matrix(draw: Callable[[jax.Array], jax.Array], ids: jax.Array) -> jax.Array:
    """``draw`` of the identity ``(2,)`` of every matrix of a stack.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.transforms.draws import for_each_matrix
        >>> for_each_matrix(lambda i: jnp.zeros((2, 6)) + i[1], jnp.zeros((5, 2))).shape
        (5, 2, 6)
    """
    for _ in ids.shape[:-1]:
        draw = jax.vmap(draw)
    return draw(ids)


def draws_of_stacks(
    seed: int, step: jax.typing.ArrayLike, ids: Sequence[jax.Array], shapes: Sequence[tuple[int, int]]
) -> list[jax.Array]:
    """``sketch_draws`` of every matrix of several stacks, drawn together where they have one shape.

    Args:
        seed: the optimizer's seed.
        step: steps taken before this one.
        ids: identities of the matrices, ``(..., 2)`` for each stack.
        shapes: of the draws, one for each stack.

    Returns:
        float32 ``(..., *shape)`` for each stack.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.transforms.draws import draws_of_stacks
        >>> ids = [jnp.zeros((5, 2), jnp.uint32), jnp.ones((2,), jnp.uint32)]
        >>> [x.shape for x in draws_of_stacks(0, 0, ids, [(2, 6), (2, 6)])]
        [(5, 2, 6), (2, 6)]
    """
    members: dict[tuple[int, int], list[int]] = {}
    for i, shape in enumerate(shapes):
        members.setdefault(shape, []).append(i)
    drawn: list[Any] = [None] * len(shapes)
    for shape, chosen in members.items():
        draw = lambda i, shape=shape: sketch_draws(seed, step, i[0], i[1], shape)  # noqa: E731
        if len(chosen) == 1:
            drawn[chosen[0]] = for_each_matrix(draw, ids[chosen[0]])
            continue
        flat = for_each_matrix(draw, jnp.concatenate([ids[i].reshape(-1, 2) for i in chosen]))
        start = 0
        for i in chosen:
            count = math.prod(ids[i].shape[:-1])
            drawn[i] = flat[start : start + count].reshape(*ids[i].shape[:-1], *shape)
            start += count
    return drawn


def identities(tree):
    """Identities of the matrices of every leaf, for use where ``as_matrices`` gives none.

    Args:
        tree: arrays ``(..., rows, columns)``.

    Returns:
        uint32 ``(..., 2)`` for every leaf: crc32 of its path, and the place in its stack.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.transforms.draws import identities
        >>> print(identities({"w": jnp.ones((2, 3, 4))})["w"][:, 1])
        [0 1]
    """

    def identify(path, x: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        places = jnp.arange(math.prod(x.shape[:-2]), dtype=jnp.uint32).reshape(x.shape[:-2])
        return jnp.stack([jnp.full_like(places, zlib.crc32(name.encode())), places], axis=-1)

    return jax.tree_util.tree_map_with_path(identify, tree)
