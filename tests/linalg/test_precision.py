# SPDX-License-Identifier: Apache-2.0
"""Dtypes of products and sums, and the platform that a program is traced for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normpre_optax.linalg.precision import (
    by_platform,
    exact_product,
    inverse_root,
    on,
    platform,
    product,
)
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
        eqn = the_product(
            functools.partial(on, where, functools.partial(product, dtype=operand)),
            x,
            x,
        )
        # XLA's CPU backend lacks half-precision products with float32 sums; operands
        # are rounded and converted back.
        half = operand in (jnp.bfloat16, jnp.float16) and where != "cpu"
        assert eqn.invars[0].aval.dtype == (operand if half else jnp.float32)
        assert eqn.params["preferred_element_type"] == jnp.float32
        assert eqn.params["precision"] == (
            None if operand is None or half else HIGHEST
        )  # None: the usual product
    with jax.default_matmul_precision("highest"):
        assert (
            the_product(functools.partial(on, where, product), x, x).params["precision"]
            == HIGHEST
        )


def test_an_exact_product_has_the_precision_of_its_operands(x64):
    with jax.default_matmul_precision("bfloat16"):
        for dtype in (jnp.float32, jnp.float64):
            eqn = the_product(exact_product, *[jnp.ones((2, 3, 3), dtype)] * 2)
            assert eqn.params["precision"] == HIGHEST
            assert [v.aval.dtype for v in (*eqn.invars, *eqn.outvars)] == [dtype] * 3


@pytest.mark.parametrize("operand", [jnp.bfloat16, jnp.float16])
def test_operands_are_rounded_and_sums_are_not(operand):
    """Also in a compiled program, which could leave out the rounding."""
    a, b = (
        jnp.asarray(np.random.default_rng(i).standard_normal((40, 40)), jnp.float32)
        for i in range(2)
    )
    got = np.asarray(jax.jit(lambda a, b: product(a, b, operand))(a, b), np.float64)
    rounded = np.float64(a.astype(operand)) @ np.float64(b.astype(operand))
    np.testing.assert_allclose(
        got, rounded, atol=40 * 2e-7 * 10
    )  # forty roundings in float32 of sums up to ten
    assert np.abs(got - np.float64(a) @ np.float64(b)).max() > 1e-3


def test_the_inverse_root_of_zero_is_zero_and_nan_stays():
    found = inverse_root(jnp.array([4.0, 0.0, -1e-20, jnp.nan, 1e-30]))
    np.testing.assert_allclose(found, [0.5, 0, 0, np.nan, 1e15], rtol=1e-6)


def choice(x):
    """Three branches, and three of them inside each."""

    def number():
        return {"cpu": 1, "tpu": 20, "gpu": 300}[platform()]

    return by_platform(lambda x: by_platform(lambda y: y + number(), x)(x), x)(x)


@pytest.mark.every_platform
def test_a_traced_platform_takes_its_branches_at_every_depth():
    x, expected = jnp.zeros(()), {"cpu": 1, "tpu": 20, "gpu": 300}
    assert {name: int(on(name, choice, x)) for name in expected} == expected
    # One jitted function: what was compiled for one platform is not used for another,
    # nor for none.
    program = jax.jit(choice)
    for _ in range(2):
        assert {name: int(on(name, program, x)) for name in expected} == expected
        assert int(program(x)) == 1
    # Without a platform all three are in the program, and nested choices are made once:
    # no combinations.
    text = str(jax.make_jaxpr(choice)(x))
    assert [text.count(f"{number:.1f}") for number in expected.values()] == [1, 1, 1]
    assert text.count("= add") == 3
    with pytest.raises(ZeroDivisionError):
        on("tpu", lambda: 1 / 0)
    assert int(choice(x)) == 1  # the platform holds for the call only
    # Without arrays, and with unknown backends.
    assert by_platform(platform)() == platform()
    assert on("rocm", platform) == "gpu"
    assert on("gpu", lambda x: by_platform(lambda y: platform(), x)(x), x) == "gpu"
