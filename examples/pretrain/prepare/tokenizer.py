# SPDX-License-Identifier: Apache-2.0
"""A byte-level byte-pair tokenizer, trained on the spot.

Every byte is in the vocabulary, so no text is unknown and every text comes back unchanged.
"""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"


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


def byte_lengths(tokenizer: Tokenizer) -> list[int]:
    """Bytes of text each token stands for; the separator stands for none."""
    # The byte-level alphabet writes each byte as one printable character.
    tokens = [tokenizer.id_to_token(token) or "" for token in range(tokenizer.get_vocab_size())]
    return [0 if token == END_OF_TEXT else len(token) for token in tokens]


def end_of_text(tokenizer: Tokenizer) -> int:
    """The separator between documents.

    Raises:
        ValueError: where the tokenizer has none.
    """
    token = tokenizer.token_to_id(END_OF_TEXT)
    if token is None:
        raise ValueError(f"the tokenizer has no {END_OF_TEXT}")
    return token
