# SPDX-License-Identifier: Apache-2.0
"""Rules for known layouts, for ``matrix_dims=``. All other parameters follow the
default rule.

Example:
    >>> import jax.numpy as jnp
    >>> from normpre_optax import explain, presets
    >>> params = {"conv_0": {"kernel": jnp.zeros((3, 3, 8, 16))}}
    >>> print(explain(params, matrix_dims=presets.convolutions).splitlines()[1])
    conv_0/kernel  (3, 3, 8, 16)  matrix     1 x (16 x 72)  given by matrix_dims
"""

from __future__ import annotations

from normpre_optax.parameters.dims import MatrixDims
from normpre_optax.parameters.experts import (
    EXPERTS_IN_FRONT,
    is_stack_of_experts,
    why_not_in_order,
)
from normpre_optax.parameters.rules import default_matrix_dims
from normpre_optax.parameters.tree import Shaped


def experts_in_front(path: str, leaf: Shaped) -> MatrixDims | None:
    """Rule for experts stored as (expert, in, out): gpt-oss, most stacked experts.

    Layer axes may be in front.

    Args:
        path: the "/"-joined path of the parameter.
        leaf: an object with ``shape``, ``ndim`` and ``dtype``.

    Returns:
        ``MatrixDims``, or None for AdamW.

    Raises:
        ValueError: if neither this rule nor the default rule covers the parameter.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import presets
        >>> presets.experts_in_front("mlp/experts/down_proj", jnp.zeros((4, 32, 8)))
        MatrixDims(inputs=-2, outputs=-1, output_blocks=1)
    """
    try:
        return default_matrix_dims(path, leaf)
    except ValueError:
        if leaf.ndim < 3 or not is_stack_of_experts(path, leaf):
            raise
        _check_order("experts_in_front", path, leaf)
        return EXPERTS_IN_FRONT


def _check_order(preset: str, path: str, leaf: Shaped) -> None:
    """Raise a ValueError if experts are (expert, out, in).

    Hugging Face stores some models so, under the same names.
    """
    why = why_not_in_order(path, leaf, EXPERTS_IN_FRONT)
    if why:
        raise ValueError(f"presets.{preset}: {why}") from None


def maxtext(path: str, leaf: Shaped) -> MatrixDims | None:
    """Rule for MaxText: layers scanned along axis 1.

    Experts are in front of them, and MLA has projections from latents.

    Args:
        path: the "/"-joined path of the parameter.
        leaf: an object with ``shape``, ``ndim`` and ``dtype``.

    Returns:
        ``MatrixDims``, or None for AdamW.

    Raises:
        ValueError: if neither this rule nor the default rule covers the parameter.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import presets
        >>> presets.maxtext(
        ...     "decoder/layers/mlp/wi_0/kernel", jnp.zeros((8, 2, 32))
        ... )  # (in, layer, out)
        MatrixDims(inputs=0, outputs=2, output_blocks=1)
    """
    module, last = ["", *path.split("/")][-2:]
    if last in ("wi_0", "wi_1", "wo"):  # (expert, layer, in, out)
        _check_order("maxtext", path, leaf)
        return EXPERTS_IN_FRONT
    if last != "kernel" or module == "gate" or leaf.ndim < 3:
        return default_matrix_dims(path, leaf)
    if "layers/" in path and leaf.ndim == 3:  # not layers_0/, which is a single layer
        return MatrixDims(inputs=0, outputs=2)
    if module == "out":  # (heads, layer, size, d)
        return MatrixDims(inputs=(0, leaf.ndim - 2), outputs=-1)
    return MatrixDims(inputs=0, outputs=(-2, -1))  # (d, layer, heads, size)


def gemma(path: str, leaf: Shaped) -> MatrixDims | None:
    """Rule for the einsums of Gemma 2 and 3.

    Gemma 1 stores ``gating_einsum`` as (2, d, hidden): inputs=1, outputs=2.

    Args:
        path: the "/"-joined path of the parameter.
        leaf: an object with ``shape``, ``ndim`` and ``dtype``.

    Returns:
        ``MatrixDims``, or None for AdamW.

    Raises:
        ValueError: if neither this rule nor the default rule covers the parameter.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import presets
        >>> presets.gemma(
        ...     "layer_0/attn/q_einsum/w", jnp.zeros((2, 16, 8))
        ... )  # (heads, d, size)
        MatrixDims(inputs=-2, outputs=(-3, -1), output_blocks=1)
    """
    einsums = {
        "q_einsum/w": MatrixDims(inputs=-2, outputs=(-3, -1)),  # (heads, d, size)
        "kv_einsum/w": MatrixDims(inputs=-2, outputs=(-3, -1)),  # (2, heads, d, size)
        "gating_einsum/w": MatrixDims(inputs=-1, outputs=-2),  # (2, hidden, d)
    }
    module_and_name = "/".join(path.split("/")[-2:])
    if module_and_name in einsums:
        return einsums[module_and_name]
    return default_matrix_dims(path, leaf)


def convolutions(path: str, leaf: Shaped) -> MatrixDims | None:
    """Rule for convolutions, one matrix with all taps.

    A weight is (out, in, taps), a kernel (taps, in, out).

    Args:
        path: the "/"-joined path of the parameter.
        leaf: an object with ``shape``, ``ndim`` and ``dtype``.

    Returns:
        ``MatrixDims``, or None for AdamW.

    Raises:
        ValueError: if neither this rule nor the default rule covers the parameter.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import presets
        >>> presets.convolutions("encoder/conv1/kernel", jnp.zeros((3, 80, 768)))
        MatrixDims(inputs=(0, 1), outputs=2, output_blocks=1)
    """
    if "conv" in path.lower() and leaf.ndim > 2 and min(leaf.shape) > 1:
        first, *others, last = range(leaf.ndim)
        if path.endswith("weight"):
            return MatrixDims(inputs=(*others, last), outputs=first)
        return MatrixDims(inputs=(first, *others), outputs=last)
    return default_matrix_dims(path, leaf)
