# SPDX-License-Identifier: Apache-2.0
"""LLaMA 350M on C4, T5-base tokens, a document per sequence.

    python -m examples.pretrain prepare c4
    python -m examples.pretrain compare --config llama_350m

The paper's validation losses: AdamW 3.0378, Muon 2.9999, MANO 2.9946, NormPre-G 2.9678, NormPre-L 2.9758.
367.97 M parameters.
"""

from ..config import ModelConfig
from .llama_130m import LLAMA
from .paper import paper

MODEL = ModelConfig(layers=24, width=1024, heads=16, mlp_width=2736, **LLAMA)
config = paper("llama_350m", 3e-4, "c4", MODEL, micro_batch=32)
