# SPDX-License-Identifier: Apache-2.0
"""Assign each parameter to the matrix group, with axes, or to the AdamW group.

``read_default`` is the default rule. Names decide first (``names.py``). For other
parameters, this file reads the layout, in the order of ``default_matrix_dims``.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from normpre_optax.parameters import vocabulary as v
from normpre_optax.parameters.dims import Axes, MatrixDims, matrix_shape
from normpre_optax.parameters.experts import (
    EXPERTS_IN_FRONT,
    is_stack_of_experts,
    why_not_in_order,
)
from normpre_optax.parameters.names import (
    Kind,
    Named,
    attention_role,
    kind_by_name,
    layer_depth,
    layer_name,
    stack_depth,
)
from normpre_optax.parameters.overrides import reader
from normpre_optax.parameters.spec import (
    Assignment,
    ParamSpec,
    Reading,
    Rule,
    UncoveredError,
)
from normpre_optax.parameters.tree import (
    MAX_ASPECT_RATIO,
    Leaf,
    Shaped,
    leaves,
    named_leaves,
)
from normpre_optax.parameters.vocabulary import words
from normpre_optax.trees import DimsTree, PyTree

# Kinds that ``decay_matrices_only`` excludes from weight decay.
_NOT_DECAYED: frozenset[Kind] = frozenset({"bias", "norm", "state_space", "vector"})


def assign(params: PyTree, matrix_dims: PyTree | Rule = None) -> Assignment:
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
        # It was computed on a larger tree: the paths of a part are enough.
        known = matrix_dims
        return Assignment((path, known[path]) for path, *_ in named_leaves(params))
    read = read_default
    if matrix_dims is not None:
        read = reader(params, matrix_dims, read_default)
    found, uncovered = Assignment(), []
    for path, leaf in leaves(params).items():
        try:
            reading = read(path, leaf)
        except UncoveredError as error:
            uncovered += error.cases
            continue
        found[path] = ParamSpec(
            path,
            leaf.shape,
            reading.dims,
            reading.reason,
            kind=reading.kind,
            default=reading.default,
            given=reading.given,
        )
    if uncovered:
        raise UncoveredError(*uncovered)
    return found


def assigned(updates: PyTree, params: PyTree, matrix_dims: DimsTree) -> Any:
    """Return the ``Assignment`` of a tree of matrices: no ``dims`` in it are None.

    Args:
        updates: tree that is assigned if ``params`` is None.
        params: tree of parameters, or None.
        matrix_dims: see ``normpre_g``.

    Raises:
        ValueError: if a parameter is not a matrix.
    """
    found = assign(updates if params is None else params, matrix_dims)
    for spec in found.values():
        if spec.dims is None:
            raise ValueError(
                f"parameter {spec.path!r} of shape {spec.shape} is not a matrix"
                f" ({spec.reason}). Complete optimizers such as normpre_g pass it to"
                " AdamW. Around a direction or a stage alone, use optax.masked or"
                " optax.partition, or pass matrix_dims with its axes:"
                " MatrixDims(inputs=..., outputs=...)"
            )
    return found


def default_matrix_dims(path: str, leaf: Shaped) -> MatrixDims | None:
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
    return read_default(path, leaf).dims


def default_reading(path: str, leaf: Shaped) -> tuple[MatrixDims | None, str]:
    """Return the axes by the default rule and the reason, for reports."""
    reading = read_default(path, leaf)
    return reading.dims, reading.reason


def read_default(path: str, leaf: Shaped) -> Reading:
    """Return what the default rule says of a parameter, see ``default_matrix_dims``."""
    if not isinstance(leaf, Leaf):
        leaf = Leaf(tuple(leaf.shape), leaf.dtype)
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return Reading(None, "dtype", _wrong_dtype(leaf.dtype))
    shape = leaf.shape
    axis_names = leaf.names or ()
    named = Named(path.split("/"), len(shape), leaf.class_name, axis_names, leaf.near)
    by_name = kind_by_name(named)
    if by_name is not None:
        return Reading(None, by_name.kind, by_name.text, by_name.quoted)
    if len(shape) > 2 and _has_one_input_channel(path, named, leaf):
        return Reading(None, "depthwise", "depthwise convolution")
    if 0 in shape:
        return Reading(None, "empty", "empty")
    if not shape:
        return Reading(None, "vector", "scalar")
    if len(shape) == 1:
        return Reading(None, "vector", "vector")
    return _read_matrix(path, named, leaf)


def _wrong_dtype(dtype: jax.typing.DTypeLike) -> str:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return f"{dtype}, not real floating point"
    return f"{dtype}, not floating point"


def _has_one_input_channel(path: str, named: Named, leaf: Leaf) -> bool:
    """Return whether a convolution of three or more axes is depthwise."""
    parts = named.parts
    own = [word for part in parts[layer_depth(parts) - 1 :] for word in words(part)]
    if "conv" not in own:
        return False
    layers, _ = leaf.tree.layer_axes(path)
    axis = leaf.ndim - 2  # of (taps, in, out)
    if "weight" in words(parts[-1]):
        axis = (layers or 0) + 1  # of (out, in, taps), behind the layers
    return leaf.ndim - (layers or 0) > 2 and leaf.shape[axis] == 1


class _Layout(NamedTuple):
    """Input and output axes, counted from the front, and what they are in words."""

    inputs: Axes
    outputs: Axes
    text: str


def _read_matrix(path: str, named: Named, leaf: Leaf) -> Reading:
    """Return the axes of a parameter of two or more axes: cases 2 to 6 of the rule."""
    # 2. Named axes.
    if leaf.names is not None:
        by_axes = _read_named_axes(path, named, leaf)
        if by_axes is not None:
            return by_axes
    # 3. Layer axes in front.
    layers, error = leaf.tree.layer_axes(path)
    if named.ndim > 2 or not any(map(words, named.parts)):
        layers = _checked_layers(path, named, leaf, layers, error)
    layers = layers or 0
    axes = tuple(range(layers, named.ndim))
    if len(axes) < 2:
        return Reading(None, "vector", "stacked vector")
    if sum(leaf.shape[axis] > 1 for axis in axes) < 2:
        return Reading(None, "vector", "vector")
    # 4. Two axes. 5. Three axes of attention.
    layout = _Layout(axes[:1], axes[1:], "(in, out)")
    if len(axes) > 2:
        layout = _attention_layout(path, named, leaf, axes)
    elif "weight" in words(named.parts[-1]):
        layout = _weight_layout(path, named, leaf, axes)
    # 6. Contradictions.
    dims = MatrixDims(layout.inputs, layout.outputs)
    why = ""
    wrong = _wrong_bias(path, leaf, layout)
    if wrong and layers:
        why = f"it looks stacked, but not on axis 0 ({wrong})"
    elif wrong:
        why = f"a bias contradicts {layout.text} ({wrong})"
    elif len(axes) > 2:
        why = _wrong_aspect_ratio(leaf, dims, layout.text)
    if why:
        raise UncoveredError((path, leaf.shape, why))
    reason = layout.text
    if layers:
        reason += f", {layers} layer {'axis' if layers == 1 else 'axes'} in front"
    return Reading(dims, "matrix", reason)


# Case 2: named axes.


def _read_named_axes(path: str, named: Named, leaf: Leaf) -> Reading | None:
    """Return the reading by the names of axes, or None if they do not show layers."""
    axes, heads = _axes_by_name(named.axes)
    if not axes:
        return None
    note = _note_of_axes(named.axes)
    if len(axes) < 2:
        return Reading(None, "vector", f"stacked vector, {note}")
    layout = _Layout(axes[:1], axes[1:], note)
    if len(axes) > 2 and len(heads) == len(axes) - 1:
        layout = _heads_layout(named, axes, heads)
    elif len(axes) > 2:
        layout = _attention_layout(path, named, leaf, axes, f"its {note}")
    elif "weight" in words(named.parts[-1]):
        layout = _weight_layout(path, named, leaf, axes)
    # A bias decides which axes are outputs, as in Levanter's GPT-2.
    swapped = _Layout(layout.outputs, layout.inputs, note)
    if _wrong_bias(path, leaf, layout) and not _wrong_bias(path, leaf, swapped):
        layout = swapped
    dims = MatrixDims(layout.inputs, layout.outputs)
    of_experts = any(v.EXPERT_AXES.intersection(words(str(x))) for x in named.axes)
    if of_experts or is_stack_of_experts(path, leaf):
        why = why_not_in_order(path, leaf, dims)
        if why:
            raise UncoveredError((path, leaf.shape, why))
    return Reading(dims, "matrix", note)


def _axes_by_name(names: tuple[object, ...]) -> tuple[Axes, Axes]:
    """Return the axes other than layers and experts, and the head axes among them.

    Both are () if the names show neither layers nor heads.
    """
    named = [set() if name is None else {*words(str(name))} for name in names]
    rest = tuple(axis for axis, found in enumerate(named) if not found & v.LAYER_AXES)
    heads = tuple(axis for axis in rest if named[axis] and named[axis] <= v.HEAD_AXES)
    if len(rest) == len(named) and len(heads) < 2:
        return (), ()
    return rest, heads


def _note_of_axes(names: tuple[object, ...]) -> str:
    return f"axes named ({', '.join(map(str, names))})"


def _heads_layout(named: Named, axes: Axes, heads: Axes) -> _Layout:
    """Return the layout of head axes and one other axis, the width."""
    (width,) = {*axes} - {*heads}
    role = attention_role(named)
    width_is_output = role == "output"
    if not role:
        # The outputs of a weight are in front, those of a kernel behind.
        is_weight = "weight" in words(named.parts[-1])
        width_is_output = (width > min(heads)) != is_weight
    if width_is_output:
        return _Layout(heads, (width,), "(heads, width)")
    return _Layout((width,), heads, "(width, heads)")


# Case 3: layers.


def _checked_layers(
    path: str, named: Named, leaf: Leaf, layers: int | None, error: str
) -> int:
    """Return the number of layer axes in front, where a wrong one would do harm.

    Args:
        path: its path.
        named: its names.
        leaf: a leaf of three or more axes, or without a name.
        layers: the number by its tree, or None.
        error: why its tree shows layers elsewhere, or "".

    Raises:
        UncoveredError: if the layers are not in front, or the order of axes is unknown.
    """
    if not any(map(words, named.parts)) and len(leaf.tree.leaves) > 1:
        error = (
            "its path has no name, so it may be an embedding, an output head or a"
            " hidden matrix"
        )
    why = _unknown_order(path, named, leaf) or error
    if layers is None:
        layers = int(stack_depth(named.parts) is not None)
    if layers and not why and named.axes and named.axes[0] is not None:
        axes = ", ".join(map(str, named.axes))
        why = f"it looks stacked, but its axes are named ({axes})"
    if why:
        raise UncoveredError((path, leaf.shape, why))
    return layers


def _unknown_order(path: str, named: Named, leaf: Leaf) -> str:
    """Return why the axis order of a convolution or of stacked experts is unknown."""
    if any("conv" in words(part) for part in (*named.parts, named.class_name)):
        return "a convolution can be flattened in several ways"
    if not is_stack_of_experts(path, leaf):
        return ""
    return why_not_in_order(path, leaf, EXPERTS_IN_FRONT) or (
        "experts may be stacked along any axis; presets.experts_in_front reads"
        " (expert, in, out)"
    )


# Cases 4 and 5: the layout of two and of three axes.


def _weight_layout(path: str, named: Named, leaf: Leaf, axes: Axes) -> _Layout:
    """Return the layout of a ``weight`` of two axes: (out, in), but in GPT-2."""
    first, second = axes[:1], axes[1:]
    if layer_name(named.parts) in v.GPT2 and _is_gpt2_in_out(path, named, leaf, axes):
        return _Layout(first, second, "(in, out)")
    return _Layout(second, first, "(out, in)")


def _is_gpt2_in_out(path: str, named: Named, leaf: Leaf, axes: Axes) -> bool:
    """Return whether the shapes show that a weight of GPT-2 is (in, out)."""
    last = named.parts[-1]
    # These have more outputs than inputs.
    wider = [
        other.shape
        for other_path, other in leaf.near.items()
        if other_path.split("/")[-2:] in (["c_attn", last], ["c_fc", last])
        and other.ndim == leaf.ndim
    ]
    for shape in wider:
        first, second = (shape[axis] for axis in axes)
        if first != second:
            return first < second
    first, second = (leaf.shape[axis] for axis in axes)
    if first != second:
        is_narrower = layer_name(named.parts) == "c_proj"
        return (first < second) != is_narrower
    why = (
        "it is (in, out) in Hugging Face's GPT-2 and (out, in) in nanoGPT, and no"
        " c_attn next to it shows which"
    )
    raise UncoveredError((path, leaf.shape, why))


def _attention_layout(
    path: str, named: Named, leaf: Leaf, axes: Axes, why: str = ""
) -> _Layout:
    """Return the layout of three axes in attention.

    Raises:
        UncoveredError: with the reason ``why``, if it is something else.
    """
    role = attention_role(named)
    # The einsums of weights are stored in other orders.
    is_weight = "weight" in words(named.parts[-1])
    if len(axes) != 3 or not role or is_weight:
        raise UncoveredError((path, leaf.shape, why))
    if role == "query":
        return _Layout(axes[:1], axes[1:], "attention (d, heads, size)")
    return _Layout(axes[:2], axes[2:], "attention (heads, size, d)")


# Case 6: contradictions.


def _wrong_bias(path: str, leaf: Leaf, layout: _Layout) -> str:
    """Return the bias that contradicts a layout, in words, or ""."""
    sides = (*layout.inputs, *layout.outputs)
    batch = [axis for axis in range(len(leaf.shape)) if axis not in sides]
    examples = {path: leaf.shape}
    outputs = [leaf.shape[axis] for axis in layout.outputs]
    if outputs == [leaf.shape[axis] for axis in layout.inputs]:
        # The bias of a square matrix fits both layouts.
        examples.update(_others_of_the_same_name(path, leaf))
    # If the batch axes are not in front, the bias may have them anywhere.
    in_order = batch == [*range(len(batch))]
    for example, shape in examples.items():
        bias = _bias_shape(example, leaf)
        front = [shape[axis] for axis in batch]
        rows = [shape[axis] for axis in layout.outputs]
        found, *fitting = (
            [size for size in sizes if size > 1]
            for sizes in (bias, front + rows, [*front, math.prod(rows)])
        )
        if not in_order:
            found, fitting = sorted(found), [sorted(sizes) for sizes in fitting]
        if bias and found not in fitting:
            whose = "its bias" if example == path else f"the bias of {example!r}"
            return f"{whose} has shape {bias}"
    return ""


def _others_of_the_same_name(
    path: str, leaf: Leaf
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the parameters nearby with the same last name and another shape."""
    last = path.rpartition("/")[2]
    for other, near in leaf.near.items():
        is_like = other.endswith(f"/{last}") and len(near.shape) == len(leaf.shape)
        if is_like and near.shape != leaf.shape:
            yield other, near.shape


