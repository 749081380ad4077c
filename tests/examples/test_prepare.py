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
from examples.pretrain.config import RunError
from examples.pretrain.prepare import python_source, token_files
from examples.pretrain.prepare.sources import sample
from examples.pretrain.prepare.tokenizer import END_OF_TEXT, byte_lengths, end_of_text, train_tokenizer


def put(folder: Path, path: str, content: bytes):
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_bytes(content)


def test_no_file_is_in_both_splits_and_none_is_lost(corpus):
    splits = python_source.find_splits(corpus, False, 20)
    assert splits["train"].keys() | splits["validation"].keys() == python_source.find_sources(corpus, set()).keys()
    train, validation = (set(python_source.read_all(files.values())) for files in splits.values())
    assert not train & validation
    assert min(len(train), len(validation)) >= 5
    # 100 of 2,000 expected; five standard deviations of a binomial (9.7) either way.
    names = [f"package/module_{i}.py" for i in range(2000)]
    assert 51 <= sum(python_source.split_of(name, 5) == "validation" for name in names) <= 149


def test_sources_leave_out_tests_packages_copies_and_other_encodings(tmp_path):
    put(tmp_path, "b.py", b"x = 1\n")
    put(tmp_path, "a/copy.py", b"x = 1\n")
    put(tmp_path, "a/kept.py", "\ufeffü = 2\r\n".encode())
    put(tmp_path, "a/latin.py", "ü = 3\n".encode("latin-1"))
    put(tmp_path, "a/empty.py", b"\n")
    put(tmp_path, "a/notes.txt", b"text")
    put(tmp_path, "test/test_a.py", b"assert 1\n")
    put(tmp_path, "site-packages/p.py", b"y = 1\n")
    put(tmp_path, "_sysconfigdata_x.py", b"z = 1\n")
    files = python_source.find_sources(tmp_path, set())
    assert list(files) == ["a/copy.py", "a/kept.py"]
    assert list(python_source.read_all(files.values())) == ["x = 1\n", "ü = 2\r\n"]
    with pytest.raises(RunError, match="no Python source for train under nowhere"):
        python_source.find_splits(Path("nowhere"), False, 5)


def test_installed_packages_add_their_programs_and_not_their_tables(corpus, data_config, tmp_path, monkeypatch):
    site = tmp_path / "lib" / "site-packages"
    for number in range(20):
        put(site, f"package/module_{number}.py", f"def function_{number}():\n    return {number}\n".encode())
    put(site, "package/tests/test_module.py", b"assert True\n")
    put(site, "package/huge.py", b"name = other  # and so on\n" * 50_000)
    put(site, "package/line.py", b"data = '" + b"a" * 5_000 + b"'\n")
    put(site, "package/numbers.py", b"[\n" + b"123, 456,\n" * 100 + b"]\n")
    put(site, "package/copy.py", (corpus / "json" / "scanner.py").read_bytes())
    monkeypatch.setattr(python_source, "site_packages", lambda: [site])
    config = dataclasses.replace(data_config, include_site_packages=True, folder=tmp_path / "data", vocabulary=300)
    splits = python_source.find_splits(config.source, True, config.validation_percent)
    added = {name for files in splits.values() for name in files if name.startswith("site-packages/")}
    assert added == {f"site-packages/package/module_{number}.py" for number in range(20)}
    dataset = data.load(python_source.prepare(config, lambda line: None))
    assert "-packages-" in dataset.folder.name
    assert dataset.manifest["source"].endswith("and installed packages")
    assert sum(dataset.manifest[split]["documents"] for split in splits) == sum(map(len, splits.values()))


def test_a_tokenizer_learns_from_a_fixed_sample_of_large_text():
    texts = [f"text number {number} of many" for number in range(2000)]
    assert list(sample(lambda: texts)) == texts
    chosen = list(sample(lambda: texts, 10_000))
    assert chosen == list(sample(lambda: texts, 10_000))
    assert set(chosen) < set(texts)
    # 10,000 bytes expected at 25 a text: 400 texts, five standard deviations (18) either way.
    assert 310 <= len(chosen) <= 490


