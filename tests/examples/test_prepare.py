# SPDX-License-Identifier: Apache-2.0
"""Python source to token files, and what is refused of such files."""

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from examples.pretrain import data
from examples.pretrain.prepare import command, python_source, token_files
from examples.pretrain.prepare.sources import sample
from examples.pretrain.prepare.tokenizer import (
    END_OF_TEXT,
    byte_lengths,
    end_of_text,
    train_tokenizer,
)
from tests.examples.conftest import refuses
from tests.examples.corpora import put, size_of


def splits_of(
    *folders: Path, installed: bool = False, percent: float = 20
) -> list[list[str]]:
    """The documents to train on, and those to validate on."""
    streams = python_source.python_streams(folders, installed, percent, {})
    return [list(stream) for stream in streams]


def test_no_file_is_in_both_splits_and_none_is_lost(corpus):
    train, validation = splits_of(corpus)
    files = python_source.python_files(corpus, set(), {})
    found = [python_source.read_source(file) for file in files]
    assert sorted(train + validation) == sorted(found)
    assert not set(train) & set(validation)
    assert min(len(train), len(validation)) >= 5


def test_the_held_out_share(tmp_path):
    for i in range(2000):
        put(tmp_path / f"module_{i}.py", str(i).encode())
    _, held_out = splits_of(tmp_path, percent=5)
    # 100 expected; five standard deviations of a binomial (9.7) either way.
    assert 51 <= len(held_out) <= 149


def test_sources_leave_out_tests_packages_copies_and_other_encodings(tmp_path):
    put(tmp_path / "b.py", b"x = 1\n")
    put(tmp_path / "a/copy.py", b"x = 1\n")
    put(tmp_path / "a/kept.py", "\ufeffü = 2\r\n".encode())
    put(tmp_path / "a/latin.py", "ü = 3\n".encode("latin-1"))
    put(tmp_path / "a/empty.py", b"\n")
    put(tmp_path / "a/notes.txt", b"text")
    put(tmp_path / "test/test_a.py", b"assert 1\n")
    put(tmp_path / "site-packages/p.py", b"y = 1\n")
    put(tmp_path / "_sysconfigdata_x.py", b"z = 1\n")
    files = list(python_source.python_files(tmp_path, set(), {}))
    names = [path.relative_to(tmp_path).as_posix() for path in files]
    assert names == ["a/copy.py", "a/kept.py"]
    texts = [python_source.read_source(path) for path in files]
    assert texts == ["x = 1\n", "ü = 2\r\n"]


@pytest.fixture
def package(corpus, tmp_path, monkeypatch) -> Path:
    """An installed package of 20 programs, a test, tables and a copy."""
    package = tmp_path / "lib" / "site-packages" / "package"
    for number in range(20):
        function = f"def function_{number}():\n    return {number}\n"
        put(package / f"module_{number}.py", function.encode())
    put(package / "tests" / "test_module.py", b"assert True\n")
    put(package / "huge.py", b"name = other  # and so on\n" * 50_000)
    put(package / "line.py", b"data = '" + b"a" * 5_000 + b"'\n")
    put(package / "numbers.py", b"[\n" + b"123, 456,\n" * 100 + b"]\n")
    put(package / "copy.py", (corpus / "json" / "scanner.py").read_bytes())
    monkeypatch.setattr(python_source, "site_packages", lambda: [package.parent])
    return package


def test_installed_packages_add_their_programs_and_not_their_tables(corpus, package):
    own = set().union(*splits_of(corpus))
    added = set().union(*splits_of(corpus, installed=True)) - own
    names = {text.split("(")[0] for text in added}
    assert names == {f"def function_{number}" for number in range(20)}


def test_files_of_packages_are_listed_and_divided_by_their_names(corpus, package):
    files = []
    for stream in python_source.python_streams((corpus,), True, 20, {}):
        files += stream.files
    # A resumed run compares these files.
    assert package / "module_0.py" in files
    programs = [path for path in files if path.parent == package]
    for stream in python_source.python_streams(programs, False, 50, {}):
        assert len(stream.files) > 3


def test_the_folder_of_installed_packages_has_a_name_of_its_own():
    _, python = command.CORPORA["python"]
    packages = dataclasses.replace(python, installed_packages=True)
    assert packages.folder.name.endswith("-packages-v2048")


