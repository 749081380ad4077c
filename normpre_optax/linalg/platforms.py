# SPDX-License-Identifier: Apache-2.0
"""The platform that a program is traced for: "cpu", "tpu" or "gpu"."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer

# The platform inside of `on`. It is part of the key of jax's caches, so programs of two
# platforms are never mixed up.
_platform = jax.make_user_context("")


def platform() -> str:
    """Return the platform that is traced for, else that of the default backend.

    The surrounding ``by_platform`` or ``on`` says which one is traced for. Any other
    accelerator than a TPU counts as "gpu".
    """
    name = _platform.value or jax.default_backend()
    if name in ("cpu", "tpu"):
        return name
    return "gpu"


def on(name: str, f: Callable, *args: Any) -> Any:
    """Return ``f(*args)``, traced for one platform.

    Example:
        >>> from normpre_optax.linalg.platforms import on, platform
        >>> on("tpu", platform)
        'tpu'
    """
    with _platform(name):
        return f(*args)


def by_platform(f: Callable, *args: Any) -> Callable:
    """Return ``f`` for these arguments, traced once per platform.

    Inside, ``platform()`` says which one. A jitted program is thus right for every
    platform it may be lowered for. Outside of jit the arrays decide. Inside of another
    ``by_platform``, this is ``f``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.platforms import by_platform, platform
        >>> f, x = lambda x: x * (2 if platform() == "cpu" else 3), jnp.ones(2)
        >>> print(by_platform(f, x)(x))
        [2. 2.]
    """
    arrays = [x for x in jax.tree.leaves(args) if isinstance(x, jax.Array)]
    if _platform.value or not arrays:
        return f
    if any(isinstance(x, Tracer) for x in arrays):
        return functools.partial(
            jax.lax.platform_dependent,
            cpu=functools.partial(on, "cpu", f),
            tpu=functools.partial(on, "tpu", f),
            default=functools.partial(on, "gpu", f),
        )
    # All arrays of a computation are on one platform.
    device = next(iter(arrays[0].devices()))
    return functools.partial(on, device.platform, f)
