# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: a byte-level byte-pair one trained on the spot, or one from disk or the Hugging Face hub.

In the trained one every byte is in the vocabulary, so no text is unknown and every text comes back unchanged.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ..config import RunError
from .sources import one_line, quiet_hub, without_network

END_OF_TEXT = "<|endoftext|>"
# What closes a document, in order of preference: GPT-2 and Qwen; T5 and Llama 2; Llama 3; Gemma.
SEPARATORS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>")
WORD_MARK = "\u2581"  # how SentencePiece writes a space


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
    """The tokenizer stored in ``path``."""
    return Tokenizer.from_file(str(path))


def find_tokenizer(name: str) -> Tokenizer:
    """A tokenizer by the path of its tokenizer.json (or the folder of it), else by its name on the hub.

    Raises:
        RunError: where it cannot be loaded, or has no separator.
    """
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    try:
        if path.exists() or path.suffix == ".json":
            tokenizer = load_tokenizer(path)
        else:
            quiet_hub()
            tokenizer = Tokenizer.from_pretrained(name)
    except Exception as error:  # `tokenizers` raises bare Exception
        if without_network(error):
            raise RunError(
                f"cannot reach the Hugging Face hub for the tokenizer {name} ({one_line(error)}): without a network, "
                "--tokenizer takes the path of a tokenizer.json"
            ) from error
        raise RunError(
            f"cannot load the tokenizer {name} ({one_line(error)}): "
            "--tokenizer takes the path of a tokenizer.json or a name on the Hugging Face hub"
        ) from error
    end_of_text(tokenizer)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def vocabulary_of(tokenizer: Tokenizer) -> int:
    """Rows a token table needs: one more than the largest id, as ids may leave holes."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def byte_lengths(tokenizer: Tokenizer) -> np.ndarray:
    """Bytes of text (float64) that each token stands for; special tokens stand for none.

    Exact for byte-level tokenizers. For others an estimate: the piece in UTF-8, its word mark as one space.
    """
    added = tokenizer.get_added_tokens_decoder()
    byte_level = has_type(json.loads(tokenizer.to_str())["decoder"], "ByteLevel")
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


def has_type(part: Any, kind: str) -> bool:
    """Whether a component of a tokenizer, or one inside it, is of the kind."""
    if isinstance(part, dict):
        return part.get("type") == kind or any(has_type(value, kind) for value in part.values())
    return isinstance(part, list) and any(has_type(value, kind) for value in part)


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
