# SPDX-License-Identifier: Apache-2.0
"""``python -m examples.pretrain prepare CORPUS``: text to a folder of token files, streamed, and resumable.

Killed and started again with the same options, a command goes on where it stopped, and what it writes is the same to
the byte. ``--files`` takes local copies of a hub data set, for machines without internet.
"""

import dataclasses
import hashlib
import json
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from ..config import RunError, read_options
from ..processes import Stopped, on_signals
from . import python_source, token_files
from .sources import (
    JSON_SUFFIXES,
    TABLE_SUFFIXES,
    TEXT_SUFFIXES,
    HubTexts,
    LeftOut,
    LocalTexts,
    Stream,
    Texts,
    find_files,
    one_line,
    read_field,
    read_plain,
    sample,
)
from .tokenizer import find_tokenizer, train_tokenizer


@dataclass(frozen=True)
class Corpus:
    """What every corpus has."""

    output: Path | None = None
    """Folder to make; None: data/<corpus>."""
    overwrite: bool = False
    """Delete what is in the folder, finished or not, and begin anew."""
    layout: Literal["packed", "documents"] = "packed"
    """packed: documents one after the other, cut anywhere. documents: a sequence each, truncated or padded."""
    context: int = 1024
    """documents: longest sequence the files can serve; training may take any --model.context up to it."""
    train_documents: int | None = None
    """Training documents to take; None: all."""
    validation_documents: int | None = None
    """Validation documents to take; None: all."""
    tokenizer: str = ""
    """Path of a tokenizer.json, or a name on the Hugging Face hub. Empty: train a byte-level BPE on the text."""

    def streams(self) -> list[Stream]:
        """The documents."""
        raise NotImplementedError

    def about(self) -> dict[str, str]:
        """What the manifest says of the corpus."""
        raise NotImplementedError

    def make_tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        return find_tokenizer(self.tokenizer)

    def inputs(self) -> list[Any]:
        """What tells the same options on other local files apart."""
        return []

    @cached_property
    def left_out(self) -> LeftOut:
        """What its local files have that is no document."""
        return LeftOut(bad=getattr(self, "skip_bad", False))


@dataclass(frozen=True)
class Trained(Corpus):
    """A corpus with a tokenizer of its own."""

    vocabulary: int = 2048
    """Tokens of the tokenizer that is trained on the text, on a sample of 50 MB where there is more."""
    validation_percent: int = 5
    """Share of the documents, chosen by hash, that is held out."""

    def make_tokenizer(self) -> Tokenizer:
        """The one that was named, or one trained on the training documents."""
        return find_tokenizer(self.tokenizer) if self.tokenizer else train_tokenizer(sample(self.read), self.vocabulary)

    def read(self) -> Iterator[str]:
        """The training documents."""
        for stream in self.streams():
            assert isinstance(stream.texts, LocalTexts)
            yield from (text for text in stream.texts.read() if stream.split_of(text) == "train")

    def tokenizer_name(self) -> str:
        """For the manifest."""
        return self.tokenizer or f"byte-level BPE of {self.vocabulary}, trained on it"


@dataclass(frozen=True)
class PythonSource(Trained):
    """Python source: the standard library, or a folder; held out by file path."""

    source: Path | None = None
    """Folder whose .py files are the corpus; None is the standard library of the running interpreter."""
    include_site_packages: bool = False
    """Add the .py files of every installed package."""

    def streams(self) -> list[Stream]:
        """The files, training ones first."""
        return python_source.streams(self._splits)

    def about(self) -> dict[str, str]:
        """What the manifest says of the corpus."""
        texts = python_source.about(self.source, self.include_site_packages, self.vocabulary)
        return {**texts, "tokenizer": self.tokenizer_name()}

    def inputs(self) -> list[Any]:
        """A digest of the files."""
        return [python_source.hash_of(self._splits, self.vocabulary)]

    @cached_property
    def _splits(self) -> python_source.Splits:
        return python_source.find_splits(self.source, self.include_site_packages, self.validation_percent)


