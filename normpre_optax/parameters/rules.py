# SPDX-License-Identifier: Apache-2.0
"""Which parameters are matrices, and along which axes: rules from a name and a shape to `MatrixDims`, or AdamW.

`default_matrix_dims` reads one leaf by its name, its shape and what the tree around it shows; `resolve` applies the
default or the user's `matrix_dims` to a whole tree; `parameters/explain.py` prints the outcome.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import tree_util
from jax.sharding import PartitionSpec
from optax.contrib import MuonDimensionNumbers

from normpre_optax.parameters import attention
from normpre_optax.parameters.dims import (
    MatrixDims,
    as_matrix_dims,
    block_axis,
    block_ends,
    check_dims,
    matrix_shape,
)
from normpre_optax.parameters.leaves import (
    Leaf,
    fits_bias,
    is_box,
    key_names,
    named_leaves,
    own_bias,
    stack_depth,
    views,
)
from normpre_optax.parameters.roles import (
    adamw_role,
    in_stacked_experts,
    is_convolution,
    is_depthwise,
    is_output,
    is_query,
    is_weight,
    word_set,
)
from normpre_optax.parameters.uncovered import UncoveredError, for_all, uncovered

LAYER_AXES = {"layer", "layers", "block", "blocks", "stack", "scan", "stage", "stages", "pipe", "pipeline", "expert"}
LAYER_AXES |= {"experts", "exp"}
_AXIS_HEADS = {"heads", "kv", "head", "dim", "size", "q", "qkv", "per", "group"}


class Choice(NamedTuple):
    """What `resolve` decided for one parameter; `dims=None` means AdamW.

    Where anybody says so, `spec` is where it lies and `rate` how many times the learning rate it has.
    """

    path: str
    shape: tuple[int, ...]
    dims: MatrixDims | None
    reason: str
    spec: PartitionSpec | None = None
    rate: Any = 1.0


def pieces(one: Choice) -> list[Choice]:
    """The blocks of a parameter whose outputs are cut into blocks of given sizes, each as one of its own; or itself.

    Example:
        >>> qkv = Choice("qkv", (8, 12), MatrixDims(inputs=0, outputs=1, output_blocks=(8, 2, 2)), "")
        >>> [(piece.path, piece.shape) for piece in pieces(qkv)]
        [('qkv/0', (8, 8)), ('qkv/1', (8, 2)), ('qkv/2', (8, 2))]
    """
    ends = [] if one.dims is None else block_ends(one.shape, one.dims)
    if one.dims is None or not ends:
        return [one]
    axis = block_axis(len(one.shape), one.dims)
    dims, spec = dataclasses.replace(one.dims, output_blocks=1), one.spec
    if spec is not None:  # Blocks end where shares do not.
        spec = PartitionSpec(*(None if at == axis else entry for at, entry in enumerate(spec)))
    sizes = [end - start for start, end in itertools.pairwise([0, *ends])]
    shapes = [(*one.shape[:axis], size, *one.shape[axis + 1 :]) for size in sizes]
    return [one._replace(path=f"{one.path}/{i}", shape=x, dims=dims, spec=spec) for i, x in enumerate(shapes)]


def adams_inputs(one: Choice) -> int:
    """Inputs of an output head, or of what a rule gave to AdamW although the default rule reads it as a matrix; else 1.

    Example:
        >>> adams_inputs(Choice("lm_head/kernel", (64, 100), None, "output head"))
        64
    """
    dims = None
    if one.reason == _GIVEN:
        with contextlib.suppress(UncoveredError):
            dims = default_matrix_dims(one.path, Leaf(one.shape, jnp.float32))
    elif one.reason.startswith("output head") and len(one.shape) == 2:
        dims = _two(one.path.split("/"), (0, 1))
    return 1 if dims is None else max(1, matrix_shape(one.shape, dims)[2])


class Choices(dict[str, Choice]):
    """`Choice` by path. Decided on a whole tree, it stands for `matrix_dims` on a part of it."""


def default_matrix_dims(path: str, leaf: Any) -> MatrixDims | None:
    """The default rule: how a parameter is read by its name and shape.

    In this order:

    1. Biases, scales and norms, embeddings, positional tables, output heads, routers, LoRA pairs, a state space's
       rates (`A_log`) and depthwise convolutions go to AdamW, however many axes they have.
    2. Axes named by a box of Linen (`nn.with_partitioning`) or Haliax tell layers, experts and heads, wherever they
       stand; inputs and outputs are exchanged where only that goes with the bias.
    3. Layer axes in front are recognised by the biases and norms around a parameter (under `resolve`), else by a path
       with a plural such as `layers` or `blocks` that no index follows. What is left with one axis is a vector.
    4. Two axes are (in, out); (out, in) if the last name is `weight`, as in Equinox and PyTorch. Three axes are read
       as (d, heads, size) for attention's query, key and value and as (heads, size, d) for its output.
    5. Anything else with three or more axes is an error, and so is a reading that the parameter's own bias, or the
       query and output of the same attention, contradict.

    What it cannot know: a projection to the vocabulary that is not named one (`head`, `unembed`, `logits`, an `output`
    at the top) is read as a matrix, and so is an embedding without a telling name or class. A `gate` is a router beside
    `experts` or directly under `moe`, and half of a gated MLP otherwise. `weight` is taken for (out, in) even where a
    library transposes it, and `kernel` for (in, out), unless a bias tells otherwise: square kernels kept as (out, in),
    as Hugging Face's Flax GPT-2 has them, are misread. Layers stacked along another axis than the first are refused,
    unless all the matrices of the stack are square and without biases: then nothing shows it. `explain` prints how each
    parameter was read.

    Args:
        path: the parameter's name, "/"-joined.
        leaf: anything with `shape`, `ndim` and `dtype`; under `resolve` a `Leaf`, which knows its neighbours too.

    Returns:
        Its `MatrixDims`, or None for AdamW.

    Raises:
        ValueError: none of these covers the leaf. The error names it and shows the rule to write; that of an optimizer
            names all such leaves.

    Example:
        >>> default_matrix_dims("blocks/0/mlp/up/kernel", jnp.zeros((8, 32)))
        MatrixDims(inputs=0, outputs=1, output_blocks=1)
        >>> default_matrix_dims("blocks/0/attn/out/kernel", jnp.zeros((2, 4, 8)))
        MatrixDims(inputs=(0, 1), outputs=2, output_blocks=1)
        >>> default_matrix_dims("wte/embedding", jnp.zeros((100, 8))) is None
        True
    """
    return default_choice(path, leaf)[0]


def default_choice(path: str, leaf: Any) -> tuple[MatrixDims | None, str]:
    """The default rule with its reason."""
    leaf = leaf if isinstance(leaf, Leaf) else Leaf(tuple(leaf.shape), leaf.dtype)
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return None, f"{leaf.dtype}, not real floating point"
    role = adamw_role(path.split("/"), leaf)
    if role:
        return None, role
    if leaf.ndim < 2 or not leaf.size:
        return None, "empty" if not leaf.size else "vector" if leaf.ndim else "scalar"
    return _by_axis_names(path, leaf) or _by_shape(path, leaf)


def _by_axis_names(path: str, leaf: Leaf) -> tuple[MatrixDims | None, str] | None:
    """Reads a boxed leaf by the names of its axes; None where they name no layer, expert or head axis."""
    if not leaf.names:
        return None
    named = [word_set(str(name)) if name is not None else set() for name in leaf.names]
    rest = tuple(axis for axis, found in enumerate(named) if not found & LAYER_AXES)
    heads = tuple(axis for axis in rest if named[axis] and named[axis] <= _AXIS_HEADS)
    if len(rest) == leaf.ndim and len(heads) < 2:
        return None
    reason = f"axes named {_names(leaf)}"
    if len(rest) == 1:
        return None, f"stacked vector, {reason}"
    parts = path.split("/")
    if len(rest) == 2:
        return _as_its_bias(path, leaf, _two(parts, rest)), reason
    dims = attention.usual(path, leaf, rest)
    if len(heads) == len(rest) - 1:
        (width,) = (axis for axis in rest if axis not in heads)
        inward = is_output(parts, leaf) or (not is_query(parts, leaf) and (width > heads[0]) != is_weight(parts))
        dims = MatrixDims(heads, width) if inward else MatrixDims(width, heads)
    if dims is None:
        raise uncovered(path, leaf, f"its axes are named {_names(leaf)}")
    return _as_its_bias(path, leaf, dims), reason


def _as_its_bias(path: str, leaf: Leaf, dims: MatrixDims) -> MatrixDims:
    """These axes, or turned where only that goes with the bias: Levanter's GPT-2 keeps `weight` as (in, out)."""
    turned = MatrixDims(inputs=dims.outputs, outputs=dims.inputs)
    return turned if not fits_bias(path, leaf, dims) and fits_bias(path, leaf, turned) else dims


