# SPDX-License-Identifier: Apache-2.0
"""Tests of the transformations on stacks of matrices, each alone."""
