# SPDX-License-Identifier: Apache-2.0
"""What is decided about a parameter, and the error if nothing can be decided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from optax.contrib import MuonDimensionNumbers

from normpre_optax.parameters.dims import MatrixDims
from normpre_optax.parameters.labels import repeated
from normpre_optax.parameters.names import Kind
from normpre_optax.parameters.tree import Leaf
from normpre_optax.parameters.vocabulary import words

# How to give arrays names, for errors and notes.
HOW_TO_NAME = (
    "pass the arrays in a dict by name, for Keras {v.path: v.value for v in"
    " model.trainable_variables}"
)
_HOW = (
    "Pass matrix_dims=rule, or a rule of normpre_optax.presets for a known layout."
    " Replace the dots by the input and output axes (all others are batch axes), or"
    " return None for AdamW:"
)
# More arrays without names are no longer told apart by hand.
_MOST_NAMELESS = 10


class Reading(NamedTuple):
    """What a rule says of a parameter. Nothing is decided by the reason.

    Args:
        dims: the axes of its matrices, or None for AdamW.
        kind: what the parameter is.
        reason: why, as ``explain`` prints it.
        quoted: whether one word of a longer name decided alone, which may mislead.
        default: for the kind "given", the axes of its matrices by the default rule,
            which knows only its path and shape; None if this does not cover it.
        given: whether the user gave it: as an entry of a tree, or by a rule that says
            something else than the default rule.
    """

    dims: MatrixDims | None
    kind: Kind
    reason: str
    quoted: bool = False
    default: MatrixDims | None = None
    given: bool = False


class ParamSpec(NamedTuple):
    """The group of a parameter: the axes of its matrices, or AdamW.

    Args:
        path: its path.
        shape: its shape.
        dims: the axes of its matrices, or None for AdamW.
        reason: why, as ``explain`` prints it.
        sharding: its PartitionSpec from the option ``shardings``.
        kind: what the parameter is.
        default: see ``Reading``.
        given: see ``Reading``.
    """

    path: str
    shape: tuple[int, ...]
    dims: MatrixDims | None
    reason: str
    sharding: Any = None
    kind: Kind = "matrix"
    default: MatrixDims | None = None
    given: bool = False


class Assignment(dict[str, ParamSpec]):
    """``ParamSpec`` by path, computed on a full tree.

    You can pass it as ``matrix_dims`` for a part of the tree.
    """


Rule = Callable[[str, Leaf], MatrixDims | MuonDimensionNumbers | None]  # of a user
Reader = Callable[[str, Leaf], Reading]
Uncovered = tuple[str, tuple[int, ...], str]  # path, shape, and why or ""


class UncoveredError(ValueError):
    """No rule covers some parameters.

    ``cases`` has (path, shape, why) of each; ``short`` is a text for a table.
    """

    def __init__(self, *cases: Uncovered):
        by_path = {path: (shape, why) for path, shape, why in cases}
        problems: list[str] = []
        rule: list[str] = []
        nameless = [path for path in by_path if not words(path)]
        if nameless:
            problems.append(f"some parameters have no names: {HOW_TO_NAME}")
        for name, paths, _ in repeated(by_path):
            shape, why = by_path[paths[0]]
            which = f"parameter {name!r}"
            if len(paths) > 1:
                which = f"{len(paths)} parameters {name!r}"
            problem = f"no rule covers {which} of shape {shape}"
            problems.append(_with_reason(problem, why))
            if words(name) or len(nameless) <= _MOST_NAMELESS:
                rule += _lines_of_rule(name, paths, shape)
        if rule:
            start = "    def rule(path, leaf):"
            end = "        return default_matrix_dims(path, leaf)"
            rule = [_HOW, start, *rule, end]
        super().__init__("\n".join([*problems, *rule]))
        self.cases = cases
        self.short = _with_reason("no rule covers it", cases[0][2])


def _lines_of_rule(
    name: str, paths: tuple[str, ...], shape: tuple[int, ...]
) -> list[str]:
    """Return lines of a rule for parameters with a common name and shape."""
    tests = [f"path == {path!r}" for path in paths]
    # Without names, arrays of one shape may be a hidden matrix and an output head.
    if len(paths) > 1 and words(name):
        tests = [_test_of_all(name, shape)]
    lines = []
    for test in tests:
        lines.append(f"        if {test}:")
        lines.append("            return MatrixDims(inputs=..., outputs=...)")
    return lines


def _test_of_all(name: str, shape: tuple[int, ...]) -> str:
    """Return Python code that tests for the parameters of several layers."""
    start = name.split("{")[0]
    end = name.split("}")[-1]
    return (
        f"path.startswith({start!r}) and path.endswith({end!r}) and leaf.shape =="
        f" {shape}"
    )


def _with_reason(text: str, why: str) -> str:
    if why:
        return f"{text}: {why}"
    return text