@dataclass(frozen=True)
class Text(Trained):
    """Files of plain text, each a document; held out by a hash of the text."""

    paths: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Files, and folders to search for .txt, .md, .rst and .tex files."""
    validation_files: tuple[Path, ...] = ()
    """Files and folders to validate on; none: hold out documents of the others."""
    not_utf8: Literal["refuse", "skip", "replace"] = "refuse"
    """What becomes of a file that is not UTF-8; replace: of what in it is not."""
    cut: int | None = None
    """Cut files, at the ends of lines, into documents of about so many characters; None: a file is a document."""

    def streams(self) -> list[Stream]:
        """The files."""
        others = self._texts(self.validation_files) if self.validation_files else None
        return split(self._texts(self.paths), others, self.validation_percent)

    def _texts(self, paths: Sequence[Path]) -> LocalTexts:
        files = find_files(paths, TEXT_SUFFIXES)
        total = None if self.cut else len(files)
        rest = self.cut, self.not_utf8, self.left_out
        return LocalTexts(lambda: (text for path in files for text in read_plain(path, *rest)), total)

    def about(self) -> dict[str, str]:
        """What the manifest says of the corpus."""
        return {"source": ", ".join(map(str, self.paths)), "tokenizer": self.tokenizer_name()}

    def inputs(self) -> list[Any]:
        """The files and their sizes."""
        return sizes(find_files((*self.paths, *self.validation_files), TEXT_SUFFIXES))


@dataclass(frozen=True)
class Jsonl(Trained):
    """Lines of JSON (.jsonl, .jsonl.gz, .jsonl.zst) or tables (.parquet, .arrow); held out by a hash of the text."""

    paths: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Files, and folders to search for them."""
    field: str = "text"
    """The field that holds the text."""
    validation_files: tuple[Path, ...] = ()
    """Files and folders to validate on; none: hold out documents of the others."""
    skip_bad: bool = False
    """Skip lines that are not JSON or have no such field, and report the first."""

    def streams(self) -> list[Stream]:
        """The records of the files."""
        others = records(self.validation_files, self.field, self.left_out) if self.validation_files else None
        return split(records(self.paths, self.field, self.left_out), others, self.validation_percent)

    def about(self) -> dict[str, str]:
        """What the manifest says of the corpus."""
        return {"source": ", ".join(map(str, self.paths)), "tokenizer": self.tokenizer_name()}

    def inputs(self) -> list[Any]:
        """The files and their sizes."""
        return sizes(find_files((*self.paths, *self.validation_files), JSON_SUFFIXES + TABLE_SUFFIXES))


@dataclass(frozen=True)
class HubCorpus(Corpus):
    """A data set of the Hugging Face hub, streamed."""

    dataset: str = ""
    """Id of the data set on the hub."""
    subset: str = ""
    """Its configuration; empty for the default."""
    revision: str = ""
    """Its branch, tag or commit; empty for the newest."""
    field: str = "text"
    """The field that holds the text."""
    validation_split: str = ""
    """Split to validate on; empty: hold out documents of the training split."""
    validation_percent: float = 0.05
    """Share of the training split that is held out, by a hash of the text, where there is no other to validate on."""
    files: tuple[Path, ...] = ()
    """Local copies to read instead: .jsonl, .json.gz, .jsonl.zst, .parquet, .arrow, or folders of them."""
    validation_files: tuple[Path, ...] = ()
    """Local copies of the validation split; none: hold out documents of --files."""
    skip_bad: bool = False
    """Skip lines of local copies that are not JSON or have no such field, and report the first."""

    def streams(self) -> list[Stream]:
        """Training documents, then validation documents where they come from elsewhere."""
        if self.files:
            texts = records(self.files, self.field, self.left_out)
            others = records(self.validation_files, self.field, self.left_out) if self.validation_files else None
        else:
            texts = self._hub("train")
            others = self._hub(self.validation_split) if self.validation_split else None
        return split(texts, others, self.validation_percent)

    def about(self) -> dict[str, str]:
        """What the manifest says of the corpus."""
        hub = f"{self.dataset} ({self.subset})" if self.subset else self.dataset
        return {"source": ", ".join(map(str, self.files)) or hub, "tokenizer": self.tokenizer}

    def inputs(self) -> list[Any]:
        """The local files and their sizes."""
        paths = (*self.files, *self.validation_files)
        return sizes(find_files(paths, JSON_SUFFIXES + TABLE_SUFFIXES)) if paths else []

    def _hub(self, split: str) -> HubTexts:
        return HubTexts(self.dataset, self.subset, split, self.field, revision=self.revision or None)


