# SPDX-License-Identifier: Apache-2.0
"""Matrix axes read off the modules of a Flax NNX model. Flax is imported when `dims_from_nnx` is called, not before.

A module knows the shape its parameter had before `nnx.vmap` or `nnx.scan` stacked it. The axes that the parameter has
beyond that are layer axes, wherever they stand.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from normpre_optax.parameters.dims import MatrixDims, as_matrix_dims
from normpre_optax.parameters.leaves import Leaf, key_names, named_leaves, views, words
from normpre_optax.parameters.roles import adamw_role
from normpre_optax.parameters.rules import LAYER_AXES, default_choice
from normpre_optax.parameters.uncovered import DOTS, Case, UncoveredError, for_all


class _Plain(NamedTuple):
    """A parameter before stacking: sizes (None: any) and its axes as a matrix; `matrix=None` means AdamW."""

    shape: tuple[int | None, ...]
    matrix: MatrixDims | None


_Positions = tuple[int, ...]


def dims_from_nnx(model: Any, wrt: Any = None, rule: Any = None) -> dict[Any, Any]:
    """Reads the matrix axes of a Flax NNX model off its modules.

    `Linear`, `LinearGeneral` (attention), `Einsum`, `Conv` and `ConvTranspose` know which of their axes are inputs and
    outputs; whatever axes `nnx.vmap` or `nnx.scan` added become batch axes, in front or elsewhere. The kernel of a
    grouped convolution becomes one matrix a group, that of a depthwise one goes to AdamW. Names still decide what is an
    embedding, a head, a positional table, a router or a LoRA pair. Parameters of other modules follow the default rule,
    after the layer axes of the modules around them have been set aside.

    Where the number of layers equals the size of an axis, the other parameters of the stack tell which axis is which;
    if none does, the layer axis is taken to stand in front.

    Args:
        model: the model, or its `nnx.eval_shape`.
        wrt: the `wrt` of the `nnx.Optimizer` if it is not `nnx.Param`.
        rule: asked first about the parameters of all other modules, such as your own: `(path, leaf)` to `MatrixDims`,
            or None for AdamW. None for the rule itself is the default rule.

    Returns:
        A tree of plain dicts with a `MatrixDims` or None for each parameter, to be passed as `matrix_dims`. It fits the
        variables that `nnx.Optimizer` shows at init and the arrays it shows at update.

    Raises:
        ValueError: a parameter of some other module with three or more axes that the default rule does not cover, or
            whose shape does not fit its module.

    Example:
        >>> from flax import nnx
        >>> dims_from_nnx(nnx.Conv(3, 8, kernel_size=(3, 3), rngs=nnx.Rngs(0)))["kernel"]
        MatrixDims(inputs=(0, 1, 2), outputs=3, output_blocks=1)
    """
    from flax import nnx

    params = nnx.state(model, nnx.Param if wrt is None else wrt)
    leaves = views(params)
    keys = {"/".join(names): _raw(key_path) for names, _, _, key_path in named_leaves(params)}
    boxes = {"/".join(names): box for names, _, box, _ in named_leaves(params)}
    plain = {path: _plain(_module_at(model, keys[path][:-1]), str(keys[path][-1])) for path in leaves}
    places = {path: _candidates(path, leaf, plain[path], boxes[path]) for path, leaf in leaves.items()}
    layers = {path: _placed(path, leaves, places) for path in leaves}
    tree: dict[Any, Any] = {}
    found = for_all(leaves, lambda path: _dims(path, leaves[path], plain[path], layers[path], rule))
    for path, dims in found.items():
        _insert(tree, keys[path], dims)
    return tree


def _raw(key_path: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the keys along a path as they are: an index of a list stays an int."""
    names = key_names(key_path)
    return tuple(getattr(e, "key", getattr(e, "idx", name)) for e, name in zip(key_path, names, strict=True))


def _module_at(model: Any, keys: Iterable[Any]) -> Any:
    node = model
    for key in keys:
        node = node[key] if isinstance(node, (Mapping, Sequence)) or isinstance(key, int) else getattr(node, key)
    return node


