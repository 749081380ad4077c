# SPDX-License-Identifier: Apache-2.0
"""``python -m examples.pretrain prepare CORPUS``: text to a folder of token files, streamed.

Stopped and started again with the same options, a command resumes, and writes the same bytes. ``--files`` takes local
copies of a hub data set, for machines without internet.
"""

import dataclasses
import hashlib
import json
import shutil
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro
from rich.console import Console
from tokenizers import Tokenizer

from ..config import RunError, read_options
from ..processes import Stopped, on_signals
from . import sources, token_files
from .sources import HubTexts, LocalTexts, Problems, Stream, find_files, one_line
from .tokenizer import find_tokenizer, train_on


@dataclass(frozen=True)
class Corpus:
    """The options of every corpus."""

    output: Path | None = None
    """Folder to write; None: data/<corpus>."""
    overwrite: bool = False
    """Delete what is in the folder, finished or not, and start again."""
    layout: Literal["packed", "documents"] = "packed"
    """packed: documents one after the other, cut anywhere. documents: a sequence each, truncated or padded."""
    context: int = 1024
    """documents: longest sequence the files can serve; training may take any --model.context up to it."""
    train_documents: int | None = None
    """Training documents to take; None: all."""
    validation_documents: int | None = None
    """Validation documents to take; None: all."""
    validation_percent: float = 5
    """Share of the documents that is held out, chosen by a hash, where there are no others to validate on."""
    tokenizer: str = ""
    """Path of a tokenizer.json, or a name on the Hugging Face hub. Empty: train a byte-level BPE on the text."""
    vocabulary: int = 2048
    """Tokens of the tokenizer that is trained on the text, on a sample of 50 MB where there is more."""
    skip_bad: bool = False
    """Leave out lines that are not JSON or have no text, and files that are not UTF-8, and report them."""

    paths: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Files, and folders to search for them."""
    validation_files: tuple[Path, ...] = ()
    """Files and folders to validate on; none: hold out documents of the others."""

    suffixes: ClassVar[tuple[str, ...]]

    @cached_property
    def problems(self) -> Problems:
        """What is left out of its files."""
        return Problems(self.skip_bad)

    def read(self, path: Path) -> Iterator[str]:
        """The documents of a file."""
        raise NotImplementedError

    def texts(self, paths: Sequence[Path]) -> LocalTexts:
        """The documents of files and folders."""
        files = find_files(paths, self.suffixes)
        return LocalTexts(lambda: (text for path in files for text in self.read(path)))

    def streams(self) -> list[Stream]:
        """The documents to train on, then those to validate on where they come from elsewhere."""
        return self.split(self.texts(self.paths), self.validation_files and self.texts(self.validation_files))

    def split(self, texts: LocalTexts | HubTexts, others: Any) -> list[Stream]:
        """``texts`` to train on and ``others`` to validate on; without them, a share of the first is held out."""
        return [Stream(texts, 0.0), Stream(others, 1.0)] if others else [Stream(texts, self.validation_percent / 100)]


@dataclass(frozen=True)
class Text(Corpus):
    """Files of plain text (folders: .txt, .md, .rst, .tex), each a document; held out by a hash of the text."""

    cut: int | None = None
    """Cut files into documents of at most so many characters, at a line end or else a space; None: do not cut."""

    suffixes = sources.TEXT_SUFFIXES

    def read(self, path: Path) -> Iterator[str]:
        """The documents of a file."""
        return sources.read_plain(path, self.cut, self.problems)


@dataclass(frozen=True)
class Jsonl(Corpus):
    """Lines of JSON (.jsonl, .jsonl.gz, .jsonl.zst) or tables (.parquet, .arrow); held out by a hash of the text."""

    field: str = "text"
    """The field that has the text."""

    suffixes = sources.JSON_SUFFIXES + sources.TABLE_SUFFIXES

    def read(self, path: Path) -> Iterator[str]:
        """The texts of a file."""
        return sources.read_records(path, self.field, self.problems)


@dataclass(frozen=True)
class HubCorpus(Jsonl):
    """A data set of the Hugging Face hub, streamed."""

    paths: Annotated[tuple[Path, ...], tyro.conf.arg(name="files")] = ()
    """Local copies to read instead: .jsonl, .json.gz, .jsonl.zst, .parquet, .arrow, or folders of them."""
    dataset: str = ""
    """Id of the data set on the hub."""
    subset: str = ""
    """Its configuration; empty for the default."""
    revision: str = ""
    """Its branch, tag or commit; empty for the newest."""
    validation_split: str = ""
    """Split to validate on; empty: hold out documents of the training split."""
    validation_percent: float = 0.05

    def streams(self) -> list[Stream]:
        """Training documents, then validation documents where they come from elsewhere."""
        if self.paths:
            return super().streams()
        return self.split(self.hub("train"), self.validation_split and self.hub(self.validation_split))

    def hub(self, split: str) -> HubTexts:
        """The documents of a split on the hub."""
        revision = self.revision or None
        return HubTexts(self.dataset, self.subset, split, self.field, self.problems, revision=revision)


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
    "text": Text,
    "jsonl": Jsonl,
    "openwebtext": OpenWebText,
    "c4": C4,
    "pile": Pile,
}
RESUME = "stopped; the same command resumes"


def main(arguments: Sequence[str]) -> None:
    """Prepare the corpus that the arguments name.

    Raises:
        RunError: for everything that the user can fix.
        Stopped: after a signal.
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
        raise Stopped(RESUME, signal.SIGINT) from None
    except OSError as error:  # a full disk, a folder that may not be written
        raise RunError(f"cannot prepare the corpus ({one_line(error)})") from error