def test_tokenizer_gives_every_text_back(dataset):
    everything = "".join(map(chr, range(1, 1000))) + "𝛁W ← W − η·T\t \r\n   \n    return None\n" + "\u200b \U0001f9ea"
    for text in [everything, "", " ", "\n\n\n", "def f(x):\n        return  x\n", "\x00\x01", END_OF_TEXT]:
        assert dataset.tokenizer.decode(dataset.tokenizer.encode(text).ids) == text
    assert dataset.vocabulary == 512


def test_token_files_and_the_manifest_hold_the_documents(dataset, data_config):
    splits = python_source.find_splits(data_config.source, False, data_config.validation_percent)
    lengths, end = byte_lengths(dataset.tokenizer), end_of_text(dataset.tokenizer)
    for split, files in splits.items():
        texts = list(python_source.read_all(files.values()))
        tokens = np.asarray(getattr(dataset, split))
        everything = "".join(text + END_OF_TEXT for text in texts)
        assert dataset.tokenizer.decode(tokens.tolist(), skip_special_tokens=False) == everything
        size = sum(len(text.encode()) for text in texts)
        assert lengths[tokens].sum() == size
        assert (tokens == end).sum() == len(texts)
        assert dataset.manifest[split] == {"documents": len(texts), "bytes": size, "tokens": len(tokens)}
        content = (dataset.folder / f"{split}.bin").read_bytes()
        assert dataset.manifest["sha256"][f"{split}.bin"] == hashlib.sha256(content).hexdigest()
    assert dataset.largest_token == max(int(dataset.train.max()), int(dataset.validation.max()))
    assert (dataset.offsets, dataset.manifest["context"]) == (None, None)


def test_prepared_once_for_each_content(corpus, data_config, dataset, tmp_path):
    said = []
    config = dataclasses.replace(data_config, folder=tmp_path / "data")
    first = python_source.prepare(config, said.append)
    assert python_source.prepare(config, said.append) == first
    assert len(said) == 1
    assert first.name == dataset.folder.name
    for name in ("train.bin", "validation.bin", "tokenizer.json", "manifest.json"):
        assert (first / name).read_bytes() == (dataset.folder / name).read_bytes()
    changed = Path(shutil.copytree(corpus, tmp_path / "corpus"))
    (changed / "json" / "extra.py").write_text("answer = 42\n")
    for other in (dataclasses.replace(config, vocabulary=300), dataclasses.replace(config, source=changed)):
        assert python_source.prepare(other, said.append).name != first.name
    assert not list(config.folder.glob(".*"))


def test_two_bytes_hold_65536_tokens():
    assert token_files.token_dtype(65_536).itemsize == 2
    assert token_files.token_dtype(65_537).itemsize == 4


def test_damaged_token_files_are_refused(dataset, tmp_path):
    manifest = json.loads((dataset.folder / "manifest.json").read_text())
    tokens = (dataset.folder / "train.bin").read_bytes()
    train_tokenizer(["other text"], 300).save(str(tmp_path / "other.json"))
    damages = {
        "train.bin": (tokens[:-2], "train.bin has .* entries, its manifest says"),
        " train.bin": (b"", "empty"),
        "  train.bin": (b"\xff\xff" + tokens[2:], "train.bin has the token 65535, its manifest says at most 511"),
        "validation.bin": (None, "validation.bin"),
        "manifest.json": (b'{"vocabulary": 5', "delimiter"),
        " manifest.json": (b"[" * 100_000, "recursion"),
        "  manifest.json": (json.dumps({**manifest, "vocabulary": 300}).encode(), "not the tokenizer"),
        "   manifest.json": (json.dumps({"dtype": "<u2"}).encode(), "layout"),
        "tokenizer.json": ((tmp_path / "other.json").read_bytes(), "not the tokenizer"),
    }
    for name, (content, message) in damages.items():
        file = Path(shutil.copytree(dataset.folder, tmp_path / name)) / name.strip()
        file.unlink() if content is None else file.write_bytes(content)
        with pytest.raises(
            RunError, match=rf"cannot read the token files in .*{message}.*: delete the folder"
        ) as error:
            data.load(file.parent)
        assert "\n" not in str(error.value)
    assert data.largest_id(np.broadcast_to(np.uint16(7), 10**12)) == 7  # in no time
