# SPDX-License-Identifier: Apache-2.0
"""Working precision: float32 at least, and back to the dtype that came in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normpre_optax.linalg.precision import in_working_dtype, working_dtype


@pytest.mark.parametrize(
    ("stored", "working"),
    [(jnp.bfloat16, jnp.float32), (jnp.float16, jnp.float32), (jnp.float32, jnp.float32), (np.float64, np.float64)],
)
def test_working_dtype(stored, working):
    with jax.enable_x64(True):
        assert working_dtype(stored) == working


def test_half_precision_is_lifted_before_and_rounded_after():
    seen = []

    def f(x, y):
        seen.extend([x.dtype, y.dtype])
        return x + y

    out = in_working_dtype(f)(jnp.ones(3, jnp.bfloat16), jnp.ones(3, jnp.float16))
    assert seen == [jnp.float32, jnp.float32]
    assert out.dtype == jnp.bfloat16
