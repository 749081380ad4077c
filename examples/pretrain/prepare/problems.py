# SPDX-License-Identifier: Apache-2.0
"""What is left out of folders and files, or replaced in them, and packages missing."""

import importlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..config import RunError

# Files and folders that a search leaves out, and what it counts them as.
LeftOut = dict[Path, str]


class Found(NamedTuple):
    """How often something was found in a file, and where first."""

    count: int
    unit: str
    first: int

    def __str__(self) -> str:
        if not (self.unit and self.first):
            return ""
        return f" ({self.unit}s: {self.count:,}, the first is {self.first:,})"


class Problems:
    """What is left out of folders and files, or replaced in them.

    A file that is read again is counted anew. ``number`` is that of the line, or other
    ``unit``, of the current file that was read last.

    Args:
        skip: whether what cannot be read is skipped, not refused.
    """

    def __init__(self, skip: bool):
        self.skip = skip
        self.left_out: LeftOut = {}
        self._found: dict[tuple[str, str], Found] = {}

    def begin(self, name: str, unit: str = "line") -> None:
        """Go to the beginning of a file."""
        self.name = name
        self.unit = unit
        self.number = 0
        self._found = {
            key: found for key, found in self._found.items() if key[0] != name
        }

    def note(self, what: str) -> None:
        """Count something in the current line."""
        key = (self.name, what)
        before = self._found.get(key, Found(0, self.unit, self.number))
        self._found[key] = before._replace(count=before.count + 1)

    def bad(self, what: str, detail: str) -> None:
        """Count the current line, which is skipped.

        Raises:
            RunError: if bad lines are not skipped.
        """
        if not self.skip:
            where = self.name
            if self.unit and self.number:
                where += f", {self.unit} {self.number}"
            raise RunError(f"{where}: {what} ({detail}); --skip-bad skips it")
        self.note(f"{what}, skipped")

    def summary(self) -> str:
        """What searches and the reading of files left out, in one line."""
        documents: Counter[str] = Counter()
        for (_, what), found in self._found.items():
            kind, _, ending = what.rpartition(", ")
            if ending in ("left out", "skipped"):
                documents[kind] += found.count
        return summary(self.left_out, documents)

    def lines(self) -> Iterator[str]:
        """One line for every file and problem."""
        for (name, what), found in self._found.items():
            yield f"{name}: {what}{found}"


def summary(left_out: LeftOut, documents: Mapping[str, int] | None = None) -> str:
    """What searches left out, and how many documents of each kind, in one line."""
    counts = Counter(left_out.values()) + Counter(documents)
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in counts.most_common())
    return f"left out: {kinds or 'nothing'}"


def require(package: str) -> Any:
    """A package of the extra ``corpora``.

    Raises:
        RunError: where it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise RunError(
            f"this needs the package `{package}`: run `pip install -e '.[corpora]'` in"
            " the clone"
        ) from error
