# SPDX-License-Identifier: Apache-2.0
"""GPT-2 Small (124M) on all Python source that is installed, with no download: for one GPU and half an hour.

    python -m examples.pretrain compare --config gpt2_small_python

The model of ``gpt2_small`` on a corpus that is made on the spot: a vocabulary as large as GPT-2's, trained on the
standard library and every installed package. 131 million tokens an arm. Not measured yet: there was no GPU at hand.
"""

from ..config import Config, DataConfig
from . import gpt2_small

config = Config(
    config="gpt2_small_python",
    steps=1_000,
    batch_size=128,
    micro_batch=32,
    learning_rate=1e-3,
    warmup_steps=100,
    evaluate_every=100,
    checkpoint_every=500,
    model=gpt2_small.config.model,
    data=DataConfig(include_site_packages=True, vocabulary=50_257, validation_tokens=524_288),
)
