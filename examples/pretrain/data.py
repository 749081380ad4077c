# SPDX-License-Identifier: Apache-2.0
"""Token files to batches.

Memory-mapped tokens are cut into sequences, which grain shuffles anew in every epoch.
The order depends on the seed alone, so every optimizer sees the same batches. Hosts
share each batch. The iterator's state, a small dictionary, is part of the checkpoint.
Shape letters: N sequences, B batch, T context, S = T + 1: a sequence holds the inputs
and, shifted by one, the targets. Packed sequences are cut from the tokens anywhere. In
the layout "documents" each is the beginning of a document, filled with ``PADDING``,
which is no token: the loss leaves such targets out, and the model reads ``max(token,
0)``.
"""

import dataclasses
import json
import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grain
import numpy as np
from rich.console import Console
from tokenizers import Tokenizer

from .config import Config, RunError, one_line
from .prepare.command import CORPORA, prepare
from .prepare.token_files import SPLITS, sha256
from .prepare.tokenizer import load_tokenizer

PADDING = -1
# Tokens of a file that are checked: a fraction of a second, whatever its size.
PART = 2**20
PARTS = 64


@dataclass(frozen=True)
class Dataset:
    """A folder of token files, opened.

    With offsets of documents where sequences are padded.
    """

    folder: Path
    manifest: dict[str, Any]
    train: np.ndarray
    validation: np.ndarray
    tokenizer: Tokenizer
    offsets: dict[str, np.ndarray] | None = None


def open_corpus(config: Config, console: Console) -> Dataset:
    """The prepared corpus that ``config`` names, else Python source.

    Python source is prepared on first use.

    Raises:
        RunError: if the folder is missing or damaged.
    """
    if config.tokens:
        return load(config.tokens)
    _, python = CORPORA["python"]
    corpus = dataclasses.replace(
        python,
        installed_packages=config.installed_packages,
        vocabulary=config.vocabulary,
    )
    if not (corpus.folder / "manifest.json").exists():
        console.print(f"Preparing {corpus.folder}, once")
        prepare(corpus, console)
    return load(corpus.folder)


def load(folder: Path) -> Dataset:
    """Map the token files of ``folder``, checking their sizes and ids.

    Raises:
        RunError: where a file is missing, cut short, not what its manifest says, or
            belongs to another tokenizer.
    """
    if not (folder / "manifest.json").exists():
        names = (name for name in CORPORA if folder.name.startswith(name))
        corpus = next(names, "CORPUS")
        output = shlex.quote(str(folder))
        command = f"python -m examples.pretrain prepare {corpus} --output {output}"
        raise RunError(
            f"there are no token files in {folder} (no manifest.json): run `{command}`"
        )
    try:
        return read(folder)
    except Exception as error:  # `tokenizers` raises bare Exception
        raise RunError(
            f"cannot read the token files in {folder} ({one_line(error)}): prepare them"
            " again with another --output, and pass that as --tokens"
        ) from error


def read(folder: Path) -> Dataset:
    """Map the token files of ``folder``.

    Raises:
        ValueError: where a file is not what its manifest says.
    """
    manifest = json.loads((folder / "manifest.json").read_text())
    files = read_files(folder, manifest)
    digest = sha256(folder / "tokenizer.json")
    own = digest == manifest["tokenizer_sha256"]
    if not own or manifest["largest_token"] >= manifest["vocabulary"]:
        raise ValueError("tokenizer.json is not the tokenizer of the token files")
    offsets = None
    if manifest["layout"] == "documents":
        offsets = {split: files[f"{split}.offsets"] for split in SPLITS}
    return Dataset(
        folder=folder,
        manifest=manifest,
        train=files["train.bin"],
        validation=files["validation.bin"],
        tokenizer=load_tokenizer(folder / "tokenizer.json"),
        offsets=offsets,
    )


def read_files(folder: Path, manifest: dict[str, Any]) -> dict[str, np.ndarray]:
    """Map the token files of ``folder``, and the offsets of documents if it has them.

    Raises:
        ValueError: where a file is not what the manifest says.
    """
    layout = manifest["layout"]
    largest = manifest["largest_token"]
    files: dict[str, np.ndarray] = {}
    entries: dict[str, int] = {}
    for split in SPLITS:
        name = f"{split}.bin"
        files[name] = np.memmap(folder / name, dtype=manifest["dtype"], mode="r")
        entries[name] = manifest[split]["tokens"]
    if layout == "documents":
        for split in SPLITS:
            name = f"{split}.offsets"
            files[name] = np.memmap(folder / name, dtype="<i8", mode="r")
            entries[name] = manifest[split]["documents"] + 1
    for name, file in files.items():
        if len(file) != entries[name]:
            raise ValueError(
                f"{name} has {len(file)} entries, its manifest says {entries[name]}"
            )
        if name.endswith(".bin") and (found := largest_id(file)) > largest:
            raise ValueError(
                f"{name} has the token {found}, its manifest says at most {largest}"
            )
    return files


