# SPDX-License-Identifier: Apache-2.0
"""The mutations of ``break_it``: how they are found, and that all can be made."""

import ast
import subprocess

import pytest

from tests import break_it
from tests.cases import rows
from tests.faults import FAULTS, Fault

LINES = """\
import math


def half(x, scale: float = 0.5, *, shift=1):
    # The comment moves nothing: é.
    return scale * x + shift


class Stack:
    count: int = 3

    def total(self, xs, weigh=False):
        def part(x):
            return half(x, scale=0.25)

        if weigh:
            xs = [part(x) for x in xs]
        else:
            weigh = True
        return sum(xs) + math.pi
"""


@pytest.fixture
def package(tmp_path):
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "one.py").write_text(LINES)
    (tmp_path / "two.py").write_text("def double(x):\n    return 2 * x\n")
    return tmp_path


def mutated(fault, package):
    place = break_it.find(fault, package)
    source = (package / place.file).read_text()
    return break_it.changed(fault, source, place)


@rows(
    "function old new expected",
    ("half", "scale * x", "scale", "return (scale) + shift"),
    ("half", "( scale*x ) + shift", "x", "return (x)"),
    ("half", "shift=1", "shift=2", "*, shift=(2))"),
    ("half", "scale=0.5", "scale=1.0", "scale: float = (1.0)"),
    ("Stack.total.part", "scale=0.25", "scale=4", "half(x, scale=(4))"),
    ("Stack.total", "math.pi", "0", "sum(xs) + (0)"),
    ("Stack.total", "weigh = True", "pass", "        else:\n            pass\n"),
    ("Stack", "count=3", "count=4", "count: int = (4)"),
    (
        "Stack.total",
        "xs = [part(x) for x in xs]",
        "xs = xs[1:]\nxs = xs + xs",
        "            xs = xs[1:]\n            xs = xs + xs\n        else:",
    ),
    ("", "scale * x + shift", "shift", "return (shift)"),
)
def test_a_fault_is_found_by_its_syntax_tree(function, old, new, expected, package):
    """In any format, as an expression, statement, keyword argument or default."""
    result = mutated(Fault("stages/one.py", function, old, new), package)
    assert expected in result
    assert ast.parse(result)
    assert len(result.splitlines()) in (
        len(LINES.splitlines()),
        len(LINES.splitlines()) + 1,
    )


def test_without_a_file_the_whole_package_is_searched(package):
    fault = Fault("", "", "2 * x", "3 * x")
    assert break_it.find(fault, package).file == "two.py"
    assert "return (3 * x)" in mutated(fault, package)
    with_function = fault._replace(function="double")
    assert break_it.find(with_function, package).file == "two.py"


@rows(
    "fault message",
    (("stages/one.py", "half", "scale * y"), "stages/one.py:6: scale * x"),
    (("stages/one.py", "Stack.total", "scale * x"), "does not occur"),
    (("stages/one.py", "Stack.sum", "math.pi"), "near are Stack, Stack.total"),
    (("stages/two.py", "", "2 * x"), "near are stages/one.py"),
    (("stages/one.py", "Stack", "xs"), "more than once: stages/one.py:1"),
    (("", "", "x"), "more than once"),
)
def test_a_fault_that_is_not_found_names_what_is_near(fault, message, package):
    with pytest.raises(break_it.NotFoundError, match=message.replace("*", r"\*")):
        break_it.find(Fault(*fault, "0"), package)


def test_a_survivor_and_a_test_that_fails_anyway_are_reported(tmp_path, monkeypatch):
    (tmp_path / "normpre_optax").mkdir()
    (tmp_path / "normpre_optax" / "two.py").write_text("x = 2 * 3\n")

    def run(returncodes):
        """Make a fault with these results of pytest; the source is as before."""
        left = iter(returncodes)

        def run_pytest(arguments, tree):
            failed = "FAILED test_two.py::test_x - assert"
            return subprocess.CompletedProcess(arguments, next(left), failed, "")

        monkeypatch.setattr(break_it, "run_pytest", run_pytest)
        fault = Fault("two.py", "", "2 * 3", "7", "test_two.py")
        try:
            return break_it.caught_by(fault, tmp_path)
        finally:
            source = (tmp_path / "normpre_optax" / "two.py").read_text()
            assert source == "x = 2 * 3\n"

    assert run([1, 0]) == "test_two.py::test_x"
    assert run([0]) == ""
    with pytest.raises(break_it.OtherReasonError, match="test_x"):
        run([1, 1])


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_can_be_made(name):
    """It occurs once, changes the program, and has tests."""
    fault = FAULTS[name]
    place = break_it.find(fault)
    source = (break_it.PACKAGE / place.file).read_text()
    result = break_it.changed(fault, source, place)
    assert ast.dump(ast.parse(result)) != ast.dump(ast.parse(source))
    tests = break_it.tests_of(fault, place.file)
    for path in tests.partition(" -k ")[0].split():
        assert (break_it.ROOT / path).exists(), path


def test_every_part_of_the_package_has_faults():
    files = [break_it.find(fault).file for fault in FAULTS.values()]
    parts = [file.split("/")[0] for file in files]
    for folder in ("linalg", "parameters", "sharding", "stages", "relatives"):
        assert parts.count(folder) >= 3, folder
    for file in ("optimizer.py", "hyperball.py", "algorithm.py", "learning_rates.py"):
        assert file in parts
