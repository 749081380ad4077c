# SPDX-License-Identifier: Apache-2.0
"""The error for parameters that no rule covers: which they are, why, and the rule to write.

The rule that it shows has the reading that names, biases and neighbours leave, if they leave just one; otherwise dots,
which `MatrixDims` refuses.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from normpre_optax.parameters.attention import possible
from normpre_optax.parameters.dims import MatrixDims, split_axes
from normpre_optax.parameters.leaves import Leaf, container, fits_bias, is_vector, own_bias, stack_depth, words
from normpre_optax.parameters.repeats import pattern, repeated
from normpre_optax.parameters.roles import in_attention, in_stacked_experts, is_convolution, is_query, is_weight

T = TypeVar("T")
DOTS = "inputs=..., outputs=..."


class Case(NamedTuple):
    """A parameter that no rule covers: why, in short, and what the arguments of its `MatrixDims` may be."""

    path: str
    shape: tuple[int, ...]
    why: str
    arguments: str
    guessed: bool = False


class UncoveredError(ValueError):
    """Parameters with three or more axes that no rule covers; `why` is the short form for tables, of the first."""

    def __init__(self, cases: Sequence[Case]):
        super().__init__(_message(cases))
        self.cases, self.why = tuple(cases), f"no rule covers it{_because(cases[0].why)}"


def _because(why: str) -> str:
    return f": {why}" if why else ""


def _message(cases: Sequence[Case]) -> str:
    lines, rule, regex = list[str](), list[str](), False
    for name, paths, case in repeated({case.path: case._replace(path="") for case in cases}):
        which, test = "parameter", f"path == {name!r}"
        if len(paths) > 1:
            which, regex = f"{len(paths)} parameters", True
            test = f"re.fullmatch({pattern(name)!r}, path) and leaf.shape == {case.shape}"
        lines.append(f"no rule covers {which} {name!r} of shape {case.shape}{_because(case.why)}")
        unsure = "  # if experts or layers stand in front" * case.guessed
        rule += [f"        if {test}:", f"            return MatrixDims({case.arguments}){unsure}"]
    dots = ", in place of the dots" * any(case.arguments == DOTS for case in cases)
    return "\n".join(
        [
            *lines,
            f"Say which axes are inputs and which are outputs{dots} (all others are batch axes), or None for AdamW, "
            "and pass it as matrix_dims=rule:",
            *["    import re", ""] * regex,
            "    def rule(path, leaf):",
            *rule,
            "        return default_matrix_dims(path, leaf)",
            "For a Flax NNX model, matrix_dims=dims_from_nnx(model) reads the axes off the modules of Flax, and takes "
            "such a rule as rule=... for parameters of your own modules.",
        ]
    )


def for_all(paths: Iterable[str], decide: Callable[[str], T]) -> dict[str, T]:
    """What `decide` says of every path; one error for all those that no rule covers."""
    found, cases = dict[str, T](), list[Case]()
    for path in paths:
        try:
            found[path] = decide(path)
        except UncoveredError as error:
            cases += error.cases
    if cases:
        raise UncoveredError(cases)
    return found


def uncovered(path: str, leaf: Leaf, why: str = "") -> UncoveredError:
    """The error for one parameter, with the reading that is left for it."""
    found = _readings(path, leaf)
    several = len(found) > 1
    if in_stacked_experts([*path.split("/"), leaf.holder]):  # they mostly stand in front
        found = [dims for dims in found if _batch(leaf, dims) == tuple(range(leaf.ndim - 2))] or found
    arguments = f"inputs={found[0].inputs}, outputs={found[0].outputs}" if len(found) == 1 else DOTS
    return UncoveredError([Case(path, leaf.shape, why, arguments, several and len(found) == 1)])


def _readings(path: str, leaf: Leaf) -> list[MatrixDims]:
    """The readings that names, bias and neighbours allow."""
    parts, axes = path.split("/"), tuple(range(leaf.ndim))
    layers = axes[: leaf.layers or 0]
    if is_convolution([*parts, leaf.holder]):
        unclear = stack_depth(parts) is not None and len(own_bias(path, leaf.near) or ()) != len(layers) + 1
        return [] if unclear else _convolution(path, leaf, axes[len(layers) :])
    projection = (in_attention(parts, leaf) or is_query(parts, leaf)) and not is_weight(parts)
    least = max(len(layers), in_stacked_experts([*parts, leaf.holder]) or bool(leaf.doubt))
    by_count: dict[int, list[MatrixDims]] = {2: [], 3: []}
    for batch in itertools.chain(*(itertools.combinations(axes, count) for count in range(least, leaf.ndim - 1))):
        rest = tuple(axis for axis in axes if axis not in batch)
        if not set(layers) <= set(batch) or not _alike(path, leaf, batch):
            continue
        if len(rest) == 3 and projection:
            by_count[3] += possible(path, leaf, rest)
        elif len(rest) == 2:
            by_count[2] += _two(path, leaf, rest)
    return by_count[3] or by_count[2]


def _two(path: str, leaf: Leaf, rest: tuple[int, ...]) -> list[MatrixDims]:
    """Two axes as their name has them; the other way around where only that fits the bias."""
    first, second = reversed(rest) if is_weight(path.split("/")) else rest
    both = MatrixDims(first, second), MatrixDims(second, first)
    return [dims for dims in both if fits_bias(path, leaf, dims)][:1]


def _convolution(path: str, leaf: Leaf, rest: tuple[int, ...]) -> list[MatrixDims]:
    """All taps as one matrix: Flax's (space, in, out), torch's (out, in, space) for a weight, if the bias permits."""
    first, last = MatrixDims(rest[1:], rest[0]), MatrixDims(rest[:-1], rest[-1])
    likely = first if is_weight(path.split("/")) else last
    return [likely] if fits_bias(path, leaf, likely) and "transpose" not in words(f"{path}/{leaf.holder}") else []


def _alike(path: str, leaf: Leaf, batch: tuple[int, ...]) -> bool:
    """Whether the matrices beside a parameter, of as many axes, have the same sizes along axes that would be batch."""
    return all(
        shape[axis] == leaf.shape[axis]
        for other, shape in leaf.near.items()
        if len(shape) == leaf.ndim and container(other) == container(path) and not is_vector(other, leaf)
        for axis in batch
    )


def _batch(leaf: Leaf, dims: MatrixDims) -> tuple[int, ...]:
    return split_axes(leaf.ndim, dims)[0]
