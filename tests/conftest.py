# SPDX-License-Identifier: Apache-2.0
"""Settings and fixtures of the whole test suite."""

import gc
import os
import time
from importlib.metadata import version
from pathlib import Path

# Programs that were compiled once, by any worker, process or earlier run, are read back: most tests compile more than
# they compute. pytest's own cache folder keeps them; `pytest --cache-clear` removes them.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "d" / "compiled"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Eight virtual CPU devices, for the tests on meshes; everything else runs on the first one. And programs that compile
# three times faster, in one part instead of up to 32, without LLVM's optimisations and XLA's newer code for fusions:
# most tests compile more than they run. What stands in XLA_FLAGS goes before. Set before JAX wakes.
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", "")]
    + [
        f"--{flag}={value}"
        for flag, value in (
            ("xla_force_host_platform_device_count", "8"),
            ("xla_backend_optimization_level", "0"),
            ("xla_cpu_parallel_codegen_split_count", "1"),
            *(
                [("xla_cpu_use_fusion_emitters", "false")] if version("jaxlib") < "0.11" else []
            ),  # later ones stop at it
        )
        if flag not in os.environ.get("XLA_FLAGS", "")
    ]
)

import jax
import pytest
from hypothesis import HealthCheck, settings

from normpre_optax import platforms

# Tracing makes objects by the million: looking for cycles among them as often as usual is a tenth of the whole run.
gc.set_threshold(100_000, 10, 10)

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


_forgotten = [time.monotonic()]


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """Programs of a module go with it: a run that keeps all takes 6 GB, and every memory mapping that Linux grants.

    Those of short modules go together: forgetting takes up to a second.
    """
    yield
    if time.monotonic() - _forgotten[0] > 8:
        jax.clear_caches()
        _forgotten[0] = time.monotonic()


@pytest.fixture(autouse=True)
def _for_cpus(request):
    """What depends on the device is traced for CPUs alone, unless a test is marked otherwise."""
    if request.node.get_closest_marker("every_platform"):
        yield
        return
    with platforms._here("cpu"):
        yield


@pytest.fixture
def x64():
    """float64 arrays, and an error instead of every implicit mixture of dtypes."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        yield
