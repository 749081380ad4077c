# SPDX-License-Identifier: Apache-2.0
"""Small faults, put into the package one at a time: the tests must catch every one.

    python -m tests.break_it                    # all of them
    python -m tests.break_it a_power_less ...   # these

``faults.py`` has the faults. Each replaces an expression or statement in a copy of the
working tree, and names the tests that must fail. They run as the default run does,
without slow tests, and stop at the first failure; that test must pass without the
fault. A fault that survives, or that can no longer be made, fails the script.

A fault is found by what it changes: syntax trees are compared, inside one function. So
it stays valid when code is reformatted, or moves within the function, and its comments
change. If the expression itself changes, the error names the nearest ones.
"""

import ast
import difflib
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.faults import FAULTS, Fault

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "normpre_optax"
NOT_COPIED = (
    ".git",
    ".venv*",
    ".pytest_cache",
    "__pycache__",
    "_build",
    "runs",
)

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Place(NamedTuple):
    """Where a fault changes the source: offsets of the text that it replaces."""

    file: str
    start: int
    end: int
    line: int
    is_statement: bool


class NotFoundError(Exception):
    """A fault does not occur exactly once."""


class OtherReasonError(Exception):
    """A test fails with a fault, and without it, too."""


# The source that a fault may change.


def files_of(fault: Fault, package: Path) -> list[str]:
    """The files where the fault may be: its own, or all."""
    if fault.file:
        return [fault.file]
    paths = sorted(package.rglob("*.py"))
    return [path.relative_to(package).as_posix() for path in paths]


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Every function and class with its qualified name, without "<locals>"."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            name = prefix + node.name
            yield name, node
            yield from functions(node, f"{name}.")
        else:
            yield from functions(node, prefix)


def scopes(fault: Fault, tree: ast.Module) -> list[ast.AST]:
    """The functions of the fault's name, or the whole file if it names none."""
    if not fault.function:
        return [tree]
    return [node for name, node in functions(tree) if name == fault.function]


# Comparison of syntax trees.


class Wanted(NamedTuple):
    """What ``Fault.old`` says: a syntax tree, and the name in ``name=value``."""

    tree: ast.expr | ast.stmt
    name: str = ""


def parsed(source: str) -> Wanted:
    """The syntax tree of one expression or statement."""
    (statement,) = ast.parse(textwrap.dedent(source).strip()).body
    if isinstance(statement, ast.Expr):
        return Wanted(statement.value)
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return Wanted(statement, statement.targets[0].id)
    return Wanted(statement)


def is_same(a: ast.AST, b: ast.AST) -> bool:
    """Whether two syntax trees are equal, at any place in a file."""
    return type(a) is type(b) and ast.dump(a) == ast.dump(b)


