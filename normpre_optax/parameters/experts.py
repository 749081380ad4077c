# SPDX-License-Identifier: Apache-2.0
"""Stacked experts: which parameters they are, and in which order their axes are."""

from __future__ import annotations

from typing import NamedTuple

from normpre_optax.parameters import vocabulary as v
from normpre_optax.parameters.dims import MatrixDims, split_axes
from normpre_optax.parameters.feed_forward import (
    Part,
    is_transposed,
    module_and_name,
    part_of,
)
from normpre_optax.parameters.names import (
    Named,
    attention_role,
    is_score_of,
    layer_depth,
    layer_name,
    module_and_gate,
    names_below,
)
from normpre_optax.parameters.tree import Leaf, Shaped
from normpre_optax.parameters.vocabulary import words

_LETTERS = {"q", "k", "v"}
_EXPERTS = {"expert", "experts"}
EXPERTS_IN_FRONT = MatrixDims(inputs=-2, outputs=-1)


def is_stack_of_experts(path: str, leaf: Shaped) -> bool:
    """Return whether a parameter may hold several experts.

    It may by its name or, outside of attention, by a router beside it.

    Args:
        path: its path.
        leaf: a ``Leaf``, or an array of which nothing nearby is known.
    """
    near = getattr(leaf, "near", {})
    named = Named(path.split("/"), leaf.ndim, near=near)
    if _is_of_attention(named) or "conv" in words(path):
        return False
    above = path.rpartition("/")[0]
    has_router = any(
        v.ROUTERS.intersection(words(other.removeprefix(above))) for other in near
    )
    has_name = not v.EXPERTS.isdisjoint(words(path))
    if has_name and v.COUNTED_EXPERT.search(path):
        has_name = False
    return has_router or has_name or _is_scored_by_a_gate(path, leaf)


def _is_of_attention(named: Named) -> bool:
    """Return whether a parameter is a projection of attention, maybe a fused one.

    Its name shows it, or for "o", "q" and the like the names beside it do.
    """
    *above, _ = named.parts[: layer_depth(named.parts)]
    layer = layer_name(named.parts)
    own = {*words(layer)}
    for part in (layer, *reversed(above)):
        if not v.ATTENTION.isdisjoint(words(part)):
            break
        if not _EXPERTS.isdisjoint(words(part)):  # experts that are attention
            return False
    if attention_role(named) or own & (v.PROJECTIONS | v.ATTENTION):
        return True
    beside = names_below(named.near, above)
    found = {word for name in beside for word in words(name)}
    found &= v.PROJECTIONS | _LETTERS
    if len(found) < 2 and found.isdisjoint(v.FUSED):
        return False
    return layer in v.OUTPUTS or not own.isdisjoint(_LETTERS | {"o", "wo", "out"})


def _is_scored_by_a_gate(path: str, leaf: Shaped) -> bool:
    """Return whether a router called "gate" is beside a parameter, by their axes."""
    module, _ = module_and_gate(path.split("/"))
    for other, gate in getattr(leaf, "near", {}).items():
        other_module, name = module_and_gate(other.split("/"))
        is_gate = other_module == module and not v.GATES.isdisjoint(words(name))
        if is_gate and is_score_of(gate.shape, leaf.shape):
            return True
    return False


def why_not_in_order(path: str, leaf: Shaped, dims: MatrixDims) -> str:
    """Return why experts are not stored with these axes, or "".

    Both layers of the experts show it if they fit each other in one order only, as for
    a fused gate and up projection. Else the width of the model does.

    Args:
        path: of one layer of the experts.
        leaf: a ``Leaf``, or an array of which nothing nearby is known.
        dims: its axes by a rule.
    """
    if not isinstance(leaf, Leaf):
        return ""
    batch, outputs, inputs = split_axes(leaf.ndim, dims)
    part, others = _parts_nearby(path, leaf)
    if not part or len(outputs) + len(inputs) > 2:
        return ""
    axes = _Sides(inputs[0], outputs[0])
    read, stored = "(expert, in, out)", "(expert, out, in)"
    if axes.inputs > axes.outputs:
        read, stored = stored, read
    which = f"{path!r} of shape {leaf.shape}"
    if others:
        which += f" and {others[0]!r} of shape {leaf.near[others[0]].shape}"
    if _is_transposed(part, leaf, others, axes):
        inputs, outputs = axes.outputs - leaf.ndim, axes.inputs - leaf.ndim
        return (
            f"{which}: these experts are not {read} but {stored}; return"
            f" MatrixDims(inputs={inputs}, outputs={outputs}) for them in a rule"
        )
    width = leaf.tree.width
    in_batch = len(batch) == 1 and leaf.shape[batch[0]] == width
    if in_batch and width not in _sizes(leaf, axes):
        return (
            f"{which}: these experts are not {read}; axis {batch[0]} is as long as the"
            f" model is wide, {width}: return MatrixDims with their axes in a rule"
        )
    return ""


class _Sides(NamedTuple):
    """The axes of a layer, or their sizes."""

    inputs: int
    outputs: int

    @property
    def transposed(self) -> _Sides:
        return _Sides(self.outputs, self.inputs)


def _parts_nearby(path: str, leaf: Leaf) -> tuple[Part, list[str]]:
    """Return the part of a layer, and the paths of the other part in its module."""
    module, _ = module_and_name(path)
    beside = {}
    for other, near in leaf.near.items():
        other_module, name = module_and_name(other)
        if other_module == module and near.ndim == leaf.ndim:
            beside[other] = name
    part = part_of(path, beside.values())
    parts = {other: part_of(other, beside.values()) for other in beside}
    return part, [x for x, its_part in parts.items() if its_part not in (part, "")]


def _is_transposed(part: Part, leaf: Leaf, others: list[str], axes: _Sides) -> bool:
    """Return whether inputs and outputs are the other way around."""
    own = _sizes(leaf, axes)
    for other in others:
        first, second = own, _sizes(leaf.near[other], axes)
        if part == "second":
            first, second = second, first
        fits = _fit(first, second)
        if fits != _fit(first.transposed, second.transposed):
            return not fits
    return is_transposed(part, own.inputs, own.outputs, leaf.tree.sizes_as_wide)


def _sizes(leaf: Leaf, axes: _Sides) -> _Sides:
    return _Sides(leaf.shape[axes.inputs], leaf.shape[axes.outputs])


def _fit(first: _Sides, second: _Sides) -> bool:
    """Return whether two layers fit each other; the first one may be fused."""
    hidden = (second.inputs, 2 * second.inputs)
    return first.inputs == second.outputs and first.outputs in hidden
