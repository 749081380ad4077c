# SPDX-License-Identifier: Apache-2.0
"""Assign each parameter to the matrix group, with the axes of its matrices, or to the
AdamW group.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from normpre_optax.parameters import tree
from normpre_optax.parameters import vocabulary as v
from normpre_optax.parameters.dims import (
    MatrixDims,
    as_matrix_dims,
    check_dims,
    matrix_shape,
    split_axes,
)
from normpre_optax.parameters.tree import Leaf, layer_depth
from normpre_optax.parameters.vocabulary import words

Reading = tuple[MatrixDims | None, str]  # the axes, or None for AdamW, and the reason
GIVEN = "given by matrix_dims"


class ParamSpec(NamedTuple):
    """The group of a parameter: ``dims`` has the axes of its matrices; None: AdamW."""

    path: str
    shape: tuple[int, ...]
    dims: MatrixDims | None
    reason: str
    sharding: Any = None  # PartitionSpec from the option shardings=


class Assignment(dict[str, ParamSpec]):
    """``ParamSpec`` by path, computed on a full tree. You can pass it as
    ``matrix_dims`` for a part of the tree.
    """


class UncoveredError(ValueError):
    """No rule covers some parameters: ``cases`` has (path, shape, why) of each,
    ``short`` is a text for a table.
    """

    def __init__(self, *cases: tuple[str, tuple[int, ...], str]):
        lines, rule = [], ["    def rule(path, leaf):"]
        for name, paths, (shape, why) in tree.repeated(
            {path: (shape, why) for path, shape, why in cases}
        ):
            which, test = "parameter", f"path == {name!r}"
            if len(paths) > 1:
                which, start, end = (
                    f"{len(paths)} parameters",
                    name.split("{")[0],
                    name.split("}")[-1],
                )
                test = (
                    f"path.startswith({start!r}) and path.endswith({end!r}) and"
                    f" leaf.shape == {shape}"
                )
            lines.append(
                f"no rule covers {which} {name!r} of shape {shape}"
                + f": {why}" * bool(why)
            )
            rule += [
                f"        if {test}:",
                "            return MatrixDims(inputs=..., outputs=...)",
            ]
        how = (
            "Pass matrix_dims=rule, or a rule of normpre_optax.presets for a known"
            " layout. Replace the dots by the "
        )
        how += (
            "input and output axes (all others are batch axes), or return None for"
            " AdamW:"
        )
        super().__init__(
            "\n".join(
                [*lines, how, *rule, "        return default_matrix_dims(path, leaf)"]
            )
        )
        self.cases, self.short = (
            cases,
            "no rule covers it" + f": {cases[0][2]}" * bool(cases[0][2]),
        )


def assign(params: Any, matrix_dims: Any = None) -> Assignment:
    """Assign every parameter to the matrix group, with axes, or to the AdamW group.

    Args:
        params: the full parameter tree: arrays, tracers or ``jax.ShapeDtypeStruct``,
            with or without boxes.
        matrix_dims: None (the default rule); a rule ``(path, leaf) -> MatrixDims |
            None``; a function of ``params`` that returns a tree; a tree, or a prefix of
            one, of ``MatrixDims`` and None, matched by paths; or the ``Assignment`` of
            a larger tree. ``optax.contrib.MuonDimensionNumbers`` work like
            ``MatrixDims``.

    Returns:
        ``ParamSpec`` by path, in the order in which jax flattens ``params``.

    Raises:
        ValueError: if no rule covers a leaf, axes do not fit, a tree does not match, or
            two paths are equal.
        TypeError: if ``matrix_dims`` has an unsupported type, or a leaf is not an
            array.

    Example:
        >>> from normpre_optax.parameters.rules import assign
        >>> found = assign({"up": {"kernel": jnp.zeros((4, 8)), "bias": jnp.zeros(8)}})
        >>> [(spec.path, spec.reason) for spec in found.values()]
        [('up/bias', 'bias'), ('up/kernel', '(in, out)')]
    """
    if isinstance(matrix_dims, Assignment):
        return Assignment(
            (path, matrix_dims[path]) for path, *_ in tree.named_leaves(params)
        )
    read = default_reading if matrix_dims is None else reader(params, matrix_dims)
    found, uncovered = Assignment(), []
    for path, leaf in tree.leaves(params).items():
        try:
            found[path] = ParamSpec(path, leaf.shape, *read(path, leaf))
        except UncoveredError as error:
            uncovered += error.cases
    if uncovered:
        raise UncoveredError(*uncovered)
    return found


def default_matrix_dims(path: str, leaf: Any) -> MatrixDims | None:
    """Return the axes of a parameter's matrices by the default rule, or None for AdamW.

    The first matching line applies:

    1. AdamW by name: biases, norms and scales, positional tables, output heads,
       embeddings, routers, LoRA pairs, rates of state spaces, depthwise convolutions.
       AdamW by shape: fewer than two axes larger than one.
    2. Named axes (Linen, Haliax): names of layers and experts are batch axes, names of
       heads are flattened.
    3. Layer axes in front, by the biases and norms nearby or by a name such as
       ``layers``: batch axes.
    4. Two axes: (out, in) if the last name is ``weight``, else (in, out). The shapes
       decide for GPT-2's ``c_attn/weight``, ``c_fc/weight`` and ``c_proj/weight``.
    5. Three axes of attention: (d, heads, size) for query, key and value, (heads, size,
       d) for the output.
    6. Anything else is an error. So is a bias of another size than the outputs, or an
       aspect ratio above 64:1 in 5.

    Args:
        path: the "/"-joined path of the parameter.
        leaf: an object with ``shape`` and ``dtype``. An optimizer also passes what is
            known of parameters nearby.

    Returns:
        ``MatrixDims``, or None for AdamW.

    Raises:
        ValueError: if the rule does not cover the leaf.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import default_matrix_dims
        >>> default_matrix_dims("blocks/0/mlp/up/kernel", jnp.zeros((8, 32)))
        MatrixDims(inputs=0, outputs=1, output_blocks=1)
        >>> default_matrix_dims("wte/embedding", jnp.zeros((100, 8))) is None
        True
    """
    return default_reading(path, leaf)[0]


def default_reading(path: str, leaf: Any) -> Reading:
    """Return the axes from ``default_matrix_dims``, or None, and the reason."""
    leaf = leaf if isinstance(leaf, Leaf) else Leaf(tuple(leaf.shape), leaf.dtype)
    parts, shape = path.split("/"), leaf.shape
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return (
            None,
            (
                f"{leaf.dtype}, not"
                f" {'real ' * jnp.issubdtype(leaf.dtype, jnp.complexfloating)}floating"
                " point"
            ),
        )
    reason = tree.vector_kind(parts, leaf)
    found = set().union(
        *map(words, (*parts, leaf.class_name, *map(str, leaf.names or ())))
    )
    for trigger, role in _ADAMW:
        if not reason and (
            trigger & found if isinstance(trigger, set) else trigger.search(path)
        ):
            reason = role if isinstance(role, str) else role(parts, leaf)
    if not reason and (len(shape) < 2 or 0 in shape):
        reason = "empty" if 0 in shape else "vector" if shape else "scalar"
    return (None, reason) if reason else _read_matrix(path, parts, leaf)


def _bias(parts: list[str], leaf: Leaf) -> str:
    owner = words(parts[-2] if len(parts) > 1 else "") + words(leaf.class_name)
    return "bias" if v.BIASES.intersection(owner) else ""


def _last_layer(parts: list[str], leaf: Leaf) -> str:
    """Return "output head" for an output layer of the whole model."""
    depth = layer_depth(parts)
    last = (
        len(leaf.shape) == 2
        and parts[depth - 1].lower() in v.LAST_LAYERS
        and not _in_attention(parts, leaf)
    )
    return (
        "output head" if last and v.WHOLE_MODELS.issuperset(parts[: depth - 1]) else ""
    )


# The nearest name decides: the reason if a part of the path has one of the first words,
# and none of the second ones.
_NEAREST = (
    ("positional table", v.POSITIONS, v.NOT_POSITIONS),
    ("output head", v.HEADS, v.NOT_HEADS | v.SIZES),
    ("embedding", v.EMBEDDINGS, v.SIZES),
)


def _nearest(parts: list[str], leaf: Leaf) -> str:
    """Return the reason of ``_NEAREST`` by the class, or by the nearest part inside of
    the block.

    It quotes a word that is not at the end of the layer's name.
    """
    depth, above = layer_depth(parts), [leaf.class_name]
    for part in reversed(parts[tree.block_depth(parts) : depth]):
        above.append(part)
        if v.INNER.intersection(words(part)):
            break
    for part in (*above, *parts[depth:]):
        found = words(part)
        for reason, names, unless in _NEAREST:
            if names.intersection(found) and not unless.intersection(found):
                *_, at = (i for i, word in enumerate(found) if word in names)
                own = part in parts[depth - 1 :] or part not in parts
                plain = own and v.PLAIN_AFTER.issuperset(found[at + 1 :])
                return reason if plain else f"{reason} ({found[at]!r} in {part!r})"
    return "embedding" if any("vocab" in str(name) for name in leaf.names or ()) else ""


def _router(parts: list[str], leaf: Leaf) -> str:
    """Return "router" for a router by name, or for a gate next to experts or in a
    mixture, but not next to ``up``.
    """
    depth = layer_depth(parts)
    layer, above = (
        {*words(parts[depth - 1])},
        {*words(parts[depth - 2] if depth > 1 else "")},
    )
    beside = set().union(*map(words, tree.names_below(leaf, parts[: depth - 1])))
    gate = layer & v.GATES and not beside & {"up", "down"}
    mixture = layer & v.EXPERTS or (
        layer <= v.GATES and ("moe" in above or beside & v.EXPERTS)
    )
    return "router" if (layer | above) & v.ROUTERS or (gate and mixture) else ""


def _depthwise(parts: list[str], leaf: Leaf) -> str:
    """Return the reason for (taps, channels) without a word for a dense layer, or for a
    single input channel.
    """
    layer = set().union(*map(words, parts[layer_depth(parts) - 1 :]))
    layers, ndim = leaf.layers or 0, len(leaf.shape)
    one_input = (
        ndim - layers > 2
        and leaf.shape[layers + 1 if "weight" in words(parts[-1]) else -2] == 1
    )
    depthwise = not layer & v.DENSE if ndim == 2 else one_input
    return "depthwise convolution" if "conv" in layer and depthwise else ""


# Parameters that use AdamW because of their name: the reason if a regex matches the
# path, or a function that returns it if one of the words is in the path, the class or
# the axis names. The first reason counts.
_ADAMW: tuple[
    tuple[re.Pattern[str] | set[str], str | Callable[[list[str], Leaf], str]], ...
] = (
    (v.BIASES, _bias),
    (v.LAMBDA, "norm or scale"),
    (v.STATE_SPACE, "rates of a state space"),
    (v.LORA, "LoRA"),
    (v.UNEMBEDDING, "output head"),
    (v.TOKEN, "embedding"),
    (v.POSITIONS | v.HEADS | v.EMBEDDINGS, _nearest),
    ({"out", "output"}, _last_layer),
    (v.ROUTERS | v.GATES, _router),
    ({"conv"}, _depthwise),
)


def _in_attention(parts: list[str], leaf: Leaf) -> bool:
    above = parts[: layer_depth(parts) - 1]
    beside = {name.lower() for name in tree.names_below(leaf, above)}
    return len(v.QUERIES & beside) > 1 or any(
        v.ATTENTION.intersection(words(part)) for part in above
    )


def _attention_role(parts: list[str], leaf: Leaf) -> str:
    """Return "query" for attention's query, key and value, "output" for its output
    projection, else "".
    """
    layer, inside = tree.layer_name(parts), _in_attention(parts, leaf)
    if layer in v.QUERIES and (inside or len(layer) > 1):
        return "query"
    return "output" if layer in v.OUTPUTS and inside else ""


def _weight_is_in_out(
    path: str, parts: list[str], leaf: Leaf, rest: tuple[int, ...]
) -> bool:
    """Return whether a ``weight`` of two axes is (in, out). Only GPT-2's names can be;
    their shapes decide.
    """
    layer, last = tree.layer_name(parts), parts[-1]
    if layer not in v.GPT2:
        return False
    near = (
        (other.split("/")[-2:], x.shape)
        for other, x in leaf.near.items()
        if len(x.shape) == len(leaf.shape)
    )
    wider = [
        shape for name, shape in near if name in (["c_attn", last], ["c_fc", last])
    ]  # more outputs than inputs
    for shape in (*wider, leaf.shape):
        first, second = (shape[axis] for axis in rest)
        if first != second:
            return (first < second) != (layer == "c_proj" and shape not in wider)
    why = (
        "it is (in, out) in Hugging Face's GPT-2 and (out, in) in nanoGPT, and no"
        " c_attn next to it shows which"
    )
    raise UncoveredError((path, leaf.shape, why))


def _bias_shape(path: str, leaf: Leaf) -> tuple[int, ...]:
    """Return the shape of a weight's bias, or ()."""
    above, slash, last = path.rpartition("/")
    names = (
        re.sub("^[wW]", "b", last),
        f"{last}_bias",
        re.sub("weight|kernel", "bias", last),
    )
    names = ("bias", "b") if last.lower() in v.WEIGHTS else names
    found = (leaf.near.get(f"{above}{slash}{name}") for name in names if name != last)
    return next((bias.shape for bias in found if bias is not None), ())


