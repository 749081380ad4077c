# SPDX-License-Identifier: Apache-2.0
"""``prepare`` stopped and resumed, and folders that are there already."""

import itertools
import os
import signal
from pathlib import Path

import pytest

from examples.pretrain import data
from examples.pretrain.prepare import command, sources, token_files
from examples.pretrain.processes import Stopped
from tests import cases
from tests.examples.conftest import refuses
from tests.examples.corpora import (
    TEXTS,
    all_decoded,
    contents,
    json_lines,
    prepare,
    put,
    save,
)


class Killed(Exception):
    """Stands for a kill."""


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(token_files, "BATCH_DOCUMENTS", 16)


def stop(batches: int, number: int, *arguments: object, **options: object) -> None:
    """Begin ``prepare``, and stop it by a signal when so many batches count.

    SIGKILL is simulated. It comes when the next batch is written, but does not count.
    """
    save_batch = token_files.Writer.save
    calls = itertools.count(1)
    kill = number == signal.SIGKILL
    expected = Stopped
    if kill:
        expected = Killed

    def interrupted(writer):
        late = next(calls) > batches
        if late and kill:
            for file in writer.files.values():
                file.flush()
            raise Killed
        if late:
            os.kill(os.getpid(), number)
        save_batch(writer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_files.Writer, "save", interrupted)
        with pytest.raises(expected) as stopped:
            prepare(*arguments, **options)
    if isinstance(stopped.value, Stopped):
        assert str(stopped.value) == "stopped; the same command resumes"
        assert stopped.value.signal_number == number


@cases.rows(
    "batches number",
    (0, signal.SIGKILL),
    (1, signal.SIGKILL),
    (14, signal.SIGKILL),
    (20, signal.SIGKILL),
    (3, signal.SIGINT),
    (17, signal.SIGTERM),
)
def test_a_stopped_preparation_resumes_to_the_same_bytes(
    tmp_path, sentence_piece, capsys, batches, number
):
    arguments = ("c4", save(tmp_path / "t.parquet", TEXTS))
    options = {
        "validation_files": save(tmp_path / "v.jsonl", TEXTS[:120]),
        "tokenizer": sentence_piece,
        "context": 16,
        "train_documents": 210,
    }
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    prepare(*arguments, **options, output=whole)
    stop(batches, number, *arguments, **options, output=parts)
    assert not parts.exists()
    capsys.readouterr()
    prepare(*arguments, **options, output=parts)
    assert contents(parts) == contents(whole)
    # The first call is before any batch.
    assert ("Resuming after" in capsys.readouterr().out) == (batches > 1)


def test_a_streamed_data_set_resumes_where_it_stopped(
    tmp_path, byte_level, monkeypatch
):
    files = []
    for start in (0, 100, 200):
        path = save(tmp_path / f"{start}.jsonl", TEXTS[start : start + 100])
        files.append(str(path))
    opened = []

    def local(dataset, subset, split, field, problems, held_out, revision):
        opened.append((dataset, subset, split, revision))
        return sources.HubStream(
            "json", "", "train", field, problems, held_out, data_files=files
        )

    monkeypatch.setattr(command, "HubStream", local)
    options = {
        "revision": "refs/pr/22",
        "tokenizer": byte_level,
        "validation_percent": 10,
    }
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    dataset = prepare("openwebtext", **options, output=whole)
    assert sorted(all_decoded(dataset)) == sorted(TEXTS)
    stop(12, signal.SIGKILL, "openwebtext", **options, output=parts)
    prepare("openwebtext", **options, output=parts)
    assert contents(parts) == contents(whole)
    assert set(opened) == {("Skylion007/openwebtext", "", "train", "refs/pr/22")}


def test_skip_bad_may_be_added_when_a_bad_line_has_stopped_the_command(
    tmp_path, out, byte_level, capsys
):
    path = tmp_path / "a.jsonl"
    records = [{"text": text} for text in TEXTS]
    put(path, json_lines(*records, "{", {"text": "good"}))
    options = {"tokenizer": byte_level, "validation_percent": 20, "output": out}
    message = "line 301: not JSON .*; --skip-bad skips it"
    refuses(message, prepare, "jsonl", path, **options)
    dataset = prepare("jsonl", path, **options, skip_bad=True)
    assert "Resuming after" in capsys.readouterr().out
    assert sorted(all_decoded(dataset)) == sorted([*TEXTS, "good"])


# Folders that are there


