# SPDX-License-Identifier: Apache-2.0
"""``prepare`` on difficult files: text is preserved, or the user is told."""

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pyarrow
import pyarrow.parquet
import pytest

from examples.pretrain import data
from examples.pretrain.prepare import reading
from examples.pretrain.prepare.tokenizer import byte_lengths, end_of_text
from tests.examples.conftest import refuses
from tests.examples.corpora import (
    LFS_POINTER,
    SPECIAL,
    TEXTS,
    WORDS,
    all_decoded,
    all_tokens,
    decoded,
    decoded_up_to,
    json_lines,
    prepare,
    put,
    save,
    size_of,
    zstd,
)


@pytest.mark.parametrize("kind", ["trained", "byte_level", "sentence_piece"])
def test_text_that_spells_a_special_token_stays_text(tmp_path, out, request, kind):
    texts = []
    for number in range(200):
        one = SPECIAL[number % 4]
        another = SPECIAL[number % 3]
        texts.append(f"{number} a {one} b{another}</s> c")
    path = save(tmp_path / "a.jsonl", texts)
    options = {"vocabulary": 300, "validation_percent": 20, "output": out}
    size = size_of(texts)
    if kind != "trained":
        options["tokenizer"] = request.getfixturevalue(kind)
    if kind == "sentence_piece":
        size += len(texts)  # a mark before the first word of each
    dataset = prepare("jsonl", path, **options)
    end = end_of_text(dataset.tokenizer)
    tokens = all_tokens(dataset)
    assert (tokens == end).sum() == 200
    assert sorted(decoded_up_to(dataset, end)) == sorted(["", *texts])
    assert byte_lengths(dataset.tokenizer)[tokens].sum() == size
    for text in SPECIAL:
        assert end not in dataset.tokenizer.encode(text).ids


# Contents of files


def parquet(**columns: object) -> bytes:
    """The bytes of a Parquet file with these columns, in groups of 64 rows."""
    file = io.BytesIO()
    pyarrow.parquet.write_table(
        pyarrow.table(columns),
        file,
        row_group_size=64,
        use_dictionary=False,
        compression="none",
        write_page_checksum=True,
    )
    return file.getvalue()


