# SPDX-License-Identifier: Apache-2.0
"""Find the places that still have the placeholder of the repository's address.

``python docs/placeholders.py`` prints each one as file:line, and fails if there is one.
It is a step of a release, and no part of CI: the address is chosen when the repository
is published.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
# In two parts, so that this file does not find itself.
PLACEHOLDER = "github.com/" + "OWNER"
SEARCHED = (
    "pyproject.toml",
    "README.md",
    ".github",
    "docs",
    "examples",
    "normpre_optax",
)
TEXT = {".cff", ".ipynb", ".md", ".py", ".rst", ".toml", ".yml"}


def files(root: Path) -> Iterator[Path]:
    """The text files that may name the repository."""
    for name in SEARCHED:
        path = root / name
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in found:
            if file.suffix in TEXT and "_build" not in file.parts:
                yield file


def places(root: Path = ROOT) -> list[str]:
    """Every line with the placeholder, as "file:line: text"."""
    found = []
    for file in files(root):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if PLACEHOLDER in line:
                where = f"{file.relative_to(root)}:{number}"
                found.append(f"{where}: {line.strip()}")
    return found


def main() -> int:
    """Print the places; return the exit status."""
    found = places()
    for place in found:
        print(place)
    print(f"{len(found)} places have {PLACEHOLDER}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
