# SPDX-License-Identifier: Apache-2.0
"""Pretrain decoder-only language models, and compare optimizers on them: ``python -m examples.pretrain``.

One file per concern, in the order of a run: ``main`` (the command line), ``config`` and ``configs/`` (what is asked
for), ``prepare/`` (text to token files), ``data`` (token files to batches), ``models/`` (tokens to logits; to Hugging
Face), ``optimizers`` (the only file here that knows ``normpre_optax``), ``train`` (the step and the loop),
``health`` (spikes and divergence), ``evaluate`` and ``generate`` (what the model has learned), ``checkpoint`` and
``logs`` (what stays on disk), ``run`` (all of it, in one folder), ``commands`` (what one can do with a finished run).
With more than one device: ``mesh`` (where arrays live) and ``cluster`` (processes that train together).

Around runs: ``compare`` (many of them, matched), with ``variants`` and ``arms`` (what runs, and how) and
``comparison_report`` and ``plot_loss`` (tables and figures); ``throughput`` (arithmetic) and ``processes`` (signals,
locks).
"""