def _wrong_bias(path: str, leaf: Leaf, dims: MatrixDims) -> str:
    """Return the bias that contradicts the axes, or "". For a square matrix, others of
    the same name count too.
    """
    batch, outputs, inputs = split_axes(len(leaf.shape), dims)
    examples = {path: leaf.shape}
    if [leaf.shape[axis] for axis in outputs] == [leaf.shape[axis] for axis in inputs]:
        near = (
            (other, x.shape)
            for other, x in leaf.near.items()
            if other.endswith("/" + path.rpartition("/")[2])
        )
        examples |= (
            (other, shape)
            for other, shape in near
            if len(shape) == len(leaf.shape) and shape != leaf.shape
        )
    order = list if batch == tuple(range(len(batch))) else sorted
    for example, shape in examples.items():
        bias = _bias_shape(example, leaf)
        front, rows = ([shape[axis] for axis in axes] for axes in (batch, outputs))
        fitting = [
            order(n for n in (*front, *sizes) if n > 1)
            for sizes in (rows, [math.prod(rows)])
        ]
        if bias and order(n for n in bias if n > 1) not in fitting:
            return (
                f"{'its bias' if example == path else f'the bias of {example!r}'} has"
                f" shape {bias}"
            )
    return ""


def _read_matrix(path: str, parts: list[str], leaf: Leaf) -> Reading:
    """Return the axes of a leaf with two or more axes: first those of layers, by names
    or leaves nearby.
    """
    weight, layers, why = "weight" in words(parts[-1]), leaf.layers or 0, ""
    named = f"axes named ({', '.join(map(str, leaf.names or ()))})"
    rest, heads = _named_axes(leaf.names or ())
    note = named if rest else ""
    if not note and (leaf.ndim > 2 or not any(map(words, parts))):
        why = _unknown_order(parts, leaf) or leaf.layers_error
        layers = (
            int(tree.stack_depth(parts) is not None) if leaf.layers is None else layers
        )
        if layers and leaf.names and leaf.names[0] is not None:
            why = (
                why or f"it looks stacked, but its {named.replace('axes', 'axes are')}"
            )
    if why:
        raise UncoveredError((path, leaf.shape, why))
    rest = rest or tuple(range(layers, leaf.ndim))
    if len(rest) < 2:
        return None, f"stacked vector, {note}" if note else "stacked vector"
    if not note and sum(leaf.shape[axis] > 1 for axis in rest) < 2:
        return None, "vector"
    role = _attention_role(parts, leaf) if len(rest) > 2 else ""
    if len(rest) == 2:
        in_out = not weight or _weight_is_in_out(path, parts, leaf, rest)
        dims, layout = (
            MatrixDims(*(rest if in_out else rest[::-1])),
            "(in, out)" if in_out else "(out, in)",
        )
    elif len(heads) == len(rest) - 1:
        (width,) = {*rest} - {*heads}
        to_width = role == "output" or (not role and (width > min(heads)) != weight)
        dims, layout = (
            MatrixDims(*((heads, width) if to_width else (width, heads))),
            note,
        )
    elif len(rest) == 3 and role and not weight:
        dims = (
            MatrixDims(rest[0], rest[1:])
            if role == "query"
            else MatrixDims(rest[:2], rest[2])
        )
        layout = (
            "attention (d, heads, size)"
            if role == "query"
            else "attention (heads, size, d)"
        )
    else:
        raise UncoveredError((path, leaf.shape, note and f"its {note}"))
    wrong = _wrong_bias(path, leaf, dims)
    if (
        note
    ):  # with named axes, a bias decides which are outputs, as in Levanter's GPT-2
        swapped = MatrixDims(inputs=dims.outputs, outputs=dims.inputs)
        return swapped if wrong and not _wrong_bias(path, leaf, swapped) else dims, note
    if wrong:
        why = (
            f"it looks stacked, but not on axis 0 ({wrong})"
            if layers
            else f"a bias contradicts {layout} ({wrong})"
        )
    elif role and max(
        sides := matrix_shape(leaf.shape, dims)[1:]
    ) > tree.MAX_ASPECT_RATIO * min(sides):
        why = f"{layout} would be a {sides[0]} x {sides[1]} matrix"
    if why:
        raise UncoveredError((path, leaf.shape, why))
    return (
        dims,
        layout
        + f", {layers} layer {'axis' if layers == 1 else 'axes'} in front"
        * bool(layers),
    )


