# SPDX-License-Identifier: Apache-2.0
"""Small corpora in files, ``prepare`` called on them, and what it has written."""

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from examples.pretrain import data
from examples.pretrain.prepare import command

WORDS = [
    "the",
    "and",
    "model",
    "größe",
    "雪",
    "matrix",
    "row",
    "3.14",
    "step",
    "falls",
    "rises",
    "loss\n",
]
SPECIAL = ["<|endoftext|>", "</s>", "<extra_id_3>", "<|im_start|>"]
LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
)


def document(number: int) -> str:
    """Text number ``number``, of 3 to 120 words."""
    draw = random.Random(number)
    length = draw.randint(3, 120)
    words = draw.choices(WORDS, k=length)
    return f"{number} " + " ".join(words)


TEXTS = [document(number) for number in range(300)]


def size_of(texts: Sequence[str]) -> int:
    """Bytes of the texts together."""
    return sum(len(text.encode()) for text in texts)


def whole_words(words: Sequence[str]) -> Tokenizer:
    """A tokenizer that knows these words, and removes digits."""
    vocabulary = ["[UNK]", "<|endoftext|>", *words]
    known = {word: number for number, word in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.normalizer = normalizers.Replace(Regex("[0-9]"), "")
    return tokenizer


# Files


def put(path: Path, content: bytes = b"") -> Path:
    """A file in a folder that need not be there yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def put_texts(folder: Path, texts: Sequence[str], suffix: str = "txt") -> None:
    """A numbered file for each text."""
    for number, text in enumerate(texts):
        put(folder / f"{number}.{suffix}", text.encode())


def zstd(content: bytes) -> bytes:
    return pyarrow.compress(content, "zstd", asbytes=True)


def json_lines(*records: object) -> bytes:
    """The records, one a line; a text is a line as it is."""
    lines = []
    for record in records:
        line = record
        if not isinstance(record, str):
            line = json.dumps(record)
        lines.append(f"{line}\n")
    return "".join(lines).encode()


def save(path: Path, texts: Sequence[str], field: str = "text") -> Path:
    """Records with the texts, in the format of the file's name."""
    table = pyarrow.table({"url": ["x"] * len(texts), field: texts})
    lines = json_lines(*table.to_pylist())
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=64)
    elif path.suffix == ".zst":
        with pyarrow.output_stream(path, compression="zstd") as file:
            file.write(lines)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines))
    else:
        path.write_bytes(lines)
    return path


# The command


def prepare(corpus: str, *paths: object, **options: object) -> data.Dataset:
    """Prepare token files in the folder ``output``, and load them.

    The option ``train_documents=50`` is ``--train-documents 50``, and ``skip_bad=True``
    is ``--skip-bad``.
    """
    words = [corpus, *map(str, paths)]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            words += [flag]
        elif value is not False:
            words += [flag, str(value)]
    command.main(words)
    return data.load(Path(str(options["output"])))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def decoded(dataset: data.Dataset, split: str) -> list[str]:
    """The documents of packed token files of a byte-level tokenizer."""
    tokens = getattr(dataset, split).tolist()
    text = dataset.tokenizer.decode(tokens, skip_special_tokens=False)
    return text.split("<|endoftext|>")[:-1]


def all_decoded(dataset: data.Dataset) -> list[str]:
    """The documents of both splits."""
    return decoded(dataset, "train") + decoded(dataset, "validation")


def all_tokens(dataset: data.Dataset) -> np.ndarray:
    """The tokens of both splits."""
    return np.concatenate([dataset.train, dataset.validation])


def decoded_up_to(dataset: data.Dataset, end: int) -> list[str]:
    """The documents of both splits, each decoded with its token ``end``.

    The last is empty: what comes after the last ``end``.
    """
    tokens = all_tokens(dataset)
    starts = np.flatnonzero(tokens == end) + 1
    return [dataset.tokenizer.decode(part) for part in np.split(tokens, starts)]
