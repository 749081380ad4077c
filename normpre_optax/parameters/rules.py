# SPDX-License-Identifier: Apache-2.0
"""Which parameters are matrices, and along which axes: rules from a name and a shape to `MatrixDims`, or AdamW.

`default_matrix_dims` reads one leaf by its name, its shape and what the tree around it shows; `resolve` applies the
default or the user's `matrix_dims` to a whole tree; `parameters/explain.py` prints the outcome.
"""

from __future__ import annotations

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

from normpre_optax.parameters.dims import MatrixDims, as_matrix_dims, block_axis, block_ends, check_dims
from normpre_optax.parameters.leaves import (
    QUERIES,
    Leaf,
    block_depth,
    is_box,
    is_norm,
    is_short_bias,
    key_names,
    module_depth,
    named_leaves,
    stack_depth,
    views,
    words,
)

_OUTPUTS = {"out", "output", "o", "o_proj", "out_proj", "output_proj", "proj", "c_proj", "to_out", "wo", "w_o"}
_ATTENTION = {"attn", "attention", "mha", "mhsa", "msa", "mqa", "gqa", "multihead", "sa"}
_ATTENTION |= {"selfattn", "crossattn", "selfattention", "crossattention"}
_MLP = {"mlp", "ffn", "ff", "feedforward", "feed"}
_SCALES = {"scale", "scales", "gamma", "beta", "offset", "gain"}
_EMBEDDINGS = {"embed", "embeds", "embedder", "embedding", "embeddings", "emb", "embs", "wte"}
_POSITIONS = {"wpe", "pos", "position", "positions", "positional", "posemb", "posembed", "relpos", "rope", "rotary"}
_HEADS = {"unembed", "unembedding", "unembedder", "logit", "logits", "lmhead", "classifier", "readout", "vocab"}
_WHOLE_MODELS = {"params", "model", "transformer", "decoder", "lm", "net", "backbone", "module"}
_NOT_HEADS = {"multi", "attn", "attention", "per", "dim"}
_LAST = {"out", "output", "out_proj", "output_proj", "output_projection", "output_layer", "proj_out"}
_ROUTERS = {"router", "routers", "routing"}
_GATES = {"gate", "gating"}
_EXPERTS = {"expert", "experts", "moe"}
LAYER_AXES = {"layer", "layers", "block", "blocks", "stack", "scan", "stage", "stages", "pipe", "pipeline", "expert"}
LAYER_AXES |= {"experts", "exp"}
_AXIS_HEADS = {"heads", "kv", "head", "dim", "q"}


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


class Choices(dict[str, Choice]):
    """`Choice` by path. Decided on a whole tree, it stands for `matrix_dims` on a part of it."""


class UncoveredError(ValueError):
    """A parameter with three or more axes that no rule covers; `why` is the short form for tables."""

    def __init__(self, message: str, why: str):
        super().__init__(message)
        self.why = why


