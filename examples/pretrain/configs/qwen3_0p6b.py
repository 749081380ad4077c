# SPDX-License-Identifier: Apache-2.0
"""Qwen3 0.6B on the Pile, Qwen3 tokens, a document per sequence.

    python -m examples.pretrain prepare pile
    python -m examples.pretrain compare --config qwen3_0p6b

The paper's validation losses: AdamW 2.8956, Muon 2.8335, MANO 2.8382, NormPre-G 2.7967, NormPre-L 2.8066.
596.05 M parameters.
"""

from typing import Any

from ..config import ModelConfig
from .paper import paper

QWEN3: dict[str, Any] = {
    **{"family": "qwen3", "layers": 28, "heads": 16, "kv_heads": 8, "head_width": 128, "context": 1024},
    **{"vocabulary": 151_936, "rotary_base": 1e6, "scaled_residuals": False, "scan_layers": True, "remat": True},
}
config = paper("qwen3_0p6b", 3e-4, "pile", ModelConfig(width=1024, mlp_width=3072, **QWEN3), micro_batch=16)
