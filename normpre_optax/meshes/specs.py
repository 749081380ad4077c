# SPDX-License-Identifier: Apache-2.0
"""Where arrays lie on a mesh: what JAX knows of it, what a user says, and what follows for stacks of matrices."""

import math
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from normpre_optax.parameters.dims import MatrixDims, equal_blocks, split_axes

Axes = tuple[str, ...]


def mesh_of(tree) -> AbstractMesh | None:
    """The mesh that the arrays of a tree live on; None for a single device, and inside ``jax.shard_map``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.meshes.specs import mesh_of
        >>> mesh_of({"w": jnp.ones((2, 3))}) is None
        True
    """
    for x in jax.tree.leaves(tree):
        mesh = jax.typeof(x).sharding.mesh
        if mesh.empty or (mesh.size == 1 and AxisType.Explicit not in mesh.axis_types):
            continue
        return None if AxisType.Manual in mesh.axis_types else mesh
    return None


def spec_of(x: jax.Array) -> PartitionSpec:
    """Where JAX says that an array lies: its Explicit axes."""
    return jax.typeof(x).sharding.spec


def shares_of(x: jax.Array) -> list[int]:
    """Over how many devices each axis of an array is known to be spread.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.meshes.specs import shares_of
        >>> shares_of(jnp.ones((2, 3)))
        [1, 1]
    """
    sizes = jax.typeof(x).sharding.mesh.shape
    entries = (*spec_of(x), *[None] * x.ndim)[: x.ndim]
    return [math.prod(sizes[name] for name in axes_of(entry)) for entry in entries]


def gathered(x: jax.Array, axis: int | None = None) -> jax.Array:
    """The array, whole on every device (or along one axis) where JAX knows how it is spread.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.meshes.specs import gathered
        >>> print(gathered(jnp.ones(2)))
        [1. 1.]
    """
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty or AxisType.Explicit not in mesh.axis_types:
        return x
    kept = () if axis is None else [None if at == axis else entry for at, entry in enumerate(spec_of(x))]
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*kept)))


def axes_of(entry) -> Axes:
    """One entry of a PartitionSpec as a tuple of names.

    Example:
        >>> from normpre_optax.meshes.specs import axes_of
        >>> axes_of("data"), axes_of(None), axes_of(("data", "fsdp"))
        (('data',), (), ('data', 'fsdp'))
    """
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def specs_of(params: Any, shardings: Any = None) -> list[PartitionSpec]:
    """Where each parameter lies, in the order of the leaves.

    Args:
        params: the parameters.
        shardings: a tree like them (or prefix) of ``NamedSharding``, ``PartitionSpec`` or None (replicated), or a
            callable ``(params) -> tree``; None asks the arrays.

    Returns:
        One ``PartitionSpec`` a parameter.

    Raises:
        ValueError: if ``shardings`` does not match the parameters, or one of them is neither.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec
        >>> params = {"w": jnp.ones((4, 8)), "b": jnp.ones(8)}
        >>> [tuple(spec) for spec in specs_of(params, {"w": PartitionSpec("fsdp"), "b": None})]
        [(), ('fsdp',)]
    """

    def is_one(x: Any) -> bool:
        return x is None or isinstance(x, NamedSharding | PartitionSpec)

    if shardings is None:
        return [getattr(getattr(x, "sharding", None), "spec", PartitionSpec()) for x in jax.tree.leaves(params)]
    if callable(shardings) and not all(map(is_one, jax.tree.leaves(shardings, is_leaf=is_one))):
        try:
            shardings = shardings(params)
        except AttributeError as error:
            why = str(error).splitlines()[0]
            raise ValueError(
                f"shardings: the callable sees names and shapes, not where arrays lie ({why}); pass the tree itself: "
                "jax.tree.map(lambda x: x.sharding, params)"
            ) from None
    odd = [x for x in jax.tree.leaves(shardings, is_leaf=is_one) if not is_one(x)]
    if odd:
        raise ValueError(f"shardings: expected NamedSharding, PartitionSpec or None at every leaf, got {odd[0]!r}")
    found: list[PartitionSpec] = []

    def spread(one: NamedSharding | PartitionSpec | None, part: Any) -> None:
        spec = one.spec if isinstance(one, NamedSharding) else one or PartitionSpec()
        found.extend([spec] * len(jax.tree.leaves(part)))

    try:
        jax.tree.map(spread, shardings, params, is_leaf=is_one)
    except ValueError as error:
        why = str(error).splitlines()[0]
        raise ValueError(f"shardings: the tree does not match the parameters: {why}") from None
    return found