def prepare(corpus: Corpus, console: Console, stopping: Sequence[int]) -> None:
    """Write the token files of a corpus, or finish them. A signal in ``stopping`` ends it after a batch."""
    check(corpus)
    name = next(name for name, kind in CORPORA.items() if kind is type(corpus))
    folder = corpus.output or Path("data") / name
    partial = folder.with_name(f".{folder.name}.partial")
    clear(folder, partial, corpus.overwrite)
    streams = corpus.streams()
    paths = (*corpus.paths, *corpus.validation_files)
    sizes = [[str(path), path.stat().st_size] for path in find_files(paths, corpus.suffixes)] if paths else []
    digest = hashlib.sha256(json.dumps(sizes).encode()).hexdigest()
    settings = dataclasses.asdict(corpus) | {"corpus": name, "local files": digest}
    del settings["output"], settings["overwrite"]
    about = {
        "source": ", ".join(map(str, corpus.paths)) or " ".join([settings["dataset"], settings["subset"]]).strip(),
        "tokenizer": corpus.tokenizer or f"byte-level BPE of {corpus.vocabulary}, trained on it",
    }

    def tokenizer() -> Tokenizer:
        return find_tokenizer(corpus.tokenizer) if corpus.tokenizer else train_on(corpus.streams, corpus.vocabulary)

    def report(counts: token_files.Counts) -> None:
        documents, tokens = (sum(split[what] for split in counts.values()) for what in ("documents", "tokens"))
        if documents and not status.status:
            console.print(f"Resuming after {documents:,} documents: {partial}")
        status.update(f"{documents:,} documents, {tokens:,} tokens")
        if stopping:
            raise Stopped(RESUME, stopping[0])

    try:
        with console.status("") as status:
            counts = token_files.write(partial, folder, tokenizer, streams, settings, about, report)
    finally:
        for line in corpus.problems.lines():
            console.print(line)
    train, validation = (f"{n['documents']:,} ({n['tokens']:,} tokens)" for n in counts.values())
    console.print(f"{folder}: documents {train} to train on, {validation} to validate on")


def check(corpus: Corpus) -> None:
    """Refuse options that make no sense.

    Raises:
        RunError: naming the option.
    """
    values = dataclasses.asdict(corpus)
    for name in ("context", "train_documents", "validation_documents", "cut"):
        if values.get(name) is not None and values[name] < 1:
            raise RunError(f"--{name.replace('_', '-')} must be at least 1, got {values[name]}")
    if not 0 < corpus.validation_percent <= 50:
        raise RunError(f"--validation-percent must be above 0 and at most 50, got {corpus.validation_percent}")
    if not 257 <= corpus.vocabulary <= 65_536:
        raise RunError(f"--vocabulary must be in 257 (the bytes and a separator)..65536, got {corpus.vocabulary}")


def clear(folder: Path, partial: Path, overwrite: bool) -> None:
    """Delete what is in the way of ``folder``, if it may be.

    Raises:
        RunError: where something else is in the way.
    """
    occupied = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if occupied and not overwrite:
        raise RunError(f"{folder} exists: --overwrite replaces it, --output names another folder")
    if occupied and not (folder / "manifest.json").exists():
        raise RunError(f"{folder} has no token files (no manifest.json in it): --overwrite will not delete it")
    if overwrite:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(partial, ignore_errors=True)
