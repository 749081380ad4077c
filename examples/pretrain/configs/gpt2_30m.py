# SPDX-License-Identifier: Apache-2.0
"""A GPT-2 of thirty million parameters on all Python source that is installed, for one GPU.

python -m examples.pretrain --config gpt2_30m
"""

from ..config import Config, DataConfig, ModelConfig

config = Config(
    config="gpt2_30m",
    steps=5000,
    batch_size=64,
    learning_rate=1e-3,
    warmup_steps=500,
    evaluate_every=500,
    checkpoint_every=500,
    model=ModelConfig(family="gpt2", layers=8, width=512, heads=8, mlp_width=2048, context=512, norm_epsilon=1e-5),
    data=DataConfig(vocabulary=8192, include_site_packages=True),
)