@pytest.fixture
def openwebtext(tmp_path, out, byte_level) -> tuple[tuple, dict]:
    """The arguments and options of a command that wants a --validation-percent, too."""
    path = save(tmp_path / "a.jsonl", TEXTS)
    return ("openwebtext", path), {"tokenizer": byte_level, "output": out}


def documents(dataset: data.Dataset, split: str) -> int:
    return dataset.manifest[split]["documents"]


def test_an_unfinished_folder_is_continued_with_its_settings_only(
    tmp_path, openwebtext
):
    arguments, options = openwebtext
    partial = tmp_path / ".out.partial"

    def refuse(percent, message):
        refuses(message, prepare, *arguments, validation_percent=percent, **options)

    # There is no text in it yet, so the second command may replace it.
    stop(1, signal.SIGKILL, *arguments, validation_percent=30, **options)
    stop(4, signal.SIGKILL, *arguments, validation_percent=10, **options)
    refuse(20, r"started with other settings \(validation_percent\)")
    with token_files.lock(partial):
        refuse(10, "another process is writing")
    (partial / "train.bin").write_bytes(b"")
    refuse(10, r"train\.bin is shorter than its state\.json says")
    for damage in ("{", "[" * 100_000):
        (partial / "state.json").write_text(damage)
        refuse(10, r"state\.json is damaged")
    dataset = prepare(*arguments, validation_percent=20, overwrite=True, **options)
    assert documents(dataset, "validation") > 30


def test_a_finished_folder_is_replaced_when_that_is_asked_for(out, openwebtext):
    arguments, options = openwebtext
    prepare(*arguments, validation_percent=20, **options)
    message = "exists: pass --overwrite to replace it"
    refuses(message, prepare, *arguments, validation_percent=20, **options)
    options["overwrite"] = True
    dataset = prepare(*arguments, validation_percent=20, train_documents=100, **options)
    assert documents(dataset, "train") == 100
    message = "no documents for validation: .*a larger --validation-percent"
    refuses(message, prepare, *arguments, validation_percent=0.001, **options)
    # The former files are there until the new ones are complete.
    stop(4, signal.SIGKILL, *arguments, validation_percent=10, **options)
    assert documents(data.load(out), "train") == 100
    del options["overwrite"]
    dataset = prepare(*arguments, validation_percent=10, **options)
    assert documents(dataset, "train") > 100


def put_others(folder: Path) -> None:
    for name in ("notes.txt", ".hidden", "more/notes.json"):
        put(folder / name, name.encode())


def test_other_files_of_a_folder_that_is_replaced_stay(out, openwebtext):
    arguments, options = openwebtext
    prepare(*arguments, validation_percent=10, **options)
    put_others(out)
    prepare(*arguments, validation_percent=20, overwrite=True, **options)
    assert {path.name for path in out.iterdir()} == {
        "notes.txt",
        ".hidden",
        "more",
        "manifest.json",
        "tokenizer.json",
        "train.bin",
        "validation.bin",
    }
    assert (out / "more" / "notes.json").read_text() == "more/notes.json"


def test_a_linked_folder_is_replaced_where_it_is(tmp_path, out, openwebtext):
    arguments, options = openwebtext
    real = tmp_path / "real"
    prepare(*arguments, validation_percent=20, **options)
    put_others(out)
    out.rename(real)
    out.symlink_to(real)
    prepare(*arguments, validation_percent=10, overwrite=True, **options)
    assert out.is_symlink()
    assert (real / "notes.txt").read_text() == "notes.txt"


def test_a_folder_without_a_manifest_is_not_deleted(out, openwebtext):
    arguments, options = openwebtext
    prepare(*arguments, validation_percent=20, **options)
    (out / "manifest.json").unlink()
    options |= {"validation_percent": 20, "overwrite": True}
    message = "--overwrite will not delete it"
    refuses(message, prepare, *arguments, **options)


def test_text_or_a_tokenizer_that_changed_is_not_continued(tmp_path, out, byte_level):
    path = save(tmp_path / "a.jsonl", TEXTS)
    tokenizer = put(tmp_path / "tokenizer.json", byte_level.read_bytes())
    options = {"tokenizer": tokenizer, "output": out}
    message = r"started with other settings \(local files\)"
    stop(4, signal.SIGKILL, "jsonl", path, **options)
    for file in (path, tokenizer):
        times = file.stat()
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
        refuses(message, prepare, "jsonl", path, **options)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    prepare("jsonl", path, **options)
