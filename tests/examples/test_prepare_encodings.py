# SPDX-License-Identifier: Apache-2.0
"""``prepare`` on text in another encoding, which may be valid UTF-8 by chance."""

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from examples.pretrain.prepare import python_source
from examples.pretrain.prepare.encodings import ENCODINGS, encoding_of, reason
from tests import cases
from tests.examples.conftest import refuses
from tests.examples.corpora import (
    TEXTS,
    all_decoded,
    decoded,
    json_lines,
    prepare,
    put,
    zstd,
)

LANGUAGES = {
    "English": "One line.\nAnd another one\n",
    "one word": "text",
    "German": "Größe und Übermut, ß\n",
    "Russian": "Привет мир. Ещё строка\n",
    "Greek": "Ελλάδα και κόσμος\n",
    "Arabic": "مرحبا بالعالم\n",
    "Hindi": "नमस्ते दुनिया\n",
    "Korean": "안녕하세요 세계 여러분\n",
    "Chinese": "\u3000这是第一段文字，没有空格。这是第二句。" * 5,
    "Japanese": "日本語のテキスト、改行なし。" * 5,
    "emoji": "a 😀 b 😀\n",
}
DAMAGE = "no text has NULs: it is damaged, or of another encoding"
RECORD = {"text": "good", "n": 1}


@pytest.fixture
def refused_or_skipped(prepare_file, capsys) -> Callable[..., None]:
    """The check that a file is refused, and skipped and reported with --skip-bad.

    It has these documents besides.
    """

    def check(corpus, name, message, reported, documents=(), **options):
        refuses(message, prepare_file, corpus, name, **options)
        assert not Path("out").exists()
        capsys.readouterr()
        options |= {"skip_bad": True, "overwrite": True}
        dataset = prepare_file(corpus, name, **options)
        said = capsys.readouterr().out
        assert f"{name}: {reported}" in said
        assert decoded(dataset, "train") == [*documents, "last"]

    return check


# Recognizing encodings


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_an_encoding_is_recognized(language, encoding):
    text = LANGUAGES[language]
    assert encoding_of(text.encode(encoding)) == encoding
    assert encoding_of(("\ufeff" + text).encode(encoding)) == encoding
    assert encoding_of((text * 5000).encode(encoding)) == encoding
    assert f"iconv -f {encoding} -t" in reason(text.encode(encoding), "")


@pytest.mark.parametrize("language", LANGUAGES)
def test_other_bytes_have_none_of_these_encodings(language):
    text = LANGUAGES[language]
    for other in (
        text.encode(),
        text.encode("utf-8-sig"),
        text.encode() + bytes(100),
        (text * 500).encode().replace(b" ", b"\0"),
        bytes(100) + text.encode(),
    ):
        assert encoding_of(other) == ""
    assert reason(text.encode(), "otherwise") == "otherwise"
    assert reason(text.encode() + b"\0", "otherwise") == DAMAGE


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4096])
def test_bytes_that_are_no_text_have_no_encoding(size):
    assert encoding_of(bytes(size)) == ""
    assert encoding_of(b"\xff" * size) == ""


# Plain text


PACKED = {".txt": bytes, ".txt.gz": gzip.compress, ".txt.zst": zstd}


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("suffix", PACKED)
def test_text_in_another_encoding_is_refused(refused_or_skipped, encoding, suffix):
    name = f"a{suffix}"
    put(Path(name), PACKED[suffix](LANGUAGES["English"].encode(encoding)))
    message = (
        rf"^{name}: NUL characters \(it looks like {encoding}: `iconv -f {encoding} -t"
        r" UTF-8` converts it\); --skip-bad skips it$"
    )
    refused_or_skipped("text", name, message, "NUL characters, skipped")


