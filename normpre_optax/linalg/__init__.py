# SPDX-License-Identifier: Apache-2.0
"""Functions of arrays: row norms, Newton-Schulz, the randomized sketch, products and
platforms.
"""
