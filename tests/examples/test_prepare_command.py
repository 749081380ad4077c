# SPDX-License-Identifier: Apache-2.0
"""``prepare``: every corpus from small local files, and what users can fix."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from examples.pretrain import data
from examples.pretrain.prepare import reading, sources, token_files
from examples.pretrain.prepare.problems import Problems
from examples.pretrain.prepare.tokenizer import end_of_text, find_tokenizer
from tests import cases
from tests.examples.conftest import refuses
from tests.examples.corpora import (
    TEXTS,
    all_decoded,
    decoded,
    document,
    prepare,
    put,
    put_texts,
    save,
    size_of,
    whole_words,
)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_records_are_read_in_every_format(tmp_path, name):
    path = save(tmp_path / name, TEXTS, "body")
    records = reading.read_records(path, "body", Problems(skip=False))
    assert list(records) == TEXTS


def test_openwebtext_from_local_files_is_held_out_by_its_text(
    tmp_path, out, byte_level
):
    path = save(tmp_path / "a.jsonl", ["", " \n", *TEXTS])
    dataset = prepare(
        "openwebtext",
        path,
        tokenizer=byte_level,
        validation_percent=20,
        train_documents=50,
        validation_documents=20,
        output=out,
    )
    kept = [text for text in TEXTS if sources.fraction(text) >= 0.2]
    held_out = [text for text in TEXTS if sources.fraction(text) < 0.2]
    assert decoded(dataset, "train") == kept[:50]
    assert decoded(dataset, "validation") == held_out[:20]
    assert dataset.manifest["source"] == str(path)
    assert dataset.manifest["tokenizer"] == str(byte_level)


CONTEXT = 24


@pytest.fixture
def c4(tmp_path, out, sentence_piece) -> data.Dataset:
    """250 documents to train on, and the first five of them to validate on."""
    train = save(tmp_path / "t.json.gz", TEXTS)
    validation = save(tmp_path / "v.jsonl", TEXTS[:9])
    return prepare(
        "c4",
        train,
        validation_files=validation,
        tokenizer=sentence_piece,
        context=CONTEXT,
        train_documents=250,
        validation_documents=5,
        output=out,
    )


def truncated_or_padded(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """The tokens of a text and its end, as many as a context and its last target."""
    length = CONTEXT + 1
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    end = tokenizer.token_to_id("</s>")
    kept = [*tokens, end][:length]
    padding = [data.PADDING] * (length - len(kept))
    return (*kept, *padding)


def test_c4_is_a_truncated_or_padded_document_per_sequence(c4, sentence_piece):
    tokenizer = find_tokenizer(str(sentence_piece))
    assert end_of_text(tokenizer) == tokenizer.token_to_id("</s>")
    expected = [truncated_or_padded(tokenizer, text) for text in TEXTS[:250]]
    assert {data.PADDING in row for row in expected} == {True, False}
    rows = data.validation_sequences(c4, context=CONTEXT, count=10**6)
    assert [tuple(row) for row in rows] == expected[:5]
    batches = data.training_batches(c4, context=CONTEXT, batch_size=250, seed=0)
    epoch = next(batches)
    assert {tuple(row) for row in epoch} == set(expected)


def test_the_manifest_has_the_bytes_of_whole_texts_and_the_sum_of_every_file(c4, out):
    paths = set(out.iterdir()) - {out / "manifest.json"}
    sums = {path.name: token_files.sha256(path) for path in paths}
    assert c4.manifest["sha256"] == sums
    assert c4.manifest["train"]["bytes"] == size_of(TEXTS[:250])


def test_a_file_to_validate_on_is_not_trained_on(tmp_path, out, byte_level):
    put_texts(tmp_path, [document(number) for number in range(3)])
    dataset = prepare(
        "text",
        tmp_path,
        validation_files=tmp_path / "1.txt",
        tokenizer=byte_level,
        output=out,
    )
    assert sorted(decoded(dataset, "train")) == sorted([document(0), document(2)])
    assert decoded(dataset, "validation") == [document(1)]


def test_folders_of_text_and_of_another_field(tmp_path, out):
    folder = tmp_path / "texts" / "inner"
    put_texts(folder, TEXTS[:50], "txt")
    put_texts(folder, TEXTS[50:100], "md")
    put(folder / "image.png", b"\x89")
    save(folder / "a.jsonl", TEXTS[:50], "body")
    save(folder / "b.jsonl.gz", TEXTS[50:100], "body")
    for corpus, options in (("text", {}), ("jsonl", {"field": "body"})):
        dataset = prepare(
            corpus, tmp_path, vocabulary=300, overwrite=True, output=out, **options
        )
        assert dataset.manifest["vocabulary"] == 300
        assert sorted(all_decoded(dataset)) == sorted(TEXTS[:100])


# What the user can fix


def put_tokenizers() -> None:
    """Files of tokenizers without an end, of one word, and without most bytes."""
    Tokenizer(models.BPE()).save("endless.json")
    whole_words(["a"]).save("words.json")
    gaps = Tokenizer(models.BPE({"a": 0, "\u0122": 1, "<|endoftext|>": 2}, []))
    gaps.pre_tokenizer = pre_tokenizers.ByteLevel()
    gaps.decoder = decoders.ByteLevel()
    gaps.save("gaps.json")


@cases.rows(
    "arguments message",
    (
        "texts nowhere",
        "prepare must be followed by one of python, text, jsonl, openwebtext, c4,"
        " pile, got",
    ),
    ("text nowhere", "nowhere does not exist"),
    ("python nowhere", "nowhere does not exist"),
    ("python folder", r"no files to read: .* left out: \.txt 1"),
    ("text", "no files to read"),
    (
        "jsonl a.jsonl --tokenizer missing.json",
        r"cannot load the tokenizer missing\.json",
    ),
    (
        "jsonl a.jsonl --tokenizer endless.json",
        "no token that ends a text",
    ),
    (
        "jsonl a.jsonl --tokenizer gaps.json",
        r"gaps\.json drops characters",
    ),
    (
        "jsonl a.jsonl --tokenizer words.json --end-token [UNK]",
        r"'\[UNK\]' cannot end documents",
    ),
    (
        "jsonl a.jsonl --tokenizer words.json --end-token a",
        "'a' cannot end documents",
    ),
    ("jsonl a.jsonl --context 0", "--context must be at least 1"),
    ("text a.jsonl --cut 0", "--cut must be at least 1"),
    (
        "text a.jsonl --cut 99999999999999999999",
        r"--cut must be in 1\.\.2147483647, got",
    ),
    ("c4 --train-documents 0", "--train-documents must be at least 1"),
    (
        "python --validation-files a.jsonl",
        "--validation-files has no effect on Python files",
    ),
    (
        "text a.txt --validation-files b --validation_files=c",
        "given twice: name all files and folders",
    ),
    (
        "pile --validation-percent 51",
        "--validation-percent must be in 0.001..50",
    ),
    ("jsonl a.jsonl --vocabulary 256", "--vocabulary must be in 257"),
)
def test_what_cannot_be_prepared_is_refused_in_one_line(
    tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    save(Path("a.jsonl"), TEXTS)
    put(Path("folder/a.txt"))
    put_tokenizers()
    refuses(message, prepare, *arguments.split(), output="out")
    assert not Path("out").exists()
    assert not Path(".out.partial").exists()


def unreachable(*arguments, **options):
    raise ConnectionError("Couldn't reach it\nmore")


def test_an_unreachable_corpus_is_said_in_one_line(monkeypatch, out, byte_level):
    monkeypatch.setattr("datasets.load_dataset", unreachable)
    message = (
        r"stream allenai/c4 .* \(Couldn't reach it\): check .* the network; .* with"
        r" paths it reads local copies"
    )
    refuses(message, prepare, "c4", tokenizer=byte_level, output=out)


def test_an_unreachable_tokenizer_is_said_in_one_line(monkeypatch):
    hub = SimpleNamespace(from_pretrained=unreachable)
    monkeypatch.setattr("examples.pretrain.prepare.tokenizer.Tokenizer", hub)
    message = r"tokenizer gpt2 \(Couldn't reach it\): .* the path .* check the network"
    refuses(message, find_tokenizer, "gpt2")


def test_a_hub_that_is_lost_midway_is_said_in_one_line(monkeypatch, tmp_path):
    def lost_midway():
        yield {"text": "first"}
        raise ConnectionError

    path = save(tmp_path / "a.jsonl", TEXTS)
    stream = sources.HubStream(
        "json",
        "",
        "train",
        "text",
        Problems(skip=False),
        0.0,
        data_files=[str(path)],
    )
    monkeypatch.setattr(stream, "_rows", lost_midway())
    texts = iter(stream)
    assert next(texts) == "first"
    refuses(r"\(ConnectionError\): .* the same command resumes", next, texts)
