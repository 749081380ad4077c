# SPDX-License-Identifier: Apache-2.0
"""The platform that a program is traced for."""

import jax
import jax.numpy as jnp
import pytest

from normpre_optax.linalg.platforms import by_platform, on, platform


def choice(x):
    """Three branches, and three of them inside each."""

    def number():
        return {"cpu": 1, "tpu": 20, "gpu": 300}[platform()]

    def inner(x):
        return by_platform(lambda y: y + number(), x)(x)

    return by_platform(inner, x)(x)


@pytest.mark.every_platform
def test_a_traced_platform_takes_its_branches_at_every_depth():
    x = jnp.zeros(())
    expected = {"cpu": 1, "tpu": 20, "gpu": 300}
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

    def inner(x):
        return by_platform(lambda y: platform(), x)(x)

    assert on("gpu", inner, x) == "gpu"
