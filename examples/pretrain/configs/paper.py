# SPDX-License-Identifier: Apache-2.0
"""What all six settings of the paper share: 10,000 steps of 512 x 1,024 tokens, clip 1.0, decay 0.1.

Not a configuration of its own. Clipping and decay are the program's defaults; the cosine ends at a tenth of the peak.
"""

from pathlib import Path
from typing import Any

from ..config import Config, DataConfig, ModelConfig


def paper(name: str, learning_rate: float, corpus: str, model: ModelConfig, **more: Any) -> Config:
    """A configuration of the paper, with ``more`` fields of its own."""
    shared = {
        "config": name,
        "optimizer": "normpre_g",
        "learning_rate": learning_rate,
        "warmup_steps": 1_000,
        "steps": 10_000,
        "batch_size": 512,
        "evaluate_every": 500,
        "checkpoint_every": 500,
        "prompt": "The history of",
        "model": model,
        "data": DataConfig(tokens=Path(f"data/{corpus}"), validation_tokens=2048 * 1024),
    }
    return Config(**shared | more)
