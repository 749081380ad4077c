# SPDX-License-Identifier: Apache-2.0
"""Where and how spectral functions are executed. ``MOVES`` and ``WAYS`` are the tables;
the first condition decides.

The spectral stage is the only one that works on whole matrices. On a mesh, a move
``(job)`` passes parameters to other devices or another kind of axes, and decides there
again. A way ``(f, stacks, job)`` computes stacks of matrices: in a loop, by shape, or
parameter by parameter. The spectral functions are in ``spectral.py``.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from normpre_optax.linalg.batches import join
from normpre_optax.linalg.platforms import by_platform, platform
from normpre_optax.linalg.sketch import matrix_ids
from normpre_optax.parameters.dims import (
    MatrixDims,
    from_matrices,
    is_stored_transposed,
    to_matrices,
)
from normpre_optax.sharding.auto import in_auto_axes, over_devices, solve_shared
from normpre_optax.sharding.exchange import exchange
from normpre_optax.sharding.placement import axes_in_use, mesh_of, spec_of
from normpre_optax.stages.blocks import split_blocks
from normpre_optax.stages.stage import CountState, init_count, init_empty


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stack:
    """Matrices of one parameter or shape.

    Attributes:
        x: ``(..., out, in)``, or ``(..., in, out)`` if ``transposed``.
        ids: uint32 ``(..., 1, 2)``: identifies the draws of each matrix, see
            ``sketch.matrix_ids``; or None. The axis of one makes it a stack of
            matrices, too.
        transposed: whether rows of ``x`` are inputs; not known of exchanged matrices.
        placed: on a mesh, the sharding (or a number, if unknown), and whether small
            problems are the same on all devices; stacks of equal ones are joined.
    """

    x: jax.Array
    ids: Any = None
    transposed: bool = dataclasses.field(default=False, metadata={"static": True})
    placed: Any = dataclasses.field(default=None, metadata={"static": True})


class Job(NamedTuple):
    """A spectral function, the blocks of parameters that it is applied to, and where
    they are.
    """

    f: Any
    blocks: list[jax.Array]
    each: tuple  # name, dims and sharding of every block, static to start again
    dims: Sequence[MatrixDims]
    specs: Sequence[Any]  # shardings; None is unknown
    known: bool  # whether all shardings are known
    mesh: Any  # None is one device
    used: Any  # ``AxesInUse`` of the mesh; None without
    operands: tuple[Any, dict]  # the step, and numbers such as ``rms``


@dataclasses.dataclass(frozen=True)
class EachMatrix:
    """A function ``f(x, rms=..., **options)`` of one matrix, applied to all."""

    f: Callable
    options: tuple[tuple[str, Any], ...] = ()
    rounded: bool = False  # whether a TPU rounds its operands to bfloat16 by default
    whole_matrices = True
    draws = False

    def __call__(
        self, stacks: list[Stack], step: Any, solve: Any = None, rms: Any = None
    ) -> list[jax.Array]:
        """Compute the function of every matrix."""
        f = functools.partial(self.f, rms=rms, **dict(self.options))
        return [jnp.vectorize(f, signature="(m,n)->(m,n)")(stack.x) for stack in stacks]


def spectral(
    f: Any, *, matrix_dims: Any = None, **numbers: Any
) -> optax.GradientTransformationExtraArgs:
    """Return the stage that applies a spectral function to the matrices of all
    parameters.

    Args:
        f: hashable function ``(stacks, step, solve, **numbers)`` that returns an array
            per ``Stack``, also of no stack and of single matrices. It commutes with
            transposition; two equal ones share compiled code. ``solve`` is passed on a
            mesh only and replaces ``batches.solve_together``, see
            ``sketch.clip_by_sketch``. Attributes: ``whole_matrices``: whether a device
            needs whole matrices, which are then exchanged; else XLA shards its
            products. It then commutes with permutations of rows and columns, too, does
            not use ``Stack.transposed``, and has ``rounded``: whether a TPU may
            exchange matrices and results in bfloat16. ``draws``: whether it is random;
            it then gets the step, and stacks with ``ids``, which exchanged matrices do
            not have.
        matrix_dims: see ``normpre_g``; ``direction`` overrides it.
        **numbers: are passed to ``f`` and may be traced, such as ``rms``.
    """

    def update(updates, state, params=None, *, matrix_dims=matrix_dims, **_):
        blocks, rebuilt = split_blocks(updates, params, matrix_dims)
        run = functools.partial(
            _run, f, tuple((block.name, block.dims, block.sharding) for block in blocks)
        )
        args = [block.u for block in blocks], state.count if f.draws else None, numbers
        new = by_platform(run, *args)(*args) if blocks else []
        return rebuilt(new), (
            CountState(optax.safe_increment(state.count)) if f.draws else state
        )

    return optax.GradientTransformationExtraArgs(
        init_count if f.draws else init_empty, update
    )


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _run(
    f: Any, each: tuple, blocks: list[jax.Array], step: Any, numbers: dict
) -> list[jax.Array]:
    """Apply ``f`` to blocks; ``each`` has their names, dims and shardings. Jitted for
    updates outside of jit.
    """
    names, dims, specs = zip(*each, strict=True)
    mesh = mesh_of(blocks)
    used = None if mesh is None else axes_in_use(mesh, names, blocks, dims, specs)
    job = Job(
        f, blocks, each, dims, specs, None not in specs, mesh, used, (step, numbers)
    )
    for condition, move in MOVES if mesh is not None else ():
        if condition(job):
            return move(job)
    transposed = [
        is_stored_transposed(x.ndim, d) for x, d in zip(blocks, dims, strict=True)
    ]
    stacks = []
    for x, d, t, name in zip(blocks, dims, transposed, names, strict=True):
        matrices = to_matrices(x, d, t, flat=False)
        ids = matrix_ids(name, matrices.shape[:-2])[..., None, :] if f.draws else None
        stacks.append(Stack(matrices, ids, t))
    way = next(way for condition, way in WAYS if condition(job))
    new = way(functools.partial(f, step=step, **numbers), stacks, job)
    return [
        from_matrices(y, d, x.shape, t)
        for y, d, x, t in zip(new, dims, blocks, transposed, strict=True)
    ]


def _on_owners(job: Job) -> list[jax.Array]:
    def compute(xs: list[jax.Array], operands: Any) -> list[jax.Array]:
        f = functools.partial(job.f, step=operands[0], **operands[1])
        here = job._replace(mesh=None)  # an owner is one device
        way = next(way for condition, way in WAYS if condition(here))
        return way(f, [Stack(x) for x in xs], here)

    return exchange(
        compute, job.operands, job.blocks, job.dims, job.specs, job.mesh, job.f.rounded
    )


def _with_auto_axes(job: Job) -> list[jax.Array]:
    return in_auto_axes(
        functools.partial(_run, job.f, job.each), job.mesh, list(job.specs)
    )(job.blocks, *job.operands)


MOVES: tuple[tuple[Callable[[Job], Any], Callable[[Job], list[jax.Array]]], ...] = (
    # Known shardings: each device collects whole matrices, and computes its share of
    # them.
    (lambda job: job.f.whole_matrices and job.known and job.used.all, _on_owners),
    # The same with copies of all parameters; but a TPU computes all matrices in less
    # time than it gathers them. On a mesh of one device, there is nothing to share.
    (
        lambda job: (
            job.f.whole_matrices
            and job.known
            and job.mesh.size > 1
            and platform() != "tpu"
        ),
        _on_owners,
    ),
    # Explicit axes, which all parameters have or none: start again with Auto ones (of
    # one device: no mesh). With Explicit ones, JAX would ask for the sharding of every
    # result.
    (lambda job: spec_of(job.blocks[0]) is not None, _with_auto_axes),
)


def _unstacked(f: Callable, stacks: list[Stack], job: Job) -> list[jax.Array]:
    return f(stacks)


def _by_shape(f: Callable, stacks: list[Stack], job: Job) -> list[jax.Array]:
    keys = [
        (stack.x.shape, stack.x.dtype, stack.transposed, stack.placed)
        for stack in stacks
    ]
    joined, places = join(stacks, keys)
    if job.mesh is None and platform() == "cpu":
        flat = jax.tree.map(
            functools.partial(jax.lax.collapse, start_dimension=0, stop_dimension=-2),
            joined,
        )
        new = [
            jax.lax.map(f, [x])[0].reshape(stack.x.shape)
            for x, stack in zip(flat, joined, strict=True)
        ]
    else:
        new = f(joined)
    return [new[number][k] for number, k in places]


def _sharded(f: Callable, stacks: list[Stack], job: Job) -> list[jax.Array]:
    # A parameter whose sharding is unknown is in a place of its own.
    places = zip(
        job.specs if job.known else range(len(stacks)), job.used.shared, strict=True
    )
    stacks = [
        dataclasses.replace(stack, placed=placed)
        for stack, placed in zip(stacks, places, strict=True)
    ]

    def solved(joined: list[Stack]) -> list[jax.Array]:
        return f(
            joined,
            solve=functools.partial(
                solve_shared, [s.placed[1] for s in joined], axes=job.used.matrices
            ),
        )

    return _by_shape(solved, stacks, job)


def _over_devices(f: Callable, stacks: list[Stack], job: Job) -> list[jax.Array]:
    return over_devices(
        lambda x: f([Stack(x)])[0], [stack.x for stack in stacks], job.mesh
    )


WAYS: tuple[
    tuple[
        Callable[[Job], Any], Callable[[Callable, list[Stack], Job], list[jax.Array]]
    ],
    ...,
] = (
    # One TPU: no stacks, so that a matrix stays on the chip (see ``tpu_groups``).
    # An owner has those that arrived.
    (lambda job: job.mesh is None and platform() == "tpu", _unstacked),
    # One GPU: one stack per shape, because it pays for every kernel. One CPU: a loop
    # over the stack.
    (lambda job: job.mesh is None, _by_shape),
    # Matrices stay sharded; thin factors are communicated, and the small problems of
    # sketches shared.
    (lambda job: not job.f.whole_matrices, _sharded),
    # Unknown shardings: the stack of a shape is sharded over its matrices.
    (lambda job: not job.known, _over_devices),
    # TPUs with copies of all parameters: each computes all.
    (lambda job: True, _unstacked),
)
