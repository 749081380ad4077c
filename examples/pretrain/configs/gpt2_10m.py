# SPDX-License-Identifier: Apache-2.0
"""A GPT-2 of ten million parameters on Python source: hours on CPU cores, minutes on a GPU.

python -m examples.pretrain --config gpt2_10m
"""

from ..config import Config, DataConfig, ModelConfig

config = Config(
    config="gpt2_10m",
    steps=3000,
    batch_size=32,
    learning_rate=2e-3,
    warmup_steps=300,
    evaluate_every=300,
    checkpoint_every=300,
    model=ModelConfig(family="gpt2", layers=6, width=320, heads=5, mlp_width=1280, context=256, norm_epsilon=1e-5),
    data=DataConfig(vocabulary=8192),
)
