# SPDX-License-Identifier: Apache-2.0
"""The two layers of an MLP, by their names, and which of their sides is wide.

The first layer reads the residual stream, so it has as many inputs as the model is
wide. The second one writes to it, so it has as many outputs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Literal

from normpre_optax.parameters import vocabulary as v
from normpre_optax.parameters.names import Kind, Shape, layer_depth
from normpre_optax.parameters.vocabulary import words

Part = Literal["first", "second", ""]
# Kinds of parameters with an axis as long as the model is wide.
AS_WIDE: frozenset[Kind] = frozenset(
    {"norm", "embedding", "head", "position", "router"}
)


def module_and_name(path: str) -> tuple[str, str]:
    """Return the module of a layer, and the name of the layer in there.

    Example:
        >>> from normpre_optax.parameters.feed_forward import module_and_name
        >>> module_and_name("0/mlp/down/kernel"), module_and_name("0/up/dense/kernel")
        (('0/mlp', 'down'), ('0', 'up'))
    """
    parts = path.split("/")
    *above, name = parts[: layer_depth(parts)]
    if name.lower() in ("dense", "linear") and above and any(_matches(above[-1])):
        name = above.pop()
    return "/".join(above), name


def _matches(name: str) -> tuple[re.Match[str] | None, re.Match[str] | None]:
    """Return how the name of a layer fits that of a first and of a second one."""
    snake_case = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return v.FIRST_LAYER.search(snake_case), v.SECOND_LAYER.search(snake_case)


def part_of(path: str, beside: Collection[str]) -> Part:
    """Return which layer of an MLP a parameter is by its name, or "".

    Args:
        path: its path.
        beside: names of the layers in its module.

    Example:
        >>> from normpre_optax.parameters.feed_forward import part_of
        >>> part_of("mlp/gate_up_proj", ()), part_of("mlp/w2", ["w1", "w2", "w3"])
        ('first', 'second')
        >>> part_of("mlp/linear_1/w", ["linear_0", "linear_1"])  # the second one
        ''
    """
    if not v.ATTENTION.isdisjoint(words(path)):
        return ""
    _, name = module_and_name(path)
    first, second = _matches(name)
    match = second or first
    if match is None:
        return ""
    if match["number"] and _counts_from_zero(name, match.span("number"), beside):
        return ""
    return "second" if second else "first"


def _counts_from_zero(name: str, at: tuple[int, int], beside: Collection[str]) -> bool:
    """Return whether the first layer has the number zero or none: "linear"."""
    start, end = at
    zero = f"{name[:start]}0{name[end:]}"
    none = name[:start].rstrip("_") + name[end:]
    return zero in beside or none in beside


def sizes_as_wide(parameters: Iterable[tuple[Kind, Shape]]) -> Counter[int]:
    """Return how many norms, tables and routers have an axis of each size.

    The most frequent size is the width of the model.
    """
    count: Counter[int] = Counter()
    for kind, shape in parameters:
        if kind in AS_WIDE:
            count.update({*shape})
    return count


def is_transposed(part: Part, inputs: int, outputs: int, sizes: Counter[int]) -> bool:
    """Return whether the other side of a layer is as wide as the model.

    Args:
        part: of the layer.
        inputs: their number, as the layer is read.
        outputs: their number.
        sizes: from ``sizes_as_wide``.

    Example:
        >>> from collections import Counter
        >>> from normpre_optax.parameters.feed_forward import is_transposed
        >>> is_transposed("first", inputs=32, outputs=8, sizes=Counter({8: 3}))
        True
    """
    if part == "second":
        inputs, outputs = outputs, inputs
    return part != "" and sizes[outputs] > sizes[inputs]