def _names(leaf: Leaf) -> str:
    return "(" + ", ".join(str(name) for name in leaf.names or ()) + ")"


def _by_shape(path: str, leaf: Leaf) -> tuple[MatrixDims | None, str]:
    parts = path.split("/")
    if is_depthwise(parts, leaf):
        return None, "depthwise convolution"
    why = _unordered([*parts, leaf.holder]) or leaf.doubt if leaf.ndim > 2 else ""
    if why:
        raise uncovered(path, leaf, why)
    layers = _layer_axes(parts, leaf)
    rest = tuple(range(layers, leaf.ndim))
    stacked = f", {counted(layers, 'layer axis', 'layer axes')} in front" if layers else ""
    if len(rest) < 2:
        return None, "stacked vector"
    if len(rest) > 2 and sum(leaf.shape[axis] > 1 for axis in rest) < 2:
        return None, "vector"
    if len(rest) == 2:
        dims, layout = _two(parts, rest), "(out, in)" if is_weight(parts) else "(in, out)"
    else:
        dims, why = attention.usual(path, leaf, rest), attention.doubt(path, leaf, rest)
        layout = f"attention {'(d, heads, size)' if dims and isinstance(dims.inputs, int) else '(heads, size, d)'}"
    if dims is None:
        raise uncovered(path, leaf)
    if not why and not fits_bias(path, leaf, dims):
        bias = f"its bias has shape {own_bias(path, leaf.near)}"
        why = f"it looks stacked, but not in front ({bias})" if layers else f"biases speak against {layout} ({bias})"
    if why:
        raise uncovered(path, leaf, why)
    return dims, layout + stacked


