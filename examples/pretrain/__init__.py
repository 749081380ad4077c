# SPDX-License-Identifier: Apache-2.0
"""Pretrain decoder-only language models, and compare optimizers on them.

The command line is ``python -m examples.pretrain``. In the order of a run:

- ``main``: the command line;
- ``config``, ``configs``: options and named configurations; ``names`` of optimizers
  with settings, ``checks`` of options, ``flat`` configurations as they are stored;
- ``run``: one run in its folder;
- ``prepare/``: text to token files; ``data``: token files to batches;
- ``models/``: tokens to logits; export to Hugging Face;
- ``optimizers``: the only file that imports ``normpre_optax``;
- ``train``: the step and the loop; ``evaluate``: the loss;
- ``checkpoint``, ``logs``: files of a run;
- ``commands``: evaluate, generate, export;
- ``compare/``: many runs and their report.

``mesh`` shards arrays over devices, ``cluster`` is for processes that train together,
``processes`` has signals and locks.
"""
