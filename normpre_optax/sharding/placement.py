# SPDX-License-Identifier: Apache-2.0
"""Shardings of parameters, gradients and optimizer state."""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from normpre_optax.parameters.broadcast import whole_tree
from normpre_optax.parameters.dims import MatrixDims, split_axes
from normpre_optax.trees import PyTree

# One entry of a PartitionSpec; it may also be PartitionSpec.UNCONSTRAINED.
Entry = str | tuple[str, ...] | None


def mesh_of(arrays: PyTree) -> AbstractMesh | None:
    """Return the mesh of a tree of arrays, or None if the devices work separately.

    It is None inside ``jax.shard_map`` over all mesh axes, and on one device, unless
    that is a mesh with Explicit axes: their arrays carry its types.

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
    """Return the ``PartitionSpec`` of an array.

    On a mesh with Explicit axes its type has it; else it is ``known``, or None.
    """
    # Inside of jit, the type of an array shows how Explicit axes shard it, and nothing
    # of Auto axes.
    own = jax.typeof(x).sharding
    if AxisType.Explicit in own.mesh.axis_types:
        return own.spec
    return known


def axes_of(entry: Entry) -> tuple[str, ...]:
    """Return one entry of a ``PartitionSpec`` as a tuple of axis names.

    Example:
        >>> from normpre_optax.sharding.placement import axes_of
        >>> axes_of("data"), axes_of(None), axes_of(("data", "fsdp"))
        (('data',), (), ('data', 'fsdp'))
    """
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    if isinstance(entry, str):
        return (entry,)
    return tuple(entry)


def unsharded(x: jax.Array, axis: int) -> jax.Array:
    """Return the array gathered along ``axis``, if an Explicit mesh axis shards it."""
    spec = spec_of(x)
    if spec is None or spec[axis] is None:
        return x
    mesh = jax.typeof(x).sharding.mesh
    return jax.sharding.reshard(x, NamedSharding(mesh, without_axis(spec, axis)))


def without_axis(spec: PartitionSpec, axis: int) -> PartitionSpec:
    """Return a ``PartitionSpec`` that does not shard ``axis``."""
    entries = list(spec)
    # A spec may have fewer entries than the array has axes.
    if axis < len(entries):
        entries[axis] = None
    return PartitionSpec(*entries)


def sharded_like(x: jax.Array, other: jax.Array) -> jax.Array:
    """Return ``x`` sharded as ``other``, if that is on a mesh with Explicit axes."""
    target = jax.typeof(other).sharding
    if jax.typeof(x).sharding == target or spec_of(other) is None:
        return x
    if isinstance(x, Tracer) or isinstance(other, Tracer):
        return jax.sharding.reshard(x, target)
    return jax.device_put(x, other.sharding)


def replicated(x: jax.Array) -> jax.Array:
    """Return ``x``, replicated if it is on a mesh with Auto axes.

    XLA's own choice would differ between models.
    """
    mesh = jax.typeof(x).sharding.mesh
    # XLA chooses no sharding along Explicit axes, and none inside of jax.shard_map.
    if mesh.empty or any(kind != AxisType.Auto for kind in mesh.axis_types):
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))


def specs_from(
    paths: Sequence[str], params: PyTree, shardings: PyTree
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
    what = "NamedSharding, PartitionSpec and None"
    tree = whole_tree("shardings", shardings, params, kinds, what)
    entries = jax.tree.leaves(tree, is_leaf=lambda x: x is None)
    found = []
    for path, x, entry in zip(paths, jax.tree.leaves(params), entries, strict=True):
        spec = _spec_from(entry)
        if len(spec) > x.ndim:
            raise ValueError(
                f"shardings: {tuple(spec)} has more entries than parameter {path!r} of"
                f" shape {x.shape}"
            )
        found.append(spec)
    return found


def without_devices(shardings: PyTree) -> PyTree:
    """Return the ``shardings=`` option with a ``PartitionSpec`` per ``NamedSharding``.

    Only specs are used, and devices cannot be pickled.
    """
    return jax.tree.map(_without_devices, shardings)


def _without_devices(entry: Any) -> Any:
    if isinstance(entry, NamedSharding):
        return entry.spec
    return entry


def _spec_from(entry: NamedSharding | PartitionSpec | None) -> PartitionSpec:
    if entry is None:
        return PartitionSpec()
    return _without_devices(entry)


def check_spec(
    path: str, shape: tuple[int, ...], spec: PartitionSpec, sizes: dict[str, int]
) -> None:
    """Raise a ValueError if a ``PartitionSpec`` does not fit its parameter and mesh.

    Args:
        path: path of the parameter, for the error.
        shape: shape of the parameter.
        spec: its ``PartitionSpec``.
        sizes: number of devices along each mesh axis.
    """
    for axis, entry in enumerate(spec):
        names = axes_of(entry)
        missing = [name for name in names if name not in sizes]
        if missing:
            why = f"the mesh has no axis {missing[0]!r}"
        elif shape[axis] % math.prod(sizes[name] for name in names):
            why = f"{entry!r} does not divide axis {axis}"
        else:
            continue
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
            devices, because no batch axis is sharded.
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
    """Return the mesh axes that share the work.

    Args:
        mesh: the mesh of the parameters.
        names: names of the parameters, for errors.
        arrays: the parameters.
        dims: their axes.
        specs: their shardings. If one is unknown (None), the largest mesh axis shards
            all matrices.

    Raises:
        ValueError: if a sharding does not fit its parameter.
    """
    sizes = dict(mesh.shape)
    batch_axes = [split_axes(x.ndim, d)[0] for x, d in zip(arrays, dims, strict=True)]
    known = [spec for spec in specs if spec is not None]
    if len(known) < len(specs):
        largest = max(sizes, key=sizes.__getitem__)
        return AxesInUse((largest,), (largest,), [not axes for axes in batch_axes])
    used, sharding_batches, shared = set(), set(), []
    for name, x, axes, spec in zip(names, arrays, batch_axes, known, strict=True):
        check_spec(name, x.shape, spec, sizes)
        # A spec may have fewer entries than the parameter has axes.
        batch = _used_by((spec[axis] for axis in axes if axis < len(spec)), sizes)
        used |= _used_by(spec, sizes)
        sharding_batches |= batch
        shared.append(not batch)
    return AxesInUse(
        tuple(a for a in sizes if a in used),
        tuple(a for a in sizes if a in used - sharding_batches),
        shared,
    )


def _used_by(entries: Iterable[Entry], sizes: dict[str, int]) -> set[str]:
    """Return the mesh axes of more than one device in entries of a PartitionSpec."""
    names = set()
    for entry in entries:
        names.update(axes_of(entry))
    return {name for name in names if sizes[name] > 1}


def place_state(
    tx: optax.GradientTransformation, state: optax.OptState, params: optax.Params
) -> optax.OptState:
    """Place a new state where the first update leaves it.

    One compilation then serves all steps. State with the shape of its parameter is
    sharded as the parameter. Smaller state is sharded along the axes of equal size, or
    replicated on a mesh with Auto axes (see ``replicated``). Counters are replicated.
    """
    mesh = _only_mesh(params)
    if mesh is None:
        return state

    def place(tree: PyTree, params: PyTree) -> PyTree:
        """Place a tree like the parameters, with other groups masked."""
        leaves, treedef = jax.tree.flatten(
            tree, is_leaf=lambda x: isinstance(x, optax.MaskedNode)
        )
        placed = []
        for x, parameter in zip(leaves, jax.tree.leaves(params), strict=True):
            if not isinstance(x, optax.MaskedNode):
                spec = _spec_like(x.shape, parameter, mesh)
                x = jax.device_put(x, NamedSharding(mesh, spec))
            placed.append(x)
        return treedef.unflatten(placed)

    everywhere = NamedSharding(mesh, PartitionSpec())
    return optax.tree.map_params(
        tx,
        place,
        state,
        params,
        transform_non_params=functools.partial(jax.device_put, device=everywhere),
        is_leaf=lambda _: True,
    )


def _only_mesh(params: optax.Params) -> Mesh | None:
    """Return the mesh of a tree of parameters; None if they have none, or several."""
    meshes = set()
    for x in jax.tree.leaves(params):
        # Inside of jit, XLA places the state.
        is_placed = isinstance(x, jax.Array) and not isinstance(x, Tracer)
        if is_placed and isinstance(x.sharding, NamedSharding):
            meshes.add(x.sharding.mesh)
    if len(meshes) != 1:
        return None
    return meshes.pop()


def _spec_like(
    shape: tuple[int, ...], parameter: jax.Array, mesh: Mesh
) -> PartitionSpec:
    """Return the ``PartitionSpec`` of state of this shape for a parameter."""
    own = PartitionSpec()
    if isinstance(parameter.sharding, NamedSharding):
        own = parameter.sharding.spec
    if AxisType.Explicit not in mesh.axis_types:
        # XLA replicates smaller state, because the stages ask for it.
        if shape == parameter.shape:
            return own
        return PartitionSpec()
    entries = [*own, *[None] * (len(shape) - len(own))]
    for axis, (n, m) in enumerate(zip(shape, parameter.shape, strict=True)):
        if n != m:
            entries[axis] = None
    return PartitionSpec(*entries)
