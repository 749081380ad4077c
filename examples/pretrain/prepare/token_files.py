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
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import IO, Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from ..config import RunError
from ..processes import LOCK, lock
from .sources import Stream, one_line, sample

SPLITS, KINDS = ("train", "validation"), ("bin", "offsets")
COUNTED, REPORTED = (
    ("documents", "bytes", "tokens"),
    ("documents without tokens", "unknown tokens"),
)
BATCH_DOCUMENTS = 1024
BATCH_CHARACTERS = 4_000_000
STATE = "state.json"
OWN = {
    "tokenizer.json",
    "manifest.json",
    STATE,
    LOCK,
    *(f"{split}.{kind}" for split in SPLITS for kind in KINDS),
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
    """Write all documents of the streams to ``partial``, from where the last process
    stopped, and rename it.

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
                make_tokenizer().save(str(partial / "tokenizer.json"))
            with ExitStack() as files:
                writer = Writer(partial, state, files)
                report(writer.counts)
                writer.fill(streams, report)
            writer.write_manifest(about)
            for path in folder.glob("*"):
                if path.name not in OWN:
                    path.rename(partial / path.name)
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(partial, folder)
        finally:
            if not (partial / STATE).exists():
                shutil.rmtree(partial, ignore_errors=True)
    for name in (STATE, LOCK):
        (folder / name).unlink(missing_ok=True)
    return writer.counts


class Writer:
    """The token files of a folder, from where its state says that the last process
    stopped.
    """

    def __init__(self, folder: Path, state: dict[str, Any], files: ExitStack):
        self.folder, self.state, self.counts = folder, state, state["splits"]
        settings = state["settings"]
        self.context: int | None = (
            settings["context"] if settings.get("layout") == "documents" else None
        )
        self.tokenizer = load_tokenizer(folder / "tokenizer.json")
        self.end = end_of_text(self.tokenizer, settings.get("end_token"))
        self.unknown = unknown_of(self.tokenizer)
        self.vocabulary = vocabulary_of(self.tokenizer)
        self.dtype = token_dtype(self.vocabulary)
        sizes = {
            f"{split}.bin": counts["tokens"] * self.dtype.itemsize
            for split, counts in self.counts.items()
        }
        if self.context:
            written = {
                split: counts["documents"] for split, counts in self.counts.items()
            }
            sizes |= {
                f"{split}.offsets": 8 * (count + 1) if count else 0
                for split, count in written.items()
            }
        self.files = {
            name: files.enter_context(reopen(folder / name, size))
            for name, size in sizes.items()
        }
        self.save()

    def fill(self, streams: Sequence[Stream], report: Callable[[Counts], None]) -> None:
        """Append the documents of the streams, from the stored position on."""
        start = self.state["position"] or {"stream": 0, "texts": None}
        for number, stream in enumerate(streams[start["stream"] :], start["stream"]):
            if number == start["stream"] and start["texts"] is not None:
                stream.load_state_dict(start["texts"])
            for texts in itertools.takewhile(
                lambda _, stream=stream: not self.full(stream), batches(stream)
            ):
                self.append([(stream.split_of(text), text) for text in texts])
                self.state["position"] = {
                    "stream": number,
                    "texts": stream.state_dict(),
                }
                self.save()
                report(self.counts)

    def room(self, split: str) -> int | None:
        """Documents that a split may still get; None: any number."""
        limit = self.state["settings"].get(f"{split}_documents")
        return None if limit is None else limit - self.counts[split]["documents"]

    def full(self, stream: Stream) -> bool:
        """Whether the splits of a stream get no more documents."""
        return all(self.room(split) == 0 for split in stream.splits)

    def append(self, documents: Sequence[tuple[str, str]]) -> None:
        """Tokenize (split, text) pairs and write them."""
        longest = self.context + 1 if self.context else None
        for split, counts in self.counts.items():
            texts = [text for name, text in documents if name == split]
            encodings = [
                encoding.ids
                for encoding in self.tokenizer.encode_batch(
                    texts, add_special_tokens=False
                )
            ]
            kept = [pair for pair in zip(texts, encodings, strict=True) if pair[1]][
                : self.room(split)
            ]
            rows = [np.array([*ids, self.end][:longest], self.dtype) for _, ids in kept]
            if not rows:
                continue
            self.files[f"{split}.bin"].write(b"".join(row.tobytes() for row in rows))
            if self.context:
                offsets = counts["tokens"] + np.cumsum(
                    [0, *map(len, rows)], dtype="<i8"
                )
                self.files[f"{split}.offsets"].write(
                    offsets[counts["documents"] > 0 :].tobytes()
                )
            counts["documents without tokens"] += encodings.count([])
            counts["unknown tokens"] += sum(
                int(np.count_nonzero(row == self.unknown)) for row in rows
            )
            counts["documents"] += len(rows)
            counts["bytes"] += sum(len(text.encode()) for text, _ in kept)
            counts["tokens"] += sum(map(len, rows))
            self.state["largest_token"] = max(
                self.state["largest_token"], *(int(row.max()) for row in rows)
            )

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
        for split, counts in self.counts.items():
            if not counts["documents"]:
                (self.folder / STATE).unlink()
                more = (
                    "a smaller --cut with `prepare text` makes more; for validation, a"
                    " larger --validation-percent"
                )
                raise RunError(
                    f"no documents for {split}: there are too few different ones;"
                    f" {more}"
                )
        sums = {
            name: sha256(self.folder / name) for name in ("tokenizer.json", *self.files)
        }
        layout = "documents" if self.context else "packed"
        manifest = {
            **about,
            "fingerprint": (
                hashlib.sha256(
                    " ".join([layout, str(self.context), *sums.values()]).encode()
                ).hexdigest()
            ),
            **{
                "vocabulary": self.vocabulary,
                "largest_token": self.state["largest_token"],
                "dtype": self.dtype.str,
            },
            **{
                "layout": layout,
                "context": self.context,
                "end_token": self.tokenizer.id_to_token(self.end),
            },
            **{
                "tokenizer_sha256": sums["tokenizer.json"],
                "sha256": sums,
                **self.counts,
            },
        }
        (self.folder / "manifest.json").write_text(
            json.dumps(manifest, indent=2) + "\n"
        )


def token_dtype(vocabulary: int) -> np.dtype:
    """The smallest type that stores every token: two bytes up to 65,536 tokens."""
    return np.dtype("<u2" if vocabulary <= 2**16 else "<u4")


def batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Documents in lists of a size that fits into memory; takes none in advance."""
    batch, characters = list[str](), 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if len(batch) >= BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    yield batch


def read_state(partial: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The state of an unfinished folder; a new one where there is none, or no text in
    it yet.

    Raises:
        RunError: where it is damaged, or has text prepared with other settings.
    """
    file = partial / STATE
    counts = {split: dict.fromkeys((*COUNTED, *REPORTED), 0) for split in SPLITS}
    new = {"settings": settings, "position": None, "splits": counts, "largest_token": 0}
    try:
        state = json.loads(file.read_text()) if file.exists() else new
        stored, position = dict(state["settings"]), state["position"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(f"{file} is damaged: --overwrite starts again") from error
    changed = [
        name
        for name in {**stored, **settings}
        if stored.get(name) != settings.get(name)
    ]
    if changed and position:
        way_out = "use those, or start again with --overwrite"
        raise RunError(
            f"{partial} was started with other settings ({', '.join(changed)}):"
            f" {way_out}"
        )
    return state if position else new


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


# Tokenizers: a byte-level byte-pair one trained on the corpus, or one from disk or the
# Hugging Face hub. Text that spells a special token is encoded as its characters: only
# the writer of token files adds special tokens.

END_OF_TEXT = "<|endoftext|>"
# What ends a document, in order of preference: GPT-2 and Qwen; T5 and Llama 2; Llama 3;
# Gemma.
SEPARATORS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>")
WORD_MARK = "\u2581"  # how SentencePiece writes a space


def train_on(streams: Callable[[], Iterable[Stream]], vocabulary: int) -> Tokenizer:
    """A tokenizer trained on the training documents of new streams, or on a sample of
    50 MB if there is more.
    """

    def read() -> Iterator[str]:
        training = (stream for stream in streams() if "train" in stream.splits)
        return (
            text
            for stream in training
            for text in stream
            if stream.split_of(text) == "train"
        )

    return train_tokenizer(sample(read), vocabulary)


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Learn ``vocabulary`` tokens: the separator, the 256 bytes, and the merges that
    shorten ``texts`` most.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options: dict[str, Any] = {
        "special_tokens": [END_OF_TEXT],
        "initial_alphabet": pre_tokenizers.ByteLevel.alphabet(),
    }
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, show_progress=False, **options)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer stored in ``path``, which reads special tokens in a text as
    characters.

    What changes an encoding at random or by its length is switched off.
    """
    tokenizer = Tokenizer.from_file(str(path))
    switch_off(tokenizer)
    return tokenizer


def switch_off(tokenizer: Tokenizer) -> None:
    """Let a tokenizer read special tokens in a text as characters, and always encode a
    text in the same way, fully.
    """
    tokenizer.encode_special_tokens = (
        True  # of the object alone: the file does not store it
    )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if isinstance(tokenizer.model, models.BPE):
        tokenizer.model.dropout = None


def find_tokenizer(name: str, end: str | None = None) -> Tokenizer:
    """A tokenizer by the path of its tokenizer.json (or the folder of it), else by its
    name on the hub.

    Raises:
        RunError: where it cannot be loaded, or has no separator, or not ``end``.
    """
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    try:
        local = path.exists() or path.suffix == ".json"
        tokenizer = (
            Tokenizer.from_file(str(path)) if local else Tokenizer.from_pretrained(name)
        )
        unknown = tokenizer.encode(
            "\U00012345", add_special_tokens=False
        ).tokens  # a rare letter
    except Exception as error:  # `tokenizers` raises bare Exception
        way_out = (
            "pass the path of a tokenizer.json, or a name on the Hugging Face hub and"
            " check the network"
        )
        raise RunError(
            f"cannot load the tokenizer {name} ({one_line(error)}): {way_out}"
        ) from error
    switch_off(tokenizer)
    number = end_of_text(tokenizer, end)
    separator: Any = tokenizer.id_to_token(number)
    byte_gaps = is_byte_level(tokenizer) and not tokenizer.get_vocab().keys() >= {
        *pre_tokenizers.ByteLevel.alphabet()
    }
    if {*unknown} <= {WORD_MARK} or byte_gaps:
        raise RunError(
            f"the tokenizer {name} drops characters that it does not know, and has no"
            " token for them"
        )
    if len(separator) == 1 or number == unknown_of(tokenizer):
        raise RunError(
            f"{separator!r} cannot end documents, because it stands for text: choose"
            " another --end-token"
        )
    tokenizer.add_special_tokens([separator])  # no text contains it from now on
    split_special_tokens(tokenizer)
    return tokenizer


def split_special_tokens(tokenizer: Tokenizer) -> None:
    """Split the text of special tokens behind their first character, where the model
    would else find them.

    The vocabulary of a Unigram model, such as T5's, contains its special tokens as
    pieces of text.
    """
    special = [
        token.content
        for token in tokenizer.get_added_tokens_decoder().values()
        if token.special
    ]
    starts = [
        f"{re.escape(text[0])}(?={re.escape(text[1:])})"
        for text in special
        if len(text) > 1
        and text in tokenizer.encode(text, add_special_tokens=False).tokens
    ]
    if starts:
        split = pre_tokenizers.Split(Regex("|".join(starts)), "isolated")
        before = [] if tokenizer.pre_tokenizer is None else [tokenizer.pre_tokenizer]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, split])


