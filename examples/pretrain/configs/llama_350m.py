# SPDX-License-Identifier: Apache-2.0
"""LLaMA 350M on C4, T5-base tokens, a document per sequence.

    python -m examples.pretrain prepare c4
    python -m examples.pretrain compare --config llama_350m

The paper's validation losses: AdamW 3.0378, Muon 2.9999, MANO 2.9946, NormPre-G 2.9678, NormPre-L 2.9758.
367.97 M parameters.
"""

from pathlib import Path

from ..config import Config, DataConfig, ModelConfig
from .paper import TRAINING

config = Config(
    config="llama_350m",
    optimizer="normpre_g",
    learning_rate=3e-4,
    warmup_steps=1_000,
    micro_batch=32,
    model=ModelConfig(
        family="llama",
        layers=24,
        width=1024,
        heads=16,
        mlp_width=2736,
        context=1024,
        vocabulary=32_000,
        tied_head=False,
        scaled_residuals=False,
        scan_layers=True,
    ),
    data=DataConfig(tokens=Path("data/c4"), validation_tokens=2048 * 1024),
    **TRAINING,
)