@pytest.mark.parametrize("language", ["German", "Chinese", "emoji"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_text_that_is_no_utf_8_either_is_refused_with_its_encoding(
    refused_or_skipped, language, encoding
):
    put(Path("a.txt"), LANGUAGES[language].encode(encoding))
    message = rf"^a\.txt: not UTF-8 \(it looks like {encoding}: "
    refused_or_skipped("text", "a.txt", message, "not UTF-8, skipped")


ZEROS = {
    "tail": b"text" + bytes(4096),
    "block": b"text" * 2000 + bytes(512) + b"text",
    "head": bytes(3) + b"text" * 20,
    "one": b"te\0xt",
    "only": bytes(4096),
}


@pytest.mark.parametrize("place", ZEROS)
def test_text_with_zeros_is_refused(refused_or_skipped, place):
    put(Path("a.md"), ZEROS[place])
    message = rf"^a\.md: NUL characters \({DAMAGE}\); --skip-bad"
    refused_or_skipped("text", "a.md", message, "NUL characters, skipped")


def test_the_part_of_a_text_with_zeros_is_named(refused_or_skipped):
    put(Path("a.txt"), b"one two\n" * 3 + bytes(8) + b"and more")
    refused_or_skipped(
        "text",
        "a.txt",
        rf"^a\.txt, part 4: NUL characters \({DAMAGE}\)",
        "NUL characters, skipped (parts: 1, the first is 4)",
        ["one two\n", "one two\n", "one two\n", "and more"],
        cut=8,
    )


@pytest.mark.parametrize("language", ["Russian", "Hindi", "English"])
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("suffix", PACKED)
def test_no_part_of_a_text_in_another_encoding_is_kept(
    refused_or_skipped, language, encoding, suffix
):
    name = f"a{suffix}"
    text = LANGUAGES[language] * 200
    put(Path(name), PACKED[suffix](text.encode(encoding)))
    message = rf"^{name}: not UTF-8 \(it looks like {encoding}: "
    refused_or_skipped("text", name, message, "not UTF-8, skipped", cut=6)


# Records


def parquet(texts: list[str]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), file)
    return file.getvalue()


UTF16 = "some text".encode("utf-16-le").decode()
UTF32 = "some text".encode("utf-32-be").decode()
RECORDS = {
    "a.jsonl": json_lines,
    "a.jsonl.gz": lambda *records: gzip.compress(json_lines(*records)),
    "a.json.zst": lambda *records: zstd(json_lines(*records)),
    "a.parquet": lambda *records: parquet([record["text"] for record in records]),
}


@cases.rows(
    "text why",
    (UTF16, "it looks like UTF-16LE: `iconv"),
    (UTF32, "it looks like UTF-32BE: `iconv"),
    ("text" + "\0" * 100, DAMAGE),
    ("te\0xt", DAMAGE),
    ("\0", DAMAGE),
)
@pytest.mark.parametrize("name", RECORDS)
def test_a_record_with_nuls_is_refused(refused_or_skipped, name, text, why):
    put(Path(name), RECORDS[name](RECORD, {"text": text}, RECORD))
    unit = "line"
    if name == "a.parquet":
        unit = "row"
    what = "NUL characters in the field 'text'"
    refused_or_skipped(
        "jsonl",
        name,
        rf"^{name}, {unit} 2: {what} \({why}",
        f"{what}, skipped ({unit}s: 1, the first is 2)",
        ["good", "good"],
    )


@pytest.mark.parametrize("encoding", [*ENCODINGS, "utf-16", "utf-32"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd])
def test_records_in_another_encoding_are_refused(refused_or_skipped, encoding, pack):
    lines = json_lines(RECORD, {"text": "größe"}).decode()
    put(Path("a.jsonl"), pack(lines.encode(encoding)))
    name = {"utf-16": "UTF-16LE", "utf-32": "UTF-32LE"}.get(encoding, encoding)
    message = rf"^a\.jsonl, line 1: not JSON \(it looks like {name}: `iconv"
    refused_or_skipped("jsonl", "a.jsonl", message, "not JSON, skipped (lines:")


@cases.rows(
    "zeros",
    (bytes(4096),),
    (bytes(10) + b"\n",),
    (b'{"text": "a' + bytes(100) + b'"}\n',),
)
def test_zeros_after_records_are_refused(refused_or_skipped, zeros):
    put(Path("a.jsonl"), json_lines(RECORD) + zeros)
    refused_or_skipped(
        "jsonl",
        "a.jsonl",
        rf"^a\.jsonl, line 2: not JSON \({DAMAGE}\)",
        "not JSON, skipped (lines: 1, the first is 2)",
        ["good"],
    )


def test_nuls_outside_of_the_text_are_nobodys_business(prepare_file, capsys):
    put(Path("a.jsonl"), json_lines({"text": "good", "key\0": "\0"}))
    dataset = prepare_file("jsonl", "a.jsonl")
    assert decoded(dataset, "train") == ["good", "last"]
    assert "a.jsonl" not in capsys.readouterr().out


DIGITS = "7" * 5_000


@pytest.mark.parametrize(
    "number", [DIGITS, f"-{DIGITS}", f"{DIGITS}.5", f"[{DIGITS}]", "1e5000", "NaN"]
)
@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd])
def test_numbers_of_any_size_outside_of_the_text_are_read(
    prepare_file, capsys, number, pack
):
    put(Path("a.jsonl"), pack(json_lines(f'{{"id": {number}, "text": "good"}}')))
    dataset = prepare_file("jsonl", "a.jsonl")
    assert decoded(dataset, "train") == ["good", "last"]
    assert "a.jsonl" not in capsys.readouterr().out


