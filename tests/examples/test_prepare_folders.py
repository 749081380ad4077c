# SPDX-License-Identifier: Apache-2.0
"""``prepare`` on folders: what they have is read, or the user is told."""

import gzip
import os

import pytest

from tests.examples.conftest import refuses
from tests.examples.corpora import (
    LFS_POINTER,
    TEXTS,
    all_decoded,
    decoded,
    prepare,
    put,
    put_texts,
    save,
    zstd,
)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "folder"


def left_out(capsys) -> list[str]:
    """What the command has just said to have left out, sorted."""
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if line.startswith("left out")]
    return sorted(line.removeprefix("left out: ").split(", "))


# How each file is packed. Its name does not decide that: the last two have another one.
PACKED = {
    "a.txt": bytes,
    "b/B.TXT": bytes,
    "c.txt.gz": gzip.compress,
    "d.Md.GZ": gzip.compress,
    "e.rst": bytes,
    "f.tex.ZST": zstd,
    "named.txt": gzip.compress,
    "plain.txt.gz": bytes,
}


def test_text_is_read_through_compression_and_capitals(
    tmp_path, folder, out, byte_level, capsys
):
    texts = TEXTS[: len(PACKED)]
    for (name, pack), text in zip(PACKED.items(), texts, strict=True):
        put(folder / name, pack(text.encode()))
    held_out = put(tmp_path / "held.txt", TEXTS[20].encode())
    dataset = prepare(
        "text", folder, validation_files=held_out, tokenizer=byte_level, output=out
    )
    assert sorted(decoded(dataset, "train")) == sorted(texts)
    assert left_out(capsys) == ["nothing"]


def test_links_are_followed_and_no_file_is_read_twice(
    tmp_path, folder, out, byte_level, capsys
):
    elsewhere = tmp_path / "elsewhere"
    put(folder / "a.txt", TEXTS[0].encode())
    put(elsewhere / "inner" / "g.txt", TEXTS[20].encode())
    # Without a suffix it is read through its link only.
    put(folder / "target", TEXTS[21].encode())
    (folder / "link").symlink_to(elsewhere)
    (folder / "twice").symlink_to(elsewhere)
    (elsewhere / "inner" / "back").symlink_to(folder)
    (folder / "link.txt").symlink_to(folder / "target")
    (folder / "again.txt").symlink_to(folder / "a.txt")
    (folder / "lost.txt").symlink_to(tmp_path / "nowhere")
    (folder / "lost").symlink_to(tmp_path / "nowhere")
    dataset = prepare(
        "text",
        folder,
        validation_files=folder / "link" / "inner" / "g.txt",
        tokenizer=byte_level,
        output=out,
    )
    assert sorted(decoded(dataset, "train")) == sorted([TEXTS[0], TEXTS[21]])
    assert decoded(dataset, "validation") == [TEXTS[20]]
    assert left_out(capsys) == ["broken links 2", "no suffix 1"]


# None of these are text, or they are hidden.
OTHERS = (
    "x.png",
    "y.PNG",
    "b/z.pdf",
    "t.tar.gz",
    "u.gz",
    "v.txt.xz",
    ".hidden.txt",
    "b/.git/h.txt",
)


def test_what_is_no_text_is_left_out_and_counted(folder, out, byte_level, capsys):
    put_texts(folder, TEXTS[:50])
    for name in OTHERS:
        put(folder / name, b"\x89")
    for name in ("p.txt", "b/q.md"):
        put(folder / name, LFS_POINTER)
    os.mkfifo(folder / "pipe.txt")
    dataset = prepare(
        "text", folder, tokenizer=byte_level, validation_percent=20, output=out
    )
    assert sorted(all_decoded(dataset)) == sorted(TEXTS[:50])
    assert left_out(capsys) == [
        ".gz 1",
        ".pdf 1",
        ".png 2",
        ".tar.gz 1",
        ".xz 1",
        "Git LFS pointers (git lfs pull) 2",
        "hidden 2",
        "pipes or devices 1",
    ]


RECORDS = (
    "a.JSONL",
    "b.jsonl.Gz",
    "c.PARQUET",
    "d.jsonl.zst",
    "e.json.gz",
    "f.json.zst",
)


def test_records_are_read_through_compression_and_capitals(
    tmp_path, folder, out, byte_level, capsys
):
    put(folder / "info.json", b"{}")
    size = len(TEXTS) // len(RECORDS)
    for number, name in enumerate(RECORDS):
        start = number * size
        saved = save(tmp_path / name.lower(), TEXTS[start : start + size])
        saved.rename(folder / name)
    dataset = prepare(
        "jsonl", folder, tokenizer=byte_level, validation_percent=20, output=out
    )
    assert sorted(all_decoded(dataset)) == sorted(TEXTS)
    assert left_out(capsys) == [".json 1"]