def _bias_shape(path: str, leaf: Leaf) -> tuple[int, ...]:
    """Return the shape of the bias of the weight at a path near a leaf, or ()."""
    above, slash, last = path.rpartition("/")
    names = ("bias", "b")
    if last.lower() not in v.WEIGHTS:
        names = (
            re.sub("^[wW]", "b", last),
            f"{last}_bias",
            re.sub("weight|kernel", "bias", last),
        )
    for name in names:
        bias = leaf.near.get(f"{above}{slash}{name}")
        if bias is not None and name != last:
            return bias.shape
    return ()


def _wrong_aspect_ratio(leaf: Leaf, dims: MatrixDims, layout: str) -> str:
    """Return why a layout of attention is wrong, by the matrix that it gives, or ""."""
    _, outputs, inputs = matrix_shape(leaf.shape, dims)
    if max(outputs, inputs) <= MAX_ASPECT_RATIO * min(outputs, inputs):
        return ""
    return f"{layout} would be a {outputs} x {inputs} matrix"


def decay_matrices_only(params: PyTree) -> PyTree:
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
    mask = []
    for path, leaf in leaves(params).items():
        decays = True  # a parameter that no rule covers has several axes
        with contextlib.suppress(UncoveredError):
            decays = read_default(path, leaf).kind not in _NOT_DECAYED
        mask.append(decays)
    return jax.tree.structure(params).unflatten(mask)