def _named_axes(names: tuple[Any, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the axes other than layers and experts, and the head axes among them; ()
    if the names do not show it.
    """
    named = [{*words(str(name))} if name is not None else set() for name in names]
    rest = tuple(axis for axis, found in enumerate(named) if not found & v.LAYER_AXES)
    heads = tuple(axis for axis in rest if named[axis] and named[axis] <= v.HEAD_AXES)
    return ((), ()) if len(rest) == len(named) and len(heads) < 2 else (rest, heads)


def _unknown_order(parts: list[str], leaf: Leaf) -> str:
    """Return why the axis order of a convolution or of stacked experts is unknown; else
    "".
    """
    if any("conv" in words(part) for part in (*parts, leaf.class_name)):
        return "a convolution can be flattened in several ways"
    if is_stack_of_experts("/".join(parts), leaf):
        return (
            "experts may be stacked along any axis; presets.experts_in_front reads"
            " (expert, in, out)"
        )
    return ""


def is_stack_of_experts(path: str, leaf: Leaf) -> bool:
    """Return whether a parameter may hold several experts: by its name or, outside of
    attention, a router beside it.
    """
    above = path.rpartition("/")[0]
    beside = any(
        v.ROUTERS.intersection(words(other.removeprefix(above)))
        for other in getattr(leaf, "near", ())
    )
    beside = beside and not _attention_role(path.split("/"), leaf)
    return beside or bool(
        v.EXPERTS.intersection(words(path)) and not v.COUNTED_EXPERT.search(path)
    )


def reader(params: Any, matrix_dims: Any) -> Callable[[str, Leaf], Reading]:
    """Return the function ``(path, leaf) -> (dims, reason)`` of a ``matrix_dims`` that
    is not None.
    """
    entries, structure = jax.tree.flatten(matrix_dims, is_leaf=_is_entry)
    # Containers can be callable, such as Equinox modules. Callables can be containers,
    # such as jax's Partial.
    container = _is_entry(matrix_dims) or not (
        jax.tree_util.treedef_is_leaf(structure) and entries
    )
    if container and (
        not callable(matrix_dims) or (entries and all(map(_is_entry, entries)))
    ):
        return _tree_reader(params, matrix_dims)
    arguments = (
        inspect.signature(matrix_dims).parameters.values()
        if callable(matrix_dims)
        else ()
    )
    required = [
        x
        for x in arguments
        if x.default is x.empty and x.kind <= x.POSITIONAL_OR_KEYWORD
    ]
    if len(required) == 1:
        return _tree_reader(params, matrix_dims(params))
    if len(required) == 2:
        return lambda path, leaf: _given(path, leaf, matrix_dims(path, leaf))
    kinds = (
        "None, a rule (path, leaf), a function of the parameters, or a tree of"
        " MatrixDims and None"
    )
    takes = f" of {len(required)} arguments" * bool(required)
    raise TypeError(f"matrix_dims must be {kinds}; got {matrix_dims!r}{takes}")


def _is_entry(value: Any) -> bool:
    return value is None or isinstance(value, MatrixDims | MuonDimensionNumbers)


def _given(path: str, leaf: Leaf, value: Any) -> Reading:
    """Check the value that a user passed. The reason is that of the default rule if
    both agree.
    """
    dims = as_matrix_dims(path, value)
    if dims is not None:
        check_dims(path, leaf.shape, dims)
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise TypeError(
                f"parameter {path!r} is complex, a matrix must be real: None passes it"
                " to AdamW"
            )
    with contextlib.suppress(UncoveredError):
        default, reason = default_reading(path, leaf)
        if dims == default:
            return dims, reason
    return dims, GIVEN


def _tree_reader(params: Any, dims: Any) -> Callable[[str, Leaf], Reading]:
    """Return the function that finds a parameter's entry in a tree, or a prefix of one,
    by its path.
    """
    wrong = "matrix_dims does not match the parameters"
    entries = {
        path: as_matrix_dims(path, value)
        for path, value, *_ in tree.named_leaves(dims, _is_entry)
    }

    def nearest(path: str) -> str:
        while path and path not in entries:
            path = path.rpartition("/")[0]
        return path

    # None or MaskedNode replaces a removed parameter.
    def removed(x):
        return x is None or isinstance(x, optax.MaskedNode)

    used = {nearest(path) for path, *_ in tree.named_leaves(params, removed)}
    for path, entry in entries.items():
        if entry is not None and path not in used:
            raise ValueError(
                f"{wrong}: it has an entry at {path!r}, where there is no parameter"
            )

    def read(path: str, leaf: Leaf) -> Reading:
        if nearest(path) not in entries:
            raise ValueError(
                f"{wrong}: it has no entry for {path!r} or its parents (None means"
                " AdamW)"
            )
        return _given(path, leaf, entries[nearest(path)])

    return read


def decay_matrices_only(params: Any) -> Any:
    """Return a weight decay mask: True for parameters with two or more axes.

    Axes of stacked layers are not counted.

    Args:
        params: the full parameter tree.

    Returns:
        A tree of bools for ``weight_decay_mask``: False for norms and scales, biases
        and other vectors.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import decay_matrices_only
        >>> decay_matrices_only(
        ...     {
        ...         "up": {"kernel": jnp.zeros((4, 8)), "bias": jnp.zeros(8)},
        ...         "wte": jnp.zeros((9, 4)),
        ...     }
        ... )
        {'up': {'bias': False, 'kernel': True}, 'wte': True}
    """
    masks, vectors = (
        [],
        ("bias", "norm or scale", "rates", "vector", "stacked vector", "scalar"),
    )
    for path, leaf in tree.leaves(params).items():
        masks.append(True)
        with contextlib.suppress(UncoveredError):
            dims, reason = default_reading(path, leaf)
            masks[-1] = dims is not None or not reason.startswith(vectors)
    return jax.tree.structure(params).unflatten(masks)
