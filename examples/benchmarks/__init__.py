# SPDX-License-Identifier: Apache-2.0
"""Measurements: ``python -m examples.benchmarks.optimizer_step --help``."""
