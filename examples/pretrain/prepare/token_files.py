# SPDX-License-Identifier: Apache-2.0
"""Write a corpus to disk: ``train.bin``, ``validation.bin``, ``tokenizer.json``, ``manifest.json``.

Token files are flat little-endian arrays, documents one after the other, each closed by the separator. The folder
appears whole or not at all: it is filled under another name and renamed.
"""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from .tokenizer import end_of_text

SPLITS = ("train", "validation")


def token_dtype(vocabulary: int) -> np.dtype:
    """The smallest type that holds every token: two bytes up to 65,536 tokens."""
    return np.dtype("<u2" if vocabulary <= 2**16 else "<u4")


def encode(tokenizer: Tokenizer, documents: Sequence[str]) -> np.ndarray:
    """All documents as one array of tokens, the separator after each."""
    end = end_of_text(tokenizer)
    encodings = tokenizer.encode_batch(list(documents), add_special_tokens=False)
    return np.concatenate([np.array([*e.ids, end], token_dtype(tokenizer.get_vocab_size())) for e in encodings])


def write(folder: Path, tokenizer: Tokenizer, splits: dict[str, Sequence[str]], about: dict[str, Any]) -> None:
    """Tokenize ``splits`` and make ``folder``; where another process has made it meanwhile, theirs stays."""
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        tokenizer.save(str(partial / "tokenizer.json"))
        vocabulary = tokenizer.get_vocab_size()
        manifest: dict[str, Any] = {**about, "vocabulary": vocabulary, "dtype": token_dtype(vocabulary).str}
        for split in SPLITS:
            tokens = encode(tokenizer, splits[split])
            tokens.tofile(partial / f"{split}.bin")
            manifest[split] = {
                "documents": len(splits[split]),
                "bytes": sum(len(text.encode()) for text in splits[split]),
                "tokens": len(tokens),
            }
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
        os.replace(partial, folder)
    except OSError:
        if not (folder / "manifest.json").exists():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
