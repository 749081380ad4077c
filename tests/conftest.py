# SPDX-License-Identifier: Apache-2.0
"""Settings and fixtures of the whole test suite."""

import os

# Eight virtual CPU devices, for the tests on meshes; everything else runs on the first one. Set before JAX wakes.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import pytest
from hypothesis import HealthCheck, settings

# Examples are few because a new shape compiles, and deterministic so that a red run can be repeated.
settings.register_profile(
    "normpre", max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(  # pytest --hypothesis-profile=thorough
    "thorough", max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("normpre")


def pytest_configure(config):
    config.addinivalue_line("markers", "parity: needs torch, the extra `parity`; CI installs it")


@pytest.fixture
def x64():
    """float64 arrays, and an error instead of every implicit mixture of dtypes."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        yield