def defaults(arguments: ast.arguments) -> Iterator[tuple[str, ast.expr]]:
    """Every parameter that has a default, with it."""
    positional = [*arguments.posonlyargs, *arguments.args]
    with_default = positional[len(positional) - len(arguments.defaults) :]
    pairs = [
        *zip(with_default, arguments.defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    for parameter, value in pairs:
        if value is not None:
            yield parameter.arg, value


def named_values(node: ast.AST) -> list[tuple[str, ast.expr]]:
    """The names and values of keyword arguments or defaults directly in a node."""
    if isinstance(node, ast.keyword) and node.arg:
        return [(node.arg, node.value)]
    if isinstance(node, ast.arguments):
        return list(defaults(node))
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [(node.target.id, node.value)] if node.value else []
    return []


def occurrences(wanted: Wanted, scope: ast.AST) -> list[ast.expr | ast.stmt]:
    """The nodes of a function or file that are what a fault wants to change.

    Of ``name=value`` as a keyword argument or default, it is the value.
    """
    found: list[ast.expr | ast.stmt] = []
    for node in ast.walk(scope):
        if isinstance(node, ast.expr | ast.stmt) and is_same(node, wanted.tree):
            found.append(node)
        if wanted.name and isinstance(wanted.tree, ast.Assign):
            for name, value in named_values(node):
                if name == wanted.name and is_same(value, wanted.tree.value):
                    found.append(value)
    return found


def place_of(node: ast.expr | ast.stmt, file: str, source: str) -> Place:
    """The text of a node; the columns of a syntax tree count bytes in UTF-8."""
    lines = source.splitlines(keepends=True)

    def offset(line: int, column: int) -> int:
        before = sum(len(x) for x in lines[: line - 1])
        return before + len(lines[line - 1].encode()[:column].decode())

    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    start = offset(node.lineno, node.col_offset)
    end = offset(node.end_lineno, node.end_col_offset)
    return Place(file, start, end, node.lineno, isinstance(node, ast.stmt))


# Find and make a fault.


def find(fault: Fault, package: Path = PACKAGE) -> Place:
    """The only place that the fault changes.

    Raises:
        NotFoundError: if there is none, with the nearest expressions, or if there are
            several, with their lines.
    """
    wanted = parsed(fault.old)
    found = []
    searched = []
    for file in files_of(fault, package):
        path = package / file
        if not path.exists():
            raise NotFoundError(f"there is no file {file}: {near_files(file, package)}")
        source = path.read_text()
        for scope in scopes(fault, ast.parse(source)):
            searched.append((file, scope))
            found += [place_of(x, file, source) for x in occurrences(wanted, scope)]
    if not searched:
        raise NotFoundError(
            f"there is no function {fault.function}: {near_functions(fault, package)}"
        )
    if not found:
        near = near_expressions(wanted, searched)
        raise NotFoundError(f"{fault.old!r} does not occur in {near}")
    if len(found) > 1:
        lines = ", ".join(f"{place.file}:{place.line}" for place in sorted(found))
        raise NotFoundError(f"{fault.old!r} occurs more than once: {lines}")
    return found[0]


def changed(fault: Fault, source: str, place: Place) -> str:
    """The source of a file with the fault."""
    new = textwrap.dedent(fault.new).strip()
    if not place.is_statement:
        new = f"({parsed_value(new)})"
    else:
        # A statement starts behind the indentation of its first line.
        column = place.start - (source.rfind("\n", 0, place.start) + 1)
        new = textwrap.indent(new, " " * column).lstrip()
    return source[: place.start] + new + source[place.end :]


def parsed_value(source: str) -> str:
    """An expression; the value of ``name=value``."""
    wanted = parsed(source)
    if isinstance(wanted.tree, ast.Assign):
        return ast.unparse(wanted.tree.value)
    return source


# What an error message says.


def near_files(file: str, package: Path) -> str:
    """The files whose names are nearest."""
    paths = [path.relative_to(package).as_posix() for path in package.rglob("*.py")]
    close = difflib.get_close_matches(file, sorted(paths), 3, 0.3)
    return f"near are {', '.join(close) or 'none'}"


def near_functions(fault: Fault, package: Path) -> str:
    """The functions whose names are nearest, in the files of the fault."""
    names = []
    for file in files_of(fault, package):
        tree = ast.parse((package / file).read_text())
        names += [name for name, _ in functions(tree)]
    close = difflib.get_close_matches(fault.function, sorted(set(names)), 3, 0.3)
    return f"near are {', '.join(close) or 'none'}"


def near_expressions(wanted: Wanted, searched: list[tuple[str, ast.AST]]) -> str:
    """Where was searched, and the expressions there that are nearest."""
    kind = ast.expr if isinstance(wanted.tree, ast.expr) else ast.stmt
    lines = {}
    for file, scope in searched:
        for node in ast.walk(scope):
            if isinstance(node, kind):
                lines.setdefault(ast.unparse(node), f"{file}:{node.lineno}")
    close = difflib.get_close_matches(ast.unparse(wanted.tree), lines, 3, 0.3)
    nearest = "".join(f"\n  {lines[source]}: {source}" for source in close)
    files = ", ".join(dict.fromkeys(file for file, _ in searched))
    return f"{files}; the nearest are{nearest or ' not there'}"


# Tests with a fault.


def tests_of(fault: Fault, file: str) -> str:
    """Arguments of pytest: the fault's own, or those of a file or its folder."""
    if fault.tests:
        return fault.tests
    folder, _, name = f"/{file.removesuffix('.py')}".rpartition("/")
    own = f"tests{folder}/test_{name}.py"
    if (ROOT / own).exists():
        return own
    return f"tests/test_{folder[1:]}.py"


def run_pytest(arguments: list[str], tree: Path) -> subprocess.CompletedProcess[str]:
    """The result of tests in a tree, up to the first failure."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", *arguments]
    return subprocess.run(
        command, cwd=tree, capture_output=True, text=True, check=False, timeout=600
    )


def caught_by(fault: Fault, tree: Path) -> str:
    """The first test that fails with the fault in ``tree``; "" if all pass.

    Raises:
        NotFoundError: if the fault cannot be made.
        OtherReasonError: if the test does not pass without the fault.
    """
    place = find(fault, tree / "normpre_optax")
    path = tree / "normpre_optax" / place.file
    source = path.read_text()
    path.write_text(changed(fault, source, place))
    try:
        done = run_pytest(tests_of(fault, place.file).split(), tree)
    finally:
        path.write_text(source)
    if not done.returncode:
        return ""

    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.MULTILINE)
    if not failed or run_pytest([failed[1]], tree).returncode:
        raise OtherReasonError(done.stdout[-2000:] + done.stderr[-2000:])
    return failed[1]


def main(names: list[str]) -> int:
    """Try the faults of these names, or all; return how many survived."""
    unknown = sorted(set(names) - FAULTS.keys())
    if unknown:
        known = ", ".join(FAULTS)
        raise SystemExit(f"no such fault: {', '.join(unknown)}; there are {known}")

    names = names or list(FAULTS)
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*NOT_COPIED))
        for name in names:
            start = time.perf_counter()
            caught = ""
            try:
                caught = caught_by(FAULTS[name], tree)
                result = caught or "SURVIVED"
            except NotFoundError as error:
                result = f"NOT FOUND: {error}"
            except OtherReasonError as error:
                result = f"FAILS FOR ANOTHER REASON: {error}"
            survivors += not caught
            seconds = time.perf_counter() - start
            print(f"{name:28} {seconds:5.0f} s  {result}", flush=True)
    print(f"{survivors} of {len(names)} survived")
    return survivors


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