def vocabulary_of(tokenizer: Tokenizer) -> int:
    """Rows that a token table needs: one more than the largest id, as ids may leave
    holes.
    """
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether its pieces are written in characters that stand for bytes."""
    return '"ByteLevel"' in json.dumps(json.loads(tokenizer.to_str())["decoder"])


def unknown_of(tokenizer: Tokenizer) -> int | None:
    """The token that stands for what a tokenizer does not know; None for one that knows
    all bytes.
    """
    model = json.loads(tokenizer.to_str())["model"]
    unknown = model.get("unk_id", tokenizer.token_to_id(model.get("unk_token") or ""))
    return None if is_byte_level(tokenizer) else unknown


def byte_lengths(tokenizer: Tokenizer) -> np.ndarray:
    """Bytes of text (float64) that each token stands for; special tokens stand for
    none.

    Exact for byte-level tokenizers. For others an estimate: the piece in UTF-8, its
    word mark as one space.
    """
    added = tokenizer.get_added_tokens_decoder()
    byte_level = is_byte_level(tokenizer)
    lengths = np.zeros(vocabulary_of(tokenizer))
    for token, number in tokenizer.get_vocab(with_added_tokens=True).items():
        if number in added:
            lengths[number] = 0 if added[number].special else len(token.encode())
        elif byte_level:
            lengths[number] = len(
                token
            )  # this alphabet writes each byte as one printable character
        elif len(token) == 6 and token.startswith("<0x"):
            lengths[number] = 1  # byte fallback
        else:
            lengths[number] = len(token.replace(WORD_MARK, " ").encode())
    return lengths


def end_of_text(tokenizer: Tokenizer, name: str | None = None) -> int:
    """The separator between documents: ``name``, or the first of ``SEPARATORS`` that
    the tokenizer has.

    Raises:
        RunError: where it has none.
    """
    for separator in [name] if name else SEPARATORS:
        if (token := tokenizer.token_to_id(separator)) is not None:
            return token
    added = ", ".join(
        [token.content for token in tokenizer.get_added_tokens_decoder().values()][:10]
    )
    what = (
        f"no token {name!r}"
        if name
        else f"no token that ends a text: none of {', '.join(SEPARATORS)}"
    )
    raise RunError(
        f"the tokenizer has {what}; --end-token names another, such as one of: {added}"
    )
