# SPDX-License-Identifier: Apache-2.0
"""MLPs that are read with inputs and outputs exchanged, as their names and widths show.

axlearn stores a ``weight`` as (in, out), PyTorch and Equinox as (out, in).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from normpre_optax.parameters import vocabulary as v
from normpre_optax.parameters.dims import MatrixDims, split_axes
from normpre_optax.parameters.feed_forward import (
    Part,
    is_transposed,
    module_and_name,
    part_of,
    sizes_as_wide,
)
from normpre_optax.parameters.roles import is_inside_layer, matrix_shapes
from normpre_optax.parameters.spec import Assignment, ParamSpec
from normpre_optax.parameters.unnamed_tables import TABLES
from normpre_optax.parameters.vocabulary import words

_MLP = {"mlp", "ffn", "ff", "feedforward", "feed"} | v.EXPERTS


def transposed_layers(found: Assignment) -> list[ParamSpec]:
    """Return the first layers of MLPs whose outputs are as wide as the model.

    Their inputs should be. All layers of the MLP have to show the same, and its hidden
    layer has to be wider than the model, unless it is an expert: an adapter has an "up"
    projection to the width of the model. A bias that fits the outputs ends the doubt.
    So does a tree without layers and tables, which may be an autoencoder.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.parameters.rules import assign
        >>> ffn = {"linear1": jnp.zeros((8, 32)), "linear2": jnp.zeros((32, 8))}
        >>> layer = {
        ...     "norm": jnp.zeros(8),
        ...     "ffn": {k: {"weight": x} for k, x in ffn.items()},
        ... }
        >>> [spec.path for spec in transposed_layers(assign({"layer_0": layer}))]
        ['layer_0/ffn/linear1/weight']
    """
    shapes = matrix_shapes(found)
    modules: dict[str, dict[str, str]] = defaultdict(dict)
    for path in shapes:
        module, name = module_and_name(path)
        modules[module][path] = name
    sizes = sizes_as_wide((spec.kind, spec.shape) for spec in found.values())
    has_table = any(spec.kind in TABLES for spec in found.values())
    doubtful = []
    for module, names in modules.items():
        if not (has_table or _is_in_layer(module)):
            continue
        parts: dict[str, Part] = {}
        for path in names:
            parts[path] = part_of(path, names.values())
        if _is_exchanged(module, parts, shapes, sizes):
            firsts = [path for path, part in parts.items() if part == "first"]
            doubtful += [path for path in firsts if not _fits_bias(path, found, shapes)]
    return [found[path] for path in doubtful]


def _is_in_layer(module: str) -> bool:
    return _is_mlp(module) or is_inside_layer(f"{module}/w")


def _is_mlp(module: str) -> bool:
    return not _MLP.isdisjoint(words(module))


def _is_exchanged(
    module: str,
    parts: Mapping[str, Part],
    shapes: Mapping[str, tuple[int, int]],
    sizes: Counter[int],
) -> bool:
    """Return whether all layers of an MLP have inputs and outputs exchanged."""
    firsts = [shapes[path] for path, part in parts.items() if part == "first"]
    seconds = [shapes[path] for path, part in parts.items() if part == "second"]
    # The other layer may be what another "up" or "w1" of a model lacks.
    if not firsts or not (seconds or _is_mlp(module)):
        return False
    is_expert = not v.EXPERTS.isdisjoint(words(module))
    for outputs, inputs in firsts:
        if not is_transposed("first", inputs, outputs, sizes):
            return False
        if inputs < outputs and not is_expert:
            return False
    hidden = {inputs for _, inputs in firsts}
    for outputs, inputs in seconds:
        fits = outputs in hidden or 2 * outputs in hidden
        if not fits or not is_transposed("second", inputs, outputs, sizes):
            return False
    return True


def _fits_bias(
    path: str, found: Assignment, shapes: Mapping[str, tuple[int, int]]
) -> bool:
    """Return whether a bias beside a matrix has as many elements as its outputs."""
    above = path.rpartition("/")[0]
    outputs, _ = shapes[path]
    biases = [found.get(f"{above}/{name}") for name in ("bias", "b")]
    return any(bias is not None and bias.shape[-1:] == (outputs,) for bias in biases)


def exchanged_dims(spec: ParamSpec) -> tuple[str, str, MatrixDims]:
    """Return the order in which a matrix is read, the other one, and its axes."""
    assert spec.dims is not None
    _, outputs, inputs = split_axes(len(spec.shape), spec.dims)
    order = ["(in, out)", "(out, in)"]
    if inputs > outputs:
        order.reverse()
    ndim = len(spec.shape)
    dims = MatrixDims(
        inputs=tuple(axis - ndim for axis in outputs),
        outputs=tuple(axis - ndim for axis in inputs),
    )
    return order[0], order[1], dims