def check_spec(path: str, shape: tuple[int, ...], spec: PartitionSpec, sizes: dict[str, int]) -> None:
    """Hold where a parameter is said to lie against its shape and the mesh.

    Raises:
        ValueError: naming the parameter.

    Example:
        >>> check_spec("up/kernel", (3, 8), PartitionSpec("fsdp"), {"fsdp": 2})
        Traceback (most recent call last):
        ...
        ValueError: parameter 'up/kernel' of shape (3, 8): fsdp=2 does not divide its axis 0
    """
    where, seen = f"parameter {path!r} of shape {shape}", []
    if len(spec) > len(shape):
        raise ValueError(f"{where}: {tuple(spec)} has more entries than the parameter has axes")
    for axis, entry in enumerate(spec):
        for name in axes_of(entry):
            if name not in sizes:
                raise ValueError(f"{where}: the mesh has no axis {name!r}, its axes are {', '.join(sizes)}")
            if name in seen:
                raise ValueError(f"{where}: {tuple(spec)} names {name!r} twice")
            seen.append(name)
        if shape[axis] % math.prod(sizes[name] for name in axes_of(entry)):
            what = ", ".join(f"{name}={sizes[name]}" for name in axes_of(entry))
            raise ValueError(f"{where}: {what} does not divide its axis {axis}")


def matrix_spec(
    spec: PartitionSpec, shape: tuple[int, ...], dims: MatrixDims, transposed: bool = False
) -> PartitionSpec:
    """Where the stack of a sharded parameter lies, if nothing is to be moved.

    Args:
        spec: the parameter's.
        shape: its shape.
        dims: axes that fit it.
        transposed: as `to_matrices` is given it.

    Returns:
        Entries for (batch, out, in), or (batch, in, out). Of axes that are flattened into one only the first can stay
        sharded, of batch axes the `leading` one; outputs that are cut into blocks cannot.

    Example:
        >>> from jax.sharding import PartitionSpec
        >>> tuple(matrix_spec(PartitionSpec(None, "tensor"), (768, 12, 64), MatrixDims(inputs=0, outputs=(1, 2))))
        (None, 'tensor', None)
    """
    entries = tuple(spec) + (None,) * (len(shape) - len(spec))
    batch, outputs, inputs = split_axes(len(shape), dims)

    def first(axes: tuple[int, ...]):
        return next((entries[axis] for axis in axes if shape[axis] > 1), None)

    rows = first(outputs) if equal_blocks(dims) == 1 else None
    sides = (first(inputs), rows) if transposed else (rows, first(inputs))
    layers = entries[batch[leading(spec, shape, dims)]] if batch else None
    return PartitionSpec(layers, *sides)


def leading(spec: PartitionSpec, shape: tuple[int, ...], dims: MatrixDims) -> int:
    """Which of the batch axes comes first in a stack, so that it can stay sharded: the longest of those that are.

    Example:
        >>> from jax.sharding import PartitionSpec
        >>> leading(PartitionSpec(None, "expert"), (24, 64, 768, 768), MatrixDims(inputs=2, outputs=3))
        1
    """
    batch, _, _ = split_axes(len(shape), dims)
    sharded = [i for i, axis in enumerate(batch) if axis < len(spec) and axes_of(spec[axis])]
    return max(sharded, key=lambda i: shape[batch[i]], default=0)


def like_parameters(updates, params):
    """Gradients moved to where the parameters lie, if they are told to lie elsewhere."""

    def move(u, p):
        there = jax.typeof(p).sharding
        if there.mesh.empty or AxisType.Explicit not in there.mesh.axis_types or jax.typeof(u).sharding == there:
            return u
        traced = isinstance(u, Tracer) or isinstance(p, Tracer)
        return jax.sharding.reshard(u, there) if traced else jax.device_put(u, p.sharding)

    return jax.tree.map(move, updates, params)
