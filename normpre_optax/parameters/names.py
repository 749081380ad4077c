# SPDX-License-Identifier: Apache-2.0
"""What the names of a parameter say: its kind, by one table that is read downwards.

``NAMES`` has a row for each group of words. The first row that applies decides. The
words themselves are in ``vocabulary.py``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol

from normpre_optax.parameters import vocabulary as v
from normpre_optax.parameters.vocabulary import words

Kind = Literal[
    "matrix",  # of the matrix group
    "given",  # AdamW by the user's rule, not by the default rule
    # AdamW by the default rule:
    "bias",  # an offset of a layer's outputs
    "norm",  # a scale or an offset of a norm, or a vector with such a name
    "embedding",  # a table of tokens or patches, or learned tokens
    "position",  # a table of positions
    "head",  # an output layer of the whole model
    "router",  # the scores of experts
    "lora",  # one of a pair of low-rank factors
    "state_space",  # rates of a state-space model, such as A_log
    "depthwise",  # a convolution of each channel by itself
    "vector",  # fewer than two axes are larger than one, not counting layers
    "empty",  # no elements
    "dtype",  # not real floating point
]

# Kinds by name, as ``explain`` writes them.
_TEXTS: dict[Kind, str] = {
    "bias": "bias",
    "norm": "norm or scale",
    "embedding": "embedding",
    "position": "positional table",
    "head": "output head",
    "router": "router",
    "lora": "LoRA",
    "state_space": "rates of a state space",
    "depthwise": "depthwise convolution",
}

# Where words count. For layers/0/up/kernel of a class Dense, the last name is "kernel",
# the module "up", the owner "up" and "Dense", the layer "up", and above it is "0". For
# layers/0/up, which has no generic last name, the layer is "up", and the module "0".
Where = Literal[
    "path",  # the whole path, for patterns
    "last",
    "module",
    "owner",
    "layer",
    "layer_name",  # the layer as one word
    "layer_or_above",
    "layer_or_below",  # the layer and the generic name after it
    "nearest",  # the innermost name with a word of ``NEAREST``
    "anywhere",  # the path, the class, or the names of axes
]


Shape = tuple[int, ...]


class HasShape(Protocol):
    """A parameter, of which its shape is known."""

    @property
    def shape(self) -> Shape:
        """Its shape."""
        ...


class Named(NamedTuple):
    """The names of a parameter, and what else the table looks at.

    Args:
        parts: names of its path.
        ndim: number of its axes.
        class_name: class of the object that has it as an attribute, or "".
        axes: names of its axes, if they have some.
        near: parameters of its own module and of its sibling modules, by path.
    """

    parts: list[str]
    ndim: int
    class_name: str = ""
    axes: tuple[object, ...] = ()
    near: Mapping[str, HasShape] = MappingProxyType({})


class NameRule(NamedTuple):
    """A row of the table: parameters with such a name are of a kind.

    Args:
        kind: the kind.
        where: the place at which words count.
        words: one of these words has to be there.
        unless: words by place; with one of them, the row does not apply.
        pattern: a pattern of the path, instead of words.
        when: a condition in addition.
        ndim: number of axes that the parameter must have; None: any.
    """

    kind: Kind
    where: Where
    words: frozenset[str] | set[str] = frozenset()
    unless: Mapping[Where, set[str]] = MappingProxyType({})
    pattern: re.Pattern[str] | None = None
    when: Callable[[Named], bool] | None = None
    ndim: int | None = None


class ByName(NamedTuple):
    """A kind by name, its text, and whether one word of a longer name decided."""

    kind: Kind
    text: str
    quoted: bool


def layer_depth(parts: list[str]) -> int:
    """Return how many parts name the layer: all but a generic last one ("kernel")."""
    generic = parts[-1].lower() in v.GENERIC
    return max(1, len(parts) - generic)


def layer_name(parts: list[str]) -> str:
    """Return the last name of the layer that is no number, in lower case, or ""."""
    for part in reversed(parts[: layer_depth(parts)]):
        if words(part):
            return part.lower()
    return ""


def names_below(near: Collection[str], parts: list[str]) -> set[str]:
    """Return the names directly below a path, among the paths near a parameter."""
    others = (other.split("/") for other in near)
    return {other[len(parts)] for other in others if other[: len(parts)] == parts}


def stack_depth(parts: list[str]) -> int | None:
    """Return the depth of the last name under which layers are stacked, or None."""
    for depth in range(len(parts), 0, -1):
        part = parts[depth - 1]
        found = {*words(part)}
        # "layers_0" is a single layer, "scan_0" is the first of several stacks.
        single = part[-1:].isdigit() and not found & v.ALWAYS_STACKS
        stacked = found & v.STACKS and not single
        if (stacked or found == {"h"}) and not _is_counted(parts, depth):
            return depth
    return None


def _is_counted(parts: list[str], depth: int) -> bool:
    """Return whether a single layer is next: "0" or "layer_0", not "ScanBlock_0"."""
    following = parts[depth] if depth < len(parts) else ""
    units = v.UNITS - v.ALWAYS_STACKS
    return following[-1:].isdigit() and units.issuperset(words(following))


def block_depth(parts: list[str]) -> int:
    """Return the depth below the innermost layer's name, or 0.

    Such names are "blocks", "block" before "0", and "TransformerBlock_0".
    """
    for depth in range(len(parts) - 1, 0, -1):
        part = parts[depth - 1]
        found = v.UNITS.intersection(words(part))
        several = found & v.STACKS or found == {"h"}
        numbered = part[-1:].isdigit() or parts[depth].isdigit()
        if found and (several or numbered):
            return depth
    return 0


def is_in_attention(named: Named) -> bool:
    """Return whether a parameter is in attention: by a name above, or by siblings."""
    above = named.parts[: layer_depth(named.parts) - 1]
    beside = {name.lower() for name in names_below(named.near, above)}
    if len(v.QUERIES & beside) > 1:
        return True
    return any(v.ATTENTION.intersection(words(part)) for part in above)


def attention_role(named: Named) -> Literal["query", "output", ""]:
    """Return "query" for query, key and value, "output" for the output projection."""
    layer = layer_name(named.parts)
    inside = is_in_attention(named)
    # "q", "k" and "v" may be anything outside of attention.
    if layer in v.QUERIES and (inside or len(layer) > 1):
        return "query"
    if layer in v.OUTPUTS and inside:
        return "output"
    return ""


# Conditions of rows.


def _has_its_weight_beside(named: Named) -> bool:
    """Return whether the "w1" of a "b1" is next to it, if it is known what is."""
    *above, last = named.parts
    beside = {name.lower() for name in names_below(named.near, above)}
    if not beside:  # a leaf without its tree: only a "b" at the top may be a weight
        return bool(above and above[-1])
    return f"w{last[1:].lower()}" in beside


def _has_a_vocabulary_axis(named: Named) -> bool:
    return any("vocab" in str(name) for name in named.axes)


def _is_of_the_whole_model(named: Named) -> bool:
    """Return whether a layer is directly in the model, and not in attention."""
    above = named.parts[: layer_depth(named.parts) - 1]
    return v.WHOLE_MODELS.issuperset(above) and not is_in_attention(named)


def _is_gate_of_experts(named: Named) -> bool:
    """Return whether a gate scores experts, and is not the gate of an MLP.

    That of an MLP has an "up" or "down" of its sizes beside it.
    """
    above, layer = module_and_gate(named.parts)
    own = {*words(layer)}
    if own.isdisjoint(v.GATES):
        return False
    beside = names_below(named.near, above)
    words_beside = {word for name in beside for word in words(name)}
    if words_beside & {"up", "down"}:
        is_plain = own <= v.GATES | v.EXPERTS | v.PLAIN | {"shared"}
        if not is_plain or not _differs_from_up_and_down(named, above):
            return False
    if own & v.EXPERTS:
        return True
    mixture = (above and "moe" in words(above[-1])) or words_beside & v.EXPERTS
    if own <= v.GATES and mixture:
        return True
    return own <= v.GATES | v.PLAIN and _scores_what_is_beside(named, above)


def is_inside_gate(parts: list[str]) -> bool:
    """Return whether a layer is all of a module with the name of a gate.

    Such layers are "gate/dense/kernel" and "gate/wg/weight".
    """
    *above, layer = parts[: layer_depth(parts)]
    if not above or not words(above[-1]) or not v.GATES.issuperset(words(above[-1])):
        return False
    return (v.GATES | v.PLAIN).issuperset(words(layer))


def module_and_gate(parts: list[str]) -> tuple[list[str], str]:
    """Return the path of the module in which a layer, maybe a gate, is; and its name.

    For "moe/gate/dense/kernel", they are "moe" and "gate".
    """
    *above, layer = parts[: layer_depth(parts)]
    if is_inside_gate(parts):
        layer = above.pop()
    return above, layer


def _differs_from_up_and_down(named: Named, above: list[str]) -> bool:
    """Return whether it is known that no "up" or "down" beside has a layer's sizes."""
    own = named.near.get("/".join(named.parts))
    others = [
        shape
        for name, shape in _shapes_beside(named.near, above)
        if not {"up", "down"}.isdisjoint(words(name))
    ]
    if own is None or not others:
        return False
    return sorted(own.shape) not in map(sorted, others)


