# SPDX-License-Identifier: Apache-2.0
"""What the rules decide, as tables from path to dims."""

from normpre_optax.parameters.rules import resolve


def chosen(params, matrix_dims=None):
    return {path: choice.dims for path, choice in resolve(params, matrix_dims).items()}


def under(prefix, table):
    return {f"{prefix}/{path}": dims for path, dims in table.items()}
