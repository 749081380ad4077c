# SPDX-License-Identifier: Apache-2.0
"""``prepare``: every corpus from small local files, stopped and resumed, and what users
can fix.
"""

import gzip
import io
import json
import os
import random
import signal
import string
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from examples.pretrain import data
from examples.pretrain.prepare import command, reading, sources, token_files
from examples.pretrain.prepare.problems import Problems
from examples.pretrain.prepare.tokenizer import (
    END_OF_TEXT,
    byte_lengths,
    end_of_text,
    find_tokenizer,
    load_tokenizer,
    train_tokenizer,
    unknown_of,
)
from examples.pretrain.processes import Stopped
from tests.examples.conftest import refuses

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


def document(number: int) -> str:
    """Text number ``number``, of 3 to 120 words."""
    draw = random.Random(number)
    return f"{number} " + " ".join(draw.choices(WORDS, k=draw.randint(3, 120)))


TEXTS = [document(number) for number in range(300)]


def save(path: Path, texts: list[str], field: str = "text") -> Path:
    """Records with the texts, in the format of the file's name."""
    table = pyarrow.table({"url": ["x"] * len(texts), field: texts})
    lines = "".join(json.dumps(row) + "\n" for row in table.to_pylist()).encode()
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=64)
    elif path.suffix == ".zst":
        with pyarrow.output_stream(path, compression="zstd") as file:
            file.write(lines)
    else:
        path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return path


