# SPDX-License-Identifier: Apache-2.0
"""Write a corpus to disk: token files, ``tokenizer.json``, ``manifest.json``.

``train.bin`` and ``validation.bin`` are flat little-endian arrays: the documents one
after the other, each followed by the separator. In the layout "documents" each is cut
to context + 1 tokens (inputs and targets, shifted by one), and ``train.offsets`` and
``validation.offsets`` (int64) store where each begins, then the end of the last.

The folder is filled under another name, batch by batch, and renamed when it is
complete. ``state.json`` says how much of the files counts; what a killed process wrote
after that is cut off by the next.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import IO, Any

import numpy as np
from tokenizers import Tokenizer

from ..config import RunError
from ..processes import LOCK, lock
from .sources import Stream
from .tokenizer import (
    end_of_text,
    load_tokenizer,
    unknown_of,
    vocabulary_of,
    write_tokenizer,
)

SPLITS = ("train", "validation")
COUNTED = ("documents", "bytes", "tokens")
REPORTED = ("documents without tokens", "unknown tokens")
BATCH_DOCUMENTS = 1024
BATCH_CHARACTERS = 4_000_000
STATE = "state.json"
OFFSET = np.dtype("<i8")
# Files of the folder that are replaced; others stay.
OWN = {
    "tokenizer.json",
    "manifest.json",
    STATE,
    LOCK,
    "train.bin",
    "train.offsets",
    "validation.bin",
    "validation.offsets",
}

Counts = Mapping[str, Mapping[str, int]]


def write(
    partial: Path,
    folder: Path,
    make_tokenizer: Callable[[], Tokenizer],
    streams: Sequence[Stream],
    settings: Mapping[str, Any],
    about: Mapping[str, str],
    report: Callable[[Counts], None] = lambda counts: None,
) -> Counts:
    """Write all documents of the streams to ``partial``, and rename it.

    It continues where the last process stopped.

    Args:
        partial: the folder to work in.
        folder: its name when it is complete.
        make_tokenizer: makes the tokenizer; called at the very start only.
        streams: the documents.
        settings: everything that the outcome depends on, as JSON. Of these, ``layout``,
            ``context``, ``end_token`` and the largest number of ``train_documents`` and
            ``validation_documents`` are used here.
        about: what the manifest says of the corpus.
        report: called with the counts at the start and after every batch.

    Returns:
        Documents, bytes of their text (before they are cut) and tokens of each split.

    Raises:
        RunError: where another process is at work, ``partial`` is damaged or has other
            settings, or a split is empty.
    """
    partial.mkdir(parents=True, exist_ok=True)
    with lock(partial) or nullcontext():
        try:
            state = read_state(partial, json.loads(json.dumps(settings, default=str)))
            if state["position"] is None:
                write_tokenizer(make_tokenizer(), partial / "tokenizer.json")
            with ExitStack() as files:
                writer = Writer(partial, state, files)
                report(writer.counts)
                writer.fill(streams, report)
            writer.write_manifest(about)
            replace(folder, partial)
        finally:
            if not (partial / STATE).exists():
                shutil.rmtree(partial, ignore_errors=True)
    for name in (STATE, LOCK):
        (folder / name).unlink(missing_ok=True)
    return writer.counts


def replace(folder: Path, new: Path) -> None:
    """Put a folder in the place of another, whose other files it takes over."""
    for path in folder.glob("*"):
        if path.name not in OWN:
            path.rename(new / path.name)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(new, folder)


class Writer:
    """The token files of a folder, from where the last process stopped."""

    def __init__(self, folder: Path, state: dict[str, Any], files: ExitStack):
        self.folder = folder
        self.state = state
        self.counts = state["splits"]
        settings = state["settings"]
        self.context: int | None = None
        if settings.get("layout") == "documents":
            self.context = settings["context"]
        self.tokenizer = load_tokenizer(folder / "tokenizer.json")
        self.end = end_of_text(self.tokenizer, settings.get("end_token"))
        self.unknown = unknown_of(self.tokenizer)
        self.vocabulary = vocabulary_of(self.tokenizer)
        self.dtype = token_dtype(self.vocabulary)
        self.files = {
            name: files.enter_context(reopen(folder / name, size))
            for name, size in self._sizes().items()
        }
        self.save()

    def _sizes(self) -> dict[str, int]:
        """Bytes of every file that count; what comes after them is to be cut off."""
        sizes = {
            f"{split}.bin": counts["tokens"] * self.dtype.itemsize
            for split, counts in self.counts.items()
        }
        if self.context:
            for split, counts in self.counts.items():
                offsets = 0
                if counts["documents"]:
                    offsets = counts["documents"] + 1  # the last is the end of the file
                sizes[f"{split}.offsets"] = offsets * OFFSET.itemsize
        return sizes

    def fill(self, streams: Sequence[Stream], report: Callable[[Counts], None]) -> None:
        """Append the documents of the streams, from the stored position on."""
        start = self.state["position"] or {"stream": 0, "texts": None}
        first = start["stream"]
        for number, stream in enumerate(streams[first:], first):
            if number == first and start["texts"] is not None:
                stream.load_state_dict(start["texts"])
            for texts in batches(stream):
                if self.full(stream):
                    break
                self.append([(stream.split_of(text), text) for text in texts])
                position = {"stream": number, "texts": stream.state_dict()}
                self.state["position"] = position
                self.save()
                report(self.counts)

    def room(self, split: str) -> int | None:
        """Documents that a split may still get; None: any number."""
        limit = self.state["settings"].get(f"{split}_documents")
        if limit is None:
            return None
        return limit - self.counts[split]["documents"]

    def full(self, stream: Stream) -> bool:
        """Whether the splits of a stream get no more documents."""
        return all(self.room(split) == 0 for split in stream.splits)

    def append(self, documents: Sequence[tuple[str, str]]) -> None:
        """Tokenize (split, text) pairs and write them."""
        for split in self.counts:
            texts = [text for name, text in documents if name == split]
            self._append_to(split, texts)

    def _append_to(self, split: str, texts: Sequence[str]) -> None:
        """Tokenize texts, write as many as there is room for, and count them."""
        counts = self.counts[split]
        encodings = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        pairs = [
            (text, encoding.ids)
            for text, encoding in zip(texts, encodings, strict=True)
            if encoding.ids
        ]
        kept = pairs[: self.room(split)]
        if not kept:
            return
        rows = [self._row(ids) for _, ids in kept]
        self._write(split, rows)
        counts["documents without tokens"] += len(texts) - len(pairs)
        counts["documents"] += len(rows)
        for (text, _), row in zip(kept, rows, strict=True):
            counts["unknown tokens"] += int(np.count_nonzero(row == self.unknown))
            counts["bytes"] += len(text.encode())
            counts["tokens"] += len(row)
        largest = max(int(row.max()) for row in rows)
        self.state["largest_token"] = max(self.state["largest_token"], largest)

    def _row(self, ids: Sequence[int]) -> np.ndarray:
        """The tokens of a document with its end, cut where documents are."""
        tokens = [*ids, self.end]
        if self.context:
            tokens = tokens[: self.context + 1]
        return np.array(tokens, self.dtype)

    def _write(self, split: str, rows: Sequence[np.ndarray]) -> None:
        """Append rows to the file of tokens, and where they end to that of offsets."""
        self.files[f"{split}.bin"].write(b"".join(row.tobytes() for row in rows))
        if not self.context:
            return
        counts = self.counts[split]
        lengths = [0, *map(len, rows)]
        offsets = counts["tokens"] + np.cumsum(lengths, dtype=OFFSET)
        if counts["documents"]:
            offsets = offsets[1:]  # the first is there as the end of the last
        self.files[f"{split}.offsets"].write(offsets.tobytes())

    def save(self) -> None:
        """Let everything that is written count."""
        for file in self.files.values():
            file.flush()
        following = self.folder / f"{STATE}.next"
        following.write_text(json.dumps(self.state))
        following.replace(self.folder / STATE)

    def write_manifest(self, about: Mapping[str, str]) -> None:
        """Write the manifest of the complete folder.

        Raises:
            RunError: where a split is empty; there is nothing to resume then.
        """
        self._check_counts()
        files = ("tokenizer.json", *self.files)
        sums = {name: sha256(self.folder / name) for name in files}
        layout = "packed"
        if self.context:
            layout = "documents"
        identity = " ".join([layout, str(self.context), *sums.values()])
        manifest = {
            **about,
            "fingerprint": hashlib.sha256(identity.encode()).hexdigest(),
            "vocabulary": self.vocabulary,
            "largest_token": self.state["largest_token"],
            "dtype": self.dtype.str,
            "layout": layout,
            "context": self.context,
            "end_token": self.tokenizer.id_to_token(self.end),
            "tokenizer_sha256": sums["tokenizer.json"],
            "sha256": sums,
            **self.counts,
        }
        text = json.dumps(manifest, indent=2) + "\n"
        (self.folder / "manifest.json").write_text(text)

    def _check_counts(self) -> None:
        """Raise a RunError where a split is empty."""
        for split, counts in self.counts.items():
            if not counts["documents"]:
                (self.folder / STATE).unlink()
                raise RunError(
                    f"no documents for {split}: there are too few different ones; a"
                    " smaller --cut with `prepare text` makes more; for validation, a"
                    " larger --validation-percent"
                )


def token_dtype(vocabulary: int) -> np.dtype:
    """The smallest type that stores every token: two bytes up to 65,536 tokens."""
    if vocabulary <= 2**16:
        return np.dtype("<u2")
    return np.dtype("<u4")


def batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Documents in lists of a size that fits into memory; takes none in advance."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if len(batch) >= BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch = []
            characters = 0
    yield batch


def read_state(partial: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The state of an unfinished folder.

    A new one where there is none, or no text in it yet.

    Raises:
        RunError: where it is damaged, or has text prepared with other settings.
    """
    file = partial / STATE
    if not file.exists():
        return new_state(settings)
    try:
        state = json.loads(file.read_text())
        stored = dict(state["settings"])
        position = state["position"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(f"{file} is damaged: --overwrite starts again") from error
    if not position:
        return new_state(settings)
    names = {**stored, **settings}
    changed = [name for name in names if stored.get(name) != settings.get(name)]
    if changed:
        raise RunError(
            f"{partial} was started with other settings ({', '.join(changed)}): use"
            " those, or start again with --overwrite"
        )
    return state


def new_state(settings: dict[str, Any]) -> dict[str, Any]:
    """The state of a folder without text."""
    counts = {split: dict.fromkeys((*COUNTED, *REPORTED), 0) for split in SPLITS}
    return {
        "settings": settings,
        "position": None,
        "splits": counts,
        "largest_token": 0,
    }


def reopen(path: Path, size: int) -> IO[bytes]:
    """A file for appending, cut to ``size`` bytes.

    Raises:
        RunError: where it is shorter.
    """
    if size and (not path.exists() or path.stat().st_size < size):
        raise RunError(
            f"{path} is shorter than its {STATE} says: --overwrite starts again"
        )
    file = path.open("ab")
    file.truncate(size)
    return file


def sha256(path: Path) -> str:
    """Hexadecimal digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
