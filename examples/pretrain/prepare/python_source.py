# SPDX-License-Identifier: Apache-2.0
"""Python files of folders, or of the standard library and the installed packages."""

import hashlib
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from .encodings import NULS, reason
from .problems import LeftOut, Problems
from .search import SUFFIXES, check_found, existing, files_below
from .sources import Stream

# Folders without prose: tests, which many distributions ship without, tables of
# characters, help texts.
LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
}
LEFT_OUT_AS = "Python files that are tests, copies, tables, empty or not UTF-8"


def python_streams(
    folders: Sequence[Path],
    installed: bool,
    percent: float,
    left_out: LeftOut,
    problems: Problems | None = None,
) -> list[Stream]:
    """Python files of the folders, or of the standard library; those held out apart.

    With those of the ``installed`` packages. Left out: tests (many distributions ship
    without them), tables of characters, help texts, files that the installation wrote,
    files that are not UTF-8, second copies of a text, and of packages tables. A file is
    in training or validation by a hash of its path: the same on every machine.

    Raises:
        RunError: if a file in the folders has NULs, and ``problems`` are not skipped.
            Without ``problems``, and of the installation, it is left out.
    """
    if not folders:
        problems = None
    files: dict[str, list[Path]] = {"train": [], "validation": []}
    for name, path in named_files(folders, installed, left_out, problems):
        split = "train"
        if zlib.crc32(name.encode()) % 100 < percent:
            split = "validation"
        files[split].append(path)
    return [
        files_stream(files["train"], held_out=0.0),
        files_stream(files["validation"], held_out=1.0),
    ]


def files_stream(files: Sequence[Path], held_out: float) -> Stream:
    """The texts of files, each a document."""
    return Stream(lambda: map(read_source, files), held_out, files)


def named_files(
    folders: Sequence[Path],
    installed: bool,
    left_out: LeftOut,
    problems: Problems | None = None,
) -> list[tuple[str, Path]]:
    """Files, and their names, which are the same on every machine."""
    files: list[tuple[str, Path]] = []
    seen: set[bytes] = set()
    for folder in map(existing, folders or [Path(sysconfig.get_path("stdlib"))]):
        root = folder
        if not folder.is_dir():
            root = folder.parent
        for path in python_files(folder, seen, left_out, problems):
            files.append((path.relative_to(root).as_posix(), path))
    if installed:
        for folder in site_packages():
            for path in python_files(folder, seen, left_out, tables=False):
                name = path.relative_to(folder).as_posix()
                files.append((f"site-packages/{name}", path))
    check_found(files, SUFFIXES["python"], left_out)
    return files


def site_packages() -> list[Path]:
    """Where the running interpreter keeps installed packages."""
    folders = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]
    return list(dict.fromkeys(folders))


def python_files(
    folder: Path,
    seen: set[bytes],
    left_out: LeftOut,
    problems: Problems | None = None,
    *,
    tables: bool = True,
) -> Iterator[Path]:
    """Files in order of path; ``seen`` collects digests of their texts."""
    for path in files_below(folder, SUFFIXES["python"], left_out, set()):
        text = ""
        if not is_without_prose(path, folder):
            data = path.read_bytes()
            if b"\0" in data and problems is not None:
                problems.begin(str(path), "")
                problems.bad(NULS, reason(data, ""))
                continue  # counted there
            text = text_of(data)
        digest = hashlib.sha256(text.encode()).digest()
        if text.strip() and digest not in seen and (tables or not is_table(text)):
            seen.add(digest)
            yield path
        else:
            left_out[path] = LEFT_OUT_AS


def is_without_prose(path: Path, folder: Path) -> bool:
    """Whether a file is in a folder to leave out, or the installation wrote it."""
    # Such as _sysconfigdata__linux_x86_64-linux-gnu.py.
    written = path.name.startswith("_sysconfigdata")
    return written or bool(LEFT_OUT.intersection(path.relative_to(folder).parts))


def text_of(data: bytes) -> str:
    """The text of a file; "" if it is not UTF-8."""
    if b"\0" in data:
        return ""
    with suppress(UnicodeDecodeError):
        return data.decode("utf-8-sig")
    return ""


def read_source(path: Path) -> str:
    """The text of a file, line endings as they are."""
    return path.read_bytes().decode("utf-8-sig")


def is_table(text: str) -> bool:
    """Whether a file is a table rather than code.

    It is huge, has lines of 200 characters on average, or consists of digits by a
    third.
    """
    lines = text.count("\n") + 5
    if len(text) > min(1_000_000, 200 * lines):
        return True
    digits = sum(map(text.count, "0123456789"))
    return digits > len(text) / 3
