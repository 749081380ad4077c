# SPDX-License-Identifier: Apache-2.0
"""A GPT-2 of two million parameters on Python source: about ten minutes on two CPU cores.

python -m examples.pretrain --config gpt2_2m
"""

from ..config import Config, DataConfig, ModelConfig

config = Config(
    config="gpt2_2m",
    steps=1500,
    batch_size=16,
    learning_rate=3e-3,
    warmup_steps=150,
    evaluate_every=150,
    checkpoint_every=150,
    model=ModelConfig(family="gpt2", layers=4, width=160, heads=5, mlp_width=640, context=128, norm_epsilon=1e-5),
    data=DataConfig(vocabulary=4096),
)