def arrow(new: Callable) -> bytes:
    """The bytes of an Arrow file or stream."""
    file = io.BytesIO()
    table = pyarrow.table({"text": ["good"]})
    with new(file, table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()


def damaged(content: bytes, part: bytes) -> bytes:
    """A file whose pages from ``part`` on are damaged."""
    start = content.index(part) - 4  # where the length of the text is
    return content[:start] + b"\xff" * 60 + content[start + 60 :]


GOOD = {"text": "good"}
LIST = [{"text": "a"}, {"text": "b"}]
DEEP = '{"text": "", "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
UTF16 = "\ufeff".encode("utf-16-le")
NUMBERED = [f"document {number} {number * 7919 % 9973}" for number in range(4096)]
FILE = arrow(pyarrow.ipc.new_file)
STREAM = arrow(pyarrow.ipc.new_stream)


def string_column() -> pyarrow.Array:
    """Texts of which the second is not UTF-8 and the third null.

    Arrow does not check buffers, as other programs do not when they write.
    """
    texts = pyarrow.array([b"good", b"caf\xe9", None, b"more"])
    return pyarrow.Array.from_buffers(pyarrow.string(), len(texts), texts.buffers())


def wide_zstd(content: bytes) -> bytes:
    """A frame of one uncompressed block, which asks for a window of 256 MiB."""
    magic_and_window = bytes.fromhex("28b52ffd0090")
    last_raw_block = 8 * len(content) + 1
    return magic_and_window + last_raw_block.to_bytes(3, "little") + content


@pytest.fixture
def prepare_file(prepare_file) -> Callable[..., data.Dataset]:
    """``prepare`` of a file; its name shows the corpus."""

    def prepared(name: str, **options: object) -> data.Dataset:
        corpus = "jsonl"
        if ".txt" in name:
            corpus = "text"
        return prepare_file(corpus, name, **options)

    return prepared


# Name: content, documents. Nothing is said of these files.
READ = {
    "bom.txt": (b"\xef\xbb\xbftext\n", ["text\n"]),
    "crlf.txt": (b"one\r\ntwo\rthree\n", ["one\r\ntwo\rthree\n"]),
    "bom.jsonl": (
        b"\xef\xbb\xbf" + json_lines({"text": "one\r\ntwo"}),
        ["one\r\ntwo"],
    ),
    "large.parquet": (
        parquet(text=pyarrow.array(["good"], pyarrow.large_string())),
        ["good"],
    ),
    "coded.parquet": (
        parquet(text=pyarrow.array(["good", "a"]).dictionary_encode()),
        ["good", "a"],
    ),
    # Only a column that is not read is damaged.
    "other.parquet": (
        damaged(parquet(text=["good"] * 9, x=NUMBERED[:9]), b"document 0"),
        ["good"] * 9,
    ),
    # Formats by their first bytes, whatever the name says.
    "gzip.jsonl": (gzip.compress(json_lines(GOOD)), ["good"]),
    "zstd.jsonl": (zstd(json_lines(GOOD)), ["good"]),
    "zstd.txt": (zstd(b"text"), ["text"]),
    "plain.jsonl.zst": (json_lines(GOOD), ["good"]),
    "table.jsonl": (parquet(text=["good"]), ["good"]),
}


@pytest.mark.parametrize("name", READ)
def test_a_file_that_is_read(prepare_file, capsys, name):
    content, documents = READ[name]
    put(Path(name), content)
    for skip_bad in (False, True):
        dataset = prepare_file(name, skip_bad=skip_bad, overwrite=True)
        assert name not in capsys.readouterr().out
        assert decoded(dataset, "train") == [*documents, "last"]


# Name: content, what is reported, documents.
REPORTED = {
    "blank.txt": (b" \n", "blank, left out", []),
    "blank.jsonl": (
        json_lines({"text": " "}) + b"\n",
        "left out (lines: 2, the first is 1)",
        [],
    ),
    "empty.jsonl": (b"", "empty", []),
    "null.jsonl": (
        json_lines(GOOD, {"text": None}),
        "null or blank in the field 'text', left out (lines: 1",
        ["good"],
    ),
    "null.parquet": (
        parquet(text=["good", None]),
        "null or blank in the field 'text', left out (rows: 1, the first is 2)",
        ["good"],
    ),
    "half.jsonl": (
        json_lines({"text": "a \ud83d b"}),
        'half a surrogate pair, replaced by "?"',
        ["a ? b"],
    ),
}


@pytest.mark.parametrize("name", REPORTED)
def test_a_file_of_which_something_is_reported(prepare_file, capsys, name):
    content, reported, documents = REPORTED[name]
    put(Path(name), content)
    for skip_bad in (False, True):
        dataset = prepare_file(name, skip_bad=skip_bad, overwrite=True)
        said = capsys.readouterr().out
        assert f"{name}: " in said
        assert reported in said
        assert decoded(dataset, "train") == [*documents, "last"]


class Bad(NamedTuple):
    """A file that is refused, and read with --skip-bad."""

    content: bytes
    error: str
    reported: str  # with --skip-bad
    documents: list[str]


BAD = {
    "latin.txt": Bad(
        b"caf\xe9",
        r"latin\.txt: not UTF-8 \(iconv .*\); --skip-bad",
        "not UTF-8, skipped",
        [],
    ),
    "utf16.txt": Bad(
        "text".encode("utf-16"),
        r"utf16\.txt: not UTF-8",
        "not UTF-8, skipped",
        [],
    ),
    "utf16.jsonl": Bad(
        UTF16 + json_lines(GOOD).decode().encode("utf-16-le"),
        "not JSON",
        "skipped",
        [],
    ),
    "deep.jsonl": Bad(
        json_lines(GOOD, DEEP),
        "deep.jsonl, line 2: not JSON .*recursion.*; --skip-bad",
        "first is 2)",
        ["good"],
    ),
    "brackets.jsonl": Bad(
        b"[" * 100_000,
        "line 1: not JSON",
        "not JSON, skipped (lines: 1, the first is 1)",
        [],
    ),
    "array.json": Bad(
        json_lines(LIST),
        r"one JSON array, not one object a line \(`jq -c '.\[\]' array",
        "one JSON",
        [],
    ),
    "pretty.json": Bad(
        json.dumps(LIST, indent=1).encode(),
        "one JSON array",
        "one JSON array",
        [],
    ),
    "row.jsonl": Bad(
        json_lines(GOOD, 17),
        "row.jsonl, line 2: .*not an object, but of type int.*; --skip",
        "is 2)",
        ["good"],
    ),
    "rows.jsonl": Bad(
        json_lines(GOOD, [1], {}, {"text": 1}, "{"),
        "line 2",
        "'text', skipped (lines: 3",
        ["good"],
    ),
    "number.jsonl": Bad(
        json_lines({"text": 17}),
        r"line 1: no text in the field 'text' \(it has the type int",
        "skipped",
        [],
    ),
    "field.jsonl": Bad(
        json_lines({"a": "", "b": ""}),
        r"\(there are: a, b; choose one with --field\)",
        "skipped",
        [],
    ),
    "row.parquet": Bad(
        parquet(text=string_column()),
        r"row\.parquet, row 2: not UTF-8 \(.*\); --skip-bad skips it",
        "is 2)",
        ["good", "more"],
    ),
    "number.parquet": Bad(
        parquet(text=[7]),
        r"row 1: no text in the field 'text' \(it has the type int",
        "(rows: 1",
        [],
    ),
    "field.parquet": Bad(
        parquet(a=["x"], b=["y"]),
        r"\(there are: a, b; choose one with --field\)",
        "skipped",
        [],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_or_skipped(prepare_file, capsys, name):
    bad = BAD[name]
    put(Path(name), bad.content)
    refuses(bad.error, prepare_file, name)
    assert not Path("out").exists()
    capsys.readouterr()
    dataset = prepare_file(name, skip_bad=True, overwrite=True)
    said = capsys.readouterr().out
    assert f"{name}: " in said
    assert bad.reported in said
    assert decoded(dataset, "train") == [*bad.documents, "last"]


# Name: content, error. They are refused with --skip-bad, too.
REFUSED = {
    "wide.jsonl.zst": (
        wide_zstd(json_lines(GOOD)),
        r"wide\.jsonl\.zst .*: .* `zstd -d --long=31 wide\.jsonl\.zst`",
    ),
    "sum.parquet": (
        parquet(text=["hello"]).replace(b"hello", b"hallo"),
        r"read sum\.parquet",
    ),
    "broken.parquet": (b"PAR1", r"cannot read broken\.parquet"),
    "junk.parquet": (
        json_lines(GOOD),
        r"cannot read junk\.parquet \(.*not a parquet file",
    ),
    "page.parquet": (
        damaged(parquet(text=NUMBERED), b"document 2000"),
        r"read page\.parquet \(.*\) after row 1,024",
    ),
    # Formats by their first bytes, whatever the name says.
    "xz.jsonl": (b"\xfd7zXZ\0", r"^xz\.jsonl is compressed by xz: .* unxz"),
    "bzip2.jsonl.gz": (
        b"BZh9",
        r"^bzip2\.jsonl\.gz is compressed by bzip2: .* bunzip2",
    ),
    "table.csv": (
        b"text,url\ngood,x\n",
        r"^table\.csv is a CSV file: .*load_dataset\('csv', ",
    ),
    "table.TSV.gz": (
        gzip.compress(b"text\turl\n"),
        r"^table\.TSV\.gz is a CSV file",
    ),
    "file.arrow": (
        FILE,
        r"^file\.arrow is an Arrow file: .*load_dataset\('arrow', .*to_parquet",
    ),
    "stream.arrow": (STREAM, r"^stream\.arrow is an Arrow file"),
    "arrow.jsonl": (STREAM, r"^arrow\.jsonl is an Arrow file"),
    "table.txt": (
        parquet(text=["good"]),
        r"^table\.txt is a Parquet file: `prepare jsonl`",
    ),
    "lfs.txt": (LFS_POINTER, r"^lfs\.txt is a Git LFS pointer: `git lfs pull`"),
    "lfs.parquet": (LFS_POINTER, r"^lfs\.parquet is a Git LFS pointer"),
    "book.txt": (b"%PDF-1.7", r"^book\.txt is a PDF: .*pdftotext"),
    "zip.jsonl": (b"PK\3\4", r"^zip\.jsonl is a zip archive: unpack it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_refused(prepare_file, name):
    content, error = REFUSED[name]
    put(Path(name), content)
    for skip_bad in (False, True):
        refuses(error, prepare_file, name, skip_bad=skip_bad)
        assert not Path("out").exists()


# Long files


CUT = 500


def long_text() -> str:
    """Lines, then a long line of words, then one without spaces (minified code)."""
    lines = "\n".join(TEXTS[:50])
    line = " ".join(WORDS[:-1]) * 200
    return lines + line + "a=b;" * 500


class MeasuredFile(io.StringIO):
    """A file that stores how much was read at once."""

    def __init__(self, text: str):
        super().__init__(text)
        self.sizes = []

    def read(self, size=-1):
        self.sizes.append(size)
        return super().read(size)


def test_a_long_text_is_cut_at_line_ends_or_spaces():
    text = long_text()
    file = MeasuredFile(text)
    pieces = list(reading.pieces(file, CUT))
    assert "".join(pieces) == text
    assert max(file.sizes) == CUT  # no more than that is in memory
    lengths = [len(piece) for piece in pieces]
    assert max(lengths) == CUT
    assert min(lengths[:-1]) > CUT / 2
    assert {piece[-1] for piece in pieces[:5]} == {"\n"}
    assert {piece[-1] for piece in pieces[-10:-6]} == {" "}
    assert lengths[-2] == CUT  # where there is no space
    assert list(reading.pieces(io.StringIO("ab"), 1)) == ["a", "b"]


def test_the_parts_of_a_long_file_are_documents(tmp_path, out, capsys):
    text = long_text()
    pieces = list(reading.pieces(io.StringIO(text), CUT))
    path = put(tmp_path / "long.txt", text.encode() + b"\xff" + b"rest")
    options = {
        "skip_bad": True,
        "validation_percent": 20,
        "vocabulary": 300,
        "output": out,
    }
    dataset = prepare("text", path, cut=CUT, **options)
    # The part that is not UTF-8, and no other.
    reported = "long.txt: not UTF-8, skipped (parts: 1, the first is"
    assert reported in capsys.readouterr().out
    documents = all_decoded(dataset)
    assert 40 < len(documents) < len(pieces)
    assert set(documents) <= set(pieces)
    message = r"no documents for (train|validation): .* a smaller --cut"
    refuses(message, prepare, "text", path, cut=10**6, overwrite=True, **options)
    assert not list(tmp_path.glob(".out*"))