@dataclass(frozen=True)
class OpenWebText(HubCorpus):
    """OpenWebText (8 million web pages, 40 GB), GPT-2's tokenizer, packed; one document in 2,000 is held out."""

    dataset: str = "Skylion007/openwebtext"
    tokenizer: str = "gpt2"


@dataclass(frozen=True)
class C4(HubCorpus):
    """C4 English, T5's tokenizer, a document per sequence: 5,120,000 to train on, 2,048 of its validation split."""

    dataset: str = "allenai/c4"
    subset: str = "en"
    validation_split: str = "validation"
    tokenizer: str = "google-t5/t5-base"
    layout: Literal["packed", "documents"] = "documents"
    train_documents: int | None = 5_120_000
    validation_documents: int | None = 2_048


@dataclass(frozen=True)
class Pile(HubCorpus):
    """The Pile, Qwen3's tokenizer, a document per sequence: 5,120,000 to train on and 2,048 others to validate.

    Documents come from the deduplicated Pile in its published order. The paper's differ: it recovers documents from the
    token stream that Pythia was trained on and tokenizes those again. --dataset or --files takes such a set instead.
    """

    dataset: str = "EleutherAI/the_pile_deduplicated"
    tokenizer: str = "Qwen/Qwen3-0.6B-Base"
    layout: Literal["packed", "documents"] = "documents"
    train_documents: int | None = 5_120_000
    validation_documents: int | None = 2_048


CORPORA: dict[str, type[Corpus]] = {
    "python-source": PythonSource,
    "text": Text,
    "jsonl": Jsonl,
    "openwebtext": OpenWebText,
    "c4": C4,
    "pile": Pile,
}


def main(arguments: Sequence[str]) -> None:
    """Prepare the corpus that the arguments name.

    Raises:
        RunError: for everything the user can mend.
    """
    name = arguments[0] if arguments else ""
    if name in CORPORA:
        corpus = read_options(CORPORA[name], arguments[1:], f"prepare {name}")
    else:
        corpus = tyro.extras.subcommand_cli_from_dict(
            CORPORA,
            args=list(arguments),
            prog="python -m examples.pretrain prepare",
            description="Write a corpus as token files. `prepare CORPUS --help` lists the options.",
        )
    stopping: list[int] = []
    try:
        with on_signals(stopping.append):
            prepare(corpus, Console(markup=False, highlight=False, soft_wrap=True), stopping)
    except KeyboardInterrupt:
        raise Stopped(HOW_TO_GO_ON, signal.SIGINT) from None
    except OSError as error:  # a full disk, a folder that may not be written
        raise RunError(f"cannot prepare the corpus ({one_line(error)})") from error


HOW_TO_GO_ON = "stopped; the same command goes on from there"


def prepare(corpus: Corpus, console: Console, stopping: Sequence[int] = ()) -> Path:
    """The folder of token files of a corpus, made or finished.

    Args:
        corpus: which, and how.
        console: for progress.
        stopping: gets a signal's number when one asks to stop; heeded after every batch of documents.

    Raises:
        RunError: where the folder exists, the options make no sense, or the text cannot be had.
        Stopped: after such a signal.
    """
    check(corpus)
    name = next(name for name, kind in CORPORA.items() if kind is type(corpus))
    folder = corpus.output or Path("data") / name
    partial = folder.with_name(f".{folder.name}.partial")
    clear(folder, partial, corpus.overwrite)
    limits = {"train": corpus.train_documents, "validation": corpus.validation_documents}
    layout = token_files.Layout(corpus.layout, corpus.context, limits)
    inputs = hashlib.sha256(json.dumps(corpus.inputs()).encode()).hexdigest()
    settings = {"corpus": name, "local files": inputs, **dataclasses.asdict(corpus)}
    for free in ("output", "overwrite"):
        del settings[free]
    writer = token_files.Writer(partial, corpus.make_tokenizer, layout, settings)
    try:
        if writer.position:
            console.print(f"Going on after {documents(writer):,} documents: {partial}")
        streams = corpus.streams()
        with Meter(console, writer, expected(streams, limits)) as meter:

            def report(writer: token_files.Writer) -> None:
                meter.update(writer)
                if stopping:
                    raise Stopped(HOW_TO_GO_ON, stopping[0])

            token_files.fill(writer, streams, report)
        writer.finish(folder, corpus.about())
    finally:
        writer.close()
    for line in corpus.left_out.lines():
        console.print(line)
    counts = writer.counts
    console.print(
        f"{folder}: {counts['train']['documents']:,} documents ({counts['train']['tokens']:,} tokens of "
        f"{writer.vocabulary:,} kinds) to train on, {counts['validation']['documents']:,} others "
        f"({counts['validation']['tokens']:,} tokens) to validate"
    )
    return folder