@cases.rows(
    "line type",
    (f'{{"text": {DIGITS}}}', "it has the type int"),
    (DIGITS, "not an object, but of type int"),
)
def test_a_long_number_is_no_text(refused_or_skipped, line, type):
    put(Path("a.jsonl"), json_lines(line))
    message = rf"line 1: no text in the field 'text' \(.*{type}\)"
    refused_or_skipped("jsonl", "a.jsonl", message, "no text in the field 'text'")


# Python


@pytest.fixture
def sources(tmp_path) -> Path:
    """A folder of Python files, of which the tests may be anything."""
    folder = tmp_path / "sources"
    for number, text in enumerate(TEXTS[:40]):
        put(folder / f"module_{number}.py", f"text = {text!r}\n".encode())
    put(folder / "tests" / "data.py", b"x = 1\0\n")
    put(folder / "latin.py", "ü = 3\n".encode("latin-1"))
    return folder


@cases.rows(
    "content why",
    ("x = 1\n".encode("utf-16-le"), "it looks like UTF-16LE: `iconv"),
    ("x = 'ü'\n".encode("utf-16-be"), "it looks like UTF-16BE: `iconv"),
    ("x = 1\n".encode("utf-16"), "it looks like UTF-16LE: `iconv"),
    ("x = 1\n".encode("utf-32-le"), "it looks like UTF-32LE: `iconv"),
    (b"x = 1\n" + bytes(512), DAMAGE),
    (b"x = 1\n" * 2000 + bytes(512) + b"y = 2\n", DAMAGE),
)
def test_python_source_with_nuls_is_refused(sources, out, capsys, content, why):
    bad = put(sources / "bad.py", content)
    options = {"vocabulary": 300, "validation_percent": 20, "output": out}
    message = rf"bad\.py: NUL characters \({why}.*; --skip-bad skips it$"
    refuses(message, prepare, "python", sources, **options)
    refuses(message, prepare, "python", bad, **options)
    assert not out.exists()
    capsys.readouterr()
    dataset = prepare("python", sources, skip_bad=True, **options)
    assert len(all_decoded(dataset)) == 40
    said = capsys.readouterr().out
    assert "or not UTF-8 2, NUL characters 1\n" in said
    assert f"{bad}: NUL characters, skipped\n" in said


def test_nuls_in_files_of_the_installation_are_left_out(sources, monkeypatch):
    """The user cannot mend these."""
    bad = put(sources / "bad.py", b"x = 1\0\n")
    monkeypatch.setattr(python_source, "site_packages", lambda: [sources])
    monkeypatch.setattr(python_source.sysconfig, "get_path", lambda name: str(sources))
    left_out = {}
    problems = python_source.Problems(skip=False)
    train, held_out = python_source.python_streams([], True, 20, left_out, problems)
    assert len([*train.files, *held_out.files]) == 40
    assert bad in left_out
    put(sources / "folder" / "good.py", b"x = 1\n")
    python_source.python_streams([sources / "folder"], True, 20, left_out, problems)


def test_json_of_this_test_is_what_others_write():
    assert json_lines({"text": UTF16}) == json.dumps({"text": UTF16}).encode() + b"\n"