def _scores_what_is_beside(named: Named, above: list[str]) -> bool:
    """Return whether the shapes or numbers beside a gate show that they are experts."""
    own = named.near.get("/".join(named.parts))
    if own is None or is_in_attention(named):
        return False
    beside = names_below(named.near, above)
    numbered = sum(name.isdigit() for name in beside)
    if numbered > 1 and numbered in own.shape[-2:]:
        return True
    shapes = _shapes_beside(named.near, above)
    return any(
        is_score_of(own.shape, shape) for name, shape in shapes if "conv" not in name
    )


def is_score_of(gate: Shape, experts: Shape) -> bool:
    """Return whether a gate may score experts that are stacked in an array.

    It has the axes of the array but one, that of the hidden layer of experts.

    Example:
        >>> from normpre_optax.parameters.names import is_score_of
        >>> is_score_of((8, 4), (4, 8, 32)), is_score_of((8, 32), (8, 32))
        (True, False)
    """
    different = len(gate) > 1 and len({*gate}) == len(gate)
    has_one_less = len(experts) == len(gate) + 1
    return different and has_one_less and Counter(gate) <= Counter(experts)


def _shapes_beside(
    near: Mapping[str, HasShape], above: list[str]
) -> Iterator[tuple[str, Shape]]:
    """Yield the name and the shape of each layer directly below a path."""
    for path, leaf in near.items():
        parts = path.split("/")
        if parts[: len(above)] == above and layer_depth(parts) == len(above) + 1:
            yield parts[len(above)], leaf.shape