def check(corpus: Corpus) -> None:
    """Refuse options that make no sense.

    Raises:
        RunError: naming the option.
    """
    values = dataclasses.asdict(corpus)
    for name in ("context", "train_documents", "validation_documents", "cut"):
        if values.get(name) is not None and values[name] < 1:
            raise RunError(f"--{name.replace('_', '-')} must be at least 1, got {values[name]}")
    if not 0 < values["validation_percent"] <= 50:
        raise RunError(f"--validation-percent must lie above 0 and not above 50, got {values['validation_percent']}")
    if not 257 <= values.get("vocabulary", 257) <= 65_536:
        raise RunError(f"--vocabulary must lie in 257 (the bytes and a separator)..65536, got {values['vocabulary']}")


def clear(folder: Path, partial: Path, overwrite: bool) -> None:
    """Make room for ``folder``.

    Raises:
        RunError: where something is in the way.
    """
    occupied = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if occupied and not overwrite:
        raise RunError(f"{folder} exists: --overwrite makes it anew, --output names another")
    if occupied and not (folder / "manifest.json").exists():
        raise RunError(f"{folder} holds no token files (no manifest.json in it): --overwrite will not delete it")
    if overwrite:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(partial, ignore_errors=True)


def split(texts: Texts, others: Texts | None, percent: float) -> list[Stream]:
    """Documents to train on and ``others`` to validate on; where there are none, a share of the first."""
    return [Stream(texts, percent / 100)] if others is None else [Stream(texts, 0.0), Stream(others, 1.0)]


def records(paths: Sequence[Path], name: str, left_out: LeftOut) -> LocalTexts:
    """The texts of files of records."""
    files = find_files(paths, JSON_SUFFIXES + TABLE_SUFFIXES)
    return LocalTexts(lambda: (text for path in files for text in read_field(path, name, left_out)))


def sizes(files: Sequence[Path]) -> list[Any]:
    """Names and sizes: what an unfinished preparation is compared by."""
    return [[str(path), path.stat().st_size] for path in files]


def documents(writer: token_files.Writer) -> int:
    """Documents written to both splits."""
    return sum(counts["documents"] for counts in writer.counts.values())


def expected(streams: Sequence[Stream], limits: dict[str, int | None]) -> int | None:
    """Documents there will be, where that is known."""
    total = 0
    for stream in streams:
        bounds = [limits[split] for split in stream.feeds]
        most = None if None in bounds else sum(bound or 0 for bound in bounds)
        known = [number for number in (most, stream.texts.total) if number is not None]
        if not known:
            return None
        total += min(known)
    return total


class Meter:
    """Progress on the terminal: documents, tokens, speed, time left where known. Elsewhere the last line alone."""

    def __init__(self, console: Console, writer: token_files.Writer, total: int | None):
        self._progress = Progress(
            BarColumn(bar_width=24),
            TaskProgressColumn(show_speed=False),
            TextColumn(
                "{task.completed:,.0f} documents  {task.fields[tokens]:,} tokens  {task.fields[speed]:.1f} MB/s "
            ),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._clock, self._before = time.perf_counter(), self._size(writer)
        self._task = self._progress.add_task(
            "prepare", total=total, completed=documents(writer), tokens=self._tokens(writer), speed=0.0
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, writer: token_files.Writer) -> None:
        """Show where the writer is."""
        speed = (self._size(writer) - self._before) / 1e6 / (time.perf_counter() - self._clock)
        self._progress.update(self._task, completed=documents(writer), tokens=self._tokens(writer), speed=speed)

    def _size(self, writer: token_files.Writer) -> int:
        return sum(counts["bytes"] for counts in writer.counts.values())

    def _tokens(self, writer: token_files.Writer) -> int:
        return sum(counts["tokens"] for counts in writer.counts.values())
