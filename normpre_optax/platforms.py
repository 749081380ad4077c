# SPDX-License-Identifier: Apache-2.0
"""What depends on the device, decided when a program is lowered: one traced program serves all of them.

``by_platform`` is the one place through which anything of the library asks where it runs:

- ``transforms.batches``: matrices in turn (CPU), a few parameters at a time (TPU), stacks (GPU);
- ``meshes.exchange``: a device's matrices in turn (CPU), or as one stack; what travels is rounded (TPU);
- ``meshes.run``: what all devices have whole is shared out, or treated by each (TPU);
- ``transforms.wrappers``: rows or columns by a branch, over parts (GPU), or both and a choice (TPU);
- ``transforms.precondition``: the sketch reads Psi in bfloat16 (GPU);
- ``linalg.rows``: doubtful rows measured again (CPU);
- ``linalg.spectrum``: a doubtful size measured again (CPU);
- ``linalg.newton_schulz``: half of a symmetric product (CPU), no Gram form for steep tables elsewhere;
- ``linalg.orthonormal`` and ``linalg.lapack``: no batched factorisations on a CPU, where they can hang;
- ``linalg.precision``: half-precision operands widened on a CPU.

The measurements behind each stand in docs/performance.md.
"""

from collections.abc import Callable
from typing import Any

import jax

# Part of what jax keys its caches by, so that what was traced for one device is not taken for another.
_here = jax.make_user_context("")
_KINDS = ("cpu", "tpu", "gpu")


def by_platform(*args: Any, cpu: Callable, default: Callable, tpu: Callable | None = None) -> Any:
    """``cpu(*args)``, ``tpu(*args)`` or ``default(*args)``, whichever the program is lowered for.

    Inside one of them further choices are made at once: no combinations are traced.

    Args:
        *args: trees of arrays.
        cpu: for CPUs.
        default: for GPUs and everything else.
        tpu: for TPUs; ``default`` if None.

    Returns:
        What the function returns; all of them must return the same shapes and dtypes.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.platforms import by_platform
        >>> print(by_platform(jnp.ones(2), cpu=lambda x: x + 1, default=lambda x: x - 1))
        [2. 2.]
    """
    chosen = {"cpu": cpu, "tpu": tpu or default, "gpu": default}.get(_here.value)
    if chosen is not None:
        return chosen(*args)
    if tpu is None:  # default may be either of two: what it asks in turn stays open
        return jax.lax.platform_dependent(*args, cpu=on("cpu", cpu), default=default)
    return jax.lax.platform_dependent(*args, cpu=on("cpu", cpu), tpu=on("tpu", tpu), default=on("gpu", default))


def on(kind: str, f: Callable) -> Callable:
    """``f`` traced as for a CPU, a TPU or a GPU: ``"cpu"``, ``"tpu"``, ``"gpu"``.

    Example:
        >>> from normpre_optax.platforms import by_platform, on
        >>> on("tpu", lambda: by_platform(cpu=lambda: "mine", default=lambda: "theirs"))()
        'theirs'
    """
    if kind not in _KINDS:
        raise ValueError(f"{kind=} is not one of {_KINDS}")

    def there(*args: Any, **options: Any) -> Any:
        with _here(kind):
            return f(*args, **options)

    return there
