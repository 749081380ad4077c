# SPDX-License-Identifier: Apache-2.0
"""How much code a reader meets: the functions of the package that run when NormPre-G's update is traced."""

import os
import sys

import jax
import jax.numpy as jnp
import pytest

import normpre_optax as npo

PACKAGE = os.path.dirname(npo.__file__)
PARAMS = {"up": {"kernel": jnp.ones((4, 8)), "bias": jnp.ones(8)}, "down": {"kernel": jnp.ones((8, 4))}}
ANONYMOUS = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<lambda>")


def traced(factory):
    """(code objects, largest number of frames of the package above a matrix product) of one trace of ``update``."""
    entered, deepest = set(), 0
    jax.clear_caches()
    tx = factory(1e-3)
    state = jax.eval_shape(tx.init, PARAMS)

    def profile(frame, event, _):
        nonlocal deepest
        if event != "call":
            return
        own = frame.f_code.co_filename.startswith(PACKAGE)
        if own:
            entered.add(frame.f_code)
        if frame.f_code.co_name == "product" and own:
            depth = 0
            while frame is not None:
                depth += frame.f_code.co_filename.startswith(PACKAGE) and frame.f_code.co_name not in ANONYMOUS
                frame = frame.f_back
            deepest = max(deepest, depth)

    sys.setprofile(profile)
    try:
        jax.make_jaxpr(tx.update)(PARAMS, state, PARAMS)
    finally:
        sys.setprofile(None)
    return entered, deepest


@pytest.mark.parametrize(("factory", "functions", "files", "frames"), [(npo.normpre_g, 61, 12, 15)])
def test_the_update_is_traced_through_few_functions(factory, functions, files, frames):
    """What is reached; optax.contrib.muon has 6 functions, 1 file and 6 frames. ``pytest -s`` prints the numbers."""
    entered, deepest = traced(factory)
    named = [code for code in entered if code.co_name not in ANONYMOUS]
    print(f"{len(named)} functions ({len(entered)} with comprehensions and lambdas), ", end="")
    print(f"{len({code.co_filename for code in entered})} files, {deepest} frames above a product")
    assert len(named) <= functions, sorted(f"{os.path.relpath(c.co_filename, PACKAGE)}:{c.co_name}" for c in named)
    assert len({code.co_filename for code in entered}) <= files
    assert deepest <= frames
