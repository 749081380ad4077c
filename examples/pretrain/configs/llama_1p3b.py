# SPDX-License-Identifier: Apache-2.0
"""LLaMA 1.3B on C4, T5-base tokens, a document per sequence.

    python -m examples.pretrain prepare c4
    python -m examples.pretrain compare --config llama_1p3b

The paper's validation losses: AdamW 2.9385, Muon 2.9037, MANO 2.8963, NormPre-G 2.8571, NormPre-L 2.8662.
1,339.08 M parameters.
"""

from pathlib import Path

from ..config import Config, DataConfig, ModelConfig
from .paper import TRAINING

config = Config(
    config="llama_1p3b",
    optimizer="normpre_g",
    learning_rate=3e-4,
    warmup_steps=1_000,
    micro_batch=16,
    model=ModelConfig(
        family="llama",
        layers=24,
        width=2048,
        heads=32,
        mlp_width=5461,
        context=1024,
        vocabulary=32_000,
        tied_head=False,
        scaled_residuals=False,
        scan_layers=True,
        remat=True,
    ),
    data=DataConfig(tokens=Path("data/c4"), validation_tokens=2048 * 1024),
    **TRAINING,
)
