# SPDX-License-Identifier: Apache-2.0
"""Qwen3 1.7B on the Pile, Qwen3 tokens, a document per sequence.

    python -m examples.pretrain prepare pile
    python -m examples.pretrain compare --config qwen3_1p7b

The paper's validation losses: AdamW 2.6758, Muon 2.6408, MANO 2.6205, NormPre-G 2.5868, NormPre-L 2.5897.
1,720.57 M parameters.
"""

from pathlib import Path

from ..config import Config, DataConfig, ModelConfig
from .paper import TRAINING

config = Config(
    config="qwen3_1p7b",
    optimizer="normpre_g",
    learning_rate=3e-4,
    warmup_steps=1_000,
    micro_batch=8,
    model=ModelConfig(
        family="qwen3",
        layers=28,
        width=2048,
        heads=16,
        kv_heads=8,
        head_width=128,
        mlp_width=6144,
        context=1024,
        vocabulary=151_936,
        rotary_base=1e6,
        scaled_residuals=False,
        scan_layers=True,
        remat=True,
    ),
    data=DataConfig(tokens=Path("data/pile"), validation_tokens=2048 * 1024),
    **TRAINING,
)
