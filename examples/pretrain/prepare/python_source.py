# SPDX-License-Identifier: Apache-2.0
"""A corpus without a download: the source of Python's standard library, or any folder of Python files.

Left out: tests (many distributions ship without them), tables of characters, help texts, files that the installation
wrote, files that are not UTF-8, and second copies of a text. Installed packages are included on request, without very
large files and files that are mostly numbers or very long lines. A file goes to training or validation by a hash of
its path: the same on every machine, and no file is in both.
"""

import functools
import hashlib
import os
import platform
import shutil
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ..config import DataConfig, RunError
from . import token_files
from .sources import LocalTexts, Stream
from .tokenizer import train_on

Splits = dict[str, dict[str, Path]]

INSTALLED = {"site-packages", "dist-packages", "__pycache__"}
LEFT_OUT = INSTALLED | {"test", "tests", "idle_test", "encodings", "pydoc_data"}
LARGEST_INSTALLED = 1_000_000


def prepare(config: DataConfig, say: Callable[[str], None]) -> Path:
    """The folder of the corpus's token files, written on first use and named by its content.

    Args:
        config: corpus, vocabulary, share of validation files, and the folder to work in.
        say: takes one line of progress.

    Raises:
        RunError: where a split has no source files.
    """
    splits = find_splits(config.source, config.include_site_packages, config.validation_percent)
    fingerprint = hash_of(splits, config.vocabulary)
    library = f"standard library of {platform.python_implementation()} {platform.python_version()}"
    version = "custom" if config.source else platform.python_version()
    packages = "-packages" if config.include_site_packages else ""
    folder = config.folder / f"python-{version}{packages}-v{config.vocabulary}-{fingerprint[:10]}"
    if (folder / "manifest.json").exists():
        return folder
    size = sum(path.stat().st_size for files in splits.values() for path in files.values()) / 1e6
    say(f"Training a tokenizer on {size:.1f} MB of Python source, once: {folder}")
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    source = f"{config.source or library}{' and installed packages' if packages else ''}"
    about = {"source": source, "tokenizer": f"byte-level BPE of {config.vocabulary}, trained on it"}
    train = functools.partial(train_on, functools.partial(streams, splits), config.vocabulary)
    try:
        token_files.write(partial, folder, train, streams(splits), {}, about)
    except OSError:  # another process may have written it meanwhile
        if not (folder / "manifest.json").exists():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def streams(splits: Splits) -> list[Stream]:
    """The files of each split, one after the other."""
    read = {split: functools.partial(read_all, files.values()) for split, files in splits.items()}
    return [Stream(LocalTexts(read["train"]), 0.0), Stream(LocalTexts(read["validation"]), 1.0)]


def site_packages() -> list[Path]:
    """Where the running interpreter keeps installed packages."""
    return list(dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")))


def find_splits(source: Path | None, include_site_packages: bool, validation_percent: int) -> Splits:
    """The files of the corpus by split.

    Raises:
        RunError: where a split has none.
    """
    seen: set[bytes] = set()
    library = source or Path(sysconfig.get_path("stdlib"))
    files = find_sources(library, seen)
    for folder in site_packages() if include_site_packages else []:
        found = find_sources(folder, seen, installed=True)
        files |= {f"site-packages/{name}": path for name, path in found.items()}
    splits: Splits = {split: {} for split in token_files.SPLITS}
    for name, path in files.items():
        splits[split_of(name, validation_percent)][name] = path
    for split in splits:
        if not splits[split]:
            raise RunError(f"no Python source for {split} under {library}: another folder of .py files may have some")
    return splits


def find_sources(folder: Path, seen: set[bytes], *, installed: bool = False) -> dict[str, Path]:
    """Name (the path below ``folder``) -> file, in order of path; ``seen`` collects digests of the texts."""
    files: dict[str, Path] = {}
    for path in sorted(folder.rglob("*.py")):
        relative = path.relative_to(folder)
        if LEFT_OUT.intersection(relative.parts) or path.name.startswith("_sysconfigdata"):
            continue
        try:
            (text,) = read_all([path])
        except (UnicodeDecodeError, OSError):
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if text.strip() and digest not in seen and not (installed and is_data(text)):
            seen.add(digest)
            files[relative.as_posix()] = path
    return files


def is_data(text: str) -> bool:
    """Whether a file is a table, not a program: huge, with lines of 200 characters on average, or a third digits."""
    if len(text) > LARGEST_INSTALLED or len(text) > 200 * (text.count("\n") + 5):
        return True
    return sum(map(text.count, "0123456789")) > len(text) / 3


def read_all(paths: Iterable[Path]) -> Iterator[str]:
    """The texts of the files."""
    for path in paths:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield file.read()


def split_of(name: str, validation_percent: int) -> str:
    """The split of a file, by the hash of its path alone."""
    return "validation" if zlib.crc32(name.encode()) % 100 < validation_percent else "train"


def hash_of(splits: Splits, vocabulary: int) -> str:
    """Hexadecimal digest of everything that the token files depend on."""
    digest = hashlib.sha256(f"token files 2, byte-level BPE {vocabulary}".encode())
    for split, files in splits.items():
        for name, text in zip(files, read_all(files.values()), strict=True):
            digest.update(f"\0{split}\0{name}\0{text}".encode())
    return digest.hexdigest()