def counted(n: int, one: str, many: str) -> str:
    """`n` things in words: "1 matrix", "48 matrices"."""
    return f"{n:,} {one if n == 1 else many}"


def _layer_axes(parts: list[str], leaf: Leaf) -> int:
    named = leaf.ndim > 2 and stack_depth(parts) is not None
    layers = int(named) if leaf.layers is None else leaf.layers
    if layers and leaf.names and leaf.names[0] is not None:
        raise uncovered("/".join(parts), leaf, f"it looks stacked, but its axes are named {_names(leaf)}")
    return layers


def _unordered(parts: list[str]) -> str:
    """Why axes in front may be something other than layers: convolutions and experts, or ""."""
    if is_convolution(parts):
        return "a convolution has no one reading as a matrix"
    return "experts may be stacked along any axis" if in_stacked_experts(parts) else ""


def _two(parts: list[str], rest: tuple[int, ...]) -> MatrixDims:
    first, second = rest
    return MatrixDims(inputs=second, outputs=first) if is_weight(parts) else MatrixDims(inputs=first, outputs=second)


def resolve(params: Any, matrix_dims: Any = None) -> Choices:
    """Decides for every parameter whether it is a matrix, and along which axes.

    Args:
        params: the whole tree; arrays, tracers or `jax.ShapeDtypeStruct`s, boxed or not.
        matrix_dims: None (the default rule); a rule `(path, leaf) -> MatrixDims | None`; a callable `(params) -> tree`;
            or a (prefix) tree of `MatrixDims` / None. `optax.contrib.MuonDimensionNumbers` may stand for `MatrixDims`.
            A rule is shown each parameter as a `Leaf`: its shape, ndim, size, dtype and axis names, not its values. A
            tree is matched by the names along its paths, so it fits boxed and bare parameters alike. Or what this
            function returned for a larger tree.

    Returns:
        A dict from path to `Choice`, in the order in which jax flattens `params`.

    Raises:
        ValueError: a leaf that no rule covers, axes that do not fit, a tree that does not match, or a path used twice.
        TypeError: `matrix_dims` is none of these, or a leaf is no array.

    Example:
        >>> params = {"up": {"kernel": jnp.zeros((4, 8)), "bias": jnp.zeros(8)}}
        >>> [(choice.path, choice.dims is not None) for choice in resolve(params).values()]
        [('up/bias', False), ('up/kernel', True)]
    """
    if isinstance(matrix_dims, Choices):
        paths = ["/".join(names) for names, *_ in named_leaves(params)]
        return Choices({path: matrix_dims[path] for path in paths})
    choose, leaves = chooser(params, matrix_dims), views(params)
    return Choices(for_all(leaves, lambda path: decide(path, leaves[path], choose)))


def no_gains_or_biases(params: Any) -> Any:
    """Which parameters nanoGPT and its like decay: those of two or more axes, not counting an axis of stacked layers.

    Args:
        params: the whole tree.

    Returns:
        A tree of bools for `weight_decay_mask`: False for norms' scales, biases and other vectors.

    Example:
        >>> no_gains_or_biases({"up": {"kernel": jnp.zeros((4, 8)), "bias": jnp.zeros(8)}, "wte": jnp.zeros((9, 4))})
        {'up': {'bias': False, 'kernel': True}, 'wte': True}
    """

    def decays(path: str, leaf: Leaf) -> bool:
        try:
            dims, reason = default_choice(path, leaf)
        except UncoveredError:
            return True
        small = ("bias", "norm or scale", "rates", "vector", "stacked vector", "scalar")
        return dims is not None or not reason.startswith(small)

    return jax.tree.structure(params).unflatten([decays(path, leaf) for path, leaf in views(params).items()])


Chooser = Callable[[str, Leaf], tuple[MatrixDims | None, str]]


