# SPDX-License-Identifier: Apache-2.0
"""``prepare``: every corpus from small local files, stopped and gone on with."""

import gzip
import json
import os
import random
import signal
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

WORDS = (
    "the",
    "of",
    "and",
    "model",
    "tokens",
    "größe",
    "雪",
    "matrix",
    "row",
    "3.14",
    "step",
    "falls",
    "rises",
    "loss\n",
)


def document(number: int) -> str:
    """Text number ``number``, of 3 to 120 words."""
    draw = random.Random(number)
    return f"{number} " + " ".join(draw.choices(WORDS, k=draw.randint(3, 120)))


TEXTS = [document(number) for number in range(300)]


def save_lines(path: Path, texts: list[str], field: str = "text") -> Path:
    lines = "".join(json.dumps({"url": "x", field: text}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return path


def save_table(path: Path, texts: list[str]) -> Path:
    table = pyarrow.table({"text": texts, "number": range(len(texts))})
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=64)
    elif path.suffix == ".zst":
        with pyarrow.output_stream(path, compression="zstd") as file:
            file.write("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    else:
        create = pyarrow.ipc.new_stream if "stream" in path.stem else pyarrow.ipc.new_file
        with pyarrow.OSFile(str(path), "wb") as file, create(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=64)
    return path


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> Path:
    """A tokenizer of GPT-2's kind."""
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_tokenizer(TEXTS, 400).save(str(path))
    return path


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory) -> Path:
    """A tokenizer of T5's kind: no bytes, no <|endoftext|>, and limits of its own, as files on the hub have them."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
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


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.gz", "a.json.gz", "a.jsonl.zst", "a.parquet", "stream.arrow", "file.arrow"]
)
def test_openwebtext_from_local_files(tmp_path, out, byte_level, name):
    save = save_lines if name.endswith((".jsonl", ".gz")) else save_table
    path = save(tmp_path / name, TEXTS)
    run("openwebtext", "--files", path, "--tokenizer", byte_level, "--validation-percent", 10, "--output", out)
    dataset = data.load(out)
    train, validation = decoded(dataset, "train"), decoded(dataset, "validation")
    assert sorted(train + validation) == sorted(TEXTS)
    assert train == [text for text in TEXTS if text in set(train)]
    # 30 of 300 expected; five standard deviations of a binomial (5.2) either way.
    assert 4 <= len(validation) <= 56
    manifest = dataset.manifest
    assert (manifest["source"], manifest["tokenizer"]) == (str(path), str(byte_level))
    assert manifest["train"]["bytes"] == sum(len(text.encode()) for text in train)
    assert not dataset.padded


def test_c4_is_a_truncated_or_padded_document_per_sequence(tmp_path, out, sentence_piece):
    train, validation = (
        save_lines(tmp_path / "t.json.gz", ["", " \n", *TEXTS]),
        save_lines(tmp_path / "v.jsonl", TEXTS[:9]),
    )
    run(
        *("c4", "--files", train, "--validation-files", validation, "--tokenizer", sentence_piece),
        *("--context", 24, "--train-documents", 250, "--validation-documents", 5, "--output", out),
    )
    dataset = data.load(out)
    for split in token_files.SPLITS:
        sums = [dataset.manifest[split][key] for key in ("sha256", "offsets_sha256")]
        assert sums == [token_files.sha256(out / f"{split}.{kind}") for kind in ("bin", "offsets")]
    assert dataset.padded
    assert [dataset.manifest[split]["documents"] for split in token_files.SPLITS] == [250, 5]
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
    # Every text gains a mark at its start.
    assert dataset.manifest["train"]["bytes"] == data.bytes_per_token(dataset)[dataset.train].sum() - 250


def test_pile_holds_out_documents_by_their_text(tmp_path, out, byte_level):
    path = save_table(tmp_path / "a.parquet", TEXTS)
    options = ("--tokenizer", byte_level, "--validation-percent", 20, "--train-documents", 50)
    run("pile", "--files", path, *options, "--validation-documents", 20, "--output", out)
    dataset = data.load(out)
    first = [text for text in TEXTS if sources.fraction(text) >= 0.2][:50]
    held_out = [text for text in TEXTS if sources.fraction(text) < 0.2][:20]
    assert (decoded(dataset, "train"), decoded(dataset, "validation")) == (first, held_out)
    assert dataset.manifest["context"] == 1024


def test_plain_text_with_a_tokenizer_of_its_own(tmp_path, out):
    folder = tmp_path / "texts"
    (folder / "inner").mkdir(parents=True)
    for number, text in enumerate(TEXTS[:100]):
        (folder / "inner" / f"{number:03}.{'md' if number % 2 else 'txt'}").write_text(text)
    (folder / "image.png").write_bytes(b"\x89")
    run("text", folder, "--vocabulary", 300, "--output", out)
    dataset = data.load(out)
    assert dataset.vocabulary == 300
    assert sorted(decoded(dataset, "train") + decoded(dataset, "validation")) == sorted(TEXTS[:100])


def test_one_long_text_is_cut_at_the_ends_of_lines(tmp_path, out):
    path = tmp_path / "long.txt"
    path.write_text("\n".join(TEXTS))
    with pytest.raises(RunError, match=r"no documents for validation: .* --cut 5000"):
        run("text", path, "--output", out)
    assert not list(tmp_path.glob(".out*"))
    run("text", path, "--cut", 500, "--validation-percent", 20, "--output", out)
    dataset = data.load(out)
    pieces = decoded(dataset, "train") + decoded(dataset, "validation")
    assert sum(map(len, pieces)) == len(path.read_text())
    assert all(piece.endswith("\n") or path.read_text().endswith(piece) for piece in pieces)


def test_jsonl_of_another_field(tmp_path, out):
    save_lines(tmp_path / "a.jsonl", TEXTS[:150], "body")
    save_lines(tmp_path / "b.jsonl.gz", TEXTS[150:], "body")
    run("jsonl", tmp_path, "--field", "body", "--output", out)
    dataset = data.load(out)
    assert sorted(decoded(dataset, "train") + decoded(dataset, "validation")) == sorted(TEXTS)


def test_python_source_is_what_training_makes_on_first_use(corpus, data_config, dataset, out):
    options = ("--vocabulary", data_config.vocabulary, "--validation-percent", data_config.validation_percent)
    run("python-source", "--source", corpus, *options, "--output", out)
    assert contents(out) == contents(dataset.folder)


def test_halves_of_surrogate_pairs_do_not_stop_a_corpus(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a \\ud83d b"}\n{"text": null}\n\n')
    assert list(sources.read_field(path, "text", sources.LeftOut())) == ["a ? b", ""]


def test_what_is_left_out_is_reported(tmp_path, out, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = save_lines(Path("a.jsonl"), TEXTS[:100])
    path.write_text(path.read_text() + '{"text": null}\n{"tex\n[1]\n{"text": null}\n')
    save_lines(Path("b.jsonl"), TEXTS[100:110])
    run("jsonl", path, "--validation-files", "b.jsonl", "--vocabulary", 300, "--skip-bad", "--output", out)
    said = capsys.readouterr().out
    assert "a.jsonl: 2 null in the field 'text', left out, the first in line 101\n" in said
    assert "a.jsonl: 1 not JSON, skipped, the first in line 102\n" in said
    assert "a.jsonl: 1 without text in the field 'text', skipped, the first in line 103\n" in said
    assert decoded(data.load(out), "train") == TEXTS[:100]
    assert decoded(data.load(out), "validation") == TEXTS[100:110]
    Path("texts").mkdir()
    Path("texts/bad.txt").write_bytes(b"caf\xe9\n")
    Path("texts/good.txt").write_text("good\n")
    Path("other.txt").write_text("other\n")
    options = ("text", "texts", "--validation-files", "other.txt", "--vocabulary", 300, "--overwrite", "--output", out)
    for choice, train in (("skip", ["good\n"]), ("replace", ["caf\ufffd\n", "good\n"])):
        run(*options, "--not-utf8", choice)
        assert f"{Path('texts/bad.txt')}: is not UTF-8" in capsys.readouterr().out
        assert decoded(data.load(out), "train") == train


# Stopping and going on


class Stop(Exception):
    """Stands for a kill."""


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(token_files, "BATCH_DOCUMENTS", 16)


def stop_after(monkeypatch, batches: int, *, halfway: bool) -> None:
    """Raise once so many batches count; ``halfway``: with the next one written, but not counted."""
    save, taken = token_files.Writer._save, []

    def interrupted(writer):
        taken.append(1)
        if len(taken) > batches:
            if halfway:
                for file in writer._files.values():
                    file.flush()
            raise Stop
        save(writer)

    monkeypatch.setattr(token_files.Writer, "_save", interrupted)


@pytest.mark.parametrize("halfway", [False, True])
def test_a_stopped_preparation_goes_on_to_the_same_bytes(
    tmp_path, sentence_piece, small_batches, monkeypatch, capsys, halfway
):
    train, validation = save_table(tmp_path / "t.parquet", TEXTS), save_lines(tmp_path / "v.jsonl", TEXTS[:120])
    options = ("c4", "--files", train, "--validation-files", validation, "--tokenizer", sentence_piece)
    options += ("--context", 16, "--train-documents", 210, "--output")
    run(*options, tmp_path / "whole")
    for batches in (0, 1, 5, 14, 20):
        parts = tmp_path / str(batches)
        with monkeypatch.context() as patch:
            stop_after(patch, batches, halfway=halfway)
            with pytest.raises(Stop):
                run(*options, parts)
        assert not parts.exists()
        capsys.readouterr()
        run(*options, parts)
        assert contents(parts) == contents(tmp_path / "whole")
        assert ("Going on after" in capsys.readouterr().out) == (batches > 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_preparation_after_its_batch(tmp_path, small_batches, monkeypatch, capsys, number):
    lines = save_lines(tmp_path / "t.jsonl", TEXTS)
    options = ("jsonl", lines, "--vocabulary", 300, "--output")
    run(*options, tmp_path / "whole")
    calls, whole = iter(range(3)), token_files.Writer.append

    def append(writer, documents, position):
        if next(calls, None) == 2:
            os.kill(os.getpid(), number)
        whole(writer, documents, position)

    with monkeypatch.context() as patch:
        patch.setattr(token_files.Writer, "append", append)
        with pytest.raises(Stopped, match="the same command goes on from there") as stopped:
            run(*options, tmp_path / "parts")
    assert stopped.value.signal_number == number
    capsys.readouterr()
    run(*options, tmp_path / "parts")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert "Going on after" in capsys.readouterr().out


def test_a_streamed_data_set_goes_on_where_it_stopped(tmp_path, byte_level, small_batches, monkeypatch):
    files = [str(save_lines(tmp_path / f"{part}.jsonl", TEXTS[100 * part : 100 * part + 100])) for part in range(3)]
    opened = []

    def local(dataset, subset, split, field, revision):
        opened.append((dataset, subset, split, revision))
        return HubTexts("json", "", "train", field, data_files=files)

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
def test_a_killed_process_goes_on_to_the_same_bytes(tmp_path, byte_level):
    path = save_lines(tmp_path / "a.jsonl", [document(number) for number in range(10_000)])
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
    path = save_lines(tmp_path / "a.jsonl", TEXTS)
    options = ("openwebtext", "--files", path, "--tokenizer", byte_level, "--output", out, "--validation-percent")
    for batches, percent in ((1, 30), (4, 10)):  # the first has a tokenizer, but no text yet: it may be replaced
        with monkeypatch.context() as patch:
            stop_after(patch, batches, halfway=False)
            with pytest.raises(Stop):
                run(*options, percent)
    with pytest.raises(RunError, match=r"begun with other settings \(validation_percent\)"):
        run(*options, 20)
    partial = tmp_path / ".out.partial"
    held = token_files.lock(partial)
    with pytest.raises(RunError, match="another process is writing"):
        run(*options, 10)
    held.close()
    (partial / "train.bin").write_bytes(b"")
    with pytest.raises(RunError, match=r"train\.bin is shorter than its state\.json says"):
        run(*options, 10)
    (partial / "state.json").write_text("{")
    with pytest.raises(RunError, match=r"state\.json is damaged"):
        run(*options, 10)
    run(*options, 20, "--overwrite")
    assert data.load(out).manifest["validation"]["documents"] > 30


def test_a_finished_folder_is_kept_unless_told_otherwise(tmp_path, out, byte_level):
    path = save_lines(tmp_path / "a.jsonl", TEXTS)
    options = ("openwebtext", "--files", path, "--tokenizer", byte_level, "--validation-percent", 10, "--output", out)
    run(*options)
    with pytest.raises(RunError, match="exists: --overwrite makes it anew"):
        run(*options)
    run(*options, "--train-documents", 100, "--overwrite")
    assert data.load(out).manifest["train"]["documents"] == 100
    (out / "manifest.json").unlink()
    with pytest.raises(RunError, match="--overwrite will not delete it"):
        run(*options, "--overwrite")


# What the user can mend


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["text", "nowhere"], "nowhere does not exist"),
        (["text"], "no files to read"),
        (["text", "latin.txt"], r"cannot read latin\.txt as UTF-8 text.*--not-utf8 skip"),
        (["jsonl", "latin.txt"], "line 1, is not JSON .* --skip-bad leaves"),
        (["jsonl", "a.jsonl", "--field", "body"], r"no text in the field 'body' \(there are: url, text\)"),
        (["jsonl", "list.jsonl"], r"no text in the field 'text' \(there are: list\)"),
        (["jsonl", "cut.jsonl.gz"], r"cannot read cut\.jsonl\.gz"),
        (["jsonl", "broken.parquet"], r"cannot read broken\.parquet"),
        (["jsonl", "broken.arrow"], r"cannot read broken\.arrow"),
        (["jsonl", "a.jsonl", "--tokenizer", "missing.json"], r"cannot load the tokenizer missing\.json"),
        (["jsonl", "a.jsonl", "--tokenizer", "endless.json"], "no token that ends a text"),
        (["jsonl", "a.jsonl", "--context", "0"], "--context must be at least 1"),
        (["text", "latin.txt", "--cut", "0"], "--cut must be at least 1"),
        (["c4", "--train-documents", "0"], "--train-documents must be at least 1"),
        (["pile", "--validation-percent", "51"], "--validation-percent must lie above 0"),
        (["jsonl", "a.jsonl", "--vocabulary", "256"], r"--vocabulary must lie in 257"),
        (["python-source", "--source", "nowhere"], "no Python source for train under nowhere"),
    ],
)
def test_what_cannot_be_prepared_is_said_in_one_line(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("latin.txt").write_bytes("ü".encode("latin-1"))
    Path("list.jsonl").write_text("[1]\n")
    save_lines(Path("a.jsonl"), TEXTS)
    Path("cut.jsonl.gz").write_bytes(save_lines(Path("b.jsonl.gz"), TEXTS).read_bytes()[:-30])
    Path("broken.parquet").write_bytes(b"PAR1")
    Path("broken.arrow").write_bytes(b"ARROW")
    Tokenizer(models.BPE()).save("endless.json")
    with pytest.raises(RunError, match=message) as error:
        run(*arguments, "--output", "out")
    assert "\n" not in str(error.value)
    assert not Path("out").exists()


def test_an_unreachable_hub_is_said_in_one_line(monkeypatch, out, byte_level):
    import datasets

    def unreachable(*arguments, **options):
        raise ConnectionError("Couldn't reach it\nmore")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    message = r"cannot stream allenai/c4 from the Hugging Face hub, which cannot be reached: .* \(Couldn't reach it\): "
    with pytest.raises(RunError, match=message + ".* --files takes local copies") as error:
        run("c4", "--tokenizer", byte_level, "--output", out)
    assert "\n" not in str(error.value)


def test_a_tokenizer_without_a_network_is_no_wrong_name(monkeypatch):
    def unreachable(name):
        try:
            raise ConnectionError("no route")
        except ConnectionError as error:
            raise RuntimeError("gpt2 is not a local folder") from error

    monkeypatch.setattr(tokenizer_module, "Tokenizer", type("T", (), {"from_pretrained": staticmethod(unreachable)}))
    with pytest.raises(RunError, match=r"cannot reach the Hugging Face hub for the tokenizer gpt2 .* the path of"):
        find_tokenizer("gpt2")


def test_a_hub_lost_midway_is_said_in_one_line(tmp_path, monkeypatch):
    texts = sources.HubTexts("json", "", "train", "text", data_files=[str(save_lines(tmp_path / "a.jsonl", TEXTS))])

    def rows():
        yield {"text": "first"}
        raise ConnectionError

    monkeypatch.setattr(texts, "_rows", rows())
    taken = iter(texts)
    assert next(taken) == "first"
    with pytest.raises(RunError, match=r"\(ConnectionError\): the same command goes on where it stopped"):
        next(taken)


# Tokenizers


@pytest.mark.parametrize("names", [["<|endoftext|>", "<|im_end|>"], ["<pad>", "</s>", "<unk>"], ["<eos>"]])
def test_the_separator_is_found_by_its_name(names):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_special_tokens(names)
    assert end_of_text(tokenizer) == {"<|endoftext|>": 0, "<pad>": 1, "<eos>": 0}[names[0]]


def test_bytes_of_added_and_special_tokens(byte_level):
    tokenizer = find_tokenizer(str(byte_level))
    tokenizer.add_special_tokens(["<|im_start|>"])
    tokenizer.add_tokens(["<höher>"])
    lengths = byte_lengths(tokenizer)
    assert lengths.shape == (402,)
    assert lengths[[0, 400, 401]].tolist() == [0, 0, 8]
    for text in TEXTS[:50]:
        assert lengths[tokenizer.encode(text).ids].sum() == len(text.encode())


def test_bytes_of_sentence_piece_tokens(sentence_piece):
    tokenizer = find_tokenizer(str(sentence_piece))
    lengths = byte_lengths(tokenizer)
    assert lengths[:3].tolist() == [0, 0, 0]
    for text in TEXTS[:50]:
        plain = " ".join(text.split())
        assert lengths[tokenizer.encode(plain).ids].sum() == len(plain.encode()) + 1  # the mark before the first word
    assert np.isfinite(lengths).all()
