# SPDX-License-Identifier: Apache-2.0
"""How much code a reader meets: the functions of the package that run when NormPre-G's update is traced."""

import jax
import jax.numpy as jnp

import normpre_optax as npo
from tests import cases


def test_the_update_is_traced_through_few_functions():
    """What is reached; optax.contrib.muon has 6 functions, 1 file and 6 frames above a matrix product."""
    params = {"up": {"kernel": jnp.ones((4, 8)), "bias": jnp.ones(8)}, "down": {"kernel": jnp.ones((8, 4))}}
    jax.clear_caches()
    tx = npo.normpre_g(1e-3)
    state = jax.eval_shape(tx.init, params)
    entered = cases.package_calls(lambda: jax.make_jaxpr(tx.update)(params, state, params))
    named = {code for code, _ in entered}
    assert 0 < len(named) <= 61, sorted(f"{code.co_filename}:{code.co_name}" for code in named)
    assert len({code.co_filename for code in named}) <= 12
    assert 0 < max(depth for code, depth in entered if code.co_name == "product") <= 15
