# SPDX-License-Identifier: Apache-2.0
"""GPT-2 Small (124M) on OpenWebText, GPT-2's byte-pair tokens, documents packed.

    python -m examples.pretrain prepare openwebtext
    python -m examples.pretrain compare --config gpt2_small

The paper's validation losses, means of three seeds: AdamW 3.1444, Muon 3.1064, MANO 3.1156, NormPre-G 3.0667,
NormPre-L 3.0826. Muon as published by its author: 0.02 for matrices, 6e-4 for the rest. The paper scores 200 random
mini-batches each time, of a size it does not give; here they are fixed, and nanoGPT's, 12 sequences each. 124.37 M
parameters, the table padded as in nanoGPT, whose own count of 123.59 M leaves the positions out.
"""

from pathlib import Path

from ..config import DataConfig, MatrixConfig, ModelConfig
from .paper import paper

config = paper(
    "gpt2_small",
    6e-4,
    "openwebtext",
    ModelConfig("gpt2", 12, 768, 12, mlp_width=3072, context=1024, vocabulary=50_304, norm_epsilon=1e-5),
    warmup_steps=2_000,
    micro_batch=32,
    matrix=MatrixConfig(muon_convention="keller", muon_ratio=0.02 / 6e-4),
    data=DataConfig(tokens=Path("data/openwebtext"), validation_tokens=200 * 12 * 1024),
)
