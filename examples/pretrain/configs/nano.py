# SPDX-License-Identifier: Apache-2.0
"""The smallest model that tells optimizers apart: about a minute on one CPU core.

    python -m examples.pretrain compare --config nano --learning-rates 2e-3,4e-3,8e-3 --seeds 3

Three GPT-2 blocks of width 64 (147,456 hidden weights) read 1.5 million bytes of Python source, tokens being bytes.
"""

from ..config import Config, DataConfig, ModelConfig

config = Config(
    config="nano",
    steps=1_500,
    batch_size=16,
    learning_rate=4e-3,
    warmup_steps=100,
    evaluate_every=250,
    checkpoint_every=500,
    log_every=50,
    sample_tokens=0,
    model=ModelConfig(family="gpt2", layers=3, width=64, heads=4, mlp_width=256, context=64, norm_epsilon=1e-5),
    data=DataConfig(vocabulary=257),
)
