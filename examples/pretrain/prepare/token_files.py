# SPDX-License-Identifier: Apache-2.0
"""Write a corpus to disk: token files, ``tokenizer.json``, ``manifest.json``.

``train.bin`` and ``validation.bin`` are flat little-endian arrays, documents one after the other, each closed by the
separator. In the layout "documents" each is cut to context + 1 tokens (inputs and, moved on by one, targets), and
``train.offsets`` and ``validation.offsets`` (int64) say where each begins, with the end of the last.

The folder appears whole or not at all: it is filled under another name, batch by batch, and renamed. A batch counts
once ``state.json`` says so; whatever a killed process wrote behind that is cut off by the next.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from tokenizers import Encoding, Tokenizer

from ..config import RunError
from ..processes import LOCK, lock
from .sources import Stream, Texts
from .tokenizer import end_of_text, load_tokenizer, vocabulary_of

SPLITS = ("train", "validation")
BATCH_DOCUMENTS = 1024
BATCH_CHARACTERS = 4_000_000
STATE = "state.json"


@dataclass(frozen=True)
class Layout:
    """How documents become sequences."""

    kind: Literal["packed", "documents"] = "packed"
    """packed: one long row, cut anywhere. documents: one sequence each, never two in one."""
    context: int | None = None
    """documents: tokens of a sequence."""
    limits: dict[str, int | None] = field(default_factory=dict)
    """Documents of each split; None: all there are."""


def token_dtype(vocabulary: int) -> np.dtype:
    """The smallest type that holds every token: two bytes up to 65,536 tokens."""
    return np.dtype("<u2" if vocabulary <= 2**16 else "<u4")


class Writer:
    """A folder of token files in the making, which goes on where the last process left it.

    Args:
        partial: the folder to work in.
        make_tokenizer: makes the tokenizer; called at the very start only.
        layout: how documents become sequences.
        settings: everything that the outcome depends on, ready for JSON.

    Raises:
        RunError: where another process is at work, or the unfinished folder is damaged or has other settings.
    """

    def __init__(
        self, partial: Path, make_tokenizer: Callable[[], Tokenizer], layout: Layout, settings: dict[str, Any]
    ):
        partial.mkdir(parents=True, exist_ok=True)
        self.partial, self.layout = partial, layout
        self._files: dict[str, IO[bytes]] = {}
        self._lock = lock(partial)
        try:
            self._open(make_tokenizer, json.loads(json.dumps(settings, default=str)))
        except BaseException:
            self.close()
            if not (partial / STATE).exists():
                self.discard()
            raise

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Documents, bytes of text and tokens of each split so far."""
        return self._state["splits"]

    @property
    def position(self) -> Any:
        """What the last ``append`` that counts was told; None before the first."""
        return self._state["position"]

    def full(self, splits: Iterable[str]) -> bool:
        """Whether each of the splits has as many documents as it may have."""
        return all(self._room(split) == 0 for split in splits)

    def append(self, documents: Sequence[tuple[str, str]], position: Any) -> None:
        """Tokenize (split, text) pairs and add them; ``position`` is that of the source behind them."""
        for split in SPLITS:
            self._append(split, [text for name, text in documents if name == split])
        self._state["position"] = position
        self._save()

    def finish(self, folder: Path, about: dict[str, Any]) -> None:
        """Write the manifest and rename to ``folder``.

        Raises:
            RunError: where a split has no documents.
        """
        for split in SPLITS:
            if not self.counts[split]["documents"]:
                self.discard()
                raise RunError(
                    f"no documents for {split}: there is too little text, or too small a share held out "
                    "(--validation-percent); of text, --cut 5000 makes several documents of each file"
                )
        self._close_files()
        manifest = self._manifest(about)
        (self.partial / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
        os.replace(self.partial, folder)
        for name in (STATE, LOCK):
            (folder / name).unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Close the files; another writer may then go on."""
        self._close_files()
        if self._lock:
            self._lock.close()

    def discard(self) -> None:
        """Delete the unfinished folder."""
        self._close_files()
        shutil.rmtree(self.partial, ignore_errors=True)
        self.close()

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()

    def _open(self, make_tokenizer: Callable[[], Tokenizer], settings: dict[str, Any]) -> None:
        stored = read_state(self.partial, settings)
        if stored is None:
            make_tokenizer().save(str(self.partial / "tokenizer.json"))
        self.tokenizer = load_tokenizer(self.partial / "tokenizer.json")
        self.end, self.vocabulary = end_of_text(self.tokenizer), vocabulary_of(self.tokenizer)
        self.dtype = token_dtype(self.vocabulary)
        empty = {split: {"documents": 0, "bytes": 0, "tokens": 0} for split in SPLITS}
        self._state = stored or {"settings": settings, "position": None, "splits": empty, "largest_token": 0}
        for name, size in self._sizes().items():
            self._files[name] = reopen(self.partial / name, size if stored else 0)
            if name.endswith(".offsets") and not stored:
                self._files[name].write(np.zeros(1, "<i8").tobytes())
        self._save()

    def _room(self, split: str) -> int | None:
        limit = self.layout.limits.get(split)
        return None if limit is None else limit - self.counts[split]["documents"]

    def _append(self, split: str, texts: list[str]) -> None:
        if not texts or self._room(split) == 0:
            return
        encodings = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        kept = [pair for pair in zip(texts, encodings, strict=True) if pair[1].ids][: self._room(split)]
        if not kept:
            return
        longest = self.layout.context + 1 if self.layout.kind == "documents" and self.layout.context else None
        rows = [np.array([*encoding.ids, self.end][:longest], self.dtype) for _, encoding in kept]
        tokens, counts = np.concatenate(rows), self.counts[split]
        self._files[f"{split}.bin"].write(tokens.tobytes())
        if self.layout.kind == "documents":
            ends = counts["tokens"] + np.cumsum([len(row) for row in rows], dtype="<i8")
            self._files[f"{split}.offsets"].write(ends.tobytes())
        counts["documents"] += len(rows)
        counts["tokens"] += len(tokens)
        counts["bytes"] += sum(kept_bytes(text, encoding, longest) for text, encoding in kept)
        self._state["largest_token"] = max(self._state["largest_token"], int(tokens.max()))

    def _sizes(self) -> dict[str, int]:
        sizes = {f"{split}.bin": self.counts[split]["tokens"] * self.dtype.itemsize for split in SPLITS}
        if self.layout.kind == "documents":
            sizes |= {f"{split}.offsets": 8 * (self.counts[split]["documents"] + 1) for split in SPLITS}
        return sizes

    def _save(self) -> None:
        for file in self._files.values():
            file.flush()
        following = self.partial / f"{STATE}.next"
        following.write_text(json.dumps(self._state))
        following.replace(self.partial / STATE)

    def _manifest(self, about: dict[str, Any]) -> dict[str, Any]:
        tokenizer = sha256(self.partial / "tokenizer.json")
        sums = {name: sha256(self.partial / name) for name in self._files}
        layout, context = self.layout.kind, self.layout.context if self.layout.kind == "documents" else None
        parts = [layout, str(context), tokenizer, *sums.values()]
        manifest = {
            **about,
            "fingerprint": hashlib.sha256(" ".join(parts).encode()).hexdigest(),
            "vocabulary": self.vocabulary,
            "largest_token": self._state["largest_token"],
            "dtype": self.dtype.str,
            "layout": layout,
            "context": context,
            "tokenizer_sha256": tokenizer,
        }
        for split in SPLITS:
            manifest[split] = {**self.counts[split], "sha256": sums[f"{split}.bin"]}
            if layout == "documents":
                manifest[split]["offsets_sha256"] = sums[f"{split}.offsets"]
        return manifest


def fill(writer: Writer, streams: Sequence[Stream], report: Callable[[Writer], None]) -> None:
    """Move all documents of the streams, from the writer's position on, into the writer."""
    start = writer.position or {"stream": 0, "texts": None}
    for number, stream in enumerate(streams[start["stream"] :], start["stream"]):
        if number == start["stream"] and start["texts"] is not None:
            stream.texts.load_state_dict(start["texts"])
        if writer.full(stream.feeds):
            continue
        for texts in batches(stream.texts):
            documents = [(stream.split_of(text), text) for text in texts]
            writer.append(documents, {"stream": number, "texts": stream.texts.state_dict()})
            report(writer)
            if writer.full(stream.feeds):
                break


def batches(texts: Texts) -> Iterator[list[str]]:
    """Documents in lists of a size that fits into memory, blank ones left out; takes none in advance."""
    batch: list[str] = []
    taken = characters = 0
    for text in texts:
        taken += 1
        characters += len(text)
        if text.strip():
            batch.append(text)
        if taken >= BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, taken, characters = [], 0, 0
    yield batch


def kept_bytes(text: str, encoding: Encoding, longest: int | None) -> int:
    """Bytes of the text that the first ``longest`` tokens stand for."""
    if longest is None or len(encoding.ids) <= longest:
        return len(text.encode())
    span = encoding.token_to_chars(longest - 1)
    return len(text[: span[1]].encode()) if span else len(text.encode())


def read_state(partial: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The state of an unfinished folder, None where there is none or, with other settings, no text in it yet.

    Raises:
        RunError: where it is damaged, or has text prepared with other settings.
    """
    file = partial / STATE
    if not file.exists():
        return None
    try:
        state = json.loads(file.read_text())
        stored, position = dict(state["settings"]), state["position"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{file} is damaged: --overwrite begins anew") from error
    changed = [name for name in {**stored, **settings} if stored.get(name) != settings.get(name)]
    if changed and position is None:
        return None
    if changed:
        raise RunError(
            f"{partial} was begun with other settings ({', '.join(changed)}): "
            "repeat those, or begin anew with --overwrite"
        )
    return state


def reopen(path: Path, size: int) -> IO[bytes]:
    """A file for appending, cut to ``size`` bytes.

    Raises:
        RunError: where it is shorter.
    """
    file = path.open("ab")
    if file.tell() < size:
        file.close()
        raise RunError(f"{path} is shorter than its {STATE} says: --overwrite begins anew")
    file.truncate(size)
    return file


def sha256(path: Path) -> str:
    """Hexadecimal digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
