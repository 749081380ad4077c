# SPDX-License-Identifier: Apache-2.0
"""Text to token files."""

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


def read(files: dict) -> list[str]:
    return list(python_source.read_all(files.values()))


def put(folder: Path, path: str, content: bytes):
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_bytes(content)


def test_no_file_is_in_both_splits_and_none_is_lost(corpus):
    files = python_source.find_sources(corpus, set())
    splits = python_source.split_by_file(files, 20)
    assert splits["train"].keys() | splits["validation"].keys() == files.keys()
    assert not splits["train"].keys() & splits["validation"].keys()
    train, validation = (set(read(splits[split])) for split in ("train", "validation"))
    assert not train & validation
    assert min(map(len, splits.values())) >= 5


def test_the_split_of_a_file_depends_on_its_path_alone():
    texts = {f"package/module_{i}.py": str(i) for i in range(2000)}
    held_out = python_source.split_by_file(texts, 5)["validation"].keys()
    fewer = dict(list(texts.items())[::3])
    assert python_source.split_by_file(fewer, 5)["validation"].keys() == held_out & fewer.keys()
    # 100 of 2,000 expected; five standard deviations of a binomial (9.7) either way.
    assert 51 <= len(held_out) <= 149


def test_sources_leave_out_tests_packages_copies_and_other_encodings(tmp_path):
    put(tmp_path, "b.py", b"x = 1\n")
    put(tmp_path, "a/copy.py", b"x = 1\n")
    put(tmp_path, "a/kept.py", "ü = 2\n".encode())
    put(tmp_path, "a/latin.py", "ü = 3\n".encode("latin-1"))
    put(tmp_path, "a/empty.py", b"\n")
    put(tmp_path, "a/notes.txt", b"text")
    put(tmp_path, "test/test_a.py", b"assert 1\n")
    put(tmp_path, "site-packages/p.py", b"y = 1\n")
    put(tmp_path, "_sysconfigdata_x.py", b"z = 1\n")
    files = python_source.find_sources(tmp_path, set())
    assert list(files) == ["a/copy.py", "a/kept.py"]
    assert read(files) == ["x = 1\n", "ü = 2\n"]


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
    config = dataclasses.replace(data_config, include_site_packages=True, folder=tmp_path / "data")
    splits = python_source.find_splits(config.source, True, config.validation_percent)
    added = {name for files in splits.values() for name in files if name.startswith("site-packages/")}
    assert added == {f"site-packages/package/module_{number}.py" for number in range(20)}
    dataset = data.load(python_source.prepare(config, lambda line: None))
    assert "-packages-" in dataset.folder.name
    assert dataset.manifest["source"].endswith("and installed packages")
    assert sum(dataset.manifest[split]["documents"] for split in splits) == 20 + len(
        python_source.find_sources(corpus, set())
    )


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
    texts = [everything, "", " ", "\n\n\n", "def f(x):\n        return  x\n", "\x00\x01"]
    for text in texts:
        assert dataset.tokenizer.decode(dataset.tokenizer.encode(text).ids) == text
    assert dataset.vocabulary == 512


def test_token_files_hold_the_documents(dataset, data_config):
    splits = python_source.find_splits(data_config.source, False, data_config.validation_percent)
    for split, files in splits.items():
        tokens = np.asarray(getattr(dataset, split)).tolist()
        end = end_of_text(dataset.tokenizer)
        assert tokens[-1] == end
        assert tokens.count(end) == len(files) == dataset.manifest[split]["documents"]
        assert dataset.tokenizer.decode(tokens, skip_special_tokens=False) == "".join(
            text + END_OF_TEXT for text in read(files)
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


def test_the_manifest_tells_what_the_files_hold(dataset):
    for split in token_files.SPLITS:
        content = (dataset.folder / f"{split}.bin").read_bytes()
        tokens = np.frombuffer(content, "<u2")
        texts = dataset.tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
        assert dataset.manifest[split] == {
            "documents": int((tokens == end_of_text(dataset.tokenizer)).sum()),
            "bytes": len(texts.encode()),
            "tokens": len(tokens),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    assert dataset.largest_token == max(int(dataset.train.max()), int(dataset.validation.max()))
    assert (dataset.padded, dataset.manifest["context"]) == (False, None)


def test_two_bytes_hold_65536_tokens():
    assert token_files.token_dtype(65_536).itemsize == 2
    assert token_files.token_dtype(65_537).itemsize == 4


@pytest.mark.parametrize("damage", ["cut", "missing", "manifest", "old manifest", "tokenizer", "vocabulary", "empty"])
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
    elif damage == "old manifest":
        del manifest["layout"]
        (folder / "manifest.json").write_text(json.dumps(manifest))
    elif damage == "tokenizer":
        train_tokenizer(["other text"], 300).save(str(folder / "tokenizer.json"))
    elif damage == "vocabulary":
        (folder / "manifest.json").write_text(json.dumps({**manifest, "vocabulary": 300}))
    else:
        (folder / "train.bin").write_bytes(b"")
    with pytest.raises(RunError, match="delete") as error:
        data.load(folder)
    assert "\n" not in str(error.value)