def default_matrix_dims(path: str, leaf: Any) -> MatrixDims | None:
    """The default rule: how a parameter is read by its name and shape.

    In this order:

    1. Biases, scales and norms, embeddings, positional tables, output heads and routers go to AdamW, however many
       axes they have.
    2. Axes named by a Linen box (`nn.with_partitioning`) tell the layer and expert axes, wherever they stand.
    3. Layer axes in front are recognised by the biases and norms around a parameter (under `resolve`), else by a path
       with a plural such as `layers` or `blocks` that no index follows. What is left with one axis is a vector.
    4. Two axes are (in, out); (out, in) if the last name is `weight`, as in Equinox and PyTorch. Three axes are read
       as (d, heads, size) for attention's query, key and value and as (heads, size, d) for its output.
    5. Anything else with three or more axes is an error.

    What it cannot know: a projection to the vocabulary that is not named one (`head`, `unembed`, `logits`, an `output`
    at the top) is read as a matrix, and so is an embedding without a telling name or class. A `gate` is a router beside
    `experts` or directly under `moe`, and half of a gated MLP otherwise. `weight` is taken for (out, in) even where a
    library transposes it, and `kernel` for (in, out), which Hugging Face's Flax GPT-2 stores as (out, in). Layers
    stacked along another axis than the first are refused, unless all the matrices of the stack are square and without
    biases: then nothing shows it. `explain` prints how each parameter was read.

    Args:
        path: the parameter's name, "/"-joined.
        leaf: anything with `shape`, `ndim` and `dtype`; under `resolve` a `Leaf`, which knows its neighbours too.

    Returns:
        Its `MatrixDims`, or None for AdamW.

    Raises:
        ValueError: the leaf has three or more axes and is covered by none of these.

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


def adamw_role(parts: list[str], leaf: Leaf) -> str:
    """What a parameter that AdamW should have is for, or ""."""
    module = parts[-2] if len(parts) > 1 else ""
    last = words(parts[-1])
    near = {*last, *words(module), *words(leaf.holder)}
    if near & {"bias", "biases"} or is_short_bias(parts, leaf):
        return "bias"
    if _SCALES.intersection(last) or is_norm(parts[-1], module, leaf.holder):
        return "norm or scale"
    if any(_POSITIONS.intersection(w) and not w & (_MLP | {"wise", "forward"}) for w in map(_word_set, parts[-2:])):
        return "positional table"
    if _is_head(parts, leaf):
        return "output head"
    if _is_embedding(parts, leaf):
        return "embedding"
    if _is_router(parts, leaf):
        return "router"
    return ""


def _word_set(part: str) -> set[str]:
    return set(words(part))


def _is_embedding(parts: list[str], leaf: Leaf) -> bool:
    named = any(_EMBEDDINGS & _word_set(part) for part in [*parts[block_depth(parts) :], leaf.holder])
    token = words(parts[-1])[-1:] in (("token",), ("tokens",), ("cls",))
    return named or token or any("vocab" in str(name) for name in leaf.names or ())


def _is_head(parts: list[str], leaf: Leaf) -> bool:
    if _in_attention(parts, leaf):
        return False
    for found in map(_word_set, parts):
        if found & _HEADS or ("head" in found and not found & _NOT_HEADS):
            return True
    layer, above = parts[module_depth(parts) - 1], parts[: module_depth(parts) - 1]
    return leaf.ndim == 2 and layer.lower() in _LAST and _WHOLE_MODELS.issuperset(above)


def _in_attention(parts: list[str], leaf: Leaf) -> bool:
    above = parts[: module_depth(parts) - 1]
    return any(_word_set(part) & _ATTENTION for part in above) or len(QUERIES & {s.lower() for s in leaf.siblings}) > 1


def _is_router(parts: list[str], leaf: Leaf) -> bool:
    """A part named router; or a gate that is beside the experts or directly in the mixture, and not beside `up`."""
    depth = module_depth(parts)
    layer, above = _word_set(parts[depth - 1]), _word_set(parts[depth - 2]) if depth > 1 else set()
    if (layer | above) & _ROUTERS:
        return True
    beside = set().union(*map(_word_set, leaf.siblings))
    if not layer & _GATES or beside & {"up", "down"}:
        return False
    return bool(layer & _EXPERTS) or (layer <= _GATES and ("moe" in above or bool(beside & _EXPERTS)))


def _by_axis_names(path: str, leaf: Leaf) -> tuple[MatrixDims | None, str] | None:
    """Reads a boxed leaf by the names of its axes; None where they name no layer or expert axis."""
    if not leaf.names:
        return None
    named = [_word_set(str(name)) if name is not None else set() for name in leaf.names]
    rest = tuple(axis for axis, found in enumerate(named) if not found & LAYER_AXES)
    if len(rest) == leaf.ndim:
        return None
    reason = f"axes named {_names(leaf)}"
    if len(rest) == 1:
        return None, f"stacked vector, {reason}"
    parts = path.split("/")
    if len(rest) == 2:
        return _two(parts, rest), reason
    first, last = (all(_heads(named[axis]) for axis in pair) for pair in (rest[:2], rest[1:]))
    dims = _attention(parts, leaf, rest)
    if len(rest) == 3 and dims is None and first != last:
        dims = MatrixDims(rest[:2], rest[2]) if first else MatrixDims(rest[0], rest[1:])
    if dims is None:
        raise _uncovered(path, leaf, f"its axes are named {_names(leaf)}")
    return dims, reason


def _names(leaf: Leaf) -> str:
    return "(" + ", ".join(str(name) for name in leaf.names or ()) + ")"


def _heads(found: set[str]) -> bool:
    return bool(found) and found <= _AXIS_HEADS


def _by_shape(path: str, leaf: Leaf) -> tuple[MatrixDims | None, str]:
    parts = path.split("/")
    why = _unordered([*parts, leaf.holder]) or leaf.doubt
    if leaf.ndim > 2 and why:
        raise _uncovered(path, leaf, why)
    layers = _layer_axes(parts, leaf)
    rest = tuple(range(layers, leaf.ndim))
    stacked = f", {counted(layers, 'layer axis', 'layer axes')} in front" if layers else ""
    if len(rest) < 2:
        return None, "stacked vector"
    if len(rest) == 2:
        return _two(parts, rest), ("(out, in)" if _is_weight(parts) else "(in, out)") + stacked
    dims = _attention(parts, leaf, rest) if len(rest) == 3 else None
    if dims is None:
        raise _uncovered(path, leaf)
    layout = "(d, heads, size)" if isinstance(dims.inputs, int) else "(heads, size, d)"
    return dims, f"attention {layout}{stacked}"


def counted(n: int, one: str, many: str) -> str:
    """`n` things in words: "1 matrix", "48 matrices"."""
    return f"{n:,} {one if n == 1 else many}"


def _layer_axes(parts: list[str], leaf: Leaf) -> int:
    named = leaf.ndim > 2 and stack_depth(parts) is not None
    layers = int(named) if leaf.layers is None else leaf.layers
    if layers and leaf.names and leaf.names[0] is not None:
        raise _uncovered("/".join(parts), leaf, f"it looks stacked, but its axes are named {_names(leaf)}")
    return layers


def _unordered(parts: list[str]) -> str:
    """Why axes in front may be something other than layers: convolutions and experts, or ""."""
    if any("conv" in words(part) for part in parts):
        return "a convolution has no one reading as a matrix"
    experts = [i for i, part in enumerate(parts) if _EXPERTS & _word_set(part)]
    counted = any(parts[i][-1:].isdigit() or "".join(parts[i + 1 : i + 2]).isdigit() for i in experts)
    return "experts may be stacked along any axis" if experts and not counted else ""


def _is_weight(parts: list[str]) -> bool:
    return "weight" in words(parts[-1])


def _two(parts: list[str], rest: tuple[int, ...]) -> MatrixDims:
    first, second = rest
    return MatrixDims(inputs=second, outputs=first) if _is_weight(parts) else MatrixDims(inputs=first, outputs=second)


def _attention(parts: list[str], leaf: Leaf, rest: tuple[int, ...]) -> MatrixDims | None:
    """Three axes of a Flax attention projection, or None."""
    layer = parts[module_depth(parts) - 1].lower()
    if len(rest) != 3 or _is_weight(parts):
        return None
    if layer in QUERIES and (len(layer) > 1 or _in_attention(parts, leaf)):
        return MatrixDims(inputs=rest[0], outputs=rest[1:])
    if layer in _OUTPUTS and _in_attention(parts, leaf):
        return MatrixDims(inputs=rest[:2], outputs=rest[2])
    return None


def _uncovered(path: str, leaf: Leaf, why: str = "") -> UncoveredError:
    first, second = leaf.ndim - 2, leaf.ndim - 1
    inputs, outputs = (second, first) if _is_weight(path.split("/")) else (first, second)
    why = f": {why}" if why else ""
    message = (
        f"no rule covers parameter {path!r} of shape {leaf.shape}{why}. Say which of its axes are inputs and which are "
        "outputs (all others are batch axes), or None for AdamW:\n"
        f"    matrix_dims=lambda path, leaf: MatrixDims(inputs={inputs}, outputs={outputs}) if path == {path!r} "
        "else default_matrix_dims(path, leaf)\n"
        "For a Flax NNX model, matrix_dims=dims_from_nnx(model) reads the axes off the modules of Flax, and "
        "takes such a rule as rule=... for parameters of your own modules."
    )
    return UncoveredError(message, f"no rule covers it{why}")


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
    choose = chooser(params, matrix_dims)
    return Choices({path: decide(path, leaf, choose) for path, leaf in views(params).items()})


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
        return dims is not None or not any(word in reason for word in ("bias", "norm or scale", "vector", "scalar"))

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