def _is_in_a_head(named: Named) -> bool:
    """Return whether a layer has the name of a head, as an embedding called "vocab"."""
    layer = named.parts[layer_depth(named.parts) - 1]
    return not v.HEADS.isdisjoint(words(layer))


# Biases and norms: they have one axis, unless layers are stacked.
VECTORS = (
    NameRule("bias", "path", pattern=v.SHORT_BIAS, when=_has_its_weight_beside),
    NameRule("bias", "last", v.BIASES),
    NameRule("norm", "last", v.SCALES | v.NORMS),
    # A norm may have matrices.
    NameRule("norm", "owner", v.NORMS, {"last": v.INNER, "module": v.DENSE}),
)
# Of these, the innermost name decides.
NEAREST = (
    NameRule("position", "nearest", v.POSITIONS, {"nearest": v.NOT_POSITIONS}),
    NameRule("head", "nearest", v.HEADS, {"nearest": v.NOT_HEADS | v.SIZES}),
    NameRule("embedding", "nearest", v.EMBEDDINGS, {"nearest": v.SIZES}),
)
_NEAREST_WORDS = v.POSITIONS | v.HEADS | v.EMBEDDINGS
# Parameters that use AdamW by name. The first row that applies decides.
NAMES = (
    *VECTORS,
    NameRule("bias", "owner", v.BIASES),
    NameRule("norm", "path", pattern=v.LAMBDA),
    NameRule("state_space", "path", pattern=v.STATE_SPACE),
    NameRule("lora", "path", pattern=v.LORA),
    NameRule("head", "path", pattern=v.UNEMBEDDING),
    NameRule("embedding", "path", pattern=v.TOKEN),
    NameRule("embedding", "last", {"embedding", "embeddings"}, when=_is_in_a_head),
    *NEAREST,
    NameRule("embedding", "anywhere", _NEAREST_WORDS, when=_has_a_vocabulary_axis),
    NameRule("head", "layer_name", v.LAST_LAYERS, when=_is_of_the_whole_model, ndim=2),
    NameRule("router", "layer_or_above", v.ROUTERS),
    NameRule("router", "layer_or_above", v.GATES, when=_is_gate_of_experts),
    # With more axes, the shape decides: see _has_one_input_channel in rules.py.
    NameRule(
        "depthwise", "layer_or_below", {"conv"}, {"layer_or_below": v.DENSE}, ndim=2
    ),
)


