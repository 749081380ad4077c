# SPDX-License-Identifier: Apache-2.0
"""LLaMA 130M on C4, T5-base tokens, a document per sequence.

    python -m examples.pretrain prepare c4
    python -m examples.pretrain compare --config llama_130m

The paper's validation losses: AdamW 3.1363, Muon 3.1019, MANO 3.1102, NormPre-G 3.0737, NormPre-L 3.0930.
134.11 M parameters.
"""

from typing import Any

from ..config import ModelConfig
from .paper import paper

LLAMA: dict[str, Any] = {
    **{"family": "llama", "context": 1024, "vocabulary": 32_000, "tied_head": False},
    **{"scaled_residuals": False, "scan_layers": True},
}
MODEL = ModelConfig(layers=12, width=768, heads=12, mlp_width=2048, **LLAMA)
config = paper("llama_130m", 6e-4, "c4", MODEL, micro_batch=64)
