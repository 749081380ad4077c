# SPDX-License-Identifier: Apache-2.0
"""Token files to batches: memory-mapped tokens, cut into sequences, shuffled by grain
anew in every epoch.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grain
import numpy as np
from rich.console import Console
from tokenizers import Tokenizer

from .config import Config, RunError
from .prepare.command import CORPORA, prepare
from .prepare.sources import one_line
from .prepare.token_files import SPLITS, load_tokenizer, sha256

PADDING = -1
PART, PARTS = (
    2**20,
    64,
)  # tokens of a file that are checked: a fraction of a second, whatever its size


@dataclass(frozen=True)
class Dataset:
    """A folder of token files, opened; offsets of documents where sequences are padded,
    else none.
    """

    folder: Path
    manifest: dict[str, Any]
    train: np.ndarray
    validation: np.ndarray
    tokenizer: Tokenizer
    offsets: dict[str, np.ndarray] | None = None


def open_corpus(config: Config, console: Console) -> Dataset:
    """The prepared corpus that ``config`` names, else Python source, prepared on first
    use.

    Raises:
        RunError: if the folder is missing or damaged.
    """
    if config.tokens:
        return load(config.tokens)
    options = {
        "installed_packages": config.installed_packages,
        "vocabulary": config.vocabulary,
    }
    corpus = dataclasses.replace(CORPORA["python"][1], **options)
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
        known = next(
            (name for name in CORPORA if folder.name.startswith(name)), "CORPUS"
        )
        command = f"python -m examples.pretrain prepare {known} --output {folder}"
        raise RunError(
            f"there are no token files in {folder} (no manifest.json): run `{command}`"
        )
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        documents, largest = (
            manifest["layout"] == "documents",
            manifest["largest_token"],
        )
        files = {
            f"{split}.bin": (manifest["dtype"], manifest[split]["tokens"])
            for split in SPLITS
        }
        files |= {
            f"{split}.offsets": ("<i8", manifest[split]["documents"] + 1)
            for split in SPLITS
            if documents
        }
        maps = {
            name: np.memmap(folder / name, dtype=dtype, mode="r")
            for name, (dtype, _) in files.items()
        }
        for name, (_, expected) in files.items():
            if len(maps[name]) != expected:
                raise ValueError(
                    f"{name} has {len(maps[name])} entries, its manifest says"
                    f" {expected}"
                )
            if name.endswith(".bin") and (found := largest_id(maps[name])) > largest:
                raise ValueError(
                    f"{name} has the token {found}, its manifest says at most {largest}"
                )
        if (
            sha256(folder / "tokenizer.json") != manifest["tokenizer_sha256"]
            or largest >= manifest["vocabulary"]
        ):
            raise ValueError("tokenizer.json is not the tokenizer of the token files")
        tokenizer = load_tokenizer(folder / "tokenizer.json")
    except Exception as error:  # `tokenizers` raises bare Exception
        way_out = "delete the folder and prepare them again"
        raise RunError(
            f"cannot read the token files in {folder} ({one_line(error)}): {way_out}"
        ) from error
    offsets: dict[str, np.ndarray] | None = (
        {split: maps[f"{split}.offsets"] for split in SPLITS} if documents else None
    )
    return Dataset(
        folder, manifest, maps["train.bin"], maps["validation.bin"], tokenizer, offsets
    )


def largest_id(tokens: np.ndarray) -> int:
    """The largest token of a file; of a large one, in ``PARTS`` evenly spread parts."""
    count = min(math.ceil(len(tokens) / PART), PARTS)
    starts = np.linspace(0, max(len(tokens) - PART, 0), count).astype(int)
    return max((int(tokens[start : start + PART].max()) for start in starts), default=0)


class Sequences:
    """A random-access source of int32 sequences (T + 1,) of a split: packed ones
    overlap by one token.

    Raises:
        RunError: where the documents were cut to less than ``context``.
    """

    def __init__(self, dataset: Dataset, split: str, context: int):
        self.tokens: np.ndarray = getattr(dataset, split)
        self.offsets = dataset.offsets[split] if dataset.offsets else None
        self.context = context
        if self.offsets is not None and context > dataset.manifest["context"]:
            longest = (
                f"the {dataset.manifest['context']} tokens that the documents of"
                f" {dataset.folder} were cut to"
            )
            raise RunError(
                f"--model.context {context} is longer than {longest}: prepare them with"
                f" --context {context}"
            )

    def __len__(self) -> int:
        return (
            max(len(self.tokens) - 1, 0) // self.context
            if self.offsets is None
            else len(self.offsets) - 1
        )

    def __getitem__(self, index: int) -> np.ndarray:
        index, offsets = int(index), self.offsets
        start, end = (
            (index * self.context, None)
            if offsets is None
            else map(int, offsets[index : index + 2])
        )
        tokens = self.tokens[start:end][: self.context + 1]
        sequence = np.full(self.context + 1, PADDING, np.int32)
        sequence[: len(tokens)] = tokens
        return sequence


def training_batches(
    dataset: Dataset,
    *,
    context: int,
    batch_size: int,
    seed: int,
    host: int = 0,
    hosts: int = 1,
) -> grain.DatasetIterator:
    """An endless iterator over int32 batches (B / hosts, T + 1), with ``get_state`` and
    ``set_state``.

    Host h of H takes the h-th part of every batch: the parts together are the batch of
    one host, in its order.

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
        held = (
            f"{len(source)} training documents"
            if dataset.offsets
            else f"{len(dataset.train)} training tokens"
        )
        raise RunError(
            f"--batch-size {batch_size} x --model.context {context} needs more than the"
            f" {held} there are"
        )
    endless = grain.MapDataset.source(source).seed(seed).shuffle().repeat()
    parts = endless.batch(
        batch_size // hosts, drop_remainder=True
    )  # else grain's length overflows at one sequence
    own = parts[host::hosts] if hosts > 1 else parts
    return iter(
        own.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=8))
    )


def validation_sequences(dataset: Dataset, *, context: int, count: int) -> np.ndarray:
    """The fixed validation set: about ``count`` predictions as sequences (N, T + 1),
    evenly spread over the split.

    The same for every seed, batch size and optimizer. Padding counts as if it were
    predicted.

    Raises:
        RunError: where the split is shorter than one sequence.
    """
    source = Sequences(dataset, "validation", context)
    if not len(source):
        raise RunError(
            f"{len(dataset.validation)} validation tokens are too few for"
            f" --model.context {context}"
        )
    chosen = (
        np.linspace(0, len(source) - 1, min(max(count // context, 1), len(source)))
        .round()
        .astype(int)
    )
    return np.stack([source[index] for index in chosen])
