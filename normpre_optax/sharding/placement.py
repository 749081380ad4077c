# SPDX-License-Identifier: Apache-2.0
"""Shardings of parameters, gradients and optimizer state."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from normpre_optax.parameters.broadcast import whole_tree
from normpre_optax.parameters.dims import MatrixDims, split_axes


def mesh_of(arrays: Any) -> AbstractMesh | None:
    """Return the mesh of a tree of arrays, or None on one device and inside
    ``jax.shard_map`` over all mesh axes.

    Raises:
        ValueError: if some axes of the mesh are Manual (in ``jax.shard_map``) and
            others Explicit, or the arrays are on several meshes.
    """
    found = dict.fromkeys(jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays))
    meshes = [mesh for mesh in found if mesh.size > 1 or mesh.explicit_axes]
    if len(meshes) > 1:
        raise ValueError(
            f"parameters are on two meshes, {meshes[0]} and {meshes[1]}: put all of"
            " them on one"
        )
    mesh = next(iter(meshes), None)
    if mesh is None or not mesh.manual_axes:
        return mesh
    if mesh.explicit_axes:
        raise ValueError(
            "update was called inside jax.shard_map over the axes"
            f" {list(mesh.manual_axes)} of a mesh whose other axes are Explicit: use"
            " jax.shard_map over all axes of the mesh, or give the other axes the type"
            " AxisType.Auto"
        )
    return None


def spec_of(x: jax.Array, known: PartitionSpec | None = None) -> PartitionSpec | None:
    """Return the ``PartitionSpec`` of an array on a mesh with Explicit axes, else what
    is known of it.
    """
    own = jax.typeof(x).sharding
    return own.spec if AxisType.Explicit in own.mesh.axis_types else known


def axes_of(entry: Any) -> tuple[str, ...]:
    """Return one entry of a ``PartitionSpec`` as a tuple of axis names.

    Example:
        >>> from normpre_optax.sharding.placement import axes_of
        >>> axes_of("data"), axes_of(None), axes_of(("data", "fsdp"))
        (('data',), (), ('data', 'fsdp'))
    """
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def unsharded(x: jax.Array, axis: int) -> jax.Array:
    """Return the array gathered along ``axis``, if an Explicit mesh axis shards it."""
    spec = spec_of(x)
    if spec is None or spec[axis] is None:
        return x
    return jax.sharding.reshard(
        x, NamedSharding(jax.typeof(x).sharding.mesh, without_axis(spec, axis))
    )


def without_axis(spec: PartitionSpec, axis: int) -> PartitionSpec:
    """Return a ``PartitionSpec`` that does not shard ``axis``."""
    return PartitionSpec(
        *(None if i == axis else entry for i, entry in enumerate(spec))
    )


def sharded_like(x: jax.Array, other: jax.Array) -> jax.Array:
    """Return ``x`` sharded as ``other``, if that is on a mesh with Explicit axes."""
    target = jax.typeof(other).sharding
    if jax.typeof(x).sharding == target or spec_of(other) is None:
        return x
    traced = isinstance(x, Tracer) or isinstance(other, Tracer)
    return (
        jax.sharding.reshard(x, target) if traced else jax.device_put(x, other.sharding)
    )


def replicated(x: jax.Array) -> jax.Array:
    """Return ``x``, replicated if it is on a mesh with Auto axes. XLA's own choice
    would differ between models.
    """
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty or any(kind != AxisType.Auto for kind in mesh.axis_types):
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))


def specs_from(
    paths: Sequence[str], params: Any, shardings: Any
) -> list[PartitionSpec]:
    """Return the ``PartitionSpec`` of every parameter from the ``shardings=`` option.

    Args:
        paths: paths of the parameters, for errors.
        params: the parameters.
        shardings: a tree like the parameters, or a prefix of one, of ``NamedSharding``,
            ``PartitionSpec`` or None (replicated); or a function ``(params) -> tree``.

    Raises:
        TypeError: if a leaf is something else.
        ValueError: if the tree does not match, or a sharding does not fit its
            parameter.
    """
    kinds = (NamedSharding, PartitionSpec, type(None))
    entries = whole_tree(
        "shardings", shardings, params, kinds, "NamedSharding, PartitionSpec and None"
    )
    found = [
        getattr(x, "spec", x) or PartitionSpec()
        for x in jax.tree.leaves(entries, is_leaf=lambda x: x is None)
    ]
    for path, x, spec in zip(paths, jax.tree.leaves(params), found, strict=True):
        if len(spec) > x.ndim:
            raise ValueError(
                f"shardings: {tuple(spec)} has more entries than parameter {path!r} of"
                f" shape {x.shape}"
            )
    return found


def check_spec(
    path: str, shape: tuple[int, ...], spec: PartitionSpec, sizes: dict[str, int]
) -> None:
    """Raise a ValueError that names the parameter if ``spec`` does not fit its shape
    and the mesh axis sizes.
    """
    for axis, entry in enumerate(spec):
        missing = [name for name in axes_of(entry) if name not in sizes]
        if missing or shape[axis] % math.prod(sizes[name] for name in axes_of(entry)):
            why = (
                f"the mesh has no axis {missing[0]!r}"
                if missing
                else f"{entry!r} does not divide axis {axis}"
            )
            raise ValueError(
                f"shardings: parameter {path!r} of shape {shape}: {why}; its axes are"
                f" {sizes}"
            )


class AxesInUse(NamedTuple):
    """The mesh axes that share the work.

    Attributes:
        all: axes of more than one device that shard some parameter.
        matrices: axes that share small problems. They shard rows or columns of some
            matrix, and no batch axis. Devices along other axes have other matrices, or
            are in other slices.
        shared: for each parameter, whether its small problems are the same on all
            devices: no batch axis is sharded.
    """

    all: tuple[str, ...]
    matrices: tuple[str, ...]
    shared: list[bool]


def axes_in_use(
    mesh: AbstractMesh,
    names: Sequence[str],
    arrays: Sequence[jax.Array],
    dims: Sequence[MatrixDims],
    specs: Sequence[PartitionSpec | None],
) -> AxesInUse:
    """Return the mesh axes that share the work. If specs are unknown (None), the
    largest axis shards all matrices.
    """
    sizes, matrices, batches, shared = dict(mesh.shape), set(), set(), []
    if any(spec is None for spec in specs):
        one = (max(sizes, key=sizes.__getitem__),)
        return AxesInUse(
            one,
            one,
            [not split_axes(x.ndim, d)[0] for x, d in zip(arrays, dims, strict=True)],
        )
    for name, x, d, spec in zip(names, arrays, dims, specs, strict=True):
        assert spec is not None
        check_spec(name, x.shape, spec, sizes)
        used = [{a for a in axes_of(entry) if sizes[a] > 1} for entry in spec]
        batch = set().union(
            *(used[axis] for axis in split_axes(x.ndim, d)[0] if axis < len(spec))
        )
        shared.append(not batch)
        batches |= batch
        matrices |= set().union(*used) - batch
    return AxesInUse(
        tuple(matrices | batches),
        tuple(a for a in sizes if a in matrices - batches),
        shared,
    )


def place_state(tx: optax.GradientTransformation, state: Any, params: Any) -> Any:
    """Place a new state where the first update leaves it, so that one compilation
    serves all steps.

    State with the shape of its parameter is sharded as the parameter. Smaller state is
    sharded along the axes of equal size, or replicated on a mesh with Auto axes (see
    ``replicated``). Counters are replicated.
    """
    arrays = [
        x
        for x in jax.tree.leaves(params)
        if isinstance(x, jax.Array) and not isinstance(x, Tracer)
    ]
    meshes = {x.sharding.mesh for x in arrays if isinstance(x.sharding, NamedSharding)}
    if len(meshes) != 1:
        return state
    (mesh,) = meshes

    def place(tree: Any, params: Any) -> Any:
        """Place a tree like the parameters, with other groups masked."""
        leaves, treedef = jax.tree.flatten(
            tree, is_leaf=lambda x: isinstance(x, optax.MaskedNode)
        )
        return treedef.unflatten(
            [one(s, p) for s, p in zip(leaves, jax.tree.leaves(params), strict=True)]
        )

    def one(s: Any, p: jax.Array) -> Any:
        if isinstance(s, optax.MaskedNode):
            return s
        own = (
            p.sharding.spec
            if isinstance(p.sharding, NamedSharding)
            else PartitionSpec()
        )
        entries = (*own, *[None] * (s.ndim - len(own)))
        spec = [
            entry if n == m else None
            for entry, n, m in zip(entries, s.shape, p.shape, strict=True)
        ]
        if AxisType.Explicit not in mesh.axis_types:
            spec = own if s.shape == p.shape else ()
        return jax.device_put(s, NamedSharding(mesh, PartitionSpec(*spec)))

    everywhere = functools.partial(
        jax.device_put, device=NamedSharding(mesh, PartitionSpec())
    )
    return optax.tree.map_params(
        tx,
        place,
        state,
        params,
        transform_non_params=everywhere,
        is_leaf=lambda _: True,
    )
