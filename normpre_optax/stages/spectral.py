# SPDX-License-Identifier: Apache-2.0
"""The spectral stage: the only stage that works on whole matrices, and the only one that is executed by platform.

A spectral function ``f(stacks, step, solve, **numbers)`` maps a list of ``Stack`` to a list of results of the same
shapes. It is hashable; ``f.distributed`` says whether it needs whole matrices on one device of a mesh, ``f.rounded``
whether a TPU rounds them in the first product, ``f.draws`` whether it depends on the step. ``spectral`` lays the
parameters out, and runs it as the platform wants:

- a **CPU** computes one matrix after the other in a loop per shape;
- a **TPU** computes every parameter by itself, so that a matrix stays on the chip (see ``base.in_groups``);
- a **GPU** computes one stack per shape, because it pays for every kernel;
- on a **mesh**, functions that are ``distributed`` compute every matrix on one device; see ``sharding``.

All spectral functions commute with transposition, so matrices are not transposed: ``Stack.transposed`` says how they
are stored.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from normpre_optax.checks import check_choice, check_numbers, static_int
from normpre_optax.linalg import newton_schulz as ns
from normpre_optax.linalg import sketch
from normpre_optax.linalg.precision import by_platform, inverse_root, platform, product
from normpre_optax.parameters.dims import from_matrices, is_stored_transposed, to_matrices
from normpre_optax.sharding.auto import in_auto_axes, over_devices, solve_shared
from normpre_optax.sharding.exchange import exchange
from normpre_optax.sharding.placement import axes_in_use, is_explicit, mesh_of, spec_of
from normpre_optax.stages.base import CountState, init_count, split_blocks

_LEAST = 0.1  # of the root mean square of all singular values: least relative level, for matrices of low rank


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stack:
    """Matrices of one parameter or shape.

    Attributes:
        x: ``(..., out, in)``, or ``(..., in, out)`` if ``transposed``.
        ids: uint32 ``(..., 1, 2)``: identifies the draws of each matrix, see ``sketch.matrix_ids``; or None.
        transposed: whether rows of ``x`` are inputs.
    """

    x: jax.Array
    ids: Any
    transposed: bool = dataclasses.field(metadata={"static": True})


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
    """Apply ``f`` to blocks, on one device or on a mesh."""
    names, dims, specs = zip(*known, strict=True)
    mesh, run = mesh_of(blocks), _on_one_device
    if mesh is not None:
        explicit = is_explicit(blocks[0])
        specs = [spec_of(x) for x in blocks] if explicit else list(specs)
        used = axes_in_use(mesh, names, blocks, dims, specs)
        if f.distributed and None not in specs and (used.all or (mesh.size > 1 and platform() != "tpu")):

            def compute(xs: list[jax.Array], operands: Any) -> list[jax.Array]:
                own = functools.partial(f, step=operands[0], **operands[1])
                return _on_one_device(own, [Stack(x, None, False) for x in xs])

            return exchange(compute, (step, numbers), blocks, dims, specs, mesh, f.rounded)
        if explicit:  # The same with Auto axes and known shardings.
            own = functools.partial(_run, f, tuple(zip(names, dims, specs, strict=True)))
            return in_auto_axes(own, mesh, specs)(blocks, step, numbers)
        # Otherwise one device; or copies on a TPU, where gathering results costs more than computing them.
        if not f.distributed:
            # Matrices of one known sharding are computed together.
            keys = list(zip(specs if None not in specs else range(len(specs)), used.shared, strict=True))
            run = functools.partial(_sharded, axes=used.matrices, keys=keys)
        elif None in specs:
            run = functools.partial(over_devices, mesh=mesh)
    stacks = []
    for x, d, name in zip(blocks, dims, names, strict=True):
        transposed = is_stored_transposed(x.ndim, d)
        x = to_matrices(x, d, transposed, flat=False)
        lead = x.shape[:-2]
        ids = sketch.matrix_ids(name, math.prod(lead)).reshape(*lead, 1, 2) if f.draws else None
        stacks.append(Stack(x, ids, transposed))
    new = run(functools.partial(f, step=step, **numbers), stacks)
    each = zip(new, stacks, dims, blocks, strict=True)
    return [from_matrices(t, d, x.shape, stack.transposed) for t, stack, d, x in each]


def _on_one_device(f: Callable[[list[Stack]], list[jax.Array]], stacks: list[Stack]) -> list[jax.Array]:
    """Run ``f`` in the way that the platform wants."""
    if platform() == "tpu":
        return f(stacks)
    joined, places = _joined(stacks, [None] * len(stacks))
    if platform() == "gpu":
        new = f(joined)
    else:  # one matrix after the other
        flat = jax.tree.map(functools.partial(jax.lax.collapse, start_dimension=0, stop_dimension=-2), joined)
        new = [jax.lax.map(f, [x])[0].reshape(stack.x.shape) for x, stack in zip(flat, joined, strict=True)]
    return [new[group][i] for group, i in places]


def _sharded(f: Callable, stacks: list[Stack], axes: tuple[str, ...], keys: Sequence[Any]) -> list[jax.Array]:
    """Run ``f`` on sharded matrices; ``keys`` say which can be joined, and which all devices share."""
    joined, places = _joined(stacks, keys)
    shared = {group: keys[i][1] for i, (group, _) in enumerate(places)}
    new = f(joined, solve=functools.partial(solve_shared, list(shared.values()), axes=axes))
    return [new[group][i] for group, i in places]


def _joined(stacks: list[Stack], keys: Sequence[Any]) -> tuple[list[Stack], list[tuple[int, int]]]:
    """Join stacks of one shape and key along a new axis; also return the group of each stack, and its index there."""
    groups: dict[Any, list[int]] = {}
    for i, (stack, key) in enumerate(zip(stacks, keys, strict=True)):
        groups.setdefault((stack.x.shape, stack.transposed, stack.x.dtype, key), []).append(i)
    joined = [jax.tree.map(lambda *xs: jnp.stack(xs), *(stacks[i] for i in group)) for group in groups.values()]
    places = {i: (number, at) for number, group in enumerate(groups.values()) for at, i in enumerate(group)}
    return joined, [places[i] for i in range(len(stacks))]


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


@dataclasses.dataclass(frozen=True)
class ClipLeading:
    """The leading singular values clipped to a threshold, or to a multiple of the RMS of the remaining ones."""

    rank: int | float
    oversample: int
    power_iterations: int
    method: str
    seed: int
    compute_dtype: Any
    relative: bool
    distributed = False
    draws = True

    def __call__(
        self, stacks: list[Stack], step: Any, solve: Any = None, rms: Any = None, threshold: Any = 1.0
    ) -> list[jax.Array]:
        """Clip every matrix; all small problems are solved together."""
        xs = [stack.x for stack in stacks]
        dtype = None if self.compute_dtype == "narrow" else self.compute_dtype  # None is narrow here
        if dtype is None and self.method != "exact" and platform() == "gpu" and xs[0].dtype == jnp.float32:
            # Reading Psi is what these products cost a GPU. The barrier keeps XLA from undoing the rounding.
            dtype, xs = jnp.bfloat16, jax.lax.optimization_barrier([x.astype(jnp.bfloat16) for x in xs])
        # The smaller dimension is worked on; for a square matrix, the outputs.
        tall = [(x.shape[-2], s.transposed) > (x.shape[-1], False) for x, s in zip(xs, stacks, strict=True)]
        wide = [x.mT if is_tall else x for x, is_tall in zip(xs, tall, strict=True)]
        squares = [sketch.sum_of_squares(x) for x in xs]
        sizes = [self.sizes(x.shape[-2]) for x in wide]
        clippings = [
            self.clipping(s, x.shape[-2], rank, threshold) for s, x, (rank, _) in zip(squares, wide, sizes, strict=True)
        ]
        if self.method == "exact":
            found = [sketch.batched(sketch.clip_exactly, x.ndim)(x, c) for x, c in zip(wide, clippings, strict=True)]
        else:
            shapes = [(size, x.shape[-1]) for x, (_, size) in zip(wide, sizes, strict=True)]
            ids = [jnp.asarray(stack.ids[..., 0, :]) for stack in stacks]
            if solve is None:
                omegas = sketch.draws(self.seed, step, ids, shapes)
            else:  # On a mesh, XLA would shard draws that are computed together, and then gather them.
                omegas = [sketch.draws(self.seed, step, [i], [s])[0] for i, s in zip(ids, shapes, strict=True)]
            omegas = [omega.astype(s.dtype) for omega, s in zip(omegas, squares, strict=True)]
            products = self.method == "products"
            found = sketch.clip_by_sketch(wide, omegas, clippings, self.power_iterations, products, dtype, solve)
        new = []
        for x, is_tall, s, (left, right, kept) in zip(xs, tall, squares, found, strict=True):
            a, b = (right, left) if is_tall else (left, right)
            t = x.astype(s.dtype) + product(a.mT, b, dtype)
            if rms is not None:  # ||T||^2 is known from small matrices
                t = t * (rms * (x.shape[-2] * x.shape[-1]) ** 0.5 * inverse_root(kept))
            new.append(t)
        return new

    def sizes(self, side: int) -> tuple[int, int]:
        """Return how many singular values of a matrix are clipped, and how many directions its sketch has."""
        rank = min(self.rank, side) if isinstance(self.rank, int) else max(1, round(self.rank * side))
        most = max(1, side - 1) if self.relative else side  # one remains
        rank, products = min(rank, most), self.method == "products"
        size = min(rank + self.oversample, most if products else side)
        return (size if products else rank), size

    def clipping(self, total: jax.Array, side: int, rank: int, threshold: Any) -> sketch.Clipping:
        """Return what is clipped of matrices with this sum of squares."""
        fixed = sketch.to_threshold(total, rank, threshold)
        if not self.relative:
            return fixed
        if side == rank:  # one singular value, and none remains
            return fixed._replace(least=total)
        return fixed._replace(least=fixed.least * total * (_LEAST**2 / side), share=fixed.least / (side - rank))


def precondition_globally(
    ns_steps: int | None = 5,
    ns_coefficients: str | Sequence[Any] = "muon",
    compute_dtype: Any = None,
    rms: jax.typing.ArrayLike | None = None,
    *,
    matrix_dims: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Bring every singular value near one: ``T = msign(Psi)`` by Newton-Schulz iterations.

    Args:
        ns_steps: number of iterations; None computes ``msign`` by a singular value decomposition.
        ns_coefficients: "muon", "you", "polar_express", one triple ``(a, b, c)``, or one triple per step. A table
            shorter than ``ns_steps`` is continued with its last triple.
        compute_dtype: dtype of the operands of products; None means the platform's default for float32 (one bfloat16
            pass on a TPU, TF32 on a GPU, float32 on a CPU), ``jnp.float32`` true float32 everywhere, and "narrow"
            bfloat16 on a TPU or GPU and float32 on a CPU.
        rms: if given, scale every result to this root mean square.
        matrix_dims: see ``normpre_g``; ``direction`` overrides it.

    Returns:
        A stage. On a mesh, every matrix is computed on one device.

    Raises:
        TypeError: if ``ns_steps`` is traced.
        ValueError: if ``ns_steps`` is less than 1 or ``ns_coefficients`` is not a table.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import precondition_globally
        >>> tx = precondition_globally(ns_steps=None)
        >>> psi = jnp.diag(jnp.array([3.0, 0.5]))
        >>> print(tx.update(psi, tx.init(psi))[0])
        [[1. 0.]
         [0. 1.]]

    References:
        Normalize-Then-Precondition, "NormPre-G"; Jordan et al., Muon, 2024.
    """
    check_numbers(rms=rms, compute_dtype=compute_dtype)
    steps = 1 if ns_steps is None else static_int("ns_steps", ns_steps, least=1, below=1000)  # unrolled
    table = ns.coefficient_table(ns_coefficients, steps)
    if ns_steps is None:
        return spectral(EachMatrix(ns.exact_msign), rms=rms, matrix_dims=matrix_dims)
    headroom = ns.HEADROOM.get(ns_coefficients, 1.0) if isinstance(ns_coefficients, str) else 1.0
    options = ("table", table), ("headroom", headroom), ("compute_dtype", compute_dtype)
    f = EachMatrix(ns.newton_schulz, options, rounded=compute_dtype is None or compute_dtype == "narrow")
    return spectral(f, rms=rms, matrix_dims=matrix_dims)


