# SPDX-License-Identifier: Apache-2.0
"""Arguments that are refused where they are given, by name and with the way out."""

import jax
import jax.numpy as jnp
import optax


def static_int(name: str, value, least: int) -> int:
    """``value`` if it is an int of at least ``least`` that is known when the program is traced.

    Example:
        >>> from normpre_optax.transforms.checks import static_int
        >>> static_int("rank", 32, least=1)
        32
    """
    if isinstance(value, jax.Array):
        raise TypeError(
            f"{name} shapes the computation and cannot be traced, got {value}. Under optax.inject_hyperparams name it "
            f"in static_args, for instance static_args={{{name!r}}} or what normpre_optax.STATIC_ARGS lists."
        )
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return value


def float_dtype(name: str, dtype: jax.typing.DTypeLike | None) -> None:
    """Refuse what is no real floating-point dtype; None passes.

    Example:
        >>> from normpre_optax.transforms.checks import float_dtype
        >>> float_dtype("mu_dtype", "int8")
        Traceback (most recent call last):
        ...
        TypeError: mu_dtype must be a floating-point dtype such as jnp.bfloat16, or None; got 'int8'
    """
    try:
        good = dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        good = False
    if not good:
        raise TypeError(f"{name} must be a floating-point dtype such as jnp.bfloat16, or None; got {dtype!r}")


def number(name: str, value) -> None:
    """Refuse what is no number and no array of one, such as None or a string.

    Example:
        >>> from normpre_optax.transforms.checks import number
        >>> number("weight_decay", None)
        Traceback (most recent call last):
        ...
        TypeError: weight_decay must be a number, got None
    """
    if value is None or isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, got {value!r}")


def check_rms(rms) -> None:
    """Refuse what is no root mean square; None passes.

    Example:
        >>> from normpre_optax.transforms.checks import check_rms
        >>> check_rms(0)
        Traceback (most recent call last):
        ...
        ValueError: rms must be positive, or None for no scaling; got 0
    """
    if isinstance(rms, int | float) and not rms > 0:
        raise ValueError(f"rms must be positive, or None for no scaling; got {rms}")


def transformation(name: str, value) -> None:
    """Refuse what is no optax transformation.

    Example:
        >>> from normpre_optax.transforms.checks import transformation
        >>> transformation("precondition", abs)
        Traceback (most recent call last):
        ...
        TypeError: precondition must be an optax.GradientTransformation, got <built-in function abs>; \
optax.stateless makes one of a function
    """
    if not isinstance(value, optax.GradientTransformation):
        raise TypeError(
            f"{name} must be an optax.GradientTransformation, got {value!r}; optax.stateless makes one of a function"
        )


def same_trees(updates, params) -> None:
    """Refuse gradients whose tree or shapes are not the parameters'.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.transforms.checks import same_trees
        >>> same_trees({"w": jnp.ones((3, 2))}, {"w": jnp.ones((2, 3))})
        Traceback (most recent call last):
        ...
        ValueError: the gradient of parameter 'w' has shape (3, 2), the parameter (2, 3)
    """
    gradient_shapes, shapes = (dict(_shapes(tree)) for tree in (updates, params))
    odd = sorted(set(gradient_shapes) ^ set(shapes))
    if odd:
        raise ValueError(
            f"gradients and parameters are different trees: only one of them has {odd[0]!r}. The order is "
            "update(grads, state, params)"
        )
    for path, shape in shapes.items():
        if gradient_shapes[path] != shape:
            raise ValueError(
                f"the gradient of parameter {path!r} has shape {gradient_shapes[path]}, the parameter {shape}"
            )


def _shapes(tree):
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path, simple=True, separator="/"), jnp.shape(leaf)
