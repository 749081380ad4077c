# SPDX-License-Identifier: Apache-2.0
"""Where and how spectral functions are executed: ``_run`` decides.

The spectral stage is the only one that works on whole matrices. On one device, matrices
are computed in a loop, by shape, or parameter by parameter. On a mesh, they are passed
to other devices or to another kind of axes. The spectral functions are in
``spectral.py``.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, PartitionSpec
from jax.typing import ArrayLike

from normpre_optax.linalg.batches import Groups, grouped, join, separate
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
from normpre_optax.sharding.placement import (
    AxesInUse,
    axes_in_use,
    mesh_of,
    spec_of,
)
from normpre_optax.stages.blocks import split_blocks
from normpre_optax.stages.stage import CountState, init_count, init_empty
from normpre_optax.trees import DimsTree

# Solves small problems together, see ``batches.solve_together``.
Solve = Callable[..., list[Any]]
# Fields that are part of the tree's structure: compared, not traced.
_STATIC = {"static": True}
# A spectral function with its step and numbers.
OfStacks = Callable[..., list[jax.Array]]


class Placement(NamedTuple):
    """Where the matrices of a parameter are on a mesh; equal ones may be one stack."""

    sharding: PartitionSpec | int  # a number of its own, if the sharding is unknown
    shared: bool  # whether small problems are the same on all devices


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
        placed: where they are, if they stay sharded on a mesh.
    """

    x: jax.Array
    ids: Any = None
    transposed: bool = dataclasses.field(default=False, metadata=_STATIC)
    placed: Placement | None = dataclasses.field(default=None, metadata=_STATIC)


class SpectralFunction(Protocol):
    """A function of matrices that commutes with transposition.

    It is hashable: two equal ones share compiled code. If ``whole_matrices``, it also
    commutes with permutations of rows and columns, and does not use
    ``Stack.transposed``.
    """

    @property
    def whole_matrices(self) -> bool:
        """Whether a device needs whole matrices, which are exchanged on a mesh.

        Otherwise XLA shards its products.
        """
        ...

    @property
    def draws(self) -> bool:
        """Whether it is random: it then needs the step and ``Stack.ids``.

        Exchanged matrices have no ids.
        """
        ...

    @property
    def rounded(self) -> bool:
        """Whether a TPU may exchange matrices and results in bfloat16."""
        ...

    def __call__(
        self,
        stacks: list[Stack],
        step: ArrayLike | None,
        solve: Solve | None = None,
        rms: ArrayLike | None = None,
    ) -> list[jax.Array]:
        """Compute the function of every matrix.

        Args:
            stacks: the matrices; there may be no stack, and stacks of single matrices.
            step: number of updates before this one; None unless ``draws``.
            solve: is passed on a mesh only and replaces ``batches.solve_together``, see
                ``sketch.clip_by_sketch``.
            rms: if given, the root mean square of every result. Other numbers are
                passed by name, too.

        Returns:
            An array for each stack.
        """
        ...


@dataclasses.dataclass(frozen=True)
class EachMatrix:
    """A function ``f(x, rms=..., **options)`` of one matrix, applied to all."""

    f: Callable[..., jax.Array]
    options: tuple[tuple[str, Any], ...] = ()
    rounded: bool = False  # whether a TPU rounds its operands to bfloat16 by default
    whole_matrices = True
    draws = False

    def __call__(
        self,
        stacks: list[Stack],
        step: ArrayLike | None,
        solve: Solve | None = None,
        rms: ArrayLike | None = None,
    ) -> list[jax.Array]:
        """Compute the function of every matrix."""
        f = functools.partial(self.f, rms=rms, **dict(self.options))
        of_stack = jnp.vectorize(f, signature="(m,n)->(m,n)")
        return [of_stack(stack.x) for stack in stacks]


class Source(NamedTuple):
    """Where matrices come from: a parameter or one of its output blocks."""

    name: str
    dims: MatrixDims
    sharding: PartitionSpec | None  # None is unknown


def spectral(
    f: SpectralFunction, *, matrix_dims: DimsTree = None, **numbers: ArrayLike | None
) -> optax.GradientTransformationExtraArgs:
    """Return the stage that applies a spectral function to all matrices.

    Args:
        f: the function.
        matrix_dims: see ``normpre_g``; ``direction`` overrides it.
        **numbers: are passed to ``f`` and may be traced, such as ``rms``.

    Returns:
        The stage. Its state is a step counter if ``f`` draws.
    """

    def update(updates, state, params=None, *, matrix_dims=matrix_dims, **_):
        blocks, rebuilt = split_blocks(updates, params, matrix_dims)
        sources = tuple(Source(x.name, x.dims, x.sharding) for x in blocks)
        run = functools.partial(_run, f, sources)
        step = state.count if f.draws else None
        args = [block.u for block in blocks], step, numbers
        new = by_platform(run, *args)(*args) if blocks else []
        if f.draws:
            state = CountState(optax.safe_increment(state.count))
        return rebuilt(new), state

    init = init_count if f.draws else init_empty
    return optax.GradientTransformationExtraArgs(init, update)


