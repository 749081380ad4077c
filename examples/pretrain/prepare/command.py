# SPDX-License-Identifier: Apache-2.0
"""``python -m examples.pretrain prepare CORPUS``: text to a folder of token files."""

import dataclasses
import functools
import hashlib
import json
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.status import Status
from tokenizers import Tokenizer

from ..checks import check_ranges
from ..config import RunError
from ..processes import Stopped, on_signals
from . import token_files
from .problems import Problems
from .python_source import python_streams
from .reading import read_plain, read_records
from .search import SUFFIXES, find_files
from .sources import HubStream, Stream
from .tokenizer import find_tokenizer, train_on


@dataclass(frozen=True)
class Corpus:
    """Write a corpus as token files. The same command resumes a stopped one, and writes
    the same bytes.
    """

    # Files, and folders to search for them; of a data set on the hub: local copies to
    # read instead.
    paths: tyro.conf.Positional[tuple[Path, ...]] = ()
    output: Path | None = None  # Folder to write; None: data/<corpus>.
    # Start again, and replace the token files of the folder when the new ones are
    # complete; its other files stay.
    overwrite: bool = False
    # packed: documents one after the other, cut anywhere. documents: a sequence each,
    # truncated or padded.
    layout: Literal["packed", "documents"] = "packed"
    # documents: longest sequence the files can serve; training may take any up to it.
    context: int = 1024
    train_documents: int | None = None  # Training documents to take; None: all.
    validation_documents: int | None = None  # Validation documents to take; None: all.
    # Files and folders to validate on; none: hold out documents of the others.
    validation_files: tuple[Path, ...] = ()
    # Share of the documents that is held out, by a hash of the text (python: of the
    # path).
    validation_percent: float = 5
    # Path of a tokenizer.json, or a name on the Hugging Face hub. Empty: train a
    # byte-level BPE on the text.
    tokenizer: str = ""
    # Token that ends a document; None: the first of
    # <|endoftext|>, </s>, <|end_of_text|> and <eos> that there is.
    end_token: str | None = None
    # Tokens of the tokenizer that is trained, on a sample of 50 MB if there is more
    # text.
    vocabulary: int = 2048
    # Leave out lines that are not JSON, and files and rows that are not UTF-8, have
    # NULs or no text, and report them.
    skip_bad: bool = False
    # text: cut files into documents of at most so many characters, at a line end or
    # else a space; None: do not cut.
    cut: int | None = None
    # python: add the installed packages to the standard library.
    installed_packages: bool = False
    field: str = "text"  # Records: the field that has the text.
    dataset: str = ""  # Id of a data set on the Hugging Face hub.
    subset: str = ""  # Its configuration; empty: the default.
    revision: str = ""  # Its branch, tag or commit; empty: the newest.
    # Its split to validate on; empty: hold out documents of the training split.
    validation_split: str = ""
    name: tyro.conf.Suppress[str] = ""

    @property
    def folder(self) -> Path:
        """The folder to write."""
        if self.output:
            return self.output
        if self.name != "python" or self.paths:
            return Path("data") / self.name
        packages = ""
        if self.installed_packages:
            packages = "-packages"
        version = platform.python_version()
        return Path(f"data/python-{version}{packages}-v{self.vocabulary}")

    @cached_property
    def problems(self) -> Problems:
        """What is left out of its files."""
        return Problems(self.skip_bad)

    def streams(self) -> list[Stream]:
        """The documents to train on, then those to validate on.

        Documents that are held out from those to train on are in their stream.
        """
        if self.name == "python":
            return self._python_streams()
        if self.dataset and not self.paths:
            return self._split_streams(self._hub, "train", self.validation_split)
        train, validation = self._files
        return self._split_streams(self._local, train, validation)

    def _python_streams(self) -> list[Stream]:
        """The streams of Python files."""
        if self.validation_files:
            raise RunError(
                "--validation-files has no effect on Python files: use"
                " --validation-percent"
            )
        return python_streams(
            self.paths,
            self.installed_packages,
            self.validation_percent,
            self.problems.left_out,
            self.problems,
        )

    def _split_streams(
        self, read: Callable[[Any, float], Stream], train: Any, validation: Any
    ) -> list[Stream]:
        """A stream of each source, or one of which a share is held out.

        Args:
            read: returns the stream of a source, with the share to hold out.
            train: the source to train on.
            validation: the source to validate on; empty if there is none.
        """
        if validation:
            return [read(train, 0.0), read(validation, 1.0)]
        return [read(train, self.validation_percent / 100)]

    @cached_property
    def _files(self) -> tuple[list[Path], list[Path]]:
        """Local files to train on, and those to validate on, which are none of them."""
        suffixes = SUFFIXES[self.name]
        left_out = self.problems.left_out
        seen: set[Path] = set()
        validation = []
        if self.validation_files:
            validation = find_files(self.validation_files, suffixes, left_out, seen)
        return find_files(self.paths, suffixes, left_out, seen), validation

    def _local(self, files: Sequence[Path], held_out: float) -> Stream:
        """The documents of files."""
        return Stream(lambda: self._documents(files), held_out, files)

    def _documents(self, files: Sequence[Path]) -> Iterator[str]:
        """The texts of files, one file after the other."""
        for path in files:
            if self.name == "text":
                yield from read_plain(path, self.cut, self.problems)
            else:
                yield from read_records(path, self.field, self.problems)

    def _hub(self, split: str, held_out: float) -> Stream:
        """The documents of a split on the hub."""
        return HubStream(
            self.dataset,
            self.subset,
            split,
            self.field,
            self.problems,
            held_out,
            revision=self.revision or None,
        )

    @property
    def source(self) -> str:
        """What the text is, in words."""
        if self.paths:
            return ", ".join(map(str, self.paths))
        if named := " ".join((self.dataset, self.subset)).strip():
            return named
        source = (
            f"standard library of {platform.python_implementation()}"
            f" {platform.python_version()}"
        )
        if self.installed_packages:
            source += " and installed packages"
        return source

    def make_tokenizer(self) -> Tokenizer:
        """The tokenizer that is named, or one trained on the text."""
        if self.tokenizer:
            return find_tokenizer(self.tokenizer, self.end_token)
        return train_on(self.streams, self.vocabulary)


