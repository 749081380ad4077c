# SPDX-License-Identifier: Apache-2.0
"""The first run: a language model of Python in a few minutes on two CPU cores, text and tokenizer included.

    python -m examples.pretrain

658,048 parameters see 1.64 million tokens of the standard library's source. Validation loss measured with Python
3.11.7, jax 0.10.2, seed 0, in nats per token: 3.600 with ``normpre_g``, 3.766 with ``--optimizer adamw``, 3.502 with
the setting that docs/get_started.md recommends, from 7.640 untrained. The corpus is the interpreter's own, so another
Python gives other numbers.
The sample has the layout and the idioms of Python, and makes no sense.
"""

from ..config import Config

config = Config(config="first_run")
