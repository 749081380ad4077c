# SPDX-License-Identifier: Apache-2.0
"""Tests; the package makes `tests.reference` importable."""