def _insert(tree: dict[Any, Any], keys: tuple[Any, ...], dims: MatrixDims | None) -> None:
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
    tree[keys[-1]] = dims


def _dims(path: str, leaf: Leaf, plain: _Plain | None, layers: _Positions | None, rule: Any) -> MatrixDims | None:
    if plain is None and rule is not None:
        return as_matrix_dims(rule(path, leaf))
    if layers is None:
        return default_choice(path, leaf)[0]
    if plain is None:
        shape = tuple(size for axis, size in enumerate(leaf.shape) if axis not in layers)
        alone = dataclasses.replace(leaf, shape=shape, names=None, layers=0, doubt="", near={} if layers else leaf.near)
        try:
            dims = default_choice(path, alone)[0]
        except UncoveredError as error:
            raise error if not layers else UncoveredError([Case(path, leaf.shape, error.cases[0].why, DOTS)]) from None
    else:
        dims = None if adamw_role(path.split("/"), leaf) else plain.matrix
    return None if dims is None else _shifted(dims, leaf.ndim, layers)


def _shifted(dims: MatrixDims, ndim: int, layers: _Positions) -> MatrixDims:
    """Returns the same dims counted among the axes of the stacked parameter."""
    kept = [axis for axis in range(ndim) if axis not in layers]

    def moved(axes: int | tuple[int, ...]) -> int | tuple[int, ...]:
        return kept[axes] if isinstance(axes, int) else tuple(kept[axis] for axis in axes)

    return MatrixDims(moved(dims.inputs), moved(dims.outputs), dims.output_blocks)


def _candidates(path: str, leaf: Leaf, plain: _Plain | None, box: Any) -> set[_Positions]:
    """Returns every set of axes that, taken out, leaves the shape its module gave the parameter."""
    if plain is None:
        return set()
    extra = leaf.ndim - len(plain.shape)
    fits = {layers for layers in itertools.combinations(range(leaf.ndim), max(extra, 0)) if _fits(leaf, plain, layers)}
    if extra < 0 or not fits:
        raise ValueError(
            f"parameter {path!r} of shape {leaf.shape} does not fit its module, which made it {plain.shape}; give its "
            "axes by a rule:\n"
            f"    matrix_dims=lambda path, leaf: MatrixDims(inputs=..., outputs=...) if path == {path!r} "
            "else default_matrix_dims(path, leaf)"
        )
    named = _named_layers(box, leaf.ndim)
    return {named} if named in fits else fits


def _fits(leaf: Leaf, plain: _Plain, layers: _Positions) -> bool:
    rest = [size for axis, size in enumerate(leaf.shape) if axis not in layers]
    return all(want is None or want == size for want, size in zip(plain.shape, rest, strict=True))


def _named_layers(box: Any, ndim: int) -> _Positions:
    """Returns the axes that a variable's sharding metadata calls layers."""
    metadata = box.get_metadata() if hasattr(box, "get_metadata") else {}
    names = next((metadata[key] for key in ("out_sharding", "sharding_names", "sharding") if metadata.get(key)), ())
    if not isinstance(names, Sequence) or len(names) != ndim:
        return ()
    return tuple(axis for axis, name in enumerate(names) if name is not None and LAYER_AXES & set(words(str(name))))


def _placed(path: str, leaves: dict[str, Leaf], places: dict[str, set[_Positions]]) -> _Positions | None:
    """Returns where a parameter's layer axes stand; where its module leaves that open, as in the nearest that does not.

    None if its own module is unknown and those around it do not settle it.
    """
    own = places[path]
    if len(own) == 1:
        return next(iter(own))
    parts = path.split("/")
    for depth in range(len(parts) - 1, -1, -1):
        prefix = "".join(f"{part}/" for part in parts[:depth])
        group = {other: p for other, p in places.items() if other.startswith(prefix) and p and _alike(own, p)}
        common = (own or next(iter(group.values()), set())).intersection(*group.values())
        if len(common) == 1 and (own or _same_sizes(next(iter(common)), leaves[path], [leaves[p] for p in group])):
            return next(iter(common))
        if group and not common:
            break
    return min(own, default=None)


