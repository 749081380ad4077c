# SPDX-License-Identifier: Apache-2.0
"""Functions of arrays: rows, Newton-Schulz, sketch, products, platforms, batches."""
