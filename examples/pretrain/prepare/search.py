# SPDX-License-Identifier: Apache-2.0
"""Search folders for files to read."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..config import RunError
from .problems import LeftOut, summary

PACKED = (".gz", ".zst")
# A folder is searched for these. A bare .json in it is rather a manifest, but you can
# name it.
RECORDS = (".jsonl", ".parquet", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst")
PLAIN = (".txt", ".md", ".rst", ".tex")
TEXT = (
    *PLAIN,
    *(kind + ".gz" for kind in PLAIN),
    *(kind + ".zst" for kind in PLAIN),
)
SUFFIXES = {
    "python": (".py",),
    "text": TEXT,
    "jsonl": RECORDS,
    "openwebtext": RECORDS,
    "c4": RECORDS,
    "pile": RECORDS,
}
LFS = b"version https://git-lfs"
LFS_BYTES = 1024


def find_files(
    paths: Iterable[Path], suffixes: tuple[str, ...], left_out: LeftOut, seen: set[Path]
) -> list[Path]:
    """The files named and those below the folders named.

    Without those in ``seen``, to which they are added.

    Raises:
        RunError: where a path does not exist, or there are no such files.
    """
    found: list[Path] = []
    for path in paths:
        found += files_below(existing(path), suffixes, left_out, seen)
    check_found(found, suffixes, left_out)
    return found


def existing(path: Path) -> Path:
    """A path that was named, which must be that of a file or folder."""
    if path.is_file() or path.is_dir():
        return path
    if path.exists():
        raise RunError(f"{path} is neither a file nor a folder")
    raise RunError(f"{path} does not exist")


def check_found(
    found: Sequence[Any], suffixes: tuple[str, ...], left_out: LeftOut
) -> None:
    """Raise a RunError where a search has found nothing."""
    if not found:
        kinds = ", ".join(suffix for suffix in suffixes if suffix.count(".") == 1)
        raise RunError(
            f"no files to read: give files, or folders with {kinds} files;"
            f" {summary(left_out)}"
        )


def files_below(
    path: Path, suffixes: tuple[str, ...], left_out: LeftOut, seen: set[Path]
) -> Iterator[Path]:
    """A file, or those of a folder with a suffix in order of their paths.

    Through links, each once.
    """
    real = path.resolve()
    if real in seen:
        return
    seen.add(real)
    if path.is_file():
        yield path
    if path.is_dir():
        for inside in sorted(path.iterdir()):
            if kind := left_out_as(inside, suffixes):
                left_out[inside] = kind
            else:
                yield from files_below(inside, suffixes, left_out, seen)


def left_out_as(path: Path, suffixes: tuple[str, ...]) -> str:
    """What a search counts a file or folder as that it leaves out; "" for others."""
    if path.name.startswith("."):
        return "hidden"
    if not path.exists():
        return "broken links"
    if not os.access(path, os.R_OK):
        return "without permission to read"
    if path.is_dir():
        return ""
    if not path.is_file():
        return "pipes or devices"
    kind = suffix_of(path)
    if kind not in suffixes:
        return kind or "no suffix"
    if path.stat().st_size < LFS_BYTES and path.read_bytes().startswith(LFS):
        return "Git LFS pointers (git lfs pull)"
    return ""


def suffix_of(path: Path) -> str:
    """The suffix of a file in lower case, of a packed one both: ".jsonl.gz"."""
    suffixes = Path(path.name.lower()).suffixes
    count = 1
    if suffixes and suffixes[-1] in PACKED:
        count = 2
    return "".join(suffixes[-count:])
