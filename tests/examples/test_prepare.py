# SPDX-License-Identifier: Apache-2.0
"""Python source to token files, and what is refused of such files."""

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import numpy as np

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


def put(folder: Path, path: str, content: bytes):
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_bytes(content)


def splits_of(
    *folders: Path, installed: bool = False, percent: float = 20
) -> list[list[str]]:
    return [
        list(stream)
        for stream in python_source.python_streams(folders, installed, percent, {})
    ]


def test_no_file_is_in_both_splits_and_none_is_lost(corpus):
    train, validation = splits_of(corpus)
    found = map(
        python_source.read_source, python_source.python_files(corpus, set(), {})
    )
    assert sorted(train + validation) == sorted(found)
    assert not set(train) & set(validation)
    assert min(len(train), len(validation)) >= 5


def test_the_held_out_share(tmp_path):
    for i in range(2000):
        put(tmp_path, f"module_{i}.py", str(i).encode())
    # 100 expected; five standard deviations of a binomial (9.7) either way.
    assert 51 <= len(splits_of(tmp_path, percent=5)[1]) <= 149


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
    files = list(python_source.python_files(tmp_path, set(), {}))
    assert [path.relative_to(tmp_path).as_posix() for path in files] == [
        "a/copy.py",
        "a/kept.py",
    ]
    assert [python_source.read_source(path) for path in files] == [
        "x = 1\n",
        "ü = 2\r\n",
    ]


def test_installed_packages_add_their_programs_and_not_their_tables(
    corpus, tmp_path, monkeypatch
):
    site = tmp_path / "lib" / "site-packages"
    for number in range(20):
        put(
            site,
            f"package/module_{number}.py",
            f"def function_{number}():\n    return {number}\n".encode(),
        )
    put(site, "package/tests/test_module.py", b"assert True\n")
    put(site, "package/huge.py", b"name = other  # and so on\n" * 50_000)
    put(site, "package/line.py", b"data = '" + b"a" * 5_000 + b"'\n")
    put(site, "package/numbers.py", b"[\n" + b"123, 456,\n" * 100 + b"]\n")
    put(site, "package/copy.py", (corpus / "json" / "scanner.py").read_bytes())
    monkeypatch.setattr(python_source, "site_packages", lambda: [site])
    added = set().union(*splits_of(corpus, installed=True)) - set().union(
        *splits_of(corpus)
    )
    assert {text.split("(")[0] for text in added} == {
        f"def function_{number}" for number in range(20)
    }
    read = []
    for stream in python_source.python_streams((corpus,), True, 20, {}):
        read += stream.files
    assert site / "package/module_0.py" in read  # a resumed run compares these files
    named = python_source.python_streams(
        [path for path in read if path.parent.name == "package"], False, 50, {}
    )
    assert all(len(stream.files) > 3 for stream in named)  # divided by their names
    packages = dataclasses.replace(
        command.CORPORA["python"][1], installed_packages=True
    )
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


def test_tokenizer_gives_every_text_back(dataset):
    everything = (
        "".join(map(chr, range(1, 1000)))
        + "𝛁W ← W − η·T\t \r\n   \n    return None\n"
        + "\u200b \U0001f9ea"
    )
    for text in [
        everything,
        "",
        " ",
        "\n\n\n",
        "def f(x):\n        return  x\n",
        "\x00\x01",
        END_OF_TEXT,
    ]:
        assert dataset.tokenizer.decode(dataset.tokenizer.encode(text).ids) == text
    assert dataset.manifest["vocabulary"] == 512


def test_token_files_and_the_manifest_hold_the_documents(dataset, corpus):
    lengths = byte_lengths(dataset.tokenizer)
    end = end_of_text(dataset.tokenizer)
    for split, texts in zip(("train", "validation"), splits_of(corpus), strict=True):
        tokens = np.asarray(getattr(dataset, split))
        everything = "".join(text + END_OF_TEXT for text in texts)
        assert (
            dataset.tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
            == everything
        )
        size = sum(len(text.encode()) for text in texts)
        assert lengths[tokens].sum() == size
        assert (tokens == end).sum() == len(texts)
        counts = {"documents": len(texts), "bytes": size, "tokens": len(tokens)}
        assert dataset.manifest[split] == counts | {
            "documents without tokens": 0,
            "unknown tokens": 0,
        }
        content = (dataset.folder / f"{split}.bin").read_bytes()
        assert (
            dataset.manifest["sha256"][f"{split}.bin"]
            == hashlib.sha256(content).hexdigest()
        )
    assert dataset.manifest["largest_token"] == max(
        int(dataset.train.max()), int(dataset.validation.max())
    )
    assert (dataset.offsets, dataset.manifest["context"]) == (None, None)


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
        "  train.bin": (
            b"\xff\xff" + tokens[2:],
            "train.bin has the token 65535, its manifest says at most 511",
        ),
        "validation.bin": (None, "validation.bin"),
        "manifest.json": (b'{"vocabulary": 5', "delimiter"),
        " manifest.json": (b"[" * 100_000, "recursion"),
        "  manifest.json": (
            json.dumps({**manifest, "vocabulary": 300}).encode(),
            "not the tokenizer",
        ),
        "   manifest.json": (json.dumps({"dtype": "<u2"}).encode(), "layout"),
        "tokenizer.json": ((tmp_path / "other.json").read_bytes(), "not the tokenizer"),
    }
    for name, (content, message) in damages.items():
        file = Path(shutil.copytree(dataset.folder, tmp_path / name)) / name.strip()
        file.unlink() if content is None else file.write_bytes(content)
        refuses(
            rf"cannot read the token files in .*{message}.*: delete the folder",
            data.load,
            file.parent,
        )
    assert data.largest_id(np.broadcast_to(np.uint16(7), 10**12)) == 7  # in no time