def _alike(own: set[_Positions], other: set[_Positions]) -> bool:
    """Whether two parameters have the same number of layer axes; one of an unknown module goes with every other."""
    return not own or len(next(iter(own))) == len(next(iter(other)))


def _same_sizes(layers: _Positions, leaf: Leaf, others: list[Leaf]) -> bool:
    return leaf.ndim > max(layers, default=-1) and all(
        leaf.shape[axis] == other.shape[axis] for axis in layers for other in others
    )


def _plain(module: Any, name: str) -> _Plain | None:
    """Returns what a module says of its parameter `name`; None for modules and parameters that are not known here."""
    from flax import nnx

    readers = (
        (nnx.LinearGeneral, _linear_general),
        (nnx.Linear, _linear),
        (nnx.Einsum, _einsum),
        (nnx.Conv, _conv),
        (nnx.ConvTranspose, _conv_transpose),
        (nnx.Embed, _embed),
        ((nnx.BatchNorm, nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm, nnx.InstanceNorm), _norm),
    )
    for kind, read in readers:
        if isinstance(module, kind):
            return read(module, name)
    return None


def _linear(module: Any, name: str) -> _Plain | None:
    shapes = {
        "kernel": _Plain((module.in_features, module.out_features), MatrixDims(0, 1)),
        "bias": _Plain((module.out_features,), None),
    }
    return shapes.get(name)


def _linear_general(module: Any, name: str) -> _Plain | None:
    batch, inputs, outputs = tuple(module.batch_axis.values()), tuple(module.in_features), tuple(module.out_features)
    if name == "bias":
        return _Plain((*batch, *outputs), None)
    first, last = len(batch), len(batch) + len(inputs)
    dims = MatrixDims(_axes(range(first, last)), _axes(range(last, last + len(outputs))))
    return _Plain((*batch, *inputs, *outputs), dims) if name == "kernel" else None


def _axes(axes: Iterable[int]) -> int | tuple[int, ...]:
    axes = tuple(axes)
    return axes[0] if len(axes) == 1 else axes


def _einsum(module: Any, name: str) -> _Plain | None:
    """An axis summed over is an input, one that only the result has an output, one that all three have a batch axis."""
    if name == "bias":
        return _Plain(tuple(module.bias_shape), None)
    if name != "kernel" or not module.einsum_str or "->" not in module.einsum_str:
        return None
    operands, result = module.einsum_str.replace(" ", "").split("->")
    inputs, kernel = operands.split(",")
    columns = tuple(axis for axis, label in enumerate(kernel) if label in inputs and label not in result)
    rows = tuple(axis for axis, label in enumerate(kernel) if label in result and label not in inputs)
    dims = MatrixDims(_axes(columns), _axes(rows)) if columns and rows else None
    return _Plain(tuple(module.kernel_shape), dims)


def _conv(module: Any, name: str) -> _Plain | None:
    if name == "bias":
        return _Plain((module.out_features,), None)
    shape, groups = tuple(module.kernel_shape), module.feature_group_count
    last = len(shape) - 1
    depthwise = groups > 1 and shape[-2] == 1
    dims = None if depthwise else MatrixDims(tuple(range(last)), last, groups)
    return _Plain(shape, dims) if name == "kernel" else None


def _conv_transpose(module: Any, name: str) -> _Plain | None:
    if name == "bias":
        return _Plain((module.out_features,), None)
    shape = tuple(module.kernel_shape)
    *space, one, other = range(len(shape))
    inputs, output = (other, one) if module.transpose_kernel else (one, other)
    return _Plain(shape, MatrixDims((*space, inputs), output)) if name == "kernel" else None


def _embed(module: Any, name: str) -> _Plain | None:
    return _Plain((module.num_embeddings, module.features), None) if name == "embedding" else None


def _norm(module: Any, name: str) -> _Plain | None:
    return _Plain((getattr(module, "num_features", None),), None) if name in ("scale", "bias") else None
