# SPDX-License-Identifier: Apache-2.0
"""Token files to batches: memory-mapped tokens, cut into sequences, shuffled by grain anew in every epoch.

The order depends on the seed alone, so every optimizer sees the same batches; the iterator's state, a small
dictionary, goes into the checkpoint. Shape letters: N sequences, B batch, T context, S = T + 1: a sequence holds the
inputs and, moved on by one, the targets.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grain
import numpy as np
from tokenizers import Tokenizer

from .config import RunError
from .prepare.token_files import SPLITS
from .prepare.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Dataset:
    """A folder of token files, opened."""

    folder: Path
    manifest: dict[str, Any]
    train: np.ndarray
    validation: np.ndarray
    tokenizer: Tokenizer

    @property
    def vocabulary(self) -> int:
        """Number of tokens the model must know."""
        return self.manifest["vocabulary"]


def load(folder: Path) -> Dataset:
    """Map the token files of ``folder``.

    Raises:
        RunError: where a file is missing, cut short, or belongs to another tokenizer.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        tokenizer = load_tokenizer(folder / "tokenizer.json")
        tokens = {split: np.memmap(folder / f"{split}.bin", dtype=manifest["dtype"], mode="r") for split in SPLITS}
        sizes = {split: manifest[split]["tokens"] for split in SPLITS}
    except Exception as error:  # `tokenizers` raises bare Exception
        raise RunError(f"cannot read the token files ({error}): delete {folder} to make them anew") from error
    for split, expected in sizes.items():
        if len(tokens[split]) != expected:
            raise RunError(
                f"{folder / split}.bin holds {len(tokens[split])} tokens, its manifest says {expected}: "
                f"delete {folder} to make it anew"
            )
    if tokenizer.get_vocab_size() != manifest["vocabulary"]:
        raise RunError(
            f"{folder}/tokenizer.json knows {tokenizer.get_vocab_size()} tokens, the token files use "
            f"{manifest['vocabulary']}: delete {folder} to make it anew"
        )
    return Dataset(folder, manifest, tokens["train"], tokens["validation"], tokenizer)


class Sequences:
    """Tokens as a random-access source of overlapping-by-one sequences (T + 1,)."""

    def __init__(self, tokens: np.ndarray, context: int):
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> np.ndarray:
        start = int(index) * self.context
        return np.asarray(self.tokens[start : start + self.context + 1], dtype=np.int32)


def training_batches(tokens: np.ndarray, *, context: int, batch_size: int, seed: int) -> grain.DatasetIterator:
    """An endless iterator over int32 batches (B, T + 1), with ``get_state`` and ``set_state``.

    Raises:
        RunError: where the tokens do not fill one batch.
    """
    source = Sequences(tokens, context)
    if len(source) < batch_size:
        raise RunError(
            f"--batch-size {batch_size} x --model.context {context} needs more than the {len(tokens)} training tokens "
            "there are"
        )
    batches = grain.MapDataset.source(source).seed(seed).shuffle().repeat().batch(batch_size)
    return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)))


def validation_sequences(tokens: np.ndarray, *, context: int, count: int) -> np.ndarray:
    """The fixed validation set: about ``count`` predictions as sequences (N, T + 1), evenly spread over the split.

    The same for every seed, batch size and optimizer.

    Raises:
        RunError: where the split is shorter than one sequence.
    """
    if len(tokens) <= context:
        raise RunError(f"the validation split has {len(tokens)} tokens, too few for --model.context {context}")
    source = Sequences(tokens, context)
    chosen = np.linspace(0, len(source) - 1, min(max(count // context, 1), len(source))).round().astype(int)
    return np.stack([source[index] for index in chosen])
