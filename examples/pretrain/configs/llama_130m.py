# SPDX-License-Identifier: Apache-2.0
"""LLaMA 130M on C4, T5-base tokens, a document per sequence.

    python -m examples.pretrain prepare c4
    python -m examples.pretrain compare --config llama_130m

The paper's validation losses: AdamW 3.1363, Muon 3.1019, MANO 3.1102, NormPre-G 3.0737, NormPre-L 3.0930.
134.11 M parameters.
"""

from pathlib import Path

from ..config import Config, DataConfig, ModelConfig
from .paper import TRAINING

config = Config(
    config="llama_130m",
    optimizer="normpre_g",
    learning_rate=6e-4,
    warmup_steps=1_000,
    micro_batch=64,
    model=ModelConfig(
        family="llama",
        layers=12,
        width=768,
        heads=12,
        mlp_width=2048,
        context=1024,
        vocabulary=32_000,
        tied_head=False,
        scaled_residuals=False,
        scan_layers=True,
    ),
    data=DataConfig(tokens=Path("data/c4"), validation_tokens=2048 * 1024),
    **TRAINING,
)
