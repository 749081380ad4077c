# SPDX-License-Identifier: Apache-2.0
"""``python -m examples.pretrain prepare CORPUS``: text to a folder of token files,
streamed.
"""

import dataclasses
import hashlib
import json
import platform
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from tokenizers import Tokenizer

from ..checks import check_ranges
from ..config import RunError
from ..processes import Stopped, on_signals
from . import sources, token_files
from .sources import HubStream, Problems, Stream, find_files, read_plain, read_records
from .token_files import find_tokenizer, train_on


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
    # Token that ends a document; None: the first of <|endoftext|>, </s>,
    # <|end_of_text|> and <eos> that there is.
    end_token: str | None = None
    # Tokens of the tokenizer that is trained, on a sample of 50 MB if there is more
    # text.
    vocabulary: int = 2048
    # Leave out lines that are not JSON, and files and rows that are not UTF-8 or have
    # no text, and report them.
    skip_bad: bool = False
    # text: cut files into documents of at most so many characters, at a line end or
    # else a space; None: do not cut.
    cut: int | None = None
    installed_packages: bool = (
        False  # python: add the installed packages to the standard library.
    )
    field: str = "text"  # Records: the field that has the text.
    dataset: str = ""  # Id of a data set on the Hugging Face hub.
    subset: str = ""  # Its configuration; empty: the default.
    revision: str = ""  # Its branch, tag or commit; empty: the newest.
    validation_split: str = (
        ""  # Its split to validate on; empty: hold out documents of the training split.
    )
    name: tyro.conf.Suppress[str] = ""

    @property
    def folder(self) -> Path:
        """The folder to write."""
        if self.output or self.name != "python" or self.paths:
            return self.output or Path("data") / self.name
        packages = "-packages" * self.installed_packages
        return Path(
            f"data/python-{platform.python_version()}{packages}-v{self.vocabulary}"
        )

    @cached_property
    def problems(self) -> Problems:
        """What is left out of its files."""
        return Problems(self.skip_bad)

    def streams(self) -> list[Stream]:
        """The documents to train on, then those to validate on if they come from
        elsewhere.
        """
        if self.name == "python":
            if self.validation_files:
                raise RunError(
                    "--validation-files has no effect on Python files: use"
                    " --validation-percent"
                )
            options = (
                self.installed_packages,
                self.validation_percent,
                self.problems.left_out,
            )
            return sources.python_streams(self.paths, *options)
        share, hub = (
            self.validation_percent / 100,
            bool(self.dataset and not self.paths),
        )
        train, other = ("train", self.validation_split) if hub else self.files
        read: Any = self.hub if hub else self.local
        return [read(train, 0.0), read(other, 1.0)] if other else [read(train, share)]

    @cached_property
    def files(self) -> tuple[list[Path], list[Path]]:
        """Local files to train on, and those to validate on, which are none of them."""
        options = sources.SUFFIXES[self.name], self.problems.left_out, set[Path]()
        held = (
            find_files(self.validation_files, *options) if self.validation_files else []
        )
        return find_files(self.paths, *options), held

    def local(self, files: Sequence[Path], held_out: float) -> Stream:
        """The documents of files."""
        one: Any = read_plain if self.name == "text" else read_records
        option = self.cut if self.name == "text" else self.field
        return Stream(
            lambda: (x for path in files for x in one(path, option, self.problems)),
            held_out,
            files,
        )

    def hub(self, split: str, held_out: float) -> Stream:
        """The documents of a split on the hub."""
        options = {"revision": self.revision or None}
        return HubStream(
            self.dataset,
            self.subset,
            split,
            self.field,
            self.problems,
            held_out,
            **options,
        )


