# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: one trained on the corpus, or one from disk or the Hugging Face hub.

Text that spells a special token is encoded as its characters: only the writer of token
files adds special tokens.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from ..config import RunError, one_line
from .sources import Stream, sample

END_OF_TEXT = "<|endoftext|>"
# What ends a document, in order of preference: GPT-2 and Qwen; T5 and Llama 2; Llama 3;
# Gemma.
SEPARATORS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>")
WORD_MARK = "\u2581"  # how SentencePiece writes a space


def train_on(streams: Callable[[], Iterable[Stream]], vocabulary: int) -> Tokenizer:
    """A tokenizer trained on the training documents of new streams.

    Or on a sample of 50 MB if there is more.
    """

    def read() -> Iterator[str]:
        for stream in streams():
            if "train" in stream.splits:
                for text in stream:
                    if stream.split_of(text) == "train":
                        yield text

    return train_tokenizer(sample(read), vocabulary)


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Learn ``vocabulary`` tokens.

    They are the separator, the 256 bytes, and the merges that shorten ``texts`` most.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        show_progress=False,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer stored in ``path``, with ``switch_off``."""
    tokenizer = read_tokenizer(path)
    switch_off(tokenizer)
    return tokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer stored in ``path``, as it is."""
    # `Tokenizer.from_file` takes no path that is not UTF-8.
    return Tokenizer.from_str(path.read_bytes().decode())


def write_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Store a tokenizer, in any path."""
    path.write_bytes(tokenizer.to_str(pretty=True).encode())


def switch_off(tokenizer: Tokenizer) -> None:
    """Switch off what changes an encoding at random or by its length.

    And let the tokenizer read special tokens in a text as characters.
    """
    # Of the object alone: the file does not store it.
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if isinstance(tokenizer.model, models.BPE):
        tokenizer.model.dropout = None


def find_tokenizer(name: str, end: str | None = None) -> Tokenizer:
    """A tokenizer by the path of its tokenizer.json, else by its name on the hub.

    The path may be that of its folder.

    Raises:
        RunError: where it cannot be loaded, or has no separator, or not ``end``.
    """
    try:
        tokenizer = open_tokenizer(name)
        rare_letter = tokenizer.encode("\U00012345", add_special_tokens=False).tokens
    except Exception as error:  # `tokenizers` raises bare Exception
        raise RunError(
            f"cannot load the tokenizer {name} ({one_line(error)}): pass the path of a"
            " tokenizer.json, or a name on the Hugging Face hub and check the network"
        ) from error
    switch_off(tokenizer)
    number = end_of_text(tokenizer, end)
    separator = tokenizer.id_to_token(number)
    assert separator is not None
    if {*rare_letter} <= {WORD_MARK} or lacks_bytes(tokenizer):
        raise RunError(
            f"the tokenizer {name} drops characters that it does not know, and has no"
            " token for them"
        )
    if len(separator) == 1 or number == unknown_of(tokenizer):
        raise RunError(
            f"{separator!r} cannot end documents, because it stands for text: choose"
            " another --end-token"
        )
    tokenizer.add_special_tokens([separator])  # no text contains it from now on
    split_special_tokens(tokenizer)
    return tokenizer


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a file or folder, else of this name on the hub."""
    path = Path(name)
    if path.is_dir():
        path = path / "tokenizer.json"
    if path.exists() or path.suffix == ".json":
        return read_tokenizer(path)
    return Tokenizer.from_pretrained(name)


def lacks_bytes(tokenizer: Tokenizer) -> bool:
    """Whether a byte-level tokenizer has no token for one of the bytes."""
    if not is_byte_level(tokenizer):
        return False
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    return not alphabet <= tokenizer.get_vocab().keys()


def split_special_tokens(tokenizer: Tokenizer) -> None:
    """Split the text of special tokens where the model would else find them.

    It is split behind the first character. The vocabulary of a Unigram model, such as
    T5's, contains its special tokens as pieces of text.
    """
    starts = []
    for token in tokenizer.get_added_tokens_decoder().values():
        text = token.content
        found = tokenizer.encode(text, add_special_tokens=False).tokens
        if token.special and len(text) > 1 and text in found:
            starts.append(f"{re.escape(text[0])}(?={re.escape(text[1:])})")
    if not starts:
        return
    steps = []
    if tokenizer.pre_tokenizer is not None:
        steps.append(tokenizer.pre_tokenizer)
    steps.append(pre_tokenizers.Split(Regex("|".join(starts)), "isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)


def vocabulary_of(tokenizer: Tokenizer) -> int:
    """Rows that a token table needs.

    One more than the largest id, as ids may leave holes.
    """
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether its pieces are written in characters that stand for bytes."""
    decoder = json.loads(tokenizer.to_str())["decoder"]
    return '"ByteLevel"' in json.dumps(decoder)


def unknown_of(tokenizer: Tokenizer) -> int | None:
    """The token that stands for what a tokenizer does not know.

    None for one that knows all bytes.
    """
    if is_byte_level(tokenizer):
        return None
    model = json.loads(tokenizer.to_str())["model"]
    if "unk_id" in model:
        return model["unk_id"]
    return tokenizer.token_to_id(model.get("unk_token") or "")


def byte_lengths(tokenizer: Tokenizer) -> np.ndarray:
    """Bytes of text (float64) that each token stands for; none for special tokens.

    Exact for byte-level tokenizers. For others an estimate: the piece in UTF-8, its
    word mark as one space.
    """
    added = tokenizer.get_added_tokens_decoder()
    byte_level = is_byte_level(tokenizer)
    lengths = np.zeros(vocabulary_of(tokenizer))
    for token, number in tokenizer.get_vocab(with_added_tokens=True).items():
        if number not in added:
            lengths[number] = piece_bytes(token, byte_level)
        elif not added[number].special:
            lengths[number] = len(token.encode())
    return lengths


def piece_bytes(token: str, byte_level: bool) -> int:
    """Bytes of text that a piece of text stands for."""
    if byte_level:
        return len(token)  # this alphabet writes each byte as one printable character
    if len(token) == 6 and token.startswith("<0x"):
        return 1  # byte fallback
    return len(token.replace(WORD_MARK, " ").encode())


def end_of_text(tokenizer: Tokenizer, name: str | None = None) -> int:
    """The separator between documents.

    It is ``name``, or the first of ``SEPARATORS`` that the tokenizer has.

    Raises:
        RunError: where it has none.
    """
    wanted = SEPARATORS
    missing = f"no token that ends a text: none of {', '.join(SEPARATORS)}"
    if name:
        wanted = (name,)
        missing = f"no token {name!r}"
    for separator in wanted:
        token = tokenizer.token_to_id(separator)
        if token is not None:
            return token
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    raise RunError(
        f"the tokenizer has {missing}; --end-token names another, such as one of:"
        f" {', '.join(added[:10])}"
    )
