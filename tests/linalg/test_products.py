# SPDX-License-Identifier: Apache-2.0
"""Dtypes of products and sums."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normpre_optax.linalg.platforms import on
from normpre_optax.linalg.products import exact_product, inverse_root, product
from tests import cases

HIGHEST = (jax.lax.Precision.HIGHEST,) * 2


def the_product(f, *args):
    """The one product of a program, also inside its conditionals."""
    equations = cases.equations(jax.make_jaxpr(f)(*args).jaxpr)
    (eqn,) = (eqn for eqn in equations if eqn.primitive.name == "dot_general")
    return eqn


@pytest.mark.parametrize("where", ["cpu", "tpu", "gpu"])
def test_products_sum_in_float32_and_are_true_float32_on_request(where):
    x = jnp.ones((3, 3))
    for operand in (None, jnp.bfloat16, jnp.float16, jnp.float32):
        times = functools.partial(product, dtype=operand)
        eqn = the_product(functools.partial(on, where, times), x, x)
        # XLA's CPU backend lacks half-precision products with float32 sums; operands
        # are rounded and converted back.
        half = operand in (jnp.bfloat16, jnp.float16) and where != "cpu"
        usual = operand is None or half
        assert eqn.invars[0].aval.dtype == (operand if half else jnp.float32)
        assert eqn.params["preferred_element_type"] == jnp.float32
        assert eqn.params["precision"] == (None if usual else HIGHEST)
    with jax.default_matmul_precision("highest"):
        eqn = the_product(functools.partial(on, where, product), x, x)
        assert eqn.params["precision"] == HIGHEST


def test_an_exact_product_has_the_precision_of_its_operands(x64):
    with jax.default_matmul_precision("bfloat16"):
        for dtype in (jnp.float32, jnp.float64):
            eqn = the_product(exact_product, *[jnp.ones((2, 3, 3), dtype)] * 2)
            assert eqn.params["precision"] == HIGHEST
            assert [v.aval.dtype for v in (*eqn.invars, *eqn.outvars)] == [dtype] * 3


@pytest.mark.parametrize("operand", [jnp.bfloat16, jnp.float16])
def test_operands_are_rounded_and_sums_are_not(operand):
    """Also in a compiled program, which could leave out the rounding."""
    a = jnp.asarray(cases.gaussian((40, 40), 0), jnp.float32)
    b = jnp.asarray(cases.gaussian((40, 40), 1), jnp.float32)
    program = jax.jit(functools.partial(product, dtype=operand))
    got = np.asarray(program(a, b), np.float64)
    rounded = np.float64(a.astype(operand)) @ np.float64(b.astype(operand))
    # Forty roundings in float32 of sums up to ten.
    np.testing.assert_allclose(got, rounded, atol=40 * 2e-7 * 10)
    assert np.abs(got - np.float64(a) @ np.float64(b)).max() > 1e-3


def test_the_inverse_root_of_zero_is_zero_and_nan_stays():
    found = inverse_root(jnp.array([4.0, 0.0, -1e-20, jnp.nan, 1e-30]))
    np.testing.assert_allclose(found, [0.5, 0, 0, np.nan, 1e15], rtol=1e-6)