# Jitted for updates outside of jit.
@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _run(
    f: SpectralFunction,
    sources: tuple[Source, ...],
    xs: list[jax.Array],
    step: jax.Array | None,
    numbers: dict[str, Any],
) -> list[jax.Array]:
    """Apply ``f`` to parameters or their blocks, where and how it costs least."""
    of_stacks = functools.partial(f, step=step, **numbers)
    mesh = mesh_of(xs)
    if mesh is None:
        stacks = _stacks(sources, xs, f.draws)
        return _parameters(_on_one_device(of_stacks, stacks), stacks, sources, xs)

    names, dims, specs = zip(*sources, strict=True)
    used = axes_in_use(mesh, names, xs, dims, specs)
    known = None not in specs
    if f.whole_matrices and known and _exchange_pays(used, mesh):
        # Each device collects whole matrices, and computes its share of them.
        return _on_owners(f, dims, specs, mesh, xs, (step, numbers))

    if spec_of(xs[0]) is not None:
        # Explicit axes, which all parameters have or none: JAX would ask for the
        # sharding of every result. So `_run` calls itself once, with Auto axes: there
        # `mesh_of` is None on one device, and `spec_of` is None on several.
        run = functools.partial(_run, f, sources)
        run_with_auto_axes = in_auto_axes(run, mesh, list(specs))
        return run_with_auto_axes(xs, step, numbers)

    stacks = _stacks(sources, xs, f.draws)
    if not f.whole_matrices:
        # Matrices stay sharded; thin factors are communicated, and the small problems
        # of sketches shared.
        new = _sharded(of_stacks, specs, used, stacks)
    elif not known:
        # The stack of a shape is sharded over its matrices.
        new = _over_devices(of_stacks, mesh, stacks)
    else:
        # TPUs with copies of all parameters: each computes all.
        new = of_stacks(stacks)
    return _parameters(new, stacks, sources, xs)


def _exchange_pays(used: AxesInUse, mesh: AbstractMesh) -> bool:
    """Return whether devices compute a share of the matrices each.

    If all have copies of all parameters, a TPU computes all matrices in less time than
    it gathers them. On a mesh of one device, there is nothing to share.
    """
    if used.all:
        return True
    return mesh.size > 1 and platform() != "tpu"


def _stacks(
    sources: tuple[Source, ...], xs: list[jax.Array], draws: bool
) -> list[Stack]:
    """Return parameters as stacks of matrices, in the order they are stored in."""
    stacks = []
    for source, x in zip(sources, xs, strict=True):
        transposed = is_stored_transposed(x.ndim, source.dims)
        matrices = to_matrices(x, source.dims, transposed, flat=False)
        ids = None
        if draws:
            ids = matrix_ids(source.name, matrices.shape[:-2])[..., None, :]
        stacks.append(Stack(matrices, ids, transposed))
    return stacks


def _parameters(
    new: list[jax.Array],
    stacks: list[Stack],
    sources: tuple[Source, ...],
    xs: list[jax.Array],
) -> list[jax.Array]:
    """Invert ``_stacks`` for new matrices."""
    found = []
    for y, stack, source, x in zip(new, stacks, sources, xs, strict=True):
        found.append(from_matrices(y, source.dims, x.shape, stack.transposed))
    return found


def _on_one_device(of_stacks: OfStacks, stacks: list[Stack]) -> list[jax.Array]:
    if platform() == "tpu":
        # No stacks, so that a matrix stays on the chip (see ``tpu_groups``).
        return of_stacks(stacks)
    groups = _groups_by_shape(stacks)
    joined = join(stacks, groups)
    if platform() == "gpu":
        # One stack per shape, because a GPU pays for every kernel.
        return separate(of_stacks(joined), groups)
    # One matrix after the other: a CPU multiplies a matrix faster than a stack of one.
    new = []
    for stack in joined:
        flat = jax.tree.map(lambda x: jax.lax.collapse(x, 0, -2), stack)
        (one_by_one,) = jax.lax.map(of_stacks, [flat])
        new.append(one_by_one.reshape(stack.x.shape))
    return separate(new, groups)


def _groups_by_shape(stacks: list[Stack]) -> Groups:
    """Return which stacks can be joined: those of one shape, stored in one way."""
    return grouped((s.x.shape, s.x.dtype, s.transposed, s.placed) for s in stacks)


def _on_owners(
    f: SpectralFunction,
    dims: Sequence[MatrixDims],
    specs: Sequence[PartitionSpec],
    mesh: AbstractMesh,
    xs: list[jax.Array],
    operands: tuple[jax.Array | None, dict[str, Any]],
) -> list[jax.Array]:
    """Compute each matrix on one device, its owner."""

    def compute(stacks, operands):
        step, numbers = operands
        of_stacks = functools.partial(f, step=step, **numbers)
        return _on_one_device(of_stacks, [Stack(x) for x in stacks])

    return exchange(compute, operands, xs, dims, specs, mesh, f.rounded)


def _sharded(
    of_stacks: OfStacks,
    specs: Sequence[PartitionSpec | None],
    used: AxesInUse,
    stacks: list[Stack],
) -> list[jax.Array]:
    """Compute sharded stacks, one per shape; small problems are shared by devices."""
    # Parameters whose shardings are unknown are not joined.
    shardings: Any = specs
    if None in specs:
        shardings = range(len(stacks))
    placed = []
    for stack, *own in zip(stacks, shardings, used.shared, strict=True):
        placed.append(dataclasses.replace(stack, placed=Placement(*own)))
    groups = _groups_by_shape(placed)
    joined = join(placed, groups)
    shared = []
    for stack in joined:
        assert stack.placed is not None
        shared.append(stack.placed.shared)
    solve = functools.partial(solve_shared, shared, axes=used.matrices)
    return separate(of_stacks(joined, solve=solve), groups)


def _over_devices(
    of_stacks: OfStacks, mesh: AbstractMesh, stacks: list[Stack]
) -> list[jax.Array]:
    """Compute stacks that are sharded over their matrices."""

    def of_one(x):
        (new,) = of_stacks([Stack(x)])
        return new

    return over_devices(of_one, [stack.x for stack in stacks], mesh)
