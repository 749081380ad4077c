# SPDX-License-Identifier: Apache-2.0
"""Paths that Orbax, or a library below it, does not take as they are.

What is written there ends up in another folder, or is not merged into one checkpoint:
it could never be read.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from .config import RunError

# Regular expressions of what is misread in a path, and as what. Neither can a
# checkpoint be read from there.
MISREAD = {
    r"\\": "'/'",
    r"\*\*": "a pattern",
    r"gs:(?=/)": "a bucket of Google Storage",
    r"^/(gs|s3|az|hf)(?=/)": "a bucket",
    "[\udc80-\udcff]": "no text, because it is not UTF-8",
}
# What can be read, but not written. Only "[" with a "]" behind it is a pattern, and
# neither "[]" nor "[!]" is.
PATTERNS = {r"[*?]|\[(![^/]|[^!/])[^/]*\]": "a pattern"}


def full_path(folder: Path) -> Path:
    """The absolute path of a folder.

    Orbax drops ``x/..`` from a path, which is another folder where ``x`` is a link.
    """
    if ".." in folder.parts:
        return folder.resolve()
    return folder.absolute()


def check_readable(folder: Path) -> None:
    """Refuse a folder whose checkpoints Orbax would look for elsewhere.

    Raises:
        RunError: naming the path, and the characters that are misread.
    """
    check(folder, MISREAD, "read from", "move the run to a path without that")


def check_writable(folder: Path) -> None:
    """Refuse a folder for checkpoints that could not be read from it.

    Raises:
        RunError: naming the path, and the characters that are misread.
    """
    fix = "choose another --name, --runs-folder or working folder"
    check(folder, MISREAD | PATTERNS, "stored in", fix)


def check(folder: Path, misread: Mapping[str, str], purpose: str, fix: str) -> None:
    """Refuse a folder with characters that are misread."""
    # As the folder of checkpoints is: something follows.
    path = f"{full_path(folder)}/"
    for pattern, what in misread.items():
        if found := re.search(pattern, path):
            raise RunError(
                f"no checkpoints can be {purpose} {full_path(folder)}: Orbax reads"
                f" {found[0]!r} in it as {what}; {fix}"
            )