def kind_by_name(named: Named, rows: Sequence[NameRule] = NAMES) -> ByName | None:
    """Return the kind by the first row of the table that applies, or None."""
    path = "/".join(named.parts)
    places = _words_by_place(named)
    nearest = ""
    if not _NEAREST_WORDS.isdisjoint(places["anywhere"]):
        nearest = _nearest_name(named)
        places["nearest"] = words(nearest)
    for row in rows:
        if row.pattern is not None:
            applies = row.pattern.search(path) is not None
        else:
            applies = not row.words.isdisjoint(places[row.where])
        if not applies or row.ndim not in (None, named.ndim):
            continue
        if any(not unless.isdisjoint(places[at]) for at, unless in row.unless.items()):
            continue
        if row.when is not None and not row.when(named):
            continue
        text = _TEXTS[row.kind]
        word = ""
        if row.where == "nearest":
            word = _misleading_word(row, named.parts, nearest)
        if word:
            text = f"{text} ({word!r} in {nearest!r})"
        return ByName(row.kind, text, quoted=word != "")
    return None


def _words_by_place(named: Named) -> dict[Where, tuple[str, ...]]:
    """Return the words at all places but the nearest name, which is rarely needed."""
    parts = named.parts
    depth = layer_depth(parts)
    last = words(parts[-1])
    layer = words(parts[depth - 1])
    above = words(parts[depth - 2]) if depth > 1 else ()
    module = words(parts[-2]) if len(parts) > 1 else ()
    of_class = words(named.class_name)
    anywhere = of_class
    for name in (*parts, *named.axes):
        anywhere += words(str(name))
    return {
        "last": last,
        "module": module,
        "owner": module + of_class,
        "layer": layer,
        "layer_name": (parts[depth - 1].lower(),),
        "layer_or_above": layer + above,
        "layer_or_below": layer + last,
        "nearest": (),
        "anywhere": anywhere,
    }


def _nearest_name(named: Named) -> str:
    """Return the innermost name to which a row of ``NEAREST`` applies, or "".

    The class is nearest. Then come the names from the layer up to the innermost one of
    ``INNER``, such as "mlp", but none above the block; then a generic last name.
    """
    parts = named.parts
    depth = layer_depth(parts)
    inside = [named.class_name]
    for part in reversed(parts[block_depth(parts) : depth]):
        inside.append(part)
        if v.INNER.intersection(words(part)):
            break
    for part in (*inside, *parts[depth:]):
        found = words(part)
        for row in NEAREST:
            unless = row.unless["nearest"]
            if not row.words.isdisjoint(found) and unless.isdisjoint(found):
                return part
    return ""


def _misleading_word(row: NameRule, parts: list[str], nearest: str) -> str:
    """Return the word that decided, if it may mean something else; else "".

    Its name may mean something else if another word follows, as in "head_mixer", or if
    it is the name of a module above the layer.
    """
    found = words(nearest)
    *_, at = (i for i, word in enumerate(found) if word in row.words)
    is_above = nearest in parts and nearest not in parts[layer_depth(parts) - 1 :]
    if is_above or not v.PLAIN_AFTER.issuperset(found[at + 1 :]):
        return found[at]
    return ""