def largest_id(tokens: np.ndarray) -> int:
    """The largest token of a file; of a large one, in ``PARTS`` evenly spread parts."""
    count = min(math.ceil(len(tokens) / PART), PARTS)
    last = max(len(tokens) - PART, 0)
    starts = np.linspace(0, last, count).astype(int)
    return max((int(tokens[start : start + PART].max()) for start in starts), default=0)


class Sequences:
    """A random-access source of int32 sequences (T + 1,) of a split.

    Packed ones overlap by one token.

    Raises:
        RunError: where the documents were cut to less than ``context``.
    """

    def __init__(self, dataset: Dataset, split: str, context: int):
        self.tokens: np.ndarray = getattr(dataset, split)
        self.context = context
        self.offsets: np.ndarray | None = None
        if dataset.offsets:
            self.offsets = dataset.offsets[split]
            check_context(dataset, context)

    def __len__(self) -> int:
        if self.offsets is not None:
            return len(self.offsets) - 1
        return max(len(self.tokens) - 1, 0) // self.context

    def __getitem__(self, index: int) -> np.ndarray:
        tokens = self._tokens_from(int(index))[: self.context + 1]
        sequence = np.full(self.context + 1, PADDING, np.int32)
        sequence[: len(tokens)] = tokens
        return sequence

    def _tokens_from(self, index: int) -> np.ndarray:
        """The tokens from the start of a sequence to the end of its document."""
        if self.offsets is None:
            return self.tokens[index * self.context :]
        start, end = self.offsets[index : index + 2]
        return self.tokens[start:end]


def check_context(dataset: Dataset, context: int) -> None:
    """Refuse sequences that are longer than the documents were cut to.

    Raises:
        RunError: naming --model.context.
    """
    longest = dataset.manifest["context"]
    if context > longest:
        raise RunError(
            f"--model.context {context} is longer than the {longest} tokens that the"
            f" documents of {dataset.folder} were cut to: prepare them with --context"
            f" {context}"
        )


def training_batches(
    dataset: Dataset,
    *,
    context: int,
    batch_size: int,
    seed: int,
    host: int = 0,
    hosts: int = 1,
) -> grain.DatasetIterator:
    """An endless iterator over int32 batches (B / hosts, T + 1).

    It has ``get_state`` and ``set_state``. Host h of H takes the h-th part of every
    batch: the parts together are the batch of one host, in its order.

    Raises:
        RunError: where the hosts cannot share a batch, or the text does not fill one.
    """
    source = Sequences(dataset, "train", context)
    if batch_size % hosts:
        raise RunError(
            f"--batch-size {batch_size} must be a multiple of the number of hosts,"
            f" {hosts}"
        )
    if len(source) < batch_size:
        held = f"{len(dataset.train)} training tokens"
        if dataset.offsets:
            held = f"{len(source)} training documents"
        raise RunError(
            f"--batch-size {batch_size} x --model.context {context} needs more than the"
            f" {held} there are"
        )
    endless = grain.MapDataset.source(source).seed(seed).shuffle().repeat()
    # Without `drop_remainder` grain's length overflows at one sequence.
    parts = endless.batch(batch_size // hosts, drop_remainder=True)
    if hosts > 1:
        parts = parts[host::hosts]
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)
    return iter(parts.to_iter_dataset(options))


def validation_sequences(dataset: Dataset, *, context: int, count: int) -> np.ndarray:
    """The fixed validation set: about ``count`` predictions as sequences (N, T + 1).

    They are evenly spread over the split, and the same for every seed, batch size and
    optimizer. Padding counts as if it were predicted.

    Raises:
        RunError: where the split is shorter than one sequence.
    """
    source = Sequences(dataset, "validation", context)
    if not len(source):
        raise RunError(
            f"{len(dataset.validation)} validation tokens are too few for"
            f" --model.context {context}"
        )
    wanted = min(max(count // context, 1), len(source))
    chosen = np.linspace(0, len(source) - 1, wanted).round().astype(int)
    return np.stack([source[index] for index in chosen])
