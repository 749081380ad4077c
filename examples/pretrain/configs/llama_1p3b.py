# SPDX-License-Identifier: Apache-2.0
"""LLaMA 1.3B on C4, T5-base tokens, a document per sequence.

    python -m examples.pretrain prepare c4
    python -m examples.pretrain compare --config llama_1p3b

The paper's validation losses: AdamW 2.9385, Muon 2.9037, MANO 2.8963, NormPre-G 2.8571, NormPre-L 2.8662.
1,339.08 M parameters.
"""

from ..config import ModelConfig
from .llama_130m import LLAMA
from .paper import paper

MODEL = ModelConfig(layers=24, width=2048, heads=32, mlp_width=5461, remat=True, **LLAMA)
config = paper("llama_1p3b", 3e-4, "c4", MODEL, micro_batch=16)
