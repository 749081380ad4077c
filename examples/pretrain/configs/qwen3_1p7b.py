# SPDX-License-Identifier: Apache-2.0
"""Qwen3 1.7B on the Pile, Qwen3 tokens, a document per sequence.

    python -m examples.pretrain prepare pile
    python -m examples.pretrain compare --config qwen3_1p7b

The paper's validation losses: AdamW 2.6758, Muon 2.6408, MANO 2.6205, NormPre-G 2.5868, NormPre-L 2.5897.
1,720.57 M parameters.
"""

from ..config import ModelConfig
from .paper import paper
from .qwen3_0p6b import QWEN3

config = paper("qwen3_1p7b", 3e-4, "pile", ModelConfig(width=2048, mlp_width=6144, **QWEN3), micro_batch=8)