def hub(name: str, dataset: str, tokenizer: str, **options: Any) -> Corpus:
    """A data set of the hub; one document in 2,000 is held out."""
    defaults: dict[str, Any] = {"validation_percent": 0.05}
    return Corpus(
        name=name, dataset=dataset, tokenizer=tokenizer, **(defaults | options)
    )


PAPER: dict[str, Any] = {
    "layout": "documents",
    "train_documents": 5_120_000,
    "validation_documents": 2_048,
}
C4 = hub(
    "c4",
    "allenai/c4",
    "google-t5/t5-base",
    subset="en",
    validation_split="validation",
    **PAPER,
)
# The paper's documents of the Pile come from the token stream of Pythia; here they come
# from the deduplicated Pile in its published order.
PILE = hub("pile", "EleutherAI/the_pile_deduplicated", "Qwen/Qwen3-0.6B-Base", **PAPER)
# Name: what it is, its defaults.
CORPORA = {
    "python": (
        "Python source: the standard library, or folders",
        Corpus(name="python"),
    ),
    "text": (
        "files of plain text (.txt, .md, .rst, .tex), each a document",
        Corpus(name="text"),
    ),
    "jsonl": (
        "lines of JSON (.jsonl; .json.gz, .jsonl.zst and so on) or tables (.parquet)",
        Corpus(name="jsonl"),
    ),
    "openwebtext": (
        "8 million web pages, 40 GB",
        hub("openwebtext", "Skylion007/openwebtext", "gpt2"),
    ),
    "c4": ("C4 English, a document per sequence", C4),
    "pile": ("the deduplicated Pile, a document per sequence", PILE),
}


def main(arguments: Sequence[str]) -> None:
    """Prepare the corpus that the arguments name.

    Raises:
        RunError: for everything that the user can fix.
        Stopped: after a signal.
    """
    name, *options = arguments or [""]
    if name in ("-h", "--help"):
        print(usage())
        return
    if name not in CORPORA:
        raise RunError(
            f"prepare must be followed by one of {', '.join(CORPORA)}, got {name!r}"
        )
    check_given_once("--validation-files", options)
    program = f"python -m examples.pretrain prepare {name}"
    _, defaults = CORPORA[name]
    corpus = tyro.cli(Corpus, default=defaults, args=options, prog=program)
    console = Console(markup=False, highlight=False, soft_wrap=True)
    stopping: list[int] = []
    with on_signals(stopping.append):
        prepare(corpus, console, stopping)


