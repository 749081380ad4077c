# SPDX-License-Identifier: Apache-2.0
"""The corpus every Python brings along: the source of its standard library. Any folder of Python files will do, too.

Left out: tests (many distributions ship without them), tables of characters, help texts, files that the installation
wrote, files that are not UTF-8, second copies of a text. Installed packages are left out unless asked for; of them,
very large files and files that are mostly numbers or endless lines are left out, too. A file goes to training or
validation by a hash of its path: the same on every machine, and no file is in both.
"""

import hashlib
import os
import platform
import shutil
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer

from ..config import DataConfig, RunError
from . import token_files
from .sources import LocalTexts, Stream, sample
from .tokenizer import train_tokenizer

T = TypeVar("T")
Splits = dict[str, dict[str, Path]]

INSTALLED = frozenset({"site-packages", "dist-packages", "__pycache__"})
TESTS = frozenset({"test", "tests", "idle_test"})
TABLES = frozenset({"encodings", "pydoc_data"})
LEFT_OUT = INSTALLED | TESTS | TABLES
LARGEST_INSTALLED = 1_000_000


def prepare(config: DataConfig, say: Callable[[str], None]) -> Path:
    """The folder with the token files of the corpus, made on first use and named by its content.

    Args:
        config: corpus, vocabulary, share of validation files, and the folder to work in.
        say: takes one line of progress.

    Raises:
        RunError: where a split has no source files.
    """
    splits = find_splits(config.source, config.include_site_packages, config.validation_percent)
    fingerprint = hash_of(splits, config.vocabulary)
    origin = "custom" if config.source else platform.python_version()
    packages = "-packages" if config.include_site_packages else ""
    folder = config.folder / f"python-{origin}{packages}-v{config.vocabulary}-{fingerprint[:10]}"
    if not (folder / "manifest.json").exists():
        size = sum(path.stat().st_size for files in splits.values() for path in files.values()) / 1e6
        say(f"Training a tokenizer on {size:.1f} MB of Python source, once: {folder}")
        write(folder, config, splits)
    return folder


def write(folder: Path, config: DataConfig, splits: Splits) -> None:
    """Make ``folder`` in one go; where another process has made it meanwhile, theirs stays."""
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    layout = token_files.Layout()
    writer = token_files.Writer(partial, lambda: make_tokenizer(splits, config.vocabulary), layout, {})
    try:
        token_files.fill(writer, streams(splits), lambda writer: None)
        writer.finish(folder, about(config.source, config.include_site_packages, config.vocabulary))
    except OSError:
        if not (folder / "manifest.json").exists():
            raise
    finally:
        writer.discard()


def about(source: Path | None, include_site_packages: bool, vocabulary: int) -> dict[str, str]:
    """What the manifest says of the corpus."""
    library = f"standard library of {platform.python_implementation()} {platform.python_version()}"
    packages = " and installed packages" if include_site_packages else ""
    return {"source": f"{source or library}{packages}", "tokenizer": f"byte-level BPE of {vocabulary}, trained on it"}


def streams(splits: Splits) -> list[Stream]:
    """The files of each split, one after the other."""
    return [
        Stream(LocalTexts(lambda files=splits[split]: read_all(files.values()), len(splits[split])), held_out)
        for split, held_out in (("train", 0.0), ("validation", 1.0))
    ]


def make_tokenizer(splits: Splits, vocabulary: int) -> Tokenizer:
    """A tokenizer trained on the training files, or on a sample where they are many."""
    return train_tokenizer(sample(lambda: read_all(splits["train"].values())), vocabulary)


def standard_library() -> Path:
    """Where the running interpreter keeps its library."""
    return Path(sysconfig.get_path("stdlib"))


def site_packages() -> list[Path]:
    """Where the running interpreter keeps installed packages."""
    return list(dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")))


def find_splits(source: Path | None, include_site_packages: bool, validation_percent: int) -> Splits:
    """The files of the corpus by split.

    Raises:
        RunError: where a split has none.
    """
    seen: set[bytes] = set()
    library = source or standard_library()
    files = find_sources(library, seen)
    for folder in site_packages() if include_site_packages else []:
        found = find_sources(folder, seen, installed=True)
        files |= {f"site-packages/{name}": path for name, path in found.items()}
    splits = split_by_file(files, validation_percent)
    for split, chosen in splits.items():
        if not chosen:
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
            text = path.read_text(encoding="utf-8")
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
    return (path.read_text(encoding="utf-8") for path in paths)


def split_by_file(files: dict[str, T], validation_percent: int) -> dict[str, dict[str, T]]:
    """Every file in exactly one of ``train`` and ``validation``, by the hash of its path alone."""
    splits: dict[str, dict[str, T]] = {name: {} for name in token_files.SPLITS}
    for path, file in files.items():
        held_out = zlib.crc32(path.encode()) % 100 < validation_percent
        splits["validation" if held_out else "train"][path] = file
    return splits


def hash_of(splits: Splits, vocabulary: int) -> str:
    """Hexadecimal digest of everything the token files depend on."""
    digest = hashlib.sha256(f"token files 2, byte-level BPE {vocabulary}".encode())
    for split, files in splits.items():
        for (name, _), text in zip(files.items(), read_all(files.values()), strict=True):
            digest.update(f"\0{split}\0{name}\0{text}".encode())
    return digest.hexdigest()