def decide(path: str, leaf: Leaf, choose: Chooser) -> Choice:
    """One parameter's `Choice`, its axes checked."""
    dims, reason = choose(path, leaf)
    if dims is not None:
        check_dims(path, leaf.shape, dims)
    return Choice(path, leaf.shape, dims, reason)


def chooser(params: Any, matrix_dims: Any) -> Chooser:
    """What `matrix_dims` says of a parameter, and why, whichever of its kinds it is."""
    if matrix_dims is None:
        return default_choice
    if _is_tree(matrix_dims):
        return _from_tree(params, matrix_dims)
    if not callable(matrix_dims):
        raise TypeError(
            f"matrix_dims={matrix_dims!r} is neither None, a rule (path, leaf), a callable (params) nor a tree of "
            "MatrixDims and None"
        )
    count = _positional(matrix_dims)
    if count == 1:
        return _from_tree(params, matrix_dims(params))
    if count == 2:
        return _from_rule(matrix_dims)
    raise TypeError(
        "matrix_dims must be a rule of two parameters (path, leaf) or a callable of one (params); "
        f"{matrix_dims!r} takes {count}"
    )


def _is_entry(value: Any) -> bool:
    return value is None or isinstance(value, (MatrixDims, MuonDimensionNumbers))


def _is_tree(value: Any) -> bool:
    """Whether `matrix_dims` is a tree. A container may be callable too (an Equinox module): then its leaves decide."""
    if _is_entry(value):
        return True
    leaves, treedef = jax.tree.flatten(value, is_leaf=_is_entry)
    if tree_util.treedef_is_leaf(treedef) and leaves:
        return False
    return not callable(value) or (bool(leaves) and all(_is_entry(leaf) for leaf in leaves))


def _positional(function: Callable[..., Any]) -> int:
    """Number of positional parameters without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        message = f"matrix_dims: cannot read the signature of {function!r}; wrap it in lambda path, leaf: ..."
        raise TypeError(message) from None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is p.empty for p in parameters)


def _from_rule(rule: Callable[[str, Leaf], Any]) -> Chooser:
    def choose(path: str, leaf: Leaf) -> tuple[MatrixDims | None, str]:
        return _given(path, leaf, _entry(path, rule(path, leaf)))

    return choose


def _given(path: str, leaf: Leaf, dims: MatrixDims | None) -> tuple[MatrixDims | None, str]:
    """Gives a user's choice its reason: the default rule's, where that says the same."""
    try:
        default, reason = default_choice(path, leaf)
    except UncoveredError:
        return dims, _GIVEN
    return dims, reason if dims == default else _GIVEN


_GIVEN = "given by matrix_dims"


def _entry(path: str, value: Any) -> MatrixDims | None:
    try:
        return as_matrix_dims(value)
    except TypeError as error:
        raise TypeError(f"matrix_dims for parameter {path!r}: {error}") from None


def _from_tree(params: Any, tree: Any) -> Chooser:
    """Matches a (prefix) tree to the parameters by the names along their paths, so that boxes make no difference."""
    entries = dict(_tree_entries(tree))
    given: dict[str, MatrixDims | None] = {}
    used: set[tuple[str, ...]] = set()
    for names in _places(params):
        prefix = next((names[:n] for n in range(len(names), -1, -1) if names[:n] in entries), None)
        if prefix is not None:
            used.add(prefix)
            given["/".join(names)] = entries[prefix]
    for names, dims in entries.items():
        if dims is not None and names not in used:
            raise ValueError(f"{_NO_PREFIX}: it has an entry at {'/'.join(names)!r}, where they have no parameter")

    def choose(path: str, leaf: Leaf) -> tuple[MatrixDims | None, str]:
        if path not in given:
            raise ValueError(f"{_NO_PREFIX}: it has no entry for {path!r} or anything above it (None means AdamW)")
        return _given(path, leaf, given[path])

    return choose


_NO_PREFIX = "matrix_dims is no prefix of the tree of parameters"


def _tree_entries(tree: Any) -> Iterator[tuple[tuple[str, ...], MatrixDims | None]]:
    for key_path, node in tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: _is_entry(x) or is_box(x))[0]:
        names = key_names(key_path)
        for value in jax.tree.leaves(node, is_leaf=_is_entry) if is_box(node) else [node]:
            yield names, _entry("/".join(names), value)


def _places(params: Any) -> Iterator[tuple[str, ...]]:
    """Paths of all leaves, and of the None and MaskedNode that stand where a parameter was taken out."""

    def is_gap(x: Any) -> bool:
        return x is None or isinstance(x, optax.MaskedNode) or is_box(x)

    yield from (names for names, *_ in named_leaves(params))
    for key_path, node in tree_util.tree_flatten_with_path(params, is_leaf=is_gap)[0]:
        if is_gap(node):
            yield key_names(key_path)