def hub(name: str, dataset: str, tokenizer: str, **options: Any) -> Corpus:
    """A data set of the hub; one document in 2,000 is held out."""
    return Corpus(
        name=name,
        dataset=dataset,
        tokenizer=tokenizer,
        **{"validation_percent": 0.05, **options},
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
        print("usage: python -m examples.pretrain prepare CORPUS ...\n")
        print(
            *(f"  {corpus:<12}{what}" for corpus, (what, _) in CORPORA.items()),
            sep="\n",
        )
        return
    if name not in CORPORA:
        raise RunError(
            f"prepare must be followed by one of {', '.join(CORPORA)}, got {name!r}"
        )
    if (
        sum(
            option.replace("_", "-").startswith("--validation-files")
            for option in options
        )
        > 1
    ):
        raise RunError(
            "--validation-files is given twice: name all files and folders after one"
        )
    program = f"python -m examples.pretrain prepare {name}"
    corpus = tyro.cli(Corpus, default=CORPORA[name][1], args=options, prog=program)
    stopping: list[int] = []
    with on_signals(stopping.append):
        prepare(
            corpus, Console(markup=False, highlight=False, soft_wrap=True), stopping
        )


def prepare(corpus: Corpus, console: Console, stopping: Sequence[int] = ()) -> None:
    """Write the token files of a corpus, or finish them. A signal in ``stopping`` ends
    it after a batch.
    """
    check_ranges(vars(corpus))
    folder = (
        corpus.folder.resolve()
        if corpus.folder.is_symlink() or not corpus.folder.name
        else corpus.folder
    )
    partial = folder.with_name(f".{folder.name}.partial")
    clear(folder, partial, corpus.overwrite)
    streams = corpus.streams()
    files = [path for stream in streams for path in stream.files]
    files += [Path(corpus.tokenizer)] * Path(corpus.tokenizer).is_file()
    local = [
        [str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in files
    ]
    if corpus.paths:
        console.print(sources.summary(corpus.problems.left_out))
    settings = dataclasses.asdict(corpus) | {
        "local files": hashlib.sha256(json.dumps(local).encode()).hexdigest()
    }
    del (
        settings["output"],
        settings["overwrite"],
        settings["skip_bad"],
    )  # nothing has been skipped without it
    library = (
        f"standard library of {platform.python_implementation()}"
        f" {platform.python_version()}"
    )
    library += " and installed packages" * corpus.installed_packages
    source = (
        ", ".join(map(str, corpus.paths))
        or " ".join((corpus.dataset, corpus.subset)).strip()
        or library
    )
    about = {
        "source": source,
        "tokenizer": (
            corpus.tokenizer or f"byte-level BPE of {corpus.vocabulary}, trained on it"
        ),
    }

    def tokenizer() -> Tokenizer:
        name, end = corpus.tokenizer, corpus.end_token
        return (
            find_tokenizer(name, end)
            if name
            else train_on(corpus.streams, corpus.vocabulary)
        )

    def report(counts: token_files.Counts) -> None:
        documents, tokens = (
            sum(split[what] for split in counts.values())
            for what in ("documents", "tokens")
        )
        if documents and not status.status:
            console.print(f"Resuming after {documents:,} documents: {partial}")
        status.update(f"{documents:,} documents, {tokens:,} tokens")
        if stopping:
            raise Stopped("stopped; the same command resumes", stopping[0])

    try:
        with console.status("") as status:
            counts = token_files.write(
                partial, folder, tokenizer, streams, settings, about, report
            )
    finally:
        for line in corpus.problems.lines():
            console.print(line)
    for what in token_files.REPORTED:
        if count := sum(split[what] for split in counts.values()):
            console.print(f"{what}: {count:,}")
    train, validation = (
        f"{n['documents']:,} ({n['tokens']:,} tokens)" for n in counts.values()
    )
    console.print(
        f"{folder}: documents {train} to train on, {validation} to validate on"
    )


def clear(folder: Path, partial: Path, overwrite: bool) -> None:
    """Check that ``folder`` may be written; with ``overwrite``, delete what an
    interrupted command left in ``partial``.

    Raises:
        RunError: if something else is in the way.
    """
    occupied = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if (
        occupied and not overwrite and not (partial / token_files.STATE).exists()
    ):  # of an interrupted --overwrite
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
