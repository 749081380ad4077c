# SPDX-License-Identifier: Apache-2.0
"""The corpus every Python brings along: the source of its standard library. Any folder of Python files will do, too.

Left out: installed packages, tests (many distributions ship without them), tables of characters, help texts, files
that the installation wrote, files that are not UTF-8, second copies of a text. A file goes to training or validation
by a hash of its path: the same on every machine, and no file is in both.
"""

import hashlib
import platform
import sysconfig
import zlib
from collections.abc import Callable
from pathlib import Path

from ..config import DataConfig, RunError
from . import token_files
from .tokenizer import train_tokenizer

INSTALLED = frozenset({"site-packages", "dist-packages", "__pycache__"})
TESTS = frozenset({"test", "tests", "idle_test"})
TABLES = frozenset({"encodings", "pydoc_data"})
LEFT_OUT = INSTALLED | TESTS | TABLES


def prepare(config: DataConfig, say: Callable[[str], None]) -> Path:
    """The folder with the token files of the corpus, made on first use and named by its content.

    Args:
        config: corpus, vocabulary, share of validation files, and the folder to work in.
        say: takes one line of progress.

    Raises:
        RunError: where a split has no source files.
    """
    source = config.source or standard_library()
    splits = split_by_file(read_sources(source), config.validation_percent)
    for name, texts in splits.items():
        if not texts:
            raise RunError(
                f"no Python source for {name} under {source}: --data.source DIR takes another folder of .py files"
            )
    fingerprint = hash_of(splits, config.vocabulary)
    origin = "custom" if config.source else platform.python_version()
    folder = config.folder / f"python-{origin}-v{config.vocabulary}-{fingerprint[:10]}"
    if not (folder / "manifest.json").exists():
        size = sum(len(text) for texts in splits.values() for text in texts.values()) / 1e6
        say(f"Training a tokenizer on {size:.1f} MB of Python source, once: {folder}")
        tokenizer = train_tokenizer(splits["train"].values(), config.vocabulary)
        library = f"standard library of {platform.python_implementation()} {platform.python_version()}"
        about = {"source": str(config.source or library), "fingerprint": fingerprint}
        token_files.write(folder, tokenizer, {name: list(texts.values()) for name, texts in splits.items()}, about)
    return folder


def standard_library() -> Path:
    """Where the running interpreter keeps its library."""
    return Path(sysconfig.get_path("stdlib"))


def read_sources(library: Path) -> dict[str, str]:
    """Path below ``library`` -> text, in order of path."""
    texts: dict[str, str] = {}
    seen: set[str] = set()
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library)
        if LEFT_OUT.intersection(relative.parts) or path.name.startswith("_sysconfigdata"):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip() and text not in seen:
            seen.add(text)
            texts[relative.as_posix()] = text
    return texts


def split_by_file(texts: dict[str, str], validation_percent: int) -> dict[str, dict[str, str]]:
    """Every file in exactly one of ``train`` and ``validation``, by the hash of its path alone."""
    splits: dict[str, dict[str, str]] = {name: {} for name in token_files.SPLITS}
    for path, text in texts.items():
        held_out = zlib.crc32(path.encode()) % 100 < validation_percent
        splits["validation" if held_out else "train"][path] = text
    return splits


def hash_of(splits: dict[str, dict[str, str]], vocabulary: int) -> str:
    """Hexadecimal digest of everything the token files depend on."""
    digest = hashlib.sha256(f"byte-level BPE {vocabulary}".encode())
    for name, texts in splits.items():
        for path, text in texts.items():
            digest.update(f"\0{name}\0{path}\0{text}".encode())
    return digest.hexdigest()
