# SPDX-License-Identifier: Apache-2.0
"""How spectral functions are executed: loop, stack, parameter by parameter, or on a mesh. ``WAYS`` is the table.

The spectral stage is the only one that works on whole matrices. ``spectral`` takes the first way whose condition holds.
Most ways are functions ``(f, stacks, job)`` of stacks of matrices; those for meshes with known shardings are functions
``(job)``. The spectral functions are in ``spectral.py``.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from normpre_optax.linalg.precision import by_platform, join, platform
from normpre_optax.linalg.sketch import matrix_ids
from normpre_optax.parameters.dims import MatrixDims, from_matrices, is_stored_transposed, to_matrices
from normpre_optax.sharding.auto import in_auto_axes, over_devices, solve_shared
from normpre_optax.sharding.exchange import exchange
from normpre_optax.sharding.placement import axes_in_use, mesh_of, spec_of
from normpre_optax.stages.base import CountState, init_count, split_blocks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stack:
    """Matrices of one parameter or shape.

    Attributes:
        x: ``(..., out, in)``, or ``(..., in, out)`` if ``transposed``.
        ids: uint32 ``(..., 1, 2)``: identifies the draws of each matrix, see ``sketch.matrix_ids``; or None.
        transposed: whether rows of ``x`` are inputs.
        placed: on a mesh, where the matrices are; only stacks in the same place are joined.
    """

    x: jax.Array
    ids: Any = None
    transposed: bool = dataclasses.field(default=False, metadata={"static": True})
    placed: Any = dataclasses.field(default=None, metadata={"static": True})


class Job(NamedTuple):
    """A spectral function, the parameters that it is applied to, and where they are."""

    f: Any
    blocks: list[jax.Array]
    names: Sequence[str]
    dims: Sequence[MatrixDims]
    specs: Sequence[Any]  # shardings; None is unknown
    known: bool  # whether all shardings are known
    mesh: Any  # None: one device
    used: Any  # the mesh axes that share the work
    operands: tuple[Any, dict]  # step and numbers


@dataclasses.dataclass(frozen=True)
class EachMatrix:
    """A function ``f(x, rms=..., **options)`` of one matrix, applied to every matrix."""

    f: Callable
    options: tuple[tuple[str, Any], ...] = ()
    rounded: bool = False  # whether a TPU rounds matrices to bfloat16 in the first product
    distributed = True
    draws = False

    def __call__(self, stacks: list[Stack], step: Any, solve: Any = None, rms: Any = None) -> list[jax.Array]:
        """Compute the function of every matrix."""
        f = functools.partial(self.f, rms=rms, **dict(self.options))
        return [jnp.vectorize(f, signature="(m,n)->(m,n)")(stack.x) for stack in stacks]


def spectral(f: Any, *, matrix_dims: Any = None, **numbers: Any) -> optax.GradientTransformationExtraArgs:
    """Return the stage that applies a spectral function to the matrices of all parameters.

    Args:
        f: the function; two equal functions share compiled code.
        matrix_dims: see ``normpre_g``; ``direction`` overrides it.
        **numbers: are passed to ``f`` and may be traced, such as ``rms``.
    """

    def update(updates, state, params=None, *, matrix_dims=matrix_dims, **_):
        blocks, rebuilt = split_blocks(updates, params, matrix_dims)
        run = functools.partial(_run, f, tuple((block.name, block.dims, block.sharding) for block in blocks))
        args = [block.u for block in blocks], state.count if f.draws else None, numbers
        new = by_platform(run, *args)(*args) if blocks else []
        return rebuilt(new), CountState(optax.safe_increment(state.count)) if f.draws else state

    init = init_count if f.draws else lambda params: optax.EmptyState()
    return optax.GradientTransformationExtraArgs(init, update)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _run(f: Any, known: tuple, blocks: list[jax.Array], step: Any, numbers: dict) -> list[jax.Array]:
    """Apply ``f`` to blocks, in the first way whose condition holds."""
    names, dims, specs = zip(*known, strict=True)
    mesh = mesh_of(blocks)
    used = None if mesh is None else axes_in_use(mesh, names, blocks, dims, specs)
    job = Job(f, blocks, names, dims, specs, None not in specs, mesh, used, (step, numbers))
    way = next(way for condition, way in WAYS if condition(job))
    if way in (_on_owners, _with_auto_axes):
        return way(job)
    transposed = [is_stored_transposed(x.ndim, d) for x, d in zip(blocks, dims, strict=True)]
    stacks = []
    for x, d, t, name in zip(blocks, dims, transposed, names, strict=True):
        matrices = to_matrices(x, d, t, flat=False)
        lead = matrices.shape[:-2]
        ids = matrix_ids(name, math.prod(lead)).reshape(*lead, 1, 2) if f.draws else None
        stacks.append(Stack(matrices, ids, t))
    new = way(functools.partial(f, step=step, **numbers), stacks, job)
    return [from_matrices(y, d, x.shape, t) for y, d, x, t in zip(new, dims, blocks, transposed, strict=True)]


def _stacked(f: Callable, stacks: list[Stack], job: Job) -> list[jax.Array]:
    keys = [(stack.x.shape, stack.x.dtype, stack.transposed, stack.placed) for stack in stacks]
    joined, places = join(stacks, keys)
    if job.mesh is None and platform() == "cpu":
        flat = jax.tree.map(functools.partial(jax.lax.collapse, start_dimension=0, stop_dimension=-2), joined)
        new = [jax.lax.map(f, [x])[0].reshape(stack.x.shape) for x, stack in zip(flat, joined, strict=True)]
    else:
        new = f(joined)
    return [new[number][k] for number, k in places]


def _on_owners(job: Job) -> list[jax.Array]:
    def compute(xs: list[jax.Array], operands: Any) -> list[jax.Array]:
        f = functools.partial(job.f, step=operands[0], **operands[1])
        here = job._replace(mesh=None)
        way = next(way for condition, way in WAYS if condition(here))
        return way(f, [Stack(x) for x in xs], here)

    return exchange(compute, job.operands, job.blocks, job.dims, job.specs, job.mesh, job.f.rounded)


def _with_auto_axes(job: Job) -> list[jax.Array]:
    known = tuple(zip(job.names, job.dims, job.specs, strict=True))
    return in_auto_axes(functools.partial(_run, job.f, known), job.mesh, list(job.specs))(job.blocks, *job.operands)


def _sharded(f: Callable, stacks: list[Stack], job: Job) -> list[jax.Array]:
    places = zip(job.specs if job.known else range(len(stacks)), job.used.shared, strict=True)
    stacks = [dataclasses.replace(stack, placed=placed) for stack, placed in zip(stacks, places, strict=True)]

    def solved(joined: list[Stack]) -> list[jax.Array]:
        return f(joined, solve=functools.partial(solve_shared, [s.placed[1] for s in joined], axes=job.used.matrices))

    return _stacked(solved, stacks, job)


def _over_devices(f: Callable, stacks: list[Stack], job: Job) -> list[jax.Array]:
    return over_devices(lambda x: f([Stack(x)])[0], [stack.x for stack in stacks], job.mesh)


_one_by_one = lambda f, stacks, job: f(stacks)  # noqa: E731
WAYS: tuple[tuple[Callable[[Job], Any], Callable], ...] = (
    # One TPU: parameter by parameter, so that a matrix stays on the chip (see ``base.in_groups``).
    (lambda job: job.mesh is None and platform() == "tpu", _one_by_one),
    # One GPU: one stack per shape, because it pays for every kernel. One CPU: a loop over the stack.
    (lambda job: job.mesh is None, _stacked),
    # Known shardings: each device collects whole matrices, and computes its share of them.
    (lambda job: job.f.distributed and job.known and job.used.all, _on_owners),
    # The same with copies of all parameters; but a TPU computes all matrices in less time than it gathers them.
    (lambda job: job.f.distributed and job.known and job.mesh.size > 1 and platform() != "tpu", _on_owners),
    # Below, XLA plans the communication. With Explicit axes, it would ask for the sharding of every result.
    (lambda job: spec_of(job.blocks[0]) is not None, _with_auto_axes),
    # Matrices stay sharded; thin factors are communicated, and small problems shared.
    (lambda job: not job.f.distributed, _sharded),
    # Unknown shardings: the stack of a shape is sharded over its matrices.
    (lambda job: not job.known, _over_devices),
    # A TPU with copies of all parameters.
    (lambda job: True, _one_by_one),
)
