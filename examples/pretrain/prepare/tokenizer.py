# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: a byte-level byte-pair one trained on the corpus, or one from disk or the Hugging Face hub.

Text that spells a special token is encoded as its characters: only the writer of token files adds special tokens.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from ..config import RunError
from .sources import Stream, one_line, sample

END_OF_TEXT = "<|endoftext|>"
# What ends a document, in order of preference: GPT-2 and Qwen; T5 and Llama 2; Llama 3; Gemma.
SEPARATORS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>")
WORD_MARK = "\u2581"  # how SentencePiece writes a space


def train_on(streams: Callable[[], Iterable[Stream]], vocabulary: int) -> Tokenizer:
    """A tokenizer trained on the training documents of new streams, or on a sample of 50 MB if there is more."""

    def read() -> Iterator[str]:
        for stream in streams():
            if "train" in stream.splits:
                yield from (text for text in stream if stream.split_of(text) == "train")

    return train_tokenizer(sample(read), vocabulary)


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Learn ``vocabulary`` tokens: the separator, the 256 bytes, and the merges that shorten ``texts`` most."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer stored in ``path``, which reads special tokens in a text as characters."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True  # of the object alone: the file does not store it
    return tokenizer


def find_tokenizer(name: str) -> Tokenizer:
    """A tokenizer by the path of its tokenizer.json (or the folder of it), else by its name on the hub.

    Raises:
        RunError: where it cannot be loaded, or has no separator.
    """
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    try:
        local = path.exists() or path.suffix == ".json"
        tokenizer = Tokenizer.from_file(str(path)) if local else Tokenizer.from_pretrained(name)
    except Exception as error:  # `tokenizers` raises bare Exception
        raise RunError(
            f"cannot load the tokenizer {name} ({one_line(error)}): --tokenizer takes the path of a tokenizer.json, or "
            "a name on the Hugging Face hub; for a name, check the network"
        ) from error
    tokenizer.encode_special_tokens = True
    end_of_text(tokenizer)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    split_special_tokens(tokenizer)
    return tokenizer


def split_special_tokens(tokenizer: Tokenizer) -> None:
    """Split the text of special tokens behind their first character, where the model would else find them.

    The vocabulary of a Unigram model, such as T5's, contains its special tokens as pieces of text.
    """
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    starts = [
        f"{re.escape(text[0])}(?={re.escape(text[1:])})"
        for text in special
        if len(text) > 1 and text in tokenizer.encode(text, add_special_tokens=False).tokens
    ]
    if starts:
        split = pre_tokenizers.Split(Regex("|".join(starts)), "isolated")
        before = [] if tokenizer.pre_tokenizer is None else [tokenizer.pre_tokenizer]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, split])


def vocabulary_of(tokenizer: Tokenizer) -> int:
    """Rows that a token table needs: one more than the largest id, as ids may leave holes."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def byte_lengths(tokenizer: Tokenizer) -> np.ndarray:
    """Bytes of text (float64) that each token stands for; special tokens stand for none.

    Exact for byte-level tokenizers. For others an estimate: the piece in UTF-8, its word mark as one space.
    """
    added = tokenizer.get_added_tokens_decoder()
    byte_level = '"ByteLevel"' in json.dumps(json.loads(tokenizer.to_str())["decoder"])
    lengths = np.zeros(vocabulary_of(tokenizer))
    for token, number in tokenizer.get_vocab(with_added_tokens=True).items():
        if number in added:
            lengths[number] = 0 if added[number].special else len(token.encode())
        elif byte_level:
            lengths[number] = len(token)  # this alphabet writes each byte as one printable character
        elif len(token) == 6 and token.startswith("<0x"):
            lengths[number] = 1  # byte fallback
        else:
            lengths[number] = len(token.replace(WORD_MARK, " ").encode())
    return lengths


def end_of_text(tokenizer: Tokenizer) -> int:
    """The separator between documents: the first of ``SEPARATORS`` that the tokenizer has.

    Raises:
        RunError: where it has none.
    """
    for separator in SEPARATORS:
        token = tokenizer.token_to_id(separator)
        if token is not None:
            return token
    raise RunError(f"the tokenizer has no token that ends a text: none of {', '.join(SEPARATORS)}")