def test_a_tokenizer_learns_from_a_fixed_sample_of_large_text():
    texts = [f"text number {number} of many" for number in range(2000)]
    assert list(sample(lambda: texts)) == texts
    chosen = list(sample(lambda: texts, 10_000))
    assert chosen == list(sample(lambda: texts, 10_000))
    assert set(chosen) < set(texts)
    # 10,000 bytes expected at 25 a text: 400 texts, five standard deviations (18)
    # either way.
    assert 310 <= len(chosen) <= 490


ALPHABET = "".join(map(chr, range(1, 1000)))
UNUSUAL = [
    ALPHABET + "𝛁W ← W − η·T\t \r\n   \n    return None\n\u200b \U0001f9ea",
    "",
    " ",
    "\n\n\n",
    "def f(x):\n        return  x\n",
    "\x00\x01",
    END_OF_TEXT,
]


def test_tokenizer_gives_every_text_back(dataset):
    for text in UNUSUAL:
        tokens = dataset.tokenizer.encode(text).ids
        assert dataset.tokenizer.decode(tokens) == text
    assert dataset.manifest["vocabulary"] == 512


def test_token_files_and_the_manifest_hold_the_documents(dataset, corpus):
    lengths = byte_lengths(dataset.tokenizer)
    end = end_of_text(dataset.tokenizer)
    for split, texts in zip(("train", "validation"), splits_of(corpus), strict=True):
        tokens = np.asarray(getattr(dataset, split))
        found = dataset.tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
        assert found == "".join(text + END_OF_TEXT for text in texts)
        assert lengths[tokens].sum() == size_of(texts)
        assert (tokens == end).sum() == len(texts)
        assert dataset.manifest[split] == {
            "documents": len(texts),
            "bytes": size_of(texts),
            "tokens": len(tokens),
            "documents without tokens": 0,
            "unknown tokens": 0,
        }
        name = f"{split}.bin"
        digest = hashlib.sha256((dataset.folder / name).read_bytes())
        assert dataset.manifest["sha256"][name] == digest.hexdigest()
    largest = max(dataset.train.max(), dataset.validation.max())
    assert dataset.manifest["largest_token"] == largest
    assert dataset.offsets is None
    assert dataset.manifest["context"] is None


def test_two_bytes_hold_65536_tokens():
    assert token_files.token_dtype(65_536).itemsize == 2
    assert token_files.token_dtype(65_537).itemsize == 4


def damages(dataset: data.Dataset) -> list[tuple[str, bytes, str]]:
    """Names of files, their damaged contents, and what is said of them."""
    tokens = (dataset.folder / "train.bin").read_bytes()
    manifest = json.loads((dataset.folder / "manifest.json").read_text())
    manifest["vocabulary"] = 300
    other_tokenizer = train_tokenizer(["other text"], 300)
    return [
        ("train.bin", tokens[:-2], "train.bin has .* entries, its manifest says"),
        ("train.bin", b"", "empty"),
        (
            "train.bin",
            b"\xff\xff" + tokens[2:],
            "train.bin has the token 65535, its manifest says at most 511",
        ),
        ("manifest.json", b'{"vocabulary": 5', "delimiter"),
        ("manifest.json", b"[" * 100_000, "recursion"),
        ("manifest.json", json.dumps(manifest).encode(), "not the tokenizer"),
        ("manifest.json", b'{"dtype": "<u2"}', "layout"),
        ("tokenizer.json", other_tokenizer.to_str().encode(), "not the tokenizer"),
    ]


def refuse_to_load(folder: Path, message: str) -> None:
    message = rf"cannot read the token files in .*{message}.*: prepare them again"
    refuses(message, data.load, folder)


def test_damaged_token_files_are_refused(dataset, tmp_path):
    for number, (name, content, message) in enumerate(damages(dataset)):
        folder = Path(shutil.copytree(dataset.folder, tmp_path / str(number)))
        (folder / name).write_bytes(content)
        refuse_to_load(folder, message)


def test_token_files_of_which_one_is_missing_are_refused(dataset, tmp_path):
    folder = Path(shutil.copytree(dataset.folder, tmp_path / "copy"))
    (folder / "validation.bin").unlink()
    refuse_to_load(folder, "validation.bin")


def test_the_largest_token_of_a_huge_file_is_found_at_once():
    tokens = np.broadcast_to(np.uint16(7), 10**12)
    assert data.largest_id(tokens) == 7
