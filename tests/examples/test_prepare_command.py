# SPDX-License-Identifier: Apache-2.0
"""``prepare``: every corpus from small local files, stopped and resumed, and what users can fix."""

import gzip
import io
import json
import os
import random
import signal
import string
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from examples.pretrain import data
from examples.pretrain.config import RunError
from examples.pretrain.prepare import command, sources, token_files
from examples.pretrain.prepare import tokenizer as tokenizer_module
from examples.pretrain.prepare.tokenizer import byte_lengths, end_of_text, find_tokenizer, train_tokenizer
from examples.pretrain.processes import Stopped

WORDS = ["the", "and", "model", "größe", "雪", "matrix", "row", "3.14", "step", "falls", "rises", "loss\n"]


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
    elif path.suffix == ".arrow":
        create = pyarrow.ipc.new_stream if "stream" in path.stem else pyarrow.ipc.new_file
        with pyarrow.OSFile(str(path), "wb") as file, create(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=64)
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
    """A tokenizer of T5's type: no bytes, no <|endoftext|>, special tokens among the pieces of the model, and limits of
    its own, as files on the hub have them."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>", "<extra_id_3>"]
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator([*TEXTS, " ".join("</>|_" + string.ascii_lowercase)], trainer)
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    path = tmp_path_factory.mktemp("t5") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


def run(*arguments: object) -> None:
    command.main([str(argument) for argument in arguments])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def decoded(dataset: data.Dataset, split: str) -> list[str]:
    """The documents of packed token files of a byte-level tokenizer."""
    tokens = getattr(dataset, split).tolist()
    return dataset.tokenizer.decode(tokens, skip_special_tokens=False).split("<|endoftext|>")[:-1]


def test_openwebtext_from_local_files(tmp_path, out, byte_level):
    names = ("a.jsonl.gz", "a.jsonl.zst", "a.parquet", "stream.arrow", "file.arrow")
    for name in names:
        path = save(tmp_path / name, TEXTS, "body")
        assert list(sources.read_records(path, "body", sources.Problems(skip=False))) == TEXTS
    path = save(tmp_path / "a.jsonl", ["", " \n", *TEXTS])
    run("openwebtext", "--files", path, "--tokenizer", byte_level, "--validation-percent", 10, "--output", out)
    dataset = data.load(out)
    train, validation = decoded(dataset, "train"), decoded(dataset, "validation")
    assert sorted(train + validation) == sorted(TEXTS)
    assert train == [text for text in TEXTS if text in set(train)]
    # 30 of 300 expected; five standard deviations of a binomial (5.2) either way.
    assert 4 <= len(validation) <= 56
    assert (dataset.manifest["source"], dataset.manifest["tokenizer"]) == (str(path), str(byte_level))


def test_c4_is_a_truncated_or_padded_document_per_sequence(tmp_path, out, sentence_piece):
    train, validation = save(tmp_path / "t.json.gz", TEXTS), save(tmp_path / "v.jsonl", TEXTS[:9])
    run(
        *("c4", "--files", train, "--validation-files", validation, "--tokenizer", sentence_piece),
        *("--context", 24, "--train-documents", 250, "--validation-documents", 5, "--output", out),
    )
    dataset = data.load(out)
    sums = {path.name: token_files.sha256(path) for path in out.iterdir() if path.name != "manifest.json"}
    assert dataset.manifest["sha256"] == sums
    assert dataset.manifest["train"]["bytes"] == sum(len(text.encode()) for text in TEXTS[:250])
    tokenizer = find_tokenizer(str(sentence_piece))
    end = tokenizer.token_to_id("</s>")
    assert end_of_text(tokenizer) == end
    rows = data.validation_sequences(dataset, context=24, count=10**6)
    iterator = data.training_batches(dataset, context=24, batch_size=10, seed=0)
    epoch = {tuple(row) for _ in range(25) for row in next(iterator)}
    expected = []
    for text in TEXTS[:250]:
        tokens = [*tokenizer.encode(text, add_special_tokens=False).ids, end][:25]
        expected.append((*tokens, *[data.PADDING] * (25 - len(tokens))))
    assert [tuple(row) for row in rows] == expected[:5]
    assert epoch == set(expected)
    assert {len([token for token in row if token >= 0]) == 25 for row in expected} == {True, False}


def test_pile_holds_out_documents_by_their_text(tmp_path, out, byte_level):
    path = save(tmp_path / "a.jsonl", TEXTS)
    options = ("--tokenizer", byte_level, "--validation-percent", 20, "--train-documents", 50)
    run("pile", "--files", path, *options, "--validation-documents", 20, "--output", out)
    dataset = data.load(out)
    first = [text for text in TEXTS if sources.fraction(text) >= 0.2][:50]
    held_out = [text for text in TEXTS if sources.fraction(text) < 0.2][:20]
    assert (decoded(dataset, "train"), decoded(dataset, "validation")) == (first, held_out)
    assert dataset.manifest["context"] == 1024


def test_folders_of_text_and_of_another_field(tmp_path, out):
    folder = tmp_path / "texts" / "inner"
    folder.mkdir(parents=True)
    for number, text in enumerate(TEXTS[:100]):
        (folder / f"{number:03}.{'md' if number % 2 else 'txt'}").write_text(text)
    (folder / "image.png").write_bytes(b"\x89")
    save(folder / "a.jsonl", TEXTS[:50], "body")
    save(folder / "b.jsonl.gz", TEXTS[50:100], "body")
    for options in (("text", tmp_path), ("jsonl", tmp_path, "--field", "body")):
        run(*options, "--vocabulary", 300, "--overwrite", "--output", out)
        dataset = data.load(out)
        assert dataset.vocabulary == 300
        assert sorted(decoded(dataset, "train") + decoded(dataset, "validation")) == sorted(TEXTS[:100])


# Text is preserved, or the user is told


@pytest.mark.parametrize("kind", ["trained", "byte_level", "sentence_piece"])
def test_text_that_spells_a_special_token_stays_text(tmp_path, out, request, kind):
    texts = [f"{number} a {SPECIAL[number % 4]} b{SPECIAL[number % 3]}{SPECIAL[1]} c" for number in range(200)]
    path = save(tmp_path / "a.jsonl", texts)
    tokenizer = () if kind == "trained" else ("--tokenizer", request.getfixturevalue(kind))
    run("jsonl", path, *tokenizer, "--vocabulary", 300, "--validation-percent", 20, "--output", out)
    dataset = data.load(out)
    end = end_of_text(dataset.tokenizer)
    tokens = np.concatenate([dataset.train, dataset.validation])
    assert (tokens == end).sum() == 200
    found = [dataset.tokenizer.decode(document) for document in np.split(tokens, np.flatnonzero(tokens == end) + 1)]
    assert sorted(found) == sorted(["", *texts])
    mark = 200 * (kind == "sentence_piece")  # one before the first word
    assert byte_lengths(dataset.tokenizer)[tokens].sum() == sum(len(text.encode()) for text in texts) + mark
    assert all(end not in dataset.tokenizer.encode(text).ids for text in SPECIAL)


def rows(*lines: object) -> bytes:
    return "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines).encode()


GOOD, LIST = {"text": "good"}, [{"text": "a"}, {"text": "b"}]
WIDE = bytes.fromhex("28b52ffd0090") + (8 * len(rows(GOOD)) + 1).to_bytes(3, "little") + rows(GOOD)  # a 256 MiB window
DIFFICULT = {  # name: (content, the error or "", what is reported without one or with --skip-bad, documents)
    "bom.txt": (b"\xef\xbb\xbftext\n", "", "", ["text\n"]),
    "crlf.txt": (b"one\r\ntwo\rthree\n", "", "", ["one\r\ntwo\rthree\n"]),
    "empty.txt": (b" \n", "", "", []),
    "latin.txt": (
        b"caf\xe9",
        r"latin.txt as UTF-8 text .*: convert it with iconv, .* --skip-bad",
        "not UTF-8, skipped",
        [],
    ),
    "utf16.txt": ("text".encode("utf-16"), "utf16.txt as UTF-8", "not UTF-8, skipped", []),
    "bom.jsonl": (b"\xef\xbb\xbf" + rows({"text": "one\r\ntwo"}), "", "", ["one\r\ntwo"]),
    "deep.jsonl": (
        rows(GOOD, '{"text": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}", GOOD),
        r"deep.jsonl, line 2: not JSON \(maximum recursion depth .*\); --skip-bad leaves it out",
        "not JSON, skipped (lines: 1, the first is 2)",
        ["good", "good"],
    ),
    "brackets.jsonl": (b"[" * 100_000, "line 1: not JSON", "not JSON, skipped (lines: 1, the first is 1)", []),
    "array.json": (rows(LIST), r"one JSON array, not one object a line \(`jq -c '.\[\]' .*array.json`", "one JSON", []),
    "pretty.json": (json.dumps(LIST, indent=1).encode(), "one JSON array", "one JSON array", []),
    "rows.jsonl": (
        rows(GOOD, 17, [1], {"body": ""}, {"text": 17}, "{oops", GOOD),
        r"rows.jsonl, line 2: no text in the field 'text' \(the line is not an object, but of type int\); --skip-bad",
        "no text in the field 'text', skipped (lines: 4, the first is 2)",
        ["good", "good"],
    ),
    "number.jsonl": (rows({"text": 17}), r"line 1: no text in the field 'text' \(it has the type int\)", "skipped", []),
    "field.jsonl": (rows({"a": "", "b": ""}), r"\(there are: a, b; --field names another\)", "skipped", []),
    "null.jsonl": (
        rows(GOOD, {"text": None}),
        "",
        "null in the field 'text', left out (lines: 1, the first is 2",
        ["good"],
    ),
    "half.jsonl": (rows({"text": "a \ud83d b"}), "", 'half a surrogate pair, replaced by "?"', ["a ? b"]),
    "cut.jsonl.gz": (gzip.compress(rows(GOOD))[:-9], r"cannot read cut\.jsonl\.gz \(Compressed file ended", None, []),
    "wide.jsonl.zst": (WIDE, r"wide\.jsonl\.zst .*: decompress it with `zstd -d --long=31 wide\.jsonl\.zst`", None, []),
    "broken.parquet": (b"PAR1", r"cannot read broken\.parquet", None, []),
    "broken.arrow": (b"ARROW", r"cannot read broken\.arrow", None, []),
}


@pytest.mark.parametrize("name", DIFFICULT)
def test_difficult_files(tmp_path, monkeypatch, capsys, byte_level, name):
    content, refused, reported, documents = DIFFICULT[name]
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content)
    Path("last.txt").write_text("last")
    save(Path("last.jsonl"), ["last"])
    last = "last.txt" if name.endswith(".txt") else "last.jsonl"
    options = (last[5:].replace("txt", "text"), name, last, "--validation-files", last, "--tokenizer", byte_level)
    for skip in ((), ("--skip-bad",)):
        if refused and (not skip or reported is None):
            with pytest.raises(RunError, match=refused) as error:
                run(*options, *skip, "--output", "out")
            assert "\n" not in str(error.value)
            assert not Path("out").exists()
        else:
            run(*options, *skip, "--overwrite", "--output", "out")
            said = capsys.readouterr().out
            assert f"{name}: " in said if reported else name not in said
            assert reported in said
            assert decoded(data.load(Path("out")), "train") == [*documents, "last"]


def test_a_long_line_is_cut_at_spaces(tmp_path, out):
    path = tmp_path / "long.txt"
    long, minified = " ".join(WORDS[:-1]) * 200, "a=b;" * 500
    path.write_text("\n".join(TEXTS[:50]) + long + minified)
    with pytest.raises(RunError, match=r"no documents for validation: .* a smaller --cut"):
        run("text", path, "--output", out)
    assert not list(tmp_path.glob(".out*"))
    run("text", path, "--cut", 500, "--validation-percent", 20, "--vocabulary", 300, "--output", out)
    documents = decoded(data.load(out), "train") + decoded(data.load(out), "validation")
    sizes = []

    class File(io.StringIO):
        def read(self, size=-1):
            sizes.append(size)
            return super().read(size)

    pieces = list(sources.pieces(File(path.read_text()), 500))
    assert sorted(pieces) == sorted(documents)
    assert "".join(pieces) == path.read_text()
    assert max(map(len, pieces)) == 500 == max(sizes)  # no more than that is in memory
    assert min(map(len, pieces[:-1])) > 250
    ends = [piece[-1] for piece in pieces]
    assert set(ends[:5]) == {"\n"}
    assert set(ends[-10:-6]) == {" "}
    assert len(pieces[-2]) == 500  # minified: no space
    assert list(sources.pieces(io.StringIO("ab"), 1)) == ["a", "b"]


def test_the_rest_of_a_cut_file_that_is_not_utf8_is_skipped(tmp_path, out, capsys):
    path = tmp_path / "bad.txt"
    lines = "".join(f"{number}\n" for number in range(10_000)).encode()
    path.write_bytes(lines + b"\xff" + lines)
    run("text", path, "--cut", 1000, "--skip-bad", "--validation-percent", 50, "--output", out)
    assert "bad.txt: not UTF-8, skipped from there on\n" in capsys.readouterr().out
    assert 0 < sum(data.load(out).manifest[split]["bytes"] for split in token_files.SPLITS) <= len(lines)


# Stopping and resuming


class Stop(Exception):
    """Stands for a kill."""


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(token_files, "BATCH_DOCUMENTS", 16)


def stop_after(monkeypatch, batches: int, *, halfway: bool) -> None:
    """Raise once so many batches count; ``halfway``: with the next one written, but not counted."""
    save, taken = token_files.Writer.save, []

    def interrupted(writer):
        taken.append(1)
        if len(taken) > batches:
            if halfway:
                for file in writer.files.values():
                    file.flush()
            raise Stop
        save(writer)

    monkeypatch.setattr(token_files.Writer, "save", interrupted)


@pytest.mark.parametrize("halfway", [False, True])
def test_a_stopped_preparation_resumes_to_the_same_bytes(
    tmp_path, sentence_piece, small_batches, monkeypatch, capsys, halfway
):
    train, validation = save(tmp_path / "t.parquet", TEXTS), save(tmp_path / "v.jsonl", TEXTS[:120])
    options = ("c4", "--files", train, "--validation-files", validation, "--tokenizer", sentence_piece)
    options += ("--context", 16, "--train-documents", 210, "--output")
    run(*options, tmp_path / "whole")
    for batches in (0, 1, 14, 20):
        parts = tmp_path / str(batches)
        with monkeypatch.context() as patch:
            stop_after(patch, batches, halfway=halfway)
            with pytest.raises(Stop):
                run(*options, parts)
        assert not parts.exists()
        capsys.readouterr()
        run(*options, parts)
        assert contents(parts) == contents(tmp_path / "whole")
        assert ("Resuming after" in capsys.readouterr().out) == (batches > 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_preparation_after_its_batch(tmp_path, small_batches, monkeypatch, capsys, number):
    lines = save(tmp_path / "t.jsonl", TEXTS)
    options = ("jsonl", lines, "--vocabulary", 300, "--output")
    run(*options, tmp_path / "whole")
    calls, whole = iter(range(3)), token_files.Writer.append

    def append(writer, documents):
        if next(calls, None) == 2:
            os.kill(os.getpid(), number)
        whole(writer, documents)

    with monkeypatch.context() as patch:
        patch.setattr(token_files.Writer, "append", append)
        with pytest.raises(Stopped, match="the same command resumes") as stopped:
            run(*options, tmp_path / "parts")
    assert stopped.value.signal_number == number
    capsys.readouterr()
    run(*options, tmp_path / "parts")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert "Resuming after" in capsys.readouterr().out


def test_a_streamed_data_set_resumes_where_it_stopped(tmp_path, byte_level, small_batches, monkeypatch):
    files = [str(save(tmp_path / f"{part}.jsonl", TEXTS[100 * part : 100 * part + 100])) for part in range(3)]
    opened = []

    def local(dataset, subset, split, field, problems, revision):
        opened.append((dataset, subset, split, revision))
        return HubTexts("json", "", "train", field, problems, data_files=files)

    HubTexts = sources.HubTexts
    monkeypatch.setattr(command, "HubTexts", local)
    options = ("openwebtext", "--revision", "refs/pr/22", "--tokenizer", byte_level, "--validation-percent", 10)
    options += ("--output",)
    run(*options, tmp_path / "whole")
    whole = data.load(tmp_path / "whole")
    assert sorted(decoded(whole, "train") + decoded(whole, "validation")) == sorted(TEXTS)
    for batches in (3, 18):
        with monkeypatch.context() as patch:
            stop_after(patch, batches, halfway=True)
            with pytest.raises(Stop):
                run(*options, tmp_path / f"parts-{batches}")
        run(*options, tmp_path / f"parts-{batches}")
        assert contents(tmp_path / f"parts-{batches}") == contents(tmp_path / "whole")
    assert set(opened) == {("Skylion007/openwebtext", "", "train", "refs/pr/22")}


@pytest.mark.slow
def test_a_killed_process_resumes_to_the_same_bytes(tmp_path, byte_level):
    path = save(tmp_path / "a.jsonl", [document(number) for number in range(10_000)])
    options = ["openwebtext", "--files", str(path), "--tokenizer", str(byte_level), "--output"]
    program = "import sys; from examples.pretrain.prepare.command import main; main(sys.argv[1:])"
    run(*options, tmp_path / "whole")
    state = tmp_path / ".parts.partial" / "state.json"
    process = subprocess.Popen([sys.executable, "-c", program, *options, str(tmp_path / "parts")])
    while not (state.exists() and json.loads(state.read_text())["position"]):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert state.exists()
    run(*options, tmp_path / "parts")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_an_unfinished_preparation_is_not_mixed_with_another(tmp_path, out, byte_level, small_batches, monkeypatch):
    path = save(tmp_path / "a.jsonl", TEXTS)
    options = ("openwebtext", "--files", path, "--tokenizer", byte_level, "--output", out, "--validation-percent")
    for batches, percent in ((1, 30), (4, 10)):  # the first has a tokenizer, but no text yet: it may be replaced
        with monkeypatch.context() as patch:
            stop_after(patch, batches, halfway=False)
            with pytest.raises(Stop):
                run(*options, percent)
    with pytest.raises(RunError, match=r"started with other settings \(validation_percent\)"):
        run(*options, 20)
    partial = tmp_path / ".out.partial"
    held = token_files.lock(partial)
    with pytest.raises(RunError, match="another process is writing"):
        run(*options, 10)
    held.close()
    (partial / "train.bin").write_bytes(b"")
    with pytest.raises(RunError, match=r"train\.bin is shorter than its state\.json says"):
        run(*options, 10)
    for damage in ("{", "[" * 100_000):
        (partial / "state.json").write_text(damage)
        with pytest.raises(RunError, match=r"state\.json is damaged"):
            run(*options, 10)
    run(*options, 20, "--overwrite")
    assert data.load(out).manifest["validation"]["documents"] > 30


def test_a_finished_folder_is_kept_unless_told_otherwise(tmp_path, out, byte_level):
    path = save(tmp_path / "a.jsonl", TEXTS)
    options = ("openwebtext", "--files", path, "--tokenizer", byte_level, "--validation-percent", 10, "--output", out)
    run(*options)
    with pytest.raises(RunError, match="exists: --overwrite replaces it"):
        run(*options)
    run(*options, "--train-documents", 100, "--overwrite")
    assert data.load(out).manifest["train"]["documents"] == 100
    (out / "manifest.json").unlink()
    with pytest.raises(RunError, match="--overwrite will not delete it"):
        run(*options, "--overwrite")


# What the user can fix


def test_what_cannot_be_prepared_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(Path("a.jsonl"), TEXTS)
    Tokenizer(models.BPE()).save("endless.json")
    for arguments, message in {
        ("text", "nowhere"): "nowhere does not exist",
        ("text",): "no files to read",
        ("jsonl", "a.jsonl", "--tokenizer", "missing.json"): r"cannot load the tokenizer missing\.json",
        ("jsonl", "a.jsonl", "--tokenizer", "endless.json"): "no token that ends a text",
        ("jsonl", "a.jsonl", "--context", "0"): "--context must be at least 1",
        ("text", "a.jsonl", "--cut", "0"): "--cut must be at least 1",
        ("c4", "--train-documents", "0"): "--train-documents must be at least 1",
        ("pile", "--validation-percent", "51"): "--validation-percent must be above 0",
        ("jsonl", "a.jsonl", "--vocabulary", "256"): r"--vocabulary must be in 257",
    }.items():
        with pytest.raises(RunError, match=message) as error:
            run(*arguments, "--output", "out")
        assert "\n" not in str(error.value)
        assert not Path("out").exists()
        assert not Path(".out.partial").exists()


def test_an_unreachable_hub_is_said_in_one_line(monkeypatch, tmp_path, out, byte_level):
    import datasets

    def unreachable(*arguments, **options):
        raise ConnectionError("Couldn't reach it\nmore")

    path = str(save(tmp_path / "a.jsonl", TEXTS))
    texts = sources.HubTexts("json", "", "train", "text", sources.Problems(skip=False), data_files=[path])
    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    message = (
        r"cannot stream allenai/c4 from the Hugging Face hub \(Couldn't reach it\): check the name and the network"
    )
    with pytest.raises(RunError, match=message + ".* --files takes local copies") as error:
        run("c4", "--tokenizer", byte_level, "--output", out)
    assert "\n" not in str(error.value)
    fake = type("T", (), {"from_pretrained": staticmethod(unreachable)})
    monkeypatch.setattr(tokenizer_module, "Tokenizer", fake)
    with pytest.raises(RunError, match=r"tokenizer gpt2 \(Couldn't reach it\): .* the path .* check the network"):
        find_tokenizer("gpt2")

    def lost_midway():
        yield {"text": "first"}
        raise ConnectionError

    monkeypatch.setattr(texts, "_rows", lost_midway())
    taken = iter(texts)
    assert next(taken) == "first"
    with pytest.raises(RunError, match=r"\(ConnectionError\): .* the same command resumes"):
        next(taken)


# Tokenizers


@pytest.mark.parametrize("names", [["<|endoftext|>", "<|im_end|>"], ["<pad>", "</s>", "<unk>"], ["<eos>"]])
def test_the_separator_is_found_by_its_name(names):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_special_tokens(names)
    assert end_of_text(tokenizer) == {"<|endoftext|>": 0, "<pad>": 1, "<eos>": 0}[names[0]]


def test_bytes_of_added_and_special_tokens(byte_level):
    tokenizer = find_tokenizer(str(byte_level))
    tokenizer.add_tokens(["<höher>"])
    lengths = byte_lengths(tokenizer)
    assert lengths.shape == (402,)
    assert lengths[[0, 400, 401]].tolist() == [0, 0, 8]
    for text in TEXTS[:50]:
        assert lengths[tokenizer.encode(text).ids].sum() == len(text.encode())


def test_bytes_of_sentence_piece_tokens(sentence_piece):
    tokenizer = find_tokenizer(str(sentence_piece))
    lengths = byte_lengths(tokenizer)
    assert lengths[:4].tolist() == [0, 0, 0, 0]
    for text in TEXTS[:50]:
        plain = " ".join(text.split())
        assert lengths[tokenizer.encode(plain).ids].sum() == len(plain.encode()) + 1  # the mark before the first word
