# SPDX-License-Identifier: Apache-2.0
"""How much code a reader meets: the functions of the package that run when NormPre-G's update is traced."""

import os
import sys

import jax
import jax.numpy as jnp

import normpre_optax as npo

PACKAGE = os.path.dirname(npo.__file__)
ANONYMOUS = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<lambda>")


def test_the_update_is_traced_through_few_functions():
    """What is reached; optax.contrib.muon has 6 functions, 1 file and 6 frames."""
    params = {"up": {"kernel": jnp.ones((4, 8)), "bias": jnp.ones(8)}, "down": {"kernel": jnp.ones((8, 4))}}
    entered, deepest = set(), 0  # code objects; the largest number of frames of the package above a matrix product
    jax.clear_caches()
    tx = npo.normpre_g(1e-3)
    state = jax.eval_shape(tx.init, params)

    def profile(frame, event, _):
        nonlocal deepest
        if event != "call" or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        entered.add(frame.f_code)
        if frame.f_code.co_name == "product":
            depth = 0
            while frame is not None:
                depth += frame.f_code.co_filename.startswith(PACKAGE) and frame.f_code.co_name not in ANONYMOUS
                frame = frame.f_back
            deepest = max(deepest, depth)

    sys.setprofile(profile)
    try:
        jax.make_jaxpr(tx.update)(params, state, params)
    finally:
        sys.setprofile(None)
    named = [code for code in entered if code.co_name not in ANONYMOUS]
    assert 0 < len(named) <= 61, sorted(f"{os.path.relpath(c.co_filename, PACKAGE)}:{c.co_name}" for c in named)
    assert len({code.co_filename for code in entered}) <= 12
    assert 0 < deepest <= 15