SPECIAL = ["<|endoftext|>", "</s>", "<extra_id_3>", "<|im_start|>"]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> Path:
    """A tokenizer of GPT-2's and Qwen's type."""
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer = train_tokenizer(TEXTS, 400)
    tokenizer.add_special_tokens(["<|im_start|>"])
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory) -> Path:
    """A tokenizer of T5's type: no bytes, no <|endoftext|>, special tokens among the
    pieces of the model, and limits of its own, as files on the hub have them."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>", "<extra_id_3>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(
        [*TEXTS, " ".join("</>|_" + string.ascii_lowercase)], trainer
    )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    path = tmp_path_factory.mktemp("t5") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


def run(*arguments: object) -> data.Dataset:
    """Prepare token files, and load them."""
    words = [str(argument) for argument in arguments]
    command.main(words)
    return data.load(Path(words[words.index("--output") + 1]))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def decoded(dataset: data.Dataset, split: str) -> list[str]:
    """The documents of packed token files of a byte-level tokenizer."""
    tokens = getattr(dataset, split).tolist()
    return dataset.tokenizer.decode(tokens, skip_special_tokens=False).split(
        "<|endoftext|>"
    )[:-1]


def test_openwebtext_from_local_files_is_held_out_by_its_text(
    tmp_path, out, byte_level
):
    for name in ("a.jsonl.gz", "a.jsonl.zst", "a.parquet"):
        path = save(tmp_path / name, TEXTS, "body")
        assert list(reading.read_records(path, "body", Problems(skip=False))) == TEXTS
    path = save(tmp_path / "a.jsonl", ["", " \n", *TEXTS])
    options = (
        "--validation-percent",
        20,
        "--train-documents",
        50,
        "--validation-documents",
        20,
        "--output",
        out,
    )
    dataset = run("openwebtext", path, "--tokenizer", byte_level, *options)
    assert (
        decoded(dataset, "train")
        == [text for text in TEXTS if sources.fraction(text) >= 0.2][:50]
    )
    assert (
        decoded(dataset, "validation")
        == [text for text in TEXTS if sources.fraction(text) < 0.2][:20]
    )
    assert (dataset.manifest["source"], dataset.manifest["tokenizer"]) == (
        str(path),
        str(byte_level),
    )


def test_c4_is_a_truncated_or_padded_document_per_sequence(
    tmp_path, out, sentence_piece
):
    train, validation = (
        save(tmp_path / "t.json.gz", TEXTS),
        save(tmp_path / "v.jsonl", TEXTS[:9]),
    )
    dataset = run(
        *("c4", train, "--validation-files", validation, "--tokenizer", sentence_piece),
        *(
            "--context",
            24,
            "--train-documents",
            250,
            "--validation-documents",
            5,
            "--output",
            out,
        ),
    )
    sums = {
        path.name: token_files.sha256(path)
        for path in out.iterdir()
        if path.name != "manifest.json"
    }
    assert dataset.manifest["sha256"] == sums
    assert dataset.manifest["train"]["bytes"] == sum(
        len(text.encode()) for text in TEXTS[:250]
    )
    tokenizer = find_tokenizer(str(sentence_piece))
    end = tokenizer.token_to_id("</s>")
    assert end_of_text(tokenizer) == end
    expected = []
    for text in TEXTS[:250]:
        tokens = [*tokenizer.encode(text, add_special_tokens=False).ids, end][:25]
        expected.append((*tokens, *[data.PADDING] * (25 - len(tokens))))
    rows = data.validation_sequences(dataset, context=24, count=10**6)
    epoch = next(data.training_batches(dataset, context=24, batch_size=250, seed=0))
    assert [tuple(row) for row in rows] == expected[:5]
    assert {tuple(row) for row in epoch} == set(expected)
    assert {len([token for token in row if token >= 0]) == 25 for row in expected} == {
        True,
        False,
    }


def test_a_file_to_validate_on_is_not_trained_on(tmp_path, out, byte_level):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(document(number))
    held = tmp_path / "1.txt"
    dataset = run(
        "text",
        tmp_path,
        "--validation-files",
        held,
        "--tokenizer",
        byte_level,
        "--output",
        out,
    )
    assert sorted(decoded(dataset, "train")) == sorted([document(0), document(2)])
    assert decoded(dataset, "validation") == [document(1)]


def test_folders_of_text_and_of_another_field(tmp_path, out):
    folder = tmp_path / "texts" / "inner"
    folder.mkdir(parents=True)
    for number, text in enumerate(TEXTS[:100]):
        (folder / f"{number:03}.{'md' if number % 2 else 'txt'}").write_text(text)
    (folder / "image.png").write_bytes(b"\x89")
    save(folder / "a.jsonl", TEXTS[:50], "body")
    save(folder / "b.jsonl.gz", TEXTS[50:100], "body")
    for options in (("text", tmp_path), ("jsonl", tmp_path, "--field", "body")):
        dataset = run(*options, "--vocabulary", 300, "--overwrite", "--output", out)
        assert dataset.manifest["vocabulary"] == 300
        assert sorted(
            decoded(dataset, "train") + decoded(dataset, "validation")
        ) == sorted(TEXTS[:100])


# What a folder has is read, or the user is told


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"


def zstd(content: bytes) -> bytes:
    return pyarrow.compress(content, "zstd", asbytes=True)


def test_a_folder_is_read_through_links_compression_and_capitals(
    tmp_path, out, byte_level, capsys
):
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    (folder / "b").mkdir(parents=True)
    (elsewhere / "inner").mkdir(parents=True)
    packed = {
        "a.txt": bytes,
        "b/B.TXT": bytes,
        "c.txt.gz": gzip.compress,
        "d.Md.GZ": gzip.compress,
    }
    packed |= {
        "e.rst": bytes,
        "f.tex.ZST": zstd,
        "named.txt": gzip.compress,
        "plain.txt.gz": bytes,
    }
    for number, (name, pack) in enumerate(packed.items()):
        (folder / name).write_bytes(pack(TEXTS[number].encode()))
    (elsewhere / "inner" / "g.txt").write_text(TEXTS[20])
    (folder / "link").symlink_to(elsewhere)
    (folder / "twice").symlink_to(elsewhere)
    (elsewhere / "inner" / "back").symlink_to(folder)
    (folder / "target").write_text(TEXTS[21])
    (folder / "link.txt").symlink_to(folder / "target")
    (folder / "again.txt").symlink_to(folder / "a.txt")
    for name in ("lost.txt", "lost"):
        (folder / name).symlink_to(tmp_path / "nowhere")
    for name in (
        "x.png",
        "y.PNG",
        "b/z.pdf",
        "t.tar.gz",
        "u.gz",
        "v.txt.xz",
        ".hidden.txt",
        "b/.git/h.txt",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"\x89")
    for name in ("p.txt", "b/q.md"):
        (folder / name).write_bytes(LFS)
    os.mkfifo(folder / "pipe.txt")
    held = folder / "link" / "inner" / "g.txt"
    dataset = run(
        "text",
        folder,
        "--validation-files",
        held,
        "--tokenizer",
        byte_level,
        "--output",
        out,
    )
    assert sorted(decoded(dataset, "train")) == sorted(
        [*TEXTS[: len(packed)], TEXTS[21]]
    )
    assert decoded(dataset, "validation") == [TEXTS[20]]
    (line,) = (
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("left out")
    )
    assert sorted(line.removeprefix("left out: ").split(", ")) == [
        *(
            ".gz 1",
            ".pdf 1",
            ".png 2",
            ".tar.gz 1",
            ".xz 1",
            "Git LFS pointers (git lfs pull) 2",
            "broken links 2",
        ),
        *("hidden 2", "no suffix 1", "pipes or devices 1"),
    ]


def test_a_folder_of_records_is_read_through_links_compression_and_capitals(
    tmp_path, out, byte_level, capsys
):
    folder = tmp_path / "folder"
    folder.mkdir()
    parts = iter(range(0, 300, 50))
    for name in ("a.JSONL", "b.jsonl.Gz", "c.parquet", "d.jsonl.zst"):
        start = next(parts)
        save(tmp_path / name.lower(), TEXTS[start : start + 50]).rename(folder / name)
    (folder / "c.parquet").rename(folder / "c.PARQUET")
    for name, pack in (("e.json.gz", gzip.compress), ("f.json.zst", zstd)):
        start = next(parts)
        content = "".join(
            json.dumps({"text": text}) + "\n" for text in TEXTS[start : start + 50]
        )
        (folder / name).write_bytes(pack(content.encode()))
    (folder / "info.json").write_text("{}")
    dataset = run(
        "jsonl",
        folder,
        "--tokenizer",
        byte_level,
        "--validation-percent",
        20,
        "--output",
        out,
    )
    assert sorted(decoded(dataset, "train") + decoded(dataset, "validation")) == sorted(
        TEXTS
    )
    assert "left out: .json 1\n" in capsys.readouterr().out


def test_what_is_left_out_is_always_said(tmp_path, out, byte_level, capsys):
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, text in enumerate(TEXTS[:50]):
        (folder / f"{number}.txt").write_text(text)
    options = (
        "text",
        folder,
        "--tokenizer",
        byte_level,
        "--validation-percent",
        20,
        "--output",
        out,
    )
    run(*options)
    assert "left out: nothing\n" in capsys.readouterr().out
    for name in ("x.png", "y.PNG", "z.pdf"):
        (folder / name).touch()
    run(*options, "--overwrite")
    assert "left out: .png 2, .pdf 1\n" in capsys.readouterr().out
    for path in folder.glob("*.txt"):
        path.unlink()
    message = (
        r"folders with \.txt, \.md, \.rst, \.tex files; left out: \.png 2, \.pdf 1$"
    )
    refuses(message, run, *options, "--overwrite")
    os.mkfifo(tmp_path / "pipe")
    refuses(
        "pipe is neither a file nor a folder",
        run,
        "text",
        tmp_path / "pipe",
        *options[1:],
        "--overwrite",
    )


def test_a_folder_without_permission_is_said(
    tmp_path, out, byte_level, capsys, monkeypatch
):
    """The superuser may read everything, so the refusal is simulated."""
    for name in ("open", "closed"):
        (tmp_path / name).mkdir()
        for number, text in enumerate(TEXTS[:50]):
            (tmp_path / name / f"{number}.txt").write_text(text)
    monkeypatch.setattr(
        os, "access", lambda path, mode: path.name not in ("closed", "3.txt")
    )
    dataset = run(
        "text",
        tmp_path,
        "--tokenizer",
        byte_level,
        "--validation-percent",
        20,
        "--output",
        out,
    )
    assert len(decoded(dataset, "train") + decoded(dataset, "validation")) == 49
    assert "left out: without permission to read 2\n" in capsys.readouterr().out


def test_python_files_are_read_through_links_and_the_others_are_said(
    tmp_path, out, capsys
):
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    (folder / "tests").mkdir(parents=True)
    elsewhere.mkdir()
    for number in range(40):
        (elsewhere / f"module_{number}.py").write_text(
            f"def function_{number}():\n    return {number}\n"
        )
    (folder / "package").symlink_to(elsewhere)
    (elsewhere / "copy.py").write_text("def function_0():\n    return 0\n")
    (elsewhere / "latin.py").write_bytes("ü = 3\n".encode("latin-1"))
    (elsewhere / "empty.py").touch()
    (folder / "tests" / "test_a.py").touch()
    (folder / "notes.txt").touch()
    dataset = run(
        "python",
        folder,
        "--vocabulary",
        300,
        "--validation-percent",
        20,
        "--output",
        out,
    )
    assert len(decoded(dataset, "train") + decoded(dataset, "validation")) == 40
    kind = "Python files that are tests, copies, tables, empty or not UTF-8"
    assert f"left out: {kind} 4, .txt 1\n" in capsys.readouterr().out


# Text is preserved, or the user is told


@pytest.mark.parametrize("kind", ["trained", "byte_level", "sentence_piece"])
def test_text_that_spells_a_special_token_stays_text(tmp_path, out, request, kind):
    texts = [
        f"{number} a {SPECIAL[number % 4]} b{SPECIAL[number % 3]}{SPECIAL[1]} c"
        for number in range(200)
    ]
    path = save(tmp_path / "a.jsonl", texts)
    tokenizer = (
        () if kind == "trained" else ("--tokenizer", request.getfixturevalue(kind))
    )
    dataset = run(
        "jsonl",
        path,
        *tokenizer,
        "--vocabulary",
        300,
        "--validation-percent",
        20,
        "--output",
        out,
    )
    end = end_of_text(dataset.tokenizer)
    tokens = np.concatenate([dataset.train, dataset.validation])
    assert (tokens == end).sum() == 200
    found = [
        dataset.tokenizer.decode(document)
        for document in np.split(tokens, np.flatnonzero(tokens == end) + 1)
    ]
    assert sorted(found) == sorted(["", *texts])
    mark = 200 * (kind == "sentence_piece")  # one before the first word
    assert (
        byte_lengths(dataset.tokenizer)[tokens].sum()
        == sum(len(text.encode()) for text in texts) + mark
    )
    assert all(end not in dataset.tokenizer.encode(text).ids for text in SPECIAL)


def rows(*lines: object) -> bytes:
    return "".join(
        (line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines
    ).encode()


GOOD, LIST = {"text": "good"}, [{"text": "a"}, {"text": "b"}]
WIDE = (
    bytes.fromhex("28b52ffd0090")
    + (8 * len(rows(GOOD)) + 1).to_bytes(3, "little")
    + rows(GOOD)
)  # a 256 MiB window
DEEP = '{"text": "", "x": ' + "[" * 100_000 + "]" * 100_000 + "}"


def parquet(**columns: object) -> bytes:
    """The bytes of a Parquet file with these columns, in groups of 64 rows."""
    file = io.BytesIO()
    options = {
        "row_group_size": 64,
        "use_dictionary": False,
        "compression": "none",
        "write_page_checksum": True,
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), file, **options)
    return file.getvalue()


def arrow(new: Callable) -> bytes:
    file = io.BytesIO()
    table = pyarrow.table({"text": ["good"]})
    with new(file, table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()


def damaged(content: bytes, part: bytes) -> bytes:
    """A file whose pages from ``part`` on are damaged."""
    start = content.index(part) - 4  # from the length of the text on
    return content[:start] + b"\xff" * 60 + content[start + 60 :]


BINARY = pyarrow.array([b"good", b"caf\xe9", None, b"more"])
STRINGS = pyarrow.Array.from_buffers(
    pyarrow.string(), 4, BINARY.buffers()
)  # without a check, as other programs write
NUMBERED = [f"document {number} {number * 7919 % 9973}" for number in range(4096)]
ARROWS = [arrow(new) for new in (pyarrow.ipc.new_file, pyarrow.ipc.new_stream)]
# name: (content, the error or "", what is reported without one or with --skip-bad,
# documents)
DIFFICULT = {
    "bom.txt": (b"\xef\xbb\xbftext\n", "", "", ["text\n"]),
    "crlf.txt": (b"one\r\ntwo\rthree\n", "", "", ["one\r\ntwo\rthree\n"]),
    "blank.txt": (b" \n", "", "blank, left out", []),
    "blank.jsonl": (
        rows({"text": " "}) + b"\n",
        "",
        "left out (lines: 2, the first is 1)",
        [],
    ),
    "latin.txt": (
        b"caf\xe9",
        r"latin\.txt: not UTF-8 \(iconv .*\); --skip-bad",
        "not UTF-8, skipped",
        [],
    ),
    "utf16.txt": (
        "text".encode("utf-16"),
        r"utf16\.txt: not UTF-8",
        "not UTF-8, skipped",
        [],
    ),
    "empty.jsonl": (b"", "", "empty", []),
    "bom.jsonl": (
        b"\xef\xbb\xbf" + rows({"text": "one\r\ntwo"}),
        "",
        "",
        ["one\r\ntwo"],
    ),
    "deep.jsonl": (
        rows(GOOD, DEEP),
        "deep.jsonl, line 2: not JSON .*recursion.*; --skip-bad",
        "first is 2)",
        ["good"],
    ),
    "brackets.jsonl": (
        b"[" * 100_000,
        "line 1: not JSON",
        "not JSON, skipped (lines: 1, the first is 1)",
        [],
    ),
    "array.json": (
        rows(LIST),
        r"one JSON array, not one object a line \(`jq -c '.\[\]' array",
        "one JSON",
        [],
    ),
    "pretty.json": (
        json.dumps(LIST, indent=1).encode(),
        "one JSON array",
        "one JSON array",
        [],
    ),
    "row.jsonl": (
        rows(GOOD, 17),
        "row.jsonl, line 2: .*not an object, but of type int.*; --skip",
        "is 2)",
        ["good"],
    ),
    "rows.jsonl": (
        rows(GOOD, [1], {}, {"text": 1}, "{"),
        "line 2",
        "'text', skipped (lines: 3",
        ["good"],
    ),
    "number.jsonl": (
        rows({"text": 17}),
        r"line 1: no text in the field 'text' \(it has the type int",
        "skipped",
        [],
    ),
    "field.jsonl": (
        rows({"a": "", "b": ""}),
        r"\(there are: a, b; choose one with --field\)",
        "skipped",
        [],
    ),
    "null.jsonl": (
        rows(GOOD, {"text": None}),
        "",
        "null or blank in the field 'text', left out (lines: 1",
        ["good"],
    ),
    "half.jsonl": (
        rows({"text": "a \ud83d b"}),
        "",
        'half a surrogate pair, replaced by "?"',
        ["a ? b"],
    ),
    "wide.jsonl.zst": (
        WIDE,
        r"wide\.jsonl\.zst .*: .* `zstd -d --long=31 wide\.jsonl\.zst`",
        None,
        [],
    ),
    "sum.parquet": (
        parquet(text=["hello"]).replace(b"hello", b"hallo"),
        r"read sum\.parquet",
        None,
        [],
    ),
    "broken.parquet": (b"PAR1", r"cannot read broken\.parquet", None, []),
    "junk.parquet": (
        rows(GOOD),
        r"cannot read junk\.parquet \(.*not a parquet file",
        None,
        [],
    ),
    "row.parquet": (
        parquet(text=STRINGS),
        r"row\.parquet, row 2: not UTF-8 \(.*\); --skip-bad skips it",
        "is 2)",
        ["good", "more"],
    ),
    "null.parquet": (
        parquet(text=["good", None]),
        "",
        "null or blank in the field 'text', left out (rows: 1, the first is 2)",
        ["good"],
    ),
    "number.parquet": (
        parquet(text=[7]),
        r"row 1: no text in the field 'text' \(it has the type int",
        "(rows: 1",
        [],
    ),
    "field.parquet": (
        parquet(a=["x"], b=["y"]),
        r"\(there are: a, b; choose one with --field\)",
        "skipped",
        [],
    ),
    "large.parquet": (
        parquet(text=pyarrow.array(["good"], pyarrow.large_string())),
        "",
        "",
        ["good"],
    ),
    "coded.parquet": (
        parquet(text=pyarrow.array(["good", "a"]).dictionary_encode()),
        "",
        "",
        ["good", "a"],
    ),
    "page.parquet": (
        damaged(parquet(text=NUMBERED), b"document 2000"),
        r"read page\.parquet \(.*\) after row 1,024",
        None,
        [],
    ),
    "other.parquet": (
        damaged(parquet(text=["good"] * 9, x=NUMBERED[:9]), b"document 0"),
        "",
        "",
        ["good"] * 9,
    ),
    # Formats by their first bytes, whatever the name says
    "gzip.jsonl": (gzip.compress(rows(GOOD)), "", "", ["good"]),
    "xz.jsonl": (b"\xfd7zXZ\0", r"^xz\.jsonl is compressed by xz: .* unxz", None, []),
    "bzip2.jsonl.gz": (
        b"BZh9",
        r"^bzip2\.jsonl\.gz is compressed by bzip2: .* bunzip2",
        None,
        [],
    ),
    "zstd.txt": (zstd(b"text"), "", "", ["text"]),
    "plain.jsonl.zst": (rows(GOOD), "", "", ["good"]),
    "utf16.jsonl": (
        "\ufeff".encode("utf-16-le") + rows(GOOD).decode().encode("utf-16-le"),
        "not JSON",
        "skipped",
        [],
    ),
    "table.csv": (
        b"text,url\ngood,x\n",
        r"^table\.csv is a CSV file: .*load_dataset\('csv', ",
        None,
        [],
    ),
    "table.TSV.gz": (
        gzip.compress(b"text\turl\n"),
        r"^table\.TSV\.gz is a CSV file",
        None,
        [],
    ),
    "file.arrow": (
        ARROWS[0],
        r"^file\.arrow is an Arrow file: .*load_dataset\('arrow', .*to_parquet",
        None,
        [],
    ),
    "stream.arrow": (ARROWS[1], r"^stream\.arrow is an Arrow file", None, []),
    "arrow.jsonl": (ARROWS[1], r"^arrow\.jsonl is an Arrow file", None, []),
    "table.jsonl": (parquet(text=["good"]), "", "", ["good"]),
    "table.txt": (
        parquet(text=["good"]),
        r"^table\.txt is a Parquet file: `prepare jsonl`",
        None,
        [],
    ),
    "lfs.txt": (LFS, r"^lfs\.txt is a Git LFS pointer: `git lfs pull`", None, []),
    "lfs.parquet": (LFS, r"^lfs\.parquet is a Git LFS pointer", None, []),
    "book.txt": (b"%PDF-1.7", r"^book\.txt is a PDF: .*pdftotext", None, []),
    "zip.jsonl": (b"PK\3\4", r"^zip\.jsonl is a zip archive: unpack it", None, []),
}


@pytest.mark.parametrize("name", DIFFICULT)
def test_difficult_files(tmp_path, monkeypatch, capsys, byte_level, name):
    content, refused, reported, documents = DIFFICULT[name]
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content)
    for other in ("last", "held"):
        Path(f"{other}.txt").write_text(other)
        save(Path(f"{other}.jsonl"), [other])
    kind = "txt" if ".txt" in name else "jsonl"
    files = name, f"last.{kind}", "--validation-files", f"held.{kind}"
    options = (kind.replace("txt", "text"), *files, "--tokenizer", byte_level)
    for skip in ((), ("--skip-bad",)):
        if refused and (not skip or reported is None):
            refuses(refused, run, *options, *skip, "--output", "out")
            assert not Path("out").exists()
        else:
            dataset = run(*options, *skip, "--overwrite", "--output", "out")
            said = capsys.readouterr().out
            assert f"{name}: " in said if reported else name not in said
            assert reported in said
            assert decoded(dataset, "train") == [*documents, "last"]


def test_a_long_line_is_cut_at_spaces(tmp_path, out, capsys):
    path = tmp_path / "long.txt"
    text = "\n".join(TEXTS[:50]) + " ".join(WORDS[:-1]) * 200 + "a=b;" * 500
    path.write_bytes(text.encode() + b"\xff" + b"rest")
    sizes = []

    class File(io.StringIO):
        def read(self, size=-1):
            sizes.append(size)
            return super().read(size)

    pieces = list(reading.pieces(File(text), 500))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) == 500 == max(sizes)  # no more than that is in memory
    assert min(map(len, pieces[:-1])) > 250
    assert {piece[-1] for piece in pieces[:5]} == {"\n"}
    assert {piece[-1] for piece in pieces[-10:-6]} == {" "}
    assert len(pieces[-2]) == 500  # minified: no space
    assert list(reading.pieces(io.StringIO("ab"), 1)) == ["a", "b"]
    options = (
        "text",
        path,
        "--skip-bad",
        "--validation-percent",
        20,
        "--vocabulary",
        300,
        "--output",
        out,
        "--cut",
    )
    dataset = run(*options, 500)
    assert (
        "long.txt: not UTF-8, skipped (parts: 1, the first is"
        in capsys.readouterr().out
    )  # and no other part
    documents = decoded(dataset, "train") + decoded(dataset, "validation")
    assert 40 < len(documents) < len(pieces)
    assert set(documents) <= set(pieces)
    refuses(
        r"no documents for (train|validation): .* a smaller --cut",
        run,
        *options,
        10**6,
        "--overwrite",
    )
    assert not list(tmp_path.glob(".out*"))


# Stopping and resuming


class Killed(Exception):
    """Stands for a kill."""


def stop(batches: int, how: int, *options: object) -> None:
    """Run until so many batches count: end with the next one written, but not counted,
    or send the signal ``how``.
    """
    save, taken = token_files.Writer.save, []

    def interrupted(writer):
        taken.append(1)
        if len(taken) > batches and how == signal.SIGKILL:
            for file in writer.files.values():
                file.flush()
            raise Killed
        if len(taken) > batches:
            os.kill(os.getpid(), how)
        save(writer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_files.Writer, "save", interrupted)
        with pytest.raises((Killed, Stopped)) as stopped:
            run(*options)
    if isinstance(stopped.value, Stopped):
        assert (str(stopped.value), stopped.value.signal_number) == (
            "stopped; the same command resumes",
            how,
        )


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(token_files, "BATCH_DOCUMENTS", 16)


def test_a_stopped_preparation_resumes_to_the_same_bytes(
    tmp_path, sentence_piece, small_batches, capsys
):
    train, validation = (
        save(tmp_path / "t.parquet", TEXTS),
        save(tmp_path / "v.jsonl", TEXTS[:120]),
    )
    options = (
        "c4",
        train,
        "--validation-files",
        validation,
        "--tokenizer",
        sentence_piece,
    )
    options += ("--context", 16, "--train-documents", 210, "--output")
    run(*options, tmp_path / "whole")
    for batches, how in (
        (0, 9),
        (1, 9),
        (14, 9),
        (20, 9),
        (3, signal.SIGINT),
        (17, signal.SIGTERM),
    ):
        parts = tmp_path / f"{batches}"
        stop(batches, how, *options, parts)
        assert not parts.exists()
        capsys.readouterr()
        run(*options, parts)
        assert contents(parts) == contents(tmp_path / "whole")
        assert ("Resuming after" in capsys.readouterr().out) == (batches > 1)


def test_a_streamed_data_set_resumes_where_it_stopped(
    tmp_path, byte_level, small_batches, monkeypatch
):
    files = [
        str(save(tmp_path / f"{part}.jsonl", TEXTS[100 * part : 100 * part + 100]))
        for part in range(3)
    ]
    opened = []

    def local(dataset, subset, split, field, problems, held_out, revision):
        opened.append((dataset, subset, split, revision))
        return sources.HubStream(
            "json", "", "train", field, problems, held_out, data_files=files
        )

    monkeypatch.setattr(command, "HubStream", local)
    options = (
        "openwebtext",
        "--revision",
        "refs/pr/22",
        "--tokenizer",
        byte_level,
        "--validation-percent",
        10,
    )
    options += ("--output",)
    whole = run(*options, tmp_path / "whole")
    assert sorted(decoded(whole, "train") + decoded(whole, "validation")) == sorted(
        TEXTS
    )
    stop(12, signal.SIGKILL, *options, tmp_path / "parts")
    run(*options, tmp_path / "parts")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert set(opened) == {("Skylion007/openwebtext", "", "train", "refs/pr/22")}


def test_skip_bad_may_be_added_when_a_bad_line_has_stopped_the_command(
    tmp_path, out, byte_level, small_batches, capsys
):
    path = save(tmp_path / "a.jsonl", TEXTS)
    path.write_bytes(path.read_bytes() + rows("{", GOOD))
    options = (
        "jsonl",
        path,
        "--tokenizer",
        byte_level,
        "--validation-percent",
        20,
        "--output",
        out,
    )
    refuses("line 301: not JSON .*; --skip-bad skips it", run, *options)
    dataset = run(*options, "--skip-bad")
    assert "Resuming after" in capsys.readouterr().out
    assert sorted(decoded(dataset, "train") + decoded(dataset, "validation")) == sorted(
        [*TEXTS, "good"]
    )


def test_an_unfinished_or_finished_folder_is_not_mixed_with_another(
    tmp_path, out, byte_level, small_batches
):
    path = save(tmp_path / "a.jsonl", TEXTS)
    options = (
        "openwebtext",
        path,
        "--tokenizer",
        byte_level,
        "--output",
        out,
        "--validation-percent",
    )
    stop(1, signal.SIGKILL, *options, 30)  # no text in it yet: it may be replaced
    stop(4, signal.SIGKILL, *options, 10)
    partial = tmp_path / ".out.partial"

    def refuse(percent, message, *more):
        refuses(message, run, *options, percent, *more)

    refuse(20, r"started with other settings \(validation_percent\)")
    with token_files.lock(partial):
        refuse(10, "another process is writing")
    (partial / "train.bin").write_bytes(b"")
    refuse(10, r"train\.bin is shorter than its state\.json says")
    for damage in ("{", "[" * 100_000):
        (partial / "state.json").write_text(damage)
        refuse(10, r"state\.json is damaged")
    assert run(*options, 20, "--overwrite").manifest["validation"]["documents"] > 30
    refuse(20, "exists: pass --overwrite to replace it")
    assert (
        run(*options, 20, "--train-documents", 100, "--overwrite").manifest["train"][
            "documents"
        ]
        == 100
    )
    refuse(
        0.001,
        "no documents for validation: .*a larger --validation-percent",
        "--overwrite",
    )
    stop(4, signal.SIGKILL, *options, 10, "--overwrite")
    assert data.load(out).manifest["train"]["documents"] == 100
    assert run(*options, 10).manifest["train"]["documents"] > 100
    for other in ("notes.txt", ".hidden", "more/notes.json"):
        (out / other).parent.mkdir(exist_ok=True)
        (out / other).write_text(other)
    run(*options, 20, "--overwrite")
    assert sorted(path.name for path in out.iterdir()) == sorted(
        [
            "notes.txt",
            ".hidden",
            "more",
            "manifest.json",
            "tokenizer.json",
            "train.bin",
            "validation.bin",
        ]
    )
    assert (out / "more" / "notes.json").read_text() == "more/notes.json"
    out.rename(tmp_path / "real")
    out.symlink_to(tmp_path / "real")
    run(*options, 10, "--overwrite")
    assert (tmp_path / "real" / "notes.txt").read_text() == "notes.txt"
    (out / "manifest.json").unlink()
    refuse(20, "--overwrite will not delete it", "--overwrite")


def test_text_or_a_tokenizer_that_changed_is_not_continued(
    tmp_path, out, byte_level, small_batches
):
    path, tokenizer = save(tmp_path / "a.jsonl", TEXTS), tmp_path / "tokenizer.json"
    tokenizer.write_bytes(byte_level.read_bytes())
    options = ("jsonl", path, "--tokenizer", tokenizer, "--output", out)
    stop(4, signal.SIGKILL, *options)
    for file in (path, tokenizer):
        times = file.stat()
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
        refuses(r"started with other settings \(local files\)", run, *options)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    run(*options)


def words_of(texts):
    """A tokenizer of whole words, which removes digits."""
    known = {
        word: number for number, word in enumerate(["[UNK]", "<|endoftext|>", *texts])
    }
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.normalizer = (
        pre_tokenizers.Whitespace(),
        normalizers.Replace(Regex("[0-9]"), ""),
    )
    return tokenizer


def test_what_a_tokenizer_does_not_know_is_reported(tmp_path, out, capsys):
    words_of(["one", "two"]).save(str(tmp_path / "words.json"))
    save(tmp_path / "a.jsonl", ["one two three four", "17", "one five"])
    save(tmp_path / "v.jsonl", ["two six"])
    options = (
        "--validation-files",
        tmp_path / "v.jsonl",
        "--tokenizer",
        tmp_path / "words.json",
        "--output",
        out,
    )
    dataset = run("jsonl", tmp_path / "a.jsonl", *options)
    said = capsys.readouterr().out
    assert "documents without tokens: 1\n" in said
    assert "unknown tokens: 4\n" in said
    assert dataset.manifest["train"]["unknown tokens"] == 3


def test_a_byte_level_tokenizer_has_no_unknown_token(tmp_path, byte_level):
    """Also if it names one, such as its end token: no text contains it."""
    settings = json.loads(Path(byte_level).read_text())
    settings["model"]["unk_token"] = END_OF_TEXT
    (tmp_path / "named.json").write_text(json.dumps(settings))
    assert unknown_of(find_tokenizer(str(tmp_path / "named.json"))) is None


def test_a_tokenizer_that_drops_characters_is_refused(tmp_path, byte_level):
    for pre_tokenizer in (None, pre_tokenizers.Metaspace()):
        tokenizer = Tokenizer(models.BPE({"a": 0, "<|endoftext|>": 1, "\u2581": 2}, []))
        tokenizer.pre_tokenizer = pre_tokenizer
        tokenizer.save(str(tmp_path / "narrow.json"))
        refuses(
            "drops characters that it does not know",
            find_tokenizer,
            str(tmp_path / "narrow.json"),
        )


# What the user can fix


def test_what_cannot_be_prepared_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(Path("a.jsonl"), TEXTS)
    Path("folder").mkdir()
    Path("folder/a.txt").touch()
    Tokenizer(models.BPE()).save("endless.json")
    words_of(["a"]).save("words.json")
    gaps = Tokenizer(
        models.BPE({"a": 0, "\u0122": 1, "<|endoftext|>": 2}, [])
    )  # byte-level, without most bytes
    gaps.pre_tokenizer, gaps.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    gaps.save("gaps.json")
    for arguments, message in {
        (
            "texts",
            "nowhere",
        ): (
            "prepare must be followed by one of python, text, jsonl, openwebtext, c4,"
            " pile, got"
        ),
        ("text", "nowhere"): "nowhere does not exist",
        ("python", "nowhere"): "nowhere does not exist",
        ("python", "folder"): r"no files to read: .* left out: \.txt 1",
        ("text",): "no files to read",
        (
            "jsonl",
            "a.jsonl",
            "--tokenizer",
            "missing.json",
        ): r"cannot load the tokenizer missing\.json",
        (
            "jsonl",
            "a.jsonl",
            "--tokenizer",
            "endless.json",
        ): "no token that ends a text",
        ("jsonl", "a.jsonl", "--context", "0"): "--context must be at least 1",
        ("text", "a.jsonl", "--cut", "0"): "--cut must be at least 1",
        (
            "text",
            "a.jsonl",
            "--cut",
            "99999999999999999999",
        ): r"--cut must be in 1\.\.2147483647, got",
        ("c4", "--train-documents", "0"): "--train-documents must be at least 1",
        (
            "python",
            "--validation-files",
            "a.jsonl",
        ): "--validation-files has no effect on Python files",
        (
            "text",
            "a.txt",
            "--validation-files",
            "b",
            "--validation_files=c",
        ): "given twice: name all files and folders",
        (
            "jsonl",
            "a.jsonl",
            "--tokenizer",
            "gaps.json",
        ): r"gaps\.json drops characters",
        (
            "jsonl",
            "a.jsonl",
            "--tokenizer",
            "words.json",
            "--end-token",
            "[UNK]",
        ): r"'\[UNK\]' cannot end documents",
        (
            "jsonl",
            "a.jsonl",
            "--tokenizer",
            "words.json",
            "--end-token",
            "a",
        ): "'a' cannot end documents",
        (
            "pile",
            "--validation-percent",
            "51",
        ): "--validation-percent must be in 0.001..50",
        ("jsonl", "a.jsonl", "--vocabulary", "256"): r"--vocabulary must be in 257",
    }.items():
        refuses(message, run, *arguments, "--output", "out")
        assert not Path("out").exists()
        assert not Path(".out.partial").exists()


def test_an_unreachable_hub_is_said_in_one_line(monkeypatch, tmp_path, out, byte_level):
    import datasets

    def unreachable(*arguments, **options):
        raise ConnectionError("Couldn't reach it\nmore")

    path = str(save(tmp_path / "a.jsonl", TEXTS))
    texts = sources.HubStream(
        "json",
        "",
        "train",
        "text",
        Problems(skip=False),
        0.0,
        data_files=[path],
    )
    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    message = (
        r"stream allenai/c4 .* \(Couldn't reach it\): check .* the network; .* with"
        r" paths it reads local copies"
    )
    refuses(message, run, "c4", "--tokenizer", byte_level, "--output", out)
    hub = SimpleNamespace(from_pretrained=unreachable)
    monkeypatch.setattr("examples.pretrain.prepare.tokenizer.Tokenizer", hub)
    message = r"tokenizer gpt2 \(Couldn't reach it\): .* the path .* check the network"
    refuses(message, find_tokenizer, "gpt2")

    def lost_midway():
        yield {"text": "first"}
        raise ConnectionError

    monkeypatch.setattr(texts, "_rows", lost_midway())
    taken = iter(texts)
    assert next(taken) == "first"
    refuses(r"\(ConnectionError\): .* the same command resumes", next, taken)


# Tokenizers


def test_the_separator_is_found_by_its_name():
    for names, separator in (
        (["<|im_end|>", "<|endoftext|>"], 1),
        (["<pad>", "</s>", "<eos>"], 1),
        (["<eos>"], 0),
    ):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.add_special_tokens(names)
        assert end_of_text(tokenizer) == separator


def test_bytes_of_added_and_special_tokens(byte_level):
    tokenizer = find_tokenizer(str(byte_level))
    tokenizer.add_tokens(["<höher>"])
    lengths = byte_lengths(tokenizer)
    assert lengths.shape == (402,)
    assert lengths[[0, 400, 401]].tolist() == [0, 0, 8]
    for text in TEXTS[:50]:
        assert lengths[tokenizer.encode(text).ids].sum() == len(text.encode())


def test_settings_that_change_an_encoding_at_random_or_by_length_are_off(
    tmp_path, byte_level
):
    """BPE dropout, truncation and padding: in the encoding, and in the stored copy."""
    tokenizer = Tokenizer.from_file(str(byte_level))
    tokenizer.model.dropout = 0.5  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=5)
    tokenizer.save(str(tmp_path / "random.json"))
    options = ("jsonl", save(tmp_path / "a.jsonl", TEXTS), "--validation-percent", 20)
    for file in (byte_level, tmp_path / "random.json"):
        run(*options, "--tokenizer", file, "--output", tmp_path / file.stem)
    plain, found = (contents(tmp_path / name) for name in ("tokenizer", "random"))
    assert all(
        found[name] == plain[name]
        for name in ("train.bin", "validation.bin", "tokenizer.json")
    )
    # An earlier version stored the file as it was.
    ids = load_tokenizer(tmp_path / "random.json").encode(TEXTS[0]).ids
    assert ids == Tokenizer.from_file(str(byte_level)).encode(TEXTS[0]).ids


@pytest.mark.parametrize("special", [True, False])
def test_a_separator_of_another_name_is_an_option(tmp_path, out, byte_level, special):
    other = Tokenizer.from_str(byte_level.read_text().replace("<|endoftext|>", "[BOS]"))
    (other.add_special_tokens if special else other.add_tokens)(["[EOS]", "[PAD]"])
    other.save(str(tmp_path / "other.json"))
    texts = [f"{number} an [EOS] b{SPECIAL[number % 4]} c" for number in range(200)]
    path = save(tmp_path / "a.jsonl", texts)
    options = (
        "jsonl",
        path,
        "--tokenizer",
        tmp_path / "other.json",
        "--validation-percent",
        20,
        "--output",
        out,
    )
    refuses(
        r"no token that ends a text: none of .*; --end-token names another, .*"
        r" \[BOS\].* \[EOS\]",
        run,
        *options,
    )
    refuses(
        r"the tokenizer has no token '\[END\]'; --end-token names another, ",
        run,
        *options,
        "--end-token",
        "[END]",
    )
    dataset = run(*options, "--end-token", "[EOS]")
    end = dataset.tokenizer.token_to_id("[EOS]")
    assert dataset.manifest["end_token"] == "[EOS]"
    tokens = np.concatenate([dataset.train, dataset.validation])
    found = [
        dataset.tokenizer.decode(document)
        for document in np.split(tokens, np.flatnonzero(tokens == end) + 1)
    ]
    assert sorted(found) == sorted(["", *texts])
    assert byte_lengths(dataset.tokenizer)[tokens].sum() == sum(
        len(text.encode()) for text in texts
    )
    text = byte_level.read_text().replace('"special": true', '"special": false')
    (tmp_path / "plain.json").write_text(
        text
    )  # the separator is no special token: text may spell it
    spelled = save(
        tmp_path / "b.jsonl", [f"{number} <|endoftext|>" for number in range(200)]
    )
    dataset = run(
        "jsonl",
        spelled,
        "--tokenizer",
        tmp_path / "plain.json",
        "--output",
        tmp_path / "third",
    )
    documents, end = (
        dataset.manifest["train"]["documents"],
        dataset.tokenizer.token_to_id("<|endoftext|>"),
    )
    assert (dataset.train == end).sum() == documents
    run(
        "jsonl",
        path,
        "--tokenizer",
        byte_level,
        "--end-token",
        "<|im_start|>",
        "--output",
        tmp_path / "second",
    )
    dataset = data.load(tmp_path / "second")
    assert (
        dataset.train == dataset.tokenizer.token_to_id("<|im_start|>")
    ).sum() == dataset.manifest["train"]["documents"]
