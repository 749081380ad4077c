# SPDX-License-Identifier: Apache-2.0
"""Running a transformation over all matrices of a model whose parameters live on a mesh.

With Explicit axes JAX tells where every parameter lies; the work is done with Auto axes inside, and what comes out
lies where the parameters do. With Auto axes the user may tell; else the partitioner sees to everything.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from normpre_optax.meshes.specs import axes_of, check_spec, leading, matrix_spec, spec_of
from normpre_optax.parameters.dims import MatrixDims, batch_sizes, matrix_shape, split_axes
from normpre_optax.platforms import by_platform
from normpre_optax.transforms import batches
from normpre_optax.transforms.batches import Parameter, Stage, is_per_parameter, on_stacks
from normpre_optax.transforms.oriented import MatrixLayout


def run_on_mesh(
    stage: Stage,
    parameters: list[Parameter],
    shared: list[Any],
    mesh: AbstractMesh,
    specs: Mapping[str, PartitionSpec | None],
) -> tuple[list[jax.Array], list[list[jax.Array]], list[Any]]:
    """Run ``stage`` once, on stacks of the matrices of all parameters.

    Args:
        stage: as ``batches.run`` takes it; it is told where the stacks lie.
        parameters: the parameters.
        shared: state that belongs to no matrix.
        mesh: where they live.
        specs: where each of them lies, by name, for a mesh with Auto axes; None where nobody says.

    Returns:
        As ``batches.run``: new updates, which lie where the parameters do, new states, new shared state.
    """
    names, lie = list(specs), _specs(parameters, specs, mesh)
    if lie is not None:
        leads = [leading(spec, p.update.shape, p.dims) for spec, p in zip(lie, parameters, strict=True)]
        parameters = [dataclasses.replace(p, lead=lead) for p, lead in zip(parameters, leads, strict=True)]

    def place(i: int) -> Hashable:
        if lie is None:  # Parameters that only a number tells apart lie alike.
            return without_numbers(names[i])
        batch, *_ = matrix_spec(lie[i], parameters[i].update.shape, parameters[i].dims)
        return lie[i], None if batch is None else i  # Where layers are shared out, nothing is put beside them.

    groups: dict[Hashable, list[int]] = {}
    for i, parameter in enumerate(parameters):
        groups.setdefault((parameter.kind(), place(i)), []).append(i)
    work = functools.partial(_on_stacks, stage, lie, list(groups.values()))
    named = {a for spec in lie or () for entry in spec for a in axes_of(entry)}
    if lie is not None and math.prod(mesh.shape[a] for a in named) == 1:  # Everyone has everything.
        alone, shared_out = functools.partial(batches.run, stage), work
        # A TPU takes longer to pack what others are to treat than to treat it.
        work = functools.partial(by_platform, cpu=shared_out, tpu=alone, default=shared_out)
        work = alone if named or mesh.size == 1 else work
    if AxisType.Explicit not in mesh.axis_types:
        return work(parameters, shared)
    out = (lie, *jax.tree.map(spec_of, ([p.state for p in parameters], shared)))
    return _in_auto_axes(work, mesh, out)(parameters, shared)


def _on_stacks(
    stage: Stage, specs: list[PartitionSpec] | None, groups: list[list[int]], parameters: list[Parameter], shared: list
):
    # As most numbers are stored, so that only the others are turned.
    balance = sum(p.update.size if p.stored_transposed() else -p.update.size for p in parameters)
    layout = MatrixLayout(transposed=balance > 0)
    if specs is None:
        return on_stacks(stage, parameters, shared, groups, layout)
    here = jax.typeof(parameters[0].update).sharding.mesh
    firsts = [(specs[i], parameters[i]) for i, *_ in groups]
    stacks = [matrix_spec(spec, p.update.shape, p.dims, layout.transposed) for spec, p in firsts]

    def placed(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(here, spec))

    layout = layout._replace(mesh=here, specs=stacks)
    new, states, shared = on_stacks(stage, parameters, shared, groups, layout, lambda x, k: placed(x, stacks[k]))
    return [jax.tree.map(lambda y, s=spec: placed(y, s), x) for x, spec in zip(new, specs, strict=True)], states, shared


def _specs(
    parameters: list[Parameter], said: Mapping[str, PartitionSpec | None], mesh: AbstractMesh
) -> list[PartitionSpec] | None:
    """Where the parameters lie; None if nobody says."""
    for name, parameter in zip(said, parameters, strict=True):
        own = jax.typeof(parameter.update).sharding.mesh
        if not own.empty and own.shape != mesh.shape:
            raise ValueError(f"parameter {name!r} lies on another mesh than others, {mesh}: put all of them on one")
    if AxisType.Explicit in mesh.axis_types:
        return [spec_of(p.update) for p in parameters]
    specs = [spec for spec in said.values() if spec is not None]
    if len(specs) < len(parameters):
        return None
    for name, parameter, spec in zip(said, parameters, specs, strict=True):
        check_spec(name, parameter.update.shape, spec, dict(mesh.shape))
    return specs


_NUMBERS = re.compile(r"\d+")


def without_numbers(path: str) -> str:
    """The name that parameters of a model's layers share.

    Example:
        >>> from normpre_optax.meshes.run import without_numbers
        >>> without_numbers("blocks/11/mlp/up_2/kernel")
        'blocks/#/mlp/up_#/kernel'
    """
    return _NUMBERS.sub("#", path)


def _in_auto_axes(f: Callable, mesh: AbstractMesh, out: Any) -> Callable:
    """``f`` with the partitioner free to choose inside, and its results lying by ``out``."""

    def on_mesh(*args):
        with jax.sharding.use_abstract_mesh(mesh):
            return jax.sharding.auto_axes(f, out_sharding=out)(*args)

    # Compiled, so that whoever calls it operation by operation needs no mesh in context: the arguments bring theirs.
    return jax.jit(on_mesh, keep_unused=True)


def init_on_mesh(make: Callable, params: Any, dims: Sequence[MatrixDims], mesh: AbstractMesh) -> Any:
    """The state of a stage for parameters on a mesh, sharded along the axes that it has in common with them.

    Args:
        make: the list of the parameters to that state.
        params: the parameters.
        dims: their axes.
        mesh: where they live.

    Returns:
        The state.
    """
    leaves, treedef = jax.tree.flatten(params)
    if AxisType.Explicit not in mesh.axis_types:
        return make(leaves)
    sizes = [batch_sizes(x.shape, d) for x, d in zip(leaves, dims, strict=True)]
    shapes = jax.eval_shape(make, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves])

    per_parameter = functools.partial(is_per_parameter, treedef=treedef, sizes=sizes)

    def specs(node):
        if not per_parameter(node):
            return jax.tree.map(lambda _: PartitionSpec(), node)
        kept = jax.tree.leaves(node)
        return treedef.unflatten([_state_spec(x.shape, p, d) for x, p, d in zip(kept, leaves, dims, strict=True)])

    out = jax.tree.map(specs, shapes, is_leaf=per_parameter)
    return _in_auto_axes(make, mesh, out)(leaves)


def _state_spec(shape: tuple[int, ...], parameter: jax.Array, dims: MatrixDims) -> PartitionSpec:
    """Of what a stage keeps: batch axes lie as the parameter's, an axis as long as rows or columns like those."""
    spec, (batch, *_) = spec_of(parameter), split_axes(parameter.ndim, dims)
    entries = [spec[axis] for axis in batch]
    entries += [None] * (len(batch_sizes(parameter.shape, dims)) - len(entries))
    sides, lie = matrix_shape(parameter.shape, dims)[1:], matrix_spec(spec, parameter.shape, dims)[1:]
    left = [0, 1]
    for place, size in enumerate(shape[len(entries) :]):
        same = [side for side in left if sides[side] == size]
        side = place if place in same else next(iter(same), None)
        if side is not None:
            left.remove(side)
        entries.append(None if side is None else lie[side])
    return PartitionSpec(*entries)