def precondition_locally(
    rank: int | float = 32,
    oversample: int = 8,
    power_iterations: int = 1,
    method: Literal["sketch", "products", "exact"] = "sketch",
    seed: int = 0,
    compute_dtype: Any = None,
    relative_threshold: jax.typing.ArrayLike | None = None,
    rms: jax.typing.ArrayLike | None = None,
    *,
    matrix_dims: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Clip the leading singular values above a threshold to it: ``T = P Psi`` of NormPre-L.

    With the ``rank`` largest eigenvalues ``lambda_i`` of ``Psi Psi^T`` and their eigenvectors ``u_i``,
    ``P = I + sum_i (lambda_i^-1/2 - 1) u_i u_i^T`` over those with ``lambda_i > 1``.

    Args:
        rank: r, how many singular values may be clipped; between zero and one, the share of the smaller dimension.
        oversample: o; the sketch has ``min(m, n, r + o)`` directions.
        power_iterations: p, iterations that sharpen the sketch.
        method: "sketch" (Algorithm 2), "products" (the same without an eigensolver; all ``r + o`` singular values of
            the sketch may be clipped) or "exact" (an eigendecomposition of the smaller dimension).
        seed: of the Gaussian draws, which depend on it, the step, the parameter's path and the batch index only.
        compute_dtype: dtype of the operands of the products with ``Psi``. None means bfloat16 on a TPU or GPU, float32
            on a CPU. Small matrices and ``method="exact"`` use float32.
        relative_threshold: c. None clips to one, as in the paper. A number clips to ``c`` times the root mean square of
            the remaining singular values: ``level^2 = c^2 (||Psi||_F^2 - sum_{i <= r} lambda_i) / (min(m, n) - r)``,
            with ``r < min(m, n)``; for ``method="products"``, r is ``r + o``. The level is at least a tenth of
            ``c ||Psi||_F / sqrt(min(m, n))``, for matrices of low rank. A matrix of one row or column is not clipped.
        rms: if given, scale every result to this root mean square.
        matrix_dims: see ``normpre_g``; ``direction`` overrides it.

    Returns:
        A stage whose state is a step counter.

    Raises:
        TypeError: if an argument that determines shapes is traced.
        ValueError: if one is out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import precondition_locally
        >>> tx = precondition_locally(rank=1, method="exact")
        >>> psi = jnp.diag(jnp.array([3.0, 2.0, 0.5]))
        >>> print(jnp.diag(tx.update(psi, tx.init(psi))[0]).round(3))
        [1.  2.  0.5]

    References:
        Normalize-Then-Precondition, "NormPre-L", Algorithm 2, Propositions 1 and 2.
    """
    check_numbers(rms=rms, relative_threshold=relative_threshold, compute_dtype=compute_dtype)
    check_choice("method", method, ("sketch", "products", "exact"))
    if isinstance(rank, float | np.floating) and not 0 < rank < 1:
        raise ValueError(f"rank must be an int of at least 1, or a share between 0 and 1, got {rank}")
    if not isinstance(rank, float | np.floating):
        rank = static_int("rank", rank, least=1)
    f = ClipLeading(
        rank,
        static_int("oversample", oversample, least=0),
        static_int("power_iterations", power_iterations, least=0, below=1000),  # unrolled
        method,
        static_int("seed", seed, least=0, below=2**32),
        compute_dtype,
        relative_threshold is not None,
    )
    threshold = 1.0 if relative_threshold is None else relative_threshold
    return spectral(f, rms=rms, threshold=threshold, matrix_dims=matrix_dims)
