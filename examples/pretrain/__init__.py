# SPDX-License-Identifier: Apache-2.0
"""Pretrain a decoder-only language model: ``python -m examples.pretrain``.

One file per concern, in the order of a run: ``config`` and ``configs/`` (what is asked for), ``prepare/`` (text to
token files), ``data`` (token files to batches), ``models/`` (tokens to logits), ``optimizers`` (the only file here
that knows ``normpre_optax``), ``train`` (the step and the loop), ``evaluate`` and ``generate`` (what the model has
learned), ``checkpoint`` and ``logs`` (what stays on disk), ``main`` (the command line).
"""
