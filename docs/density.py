# SPDX-License-Identifier: Apache-2.0
"""Print how dense code is; advice, never a failure: ``python docs/density.py FOLDER``.

A code line is one that is not blank, a comment or part of a docstring. The aim, after
optax and dion: a mean of 36 characters, nothing over 88, two conditional expressions
per 100 lines, 6 to 8 comments per 100 lines, no function above 45 lines.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

AIM = "aim: mean 36, 0 over 88, 2 conditional expressions, longest function 45"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LAYOUT = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


class Source(NamedTuple):
    """A file: its syntax tree, its code lines by number, and its comments."""

    path: Path
    tree: ast.Module
    lines: dict[int, str]
    comments: int


def docstring_lines(tree: ast.Module) -> set[int]:
    """The numbers of the lines of docstrings."""
    found: set[int] = set()
    for node in ast.walk(tree):
        documented = isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS))
        if documented and ast.get_docstring(node) is not None:
            text = node.body[0]
            found.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return found


def read(path: Path) -> Source:
    """Read a file."""
    text = path.read_text()
    tree, used, comments = ast.parse(text), set(), 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments += not token.string.startswith("# SPDX")
        elif token.type not in LAYOUT:
            used.update(range(token.start[0], token.end[0] + 1))
    numbers = sorted(used - docstring_lines(tree))
    lines = text.splitlines()
    return Source(path, tree, {i: lines[i - 1] for i in numbers}, comments)


def functions(source: Source) -> list[tuple[int, str]]:
    """The code lines and the name of every function."""
    found = []
    for node in ast.walk(source.tree):
        if isinstance(node, FUNCTIONS):
            span = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            count = sum(i in source.lines for i in span)
            found.append((count, f"{source.path}:{node.name}"))
    return found


def describe(folder: str) -> list[str]:
    """The figures of a folder, and its longest functions."""
    sources = [read(path) for path in sorted(Path(folder).rglob("*.py"))]
    lines = [line for source in sources for line in source.lines.values()]
    count = max(1, len(lines))
    nodes = [node for source in sources for node in ast.walk(source.tree)]
    mean = sum(len(line.strip()) for line in lines) / count
    conditional = 100 * sum(isinstance(node, ast.IfExp) for node in nodes) / count
    comments = 100 * sum(source.comments for source in sources) / count
    longest = sorted((f for source in sources for f in functions(source)), reverse=True)
    figures = (
        f"{folder}: {len(lines)} code lines, mean {mean:.1f},"
        f" {sum(len(line) > 88 for line in lines)} over 88;"
        f" per 100 lines {conditional:.1f} conditional expressions"
        f" and {comments:.1f} comments"
    )
    return [figures, *(f"  {lines:3} lines: {name}" for lines, name in longest[:3])]


if __name__ == "__main__":
    for folder in sys.argv[1:] or ["normpre_optax", "examples/pretrain"]:
        print(*describe(folder), sep="\n")
    print(AIM)
