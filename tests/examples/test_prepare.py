# SPDX-License-Identifier: Apache-2.0
"""Text to token files."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from examples.pretrain import data
from examples.pretrain.config import RunError
from examples.pretrain.prepare import python_source, token_files
from examples.pretrain.prepare.tokenizer import END_OF_TEXT, byte_lengths, end_of_text


def test_no_file_is_in_both_splits_and_none_is_lost(corpus):
    texts = python_source.read_sources(corpus)
    splits = python_source.split_by_file(texts, 20)
    assert splits["train"].keys() | splits["validation"].keys() == texts.keys()
    assert not splits["train"].keys() & splits["validation"].keys()
    assert not set(splits["train"].values()) & set(splits["validation"].values())
    assert min(map(len, splits.values())) >= 5


def test_the_split_of_a_file_depends_on_its_path_alone():
    texts = {f"package/module_{i}.py": str(i) for i in range(2000)}
    held_out = python_source.split_by_file(texts, 5)["validation"].keys()
    fewer = dict(list(texts.items())[::3])
    assert python_source.split_by_file(fewer, 5)["validation"].keys() == held_out & fewer.keys()
    # 100 of 2,000 expected; five standard deviations of a binomial (9.7) either way.
    assert 51 <= len(held_out) <= 149


def test_sources_leave_out_tests_packages_copies_and_other_encodings(tmp_path):
    def write(path: str, content: bytes):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)

    write("b.py", b"x = 1\n")
    write("a/copy.py", b"x = 1\n")
    write("a/kept.py", "ü = 2\n".encode())
    write("a/latin.py", "ü = 3\n".encode("latin-1"))
    write("a/empty.py", b"\n")
    write("a/notes.txt", b"text")
    write("test/test_a.py", b"assert 1\n")
    write("site-packages/p.py", b"y = 1\n")
    write("_sysconfigdata_x.py", b"z = 1\n")
    assert python_source.read_sources(tmp_path) == {"a/copy.py": "x = 1\n", "a/kept.py": "ü = 2\n"}


def test_tokenizer_gives_every_text_back(dataset):
    everything = "".join(map(chr, range(1, 1000))) + "𝛁W ← W − η·T\t \r\n   \n    return None\n" + "\u200b \U0001f9ea"
    texts = [everything, "", " ", "\n\n\n", "def f(x):\n        return  x\n", "\x00\x01"]
    for text in texts:
        assert dataset.tokenizer.decode(dataset.tokenizer.encode(text).ids) == text
    assert dataset.vocabulary == 512


def test_token_files_hold_the_documents(dataset, data_config):
    texts = python_source.read_sources(data_config.source)
    for split, documents in python_source.split_by_file(texts, data_config.validation_percent).items():
        tokens = np.asarray(getattr(dataset, split)).tolist()
        end = end_of_text(dataset.tokenizer)
        assert tokens[-1] == end
        assert tokens.count(end) == len(documents) == dataset.manifest[split]["documents"]
        assert dataset.tokenizer.decode(tokens, skip_special_tokens=False) == "".join(
            text + END_OF_TEXT for text in documents.values()
        )


def test_byte_lengths_add_up_to_the_text(dataset):
    lengths = np.asarray(byte_lengths(dataset.tokenizer))
    assert lengths[np.asarray(dataset.validation)].sum() == dataset.manifest["validation"]["bytes"]


def test_prepared_once_for_each_content(data_config, dataset, tmp_path):
    said = []
    config = dataclasses.replace(data_config, folder=tmp_path)
    first = python_source.prepare(config, said.append)
    again = python_source.prepare(config, said.append)
    assert first == again
    assert len(said) == 1
    assert first.name == dataset.folder.name
    for name in ("train.bin", "validation.bin", "tokenizer.json", "manifest.json"):
        assert (first / name).read_bytes() == (dataset.folder / name).read_bytes()
    assert python_source.prepare(dataclasses.replace(config, vocabulary=300), said.append) != first
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


def test_other_text_is_another_folder(corpus, data_config, dataset, tmp_path):
    changed = tmp_path / "corpus"
    shutil.copytree(corpus, changed)
    (changed / "json" / "extra.py").write_text("answer = 42\n")
    config = dataclasses.replace(data_config, source=changed, folder=tmp_path / "data")
    assert python_source.prepare(config, lambda line: None).name != dataset.folder.name


def test_two_bytes_hold_65536_tokens():
    assert token_files.token_dtype(65_536).itemsize == 2
    assert token_files.token_dtype(65_537).itemsize == 4


@pytest.mark.parametrize("damage", ["cut", "missing", "manifest", "tokenizer", "empty"])
def test_damaged_token_files_are_refused(dataset, tmp_path, damage):
    folder = tmp_path / "copy"
    shutil.copytree(dataset.folder, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    if damage == "cut":
        tokens = (folder / "train.bin").read_bytes()
        (folder / "train.bin").write_bytes(tokens[:-2])
    elif damage == "missing":
        (folder / "validation.bin").unlink()
    elif damage == "manifest":
        (folder / "manifest.json").write_text('{"vocabulary": 5')
    elif damage == "tokenizer":
        (folder / "manifest.json").write_text(json.dumps({**manifest, "vocabulary": 600}))
    else:
        (folder / "train.bin").write_bytes(b"")
    with pytest.raises(RunError, match="delete") as error:
        data.load(folder)
    assert "\n" not in str(error.value)
