# SPDX-License-Identifier: Apache-2.0
"""Working precision: float32 at least, and back to the dtype that came in."""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from normpre_optax.linalg.precision import exact_product, in_working_dtype, product, working_dtype


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


def products(jaxpr):
    """Every product of a program, inside its conditionals too."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from products(inner)


@pytest.mark.every_platform
@pytest.mark.parametrize("operand", [None, jnp.bfloat16, jnp.float16, jnp.float32])
def test_every_product_sums_in_float32_and_is_true_float32_where_that_is_asked_for(operand):
    x = jnp.ones((3, 3))
    found = list(products(jax.make_jaxpr(lambda a, b: product(a, b, operand))(x, x).jaxpr))
    halves = [eqn for eqn in found if eqn.invars[0].aval.dtype == operand != jnp.float32]
    wholes = [eqn for eqn in found if eqn.invars[0].aval.dtype == jnp.float32]
    assert len(halves) == (operand in (jnp.bfloat16, jnp.float16))  # what an accelerator is given; the CPU lifts them
    assert len(wholes) == 1
    assert len(found) == len(halves) + len(wholes)
    for eqn in found:
        assert eqn.params["preferred_element_type"] == jnp.float32
    highest = None if operand is None else (jax.lax.Precision.HIGHEST,) * 2  # None: as the device usually does
    assert [eqn.params["precision"] for eqn in wholes] == [highest]
    assert all(eqn.params["precision"] is None for eqn in halves)


def test_the_usual_product_follows_the_default_matmul_precision():
    x = jnp.ones((3, 3))
    with jax.default_matmul_precision("highest"):
        (eqn,) = products(jax.make_jaxpr(product)(x, x).jaxpr)
    assert set(eqn.params["precision"]) == {jax.lax.Precision.HIGHEST}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_an_exact_product_is_in_the_operands_own_precision(x64, dtype):
    """On every device: it has one branch, and a default that is lower does not reach it."""
    x = jnp.ones((2, 3, 3), dtype)
    with jax.default_matmul_precision("bfloat16"):
        (eqn,) = products(jax.make_jaxpr(exact_product)(x, x).jaxpr)
    assert set(eqn.params["precision"]) == {jax.lax.Precision.HIGHEST}
    assert [v.aval.dtype for v in (*eqn.invars, *eqn.outvars)] == [dtype] * 3


@pytest.mark.parametrize("operand", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("compiled", [True, False])
def test_operands_are_rounded_and_sums_are_not(operand, compiled):
    a, b = (jnp.asarray(np.random.default_rng(i).standard_normal((40, 40)), jnp.float32) for i in range(2))
    f = lambda a, b: product(a, b, operand)  # noqa: E731
    got = np.asarray((jax.jit(f) if compiled else f)(a, b), np.float64)
    rounded = np.float64(a.astype(operand)) @ np.float64(b.astype(operand))
    np.testing.assert_allclose(got, rounded, atol=40 * 2e-7 * 10)  # forty roundings in float32 of sums up to ten
    assert np.abs(got - np.float64(a) @ np.float64(b)).max() > 1e-3