def test_what_is_left_out_is_said_the_most_first(folder, out, byte_level, capsys):
    put_texts(folder, TEXTS[:50])
    for name in ("x.png", "y.PNG", "z.pdf"):
        put(folder / name)
    prepare("text", folder, tokenizer=byte_level, validation_percent=20, output=out)
    assert "left out: .png 2, .pdf 1\n" in capsys.readouterr().out


def test_blank_documents_are_counted_with_what_is_left_out(
    folder, out, byte_level, capsys
):
    put_texts(folder, TEXTS[:50])
    for name in ("blank.txt", "empty.txt", "other.md"):
        put(folder / name, b" \n" * (name != "empty.txt"))
    put(folder / "x.png")
    put(folder / "latin.txt", b"caf\xe9")
    options = {"tokenizer": byte_level, "validation_percent": 20, "output": out}
    prepare("text", folder, skip_bad=True, **options)
    said = capsys.readouterr().out
    assert "left out: blank 3, .png 1, not UTF-8 1\n" in said
    assert said.count(": blank, left out\n") == 3


def test_blank_records_are_counted_with_what_is_left_out(
    folder, out, byte_level, capsys
):
    folder.mkdir()
    save(folder / "a.jsonl", [*TEXTS[:50], " ", ""])
    put(folder / "b.jsonl", b'{"text": null}\n\n{"text": 1}\n')
    put(folder / "empty.jsonl")
    options = {"tokenizer": byte_level, "validation_percent": 20, "output": out}
    prepare("jsonl", folder, skip_bad=True, **options)
    assert left_out(capsys) == [
        "empty 1",
        "no text in the field 'text' 1",
        "null or blank in the field 'text' 4",
    ]


def test_parts_are_counted_with_what_is_left_out(folder, out, byte_level, capsys):
    put_texts(folder, TEXTS[:50])
    put(folder / "spaces.txt", b"one\n" + b" " * 40 + b"two\n")
    options = {"tokenizer": byte_level, "validation_percent": 20, "output": out}
    prepare("text", folder, cut=10, **options)
    (line,) = left_out(capsys)
    assert line.startswith("blank ")


def test_a_folder_without_text_is_refused_with_what_it_has(folder, out, byte_level):
    for name in ("x.png", "y.PNG", "z.pdf"):
        put(folder / name)
    message = (
        r"folders with \.txt, \.md, \.rst, \.tex files; left out: \.png 2, \.pdf 1$"
    )
    refuses(message, prepare, "text", folder, tokenizer=byte_level, output=out)


def test_a_pipe_is_refused(tmp_path, out, byte_level):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    message = "pipe is neither a file nor a folder"
    refuses(message, prepare, "text", pipe, tokenizer=byte_level, output=out)


def test_a_folder_without_permission_is_said(
    folder, out, byte_level, capsys, monkeypatch
):
    """The superuser may read everything, so the refusal is simulated."""

    def access(path, mode):
        return path.name not in ("closed", "3.txt")

    for name in ("open", "closed"):
        put_texts(folder / name, TEXTS[:50])
    monkeypatch.setattr(os, "access", access)
    dataset = prepare(
        "text", folder, tokenizer=byte_level, validation_percent=20, output=out
    )
    assert len(all_decoded(dataset)) == 49
    assert left_out(capsys) == ["without permission to read 2"]


def test_python_files_are_read_through_links_and_the_others_are_said(
    tmp_path, folder, out, capsys
):
    elsewhere = tmp_path / "elsewhere"
    for number in range(40):
        function = f"def function_{number}():\n    return {number}\n"
        put(elsewhere / f"module_{number}.py", function.encode())
    put(elsewhere / "copy.py", b"def function_0():\n    return 0\n")
    put(elsewhere / "latin.py", "ü = 3\n".encode("latin-1"))
    put(elsewhere / "empty.py")
    put(folder / "tests" / "test_a.py")
    put(folder / "notes.txt")
    (folder / "package").symlink_to(elsewhere)
    dataset = prepare(
        "python", folder, vocabulary=300, validation_percent=20, output=out
    )
    assert len(all_decoded(dataset)) == 40
    kind = "Python files that are tests, copies, tables, empty or not UTF-8"
    assert f"left out: {kind} 4, .txt 1\n" in capsys.readouterr().out