def usage() -> str:
    """The corpora, one a line."""
    lines = [f"  {corpus:<12}{what}" for corpus, (what, _) in CORPORA.items()]
    head = "usage: python -m examples.pretrain prepare CORPUS ...\n"
    return "\n".join([head, *lines])


def check_given_once(flag: str, options: Sequence[str]) -> None:
    """Refuse a flag that is there twice, of which the first would have no effect.

    Raises:
        RunError: naming the flag.
    """
    given = [option.replace("_", "-") for option in options]
    if sum(option.startswith(flag) for option in given) > 1:
        raise RunError(f"{flag} is given twice: name all files and folders after one")


def prepare(corpus: Corpus, console: Console, stopping: Sequence[int] = ()) -> None:
    """Write the token files of a corpus, or finish them.

    A signal in ``stopping`` ends it after a batch.
    """
    check_ranges(vars(corpus))
    folder = corpus.folder
    if folder.is_symlink() or not folder.name:
        folder = folder.resolve()
    partial = folder.with_name(f".{folder.name}.partial")
    clear(folder, partial, corpus.overwrite)
    streams = corpus.streams()
    settings = settings_of(corpus, streams)
    trained = f"byte-level BPE of {corpus.vocabulary}, trained on it"
    about = {"source": corpus.source, "tokenizer": corpus.tokenizer or trained}
    try:
        with console.status("") as status:
            counts = token_files.write(
                partial,
                folder,
                corpus.make_tokenizer,
                streams,
                settings,
                about,
                functools.partial(report, console, status, partial, stopping),
            )
    finally:
        # Once all files are read: blank ones are left out, too.
        if corpus.paths:
            console.print(corpus.problems.summary())
        for line in corpus.problems.lines():
            console.print(line)
    print_counts(console, folder, counts)


def settings_of(corpus: Corpus, streams: Sequence[Stream]) -> dict[str, Any]:
    """What the token files depend on: options, and the local files as they are."""
    files = [path for stream in streams for path in stream.files]
    if Path(corpus.tokenizer).is_file():
        files.append(Path(corpus.tokenizer))
    local = []
    for path in files:
        stat = path.stat()
        local.append([str(path), stat.st_size, stat.st_mtime_ns])
    settings = dataclasses.asdict(corpus)
    digest = hashlib.sha256(json.dumps(local).encode())
    settings["local files"] = digest.hexdigest()
    del settings["output"], settings["overwrite"]
    del settings["skip_bad"]  # nothing has been skipped without it
    return settings


def total(counts: token_files.Counts, what: str) -> int:
    """A count of all splits together."""
    return sum(split[what] for split in counts.values())


def report(
    console: Console,
    status: Status,
    partial: Path,
    stopping: Sequence[int],
    counts: token_files.Counts,
) -> None:
    """Show how far it is, before the first batch and after each.

    Raises:
        Stopped: if there is a signal in ``stopping``.
    """
    documents = total(counts, "documents")
    if documents and not status.status:
        console.print(f"Resuming after {documents:,} documents: {partial}")
    status.update(f"{documents:,} documents, {total(counts, 'tokens'):,} tokens")
    if stopping:
        raise Stopped("stopped; the same command resumes", stopping[0])


def print_counts(console: Console, folder: Path, counts: token_files.Counts) -> None:
    """Say what was written, and what is remarkable about it."""
    for what in token_files.REPORTED:
        if count := total(counts, what):
            console.print(f"{what}: {count:,}")
    train = documents_of(counts["train"])
    validation = documents_of(counts["validation"])
    console.print(
        f"{folder}: documents {train} to train on, {validation} to validate on"
    )


def documents_of(split: Mapping[str, int]) -> str:
    """The documents and tokens of a split, in words."""
    return f"{split['documents']:,} ({split['tokens']:,} tokens)"


def clear(folder: Path, partial: Path, overwrite: bool) -> None:
    """Check that ``folder`` may be written.

    With ``overwrite``, delete what an interrupted command left in ``partial``.

    Raises:
        RunError: if something else is in the way.
    """
    occupied = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    # An interrupted --overwrite is finished without the flag, too.
    interrupted = (partial / token_files.STATE).exists()
    if occupied and not overwrite and not interrupted:
        raise RunError(
            f"{folder} exists: pass --overwrite to replace it, or another --output"
        )
    if occupied and not (folder / "manifest.json").exists():
        raise RunError(
            f"{folder} has no token files (no manifest.json in it): --overwrite will"
            " not delete it"
        )
    if overwrite:
        shutil.rmtree(partial, ignore_errors=True)
