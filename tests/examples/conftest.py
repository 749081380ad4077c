# SPDX-License-Identifier: Apache-2.0
"""A corpus of a few standard packages: real Python, tokenized in about a second.

Beside it tokenizers of two types, trained on ``corpora.TEXTS``.
"""

import os
import shutil
import string
import subprocess
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from examples.pretrain import data, main
from examples.pretrain.config import RunError
from examples.pretrain.logs import read_lines
from examples.pretrain.prepare import command
from examples.pretrain.prepare.tokenizer import train_tokenizer
from tests.examples.corpora import TEXTS, prepare, put, save

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
PACKAGES = ("json", "email", "http", "logging")
# What every report says of its runs.
FACTS = {
    "settings": "nano --steps 10",
    "command": "python -m examples",
    "date": "2026-01-01",
    "machine": {"kind": "cpu", "cores": 1},
    "versions": {"python": "3.11", "jax": "0.10"},
    "parameters": 1000,
    "text": {"source": "text"},
    "config": {
        "config": "nano",
        "steps": 10,
        "batch_size": 2,
        "learning_rate": 0.1,
        "model.context": 4,
        "model.family": "gpt2",
        "model.layers": 1,
        "model.width": 8,
    },
}


def words(command: str) -> list[str]:
    """The words of a command line."""
    return command.split()


def refuses(message: str, call: Callable, *arguments, **options) -> None:
    """Assert that a call is refused with one line."""
    with pytest.raises(RunError, match=message) as error:
        call(*arguments, **options)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder of Python files."""
    folder = tmp_path_factory.mktemp("corpus")
    library = Path(sysconfig.get_path("stdlib"))
    for package in PACKAGES:
        shutil.copytree(library / package, folder / package)
    return folder


@pytest.fixture(scope="session")
def dataset(corpus, tmp_path_factory) -> data.Dataset:
    folder = tmp_path_factory.mktemp("data") / "tokens"
    options = ["--vocabulary", "512", "--validation-percent", "20"]
    command.main(["python", str(corpus), *options, "--output", str(folder)])
    return data.load(folder)


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory) -> Path:
    """A tokenizer of GPT-2's and Qwen's type."""
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer = train_tokenizer(TEXTS, 400)
    tokenizer.add_special_tokens(["<|im_start|>"])
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="session")
def sentence_piece(tmp_path_factory) -> Path:
    """A tokenizer of T5's type.

    It has no bytes, no <|endoftext|>, special tokens among the pieces of the model, and
    limits of its own, as files on the hub have them.
    """
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>", "<extra_id_3>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    # So that no letter of a special token is unknown.
    spelling = " ".join("</>|_" + string.ascii_lowercase)
    tokenizer.train_from_iterator([*TEXTS, spelling], trainer)
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    path = tmp_path_factory.mktemp("t5") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def flags(dataset, tmp_path) -> list[str]:
    """Command-line arguments of a tiny run in a folder of the test's own.

    It is on the session's corpus.
    """
    folders = ["--runs-folder", str(tmp_path / "runs"), "--tokens", str(dataset.folder)]
    return ["--config", "tiny", *folders]


@pytest.fixture
def refused_at_once(tmp_path, monkeypatch, capsys) -> Callable:
    """The check that a program refuses its arguments before anything is written.

    It says why in one line.
    """
    monkeypatch.chdir(tmp_path)

    def check(arguments: list[str], line: str, program: Callable = main.main) -> None:
        assert program(arguments) == 1
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert line in said
        assert said.count("\n") == 1
        assert list(tmp_path.iterdir()) == []

    return check


def losses(run: Path) -> list[dict]:
    """The log of a run without what the clock says."""
    lines = read_lines(run / "log.jsonl")
    for line in lines:
        line.pop("tokens_per_second", None)
    return lines


def wait_for(run: Path, step: int, *processes: subprocess.Popen) -> None:
    """Wait until these processes have logged a step of their run."""
    deadline = time.monotonic() + 300
    while not any(line["step"] >= step for line in read_lines(run / "log.jsonl")):
        assert all(process.poll() is None for process in processes)
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def prepare_file(tmp_path, monkeypatch, byte_level) -> Callable[..., data.Dataset]:
    """``prepare`` of a file in the working folder, and of a good one after it.

    It takes the corpus, "text" or "jsonl", and the name of the file.
    """
    monkeypatch.chdir(tmp_path)
    for name in ("last", "held"):
        put(Path(f"{name}.txt"), name.encode())
        save(Path(f"{name}.jsonl"), [name])

    def prepared(corpus: str, name: str, **options: object) -> data.Dataset:
        suffix = ".txt"
        if corpus == "jsonl":
            suffix = ".jsonl"
        return prepare(
            corpus,
            name,
            f"last{suffix}",
            validation_files=f"held{suffix}",
            tokenizer=byte_level,
            output="out",
            **options,
        )

    return prepared
