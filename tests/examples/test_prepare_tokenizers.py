# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of ``prepare``: what ends a text, what is unknown or switched off."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from examples.pretrain.prepare.tokenizer import (
    END_OF_TEXT,
    byte_lengths,
    end_of_text,
    find_tokenizer,
    load_tokenizer,
    unknown_of,
)
from tests import cases
from tests.examples.conftest import refuses
from tests.examples.corpora import (
    SPECIAL,
    TEXTS,
    all_tokens,
    contents,
    decoded_up_to,
    prepare,
    save,
    size_of,
    whole_words,
)


def test_what_a_tokenizer_does_not_know_is_reported(tmp_path, out, capsys):
    tokenizer = tmp_path / "words.json"
    whole_words(["one", "two"]).save(str(tokenizer))
    train = save(tmp_path / "a.jsonl", ["one two three four", "17", "one five"])
    validation = save(tmp_path / "v.jsonl", ["two six"])
    dataset = prepare(
        "jsonl", train, validation_files=validation, tokenizer=tokenizer, output=out
    )
    said = capsys.readouterr().out
    assert "documents without tokens: 1\n" in said
    assert "unknown tokens: 4\n" in said
    assert dataset.manifest["train"]["unknown tokens"] == 3


def test_a_byte_level_tokenizer_has_no_unknown_token(tmp_path, byte_level):
    """Also if it names one, such as its end token: no text contains it."""
    settings = json.loads(byte_level.read_text())
    settings["model"]["unk_token"] = END_OF_TEXT
    path = tmp_path / "named.json"
    path.write_text(json.dumps(settings))
    assert unknown_of(find_tokenizer(str(path))) is None


@pytest.mark.parametrize("pre_tokenizer", [None, pre_tokenizers.Metaspace()])
def test_a_tokenizer_that_drops_characters_is_refused(tmp_path, pre_tokenizer):
    tokenizer = Tokenizer(models.BPE({"a": 0, "<|endoftext|>": 1, "\u2581": 2}, []))
    tokenizer.pre_tokenizer = pre_tokenizer
    path = str(tmp_path / "narrow.json")
    tokenizer.save(path)
    refuses("drops characters that it does not know", find_tokenizer, path)


def test_bytes_of_added_and_special_tokens(byte_level):
    tokenizer = find_tokenizer(str(byte_level))
    tokenizer.add_tokens(["<höher>"])
    lengths = byte_lengths(tokenizer)
    assert lengths.shape == (402,)
    assert lengths[[0, 400, 401]].tolist() == [0, 0, 8]
    for text in TEXTS[:50]:
        assert lengths[tokenizer.encode(text).ids].sum() == len(text.encode())


@pytest.fixture
def random_tokenizer(tmp_path, byte_level) -> Path:
    """``byte_level`` with BPE dropout, truncation and padding."""
    tokenizer = Tokenizer.from_file(str(byte_level))
    tokenizer.model.dropout = 0.5  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=5)
    path = tmp_path / "random.json"
    tokenizer.save(str(path))
    return path


def test_settings_that_change_an_encoding_at_random_or_by_length_are_off(
    tmp_path, byte_level, random_tokenizer
):
    """In the encoding, and in the stored copy."""
    text = save(tmp_path / "a.jsonl", TEXTS)

    def prepared(tokenizer):
        folder = tmp_path / f"with {tokenizer.stem}"
        prepare(
            "jsonl", text, tokenizer=tokenizer, validation_percent=20, output=folder
        )
        return contents(folder)

    plain = prepared(byte_level)
    found = prepared(random_tokenizer)
    for name in ("train.bin", "validation.bin", "tokenizer.json"):
        assert found[name] == plain[name], name


def test_a_stored_copy_with_such_settings_is_read_without_them(
    byte_level, random_tokenizer
):
    """An earlier version stored the file as it was."""
    ids = load_tokenizer(random_tokenizer).encode(TEXTS[0]).ids
    assert ids == Tokenizer.from_file(str(byte_level)).encode(TEXTS[0]).ids


# What ends a text


@cases.rows(
    "names separator",
    (["<|im_end|>", "<|endoftext|>"], 1),
    (["<pad>", "</s>", "<eos>"], 1),
    (["<eos>"], 0),
)
def test_the_separator_is_found_by_its_name(names, separator):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_special_tokens(names)
    assert end_of_text(tokenizer) == separator


@pytest.fixture(params=[True, False], ids=["special", "plain"])
def other_tokenizer(request, tmp_path, byte_level) -> Path:
    """A tokenizer without a usual separator, but with [BOS], [EOS] and [PAD].

    The last two are special tokens, or plain ones.
    """
    text = byte_level.read_text().replace("<|endoftext|>", "[BOS]")
    tokenizer = Tokenizer.from_str(text)
    names = ["[EOS]", "[PAD]"]
    if request.param:
        tokenizer.add_special_tokens(names)
    else:
        tokenizer.add_tokens(names)
    path = tmp_path / "other.json"
    tokenizer.save(str(path))
    return path


# They spell [EOS] and other special tokens.
SPELLING = [f"{number} an [EOS] b{SPECIAL[number % 4]} c" for number in range(200)]


def test_a_separator_of_another_name_is_asked_for(tmp_path, out, other_tokenizer):
    path = save(tmp_path / "a.jsonl", SPELLING)
    options = {"tokenizer": other_tokenizer, "output": out}
    message = (
        r"no token that ends a text: none of .*; --end-token names another, .*"
        r" \[BOS\].* \[EOS\]"
    )
    refuses(message, prepare, "jsonl", path, **options)
    message = r"the tokenizer has no token '\[END\]'; --end-token names another, "
    refuses(message, prepare, "jsonl", path, **options, end_token="[END]")


def test_a_separator_of_another_name_is_an_option(tmp_path, out, other_tokenizer):
    dataset = prepare(
        "jsonl",
        save(tmp_path / "a.jsonl", SPELLING),
        tokenizer=other_tokenizer,
        end_token="[EOS]",
        validation_percent=20,
        output=out,
    )
    assert dataset.manifest["end_token"] == "[EOS]"
    end = dataset.tokenizer.token_to_id("[EOS]")
    assert sorted(decoded_up_to(dataset, end)) == sorted(["", *SPELLING])
    lengths = byte_lengths(dataset.tokenizer)
    assert lengths[all_tokens(dataset)].sum() == size_of(SPELLING)


def test_a_separator_may_be_another_than_the_usual_one(tmp_path, out, byte_level):
    dataset = prepare(
        "jsonl",
        save(tmp_path / "a.jsonl", SPELLING),
        tokenizer=byte_level,
        end_token="<|im_start|>",
        output=out,
    )
    ends = dataset.train == dataset.tokenizer.token_to_id("<|im_start|>")
    assert ends.sum() == dataset.manifest["train"]["documents"]


def test_text_may_spell_a_separator_that_is_no_special_token(tmp_path, out, byte_level):
    tokenizer = tmp_path / "plain.json"
    text = byte_level.read_text()
    tokenizer.write_text(text.replace('"special": true', '"special": false'))
    texts = [f"{number} <|endoftext|>" for number in range(200)]
    path = save(tmp_path / "a.jsonl", texts)
    dataset = prepare("jsonl", path, tokenizer=tokenizer, output=out)
    ends = dataset.train == dataset.tokenizer.token_to_id("<|endoftext|>")
    assert ends.sum() == dataset.manifest["train"]["documents"]
