# SPDX-License-Identifier: Apache-2.0

"""Settings and fixtures of the whole test suite."""

import gc
import os
import time
from importlib.metadata import version
from pathlib import Path

# Compilation is most of the run: compiled programs are shared by workers, processes and
# runs, in pytest's cache folder.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(Path(__file__).parents[1] / ".pytest_cache" / "d" / "compiled"),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# NumPy's own threads spin while they wait, which costs other processes more than they
# gain on small matrices.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Eight virtual CPU devices for tests on meshes; everything else runs on the first one.
# The other flags compile three times faster. Flags that are set already take
# precedence. All of this must be set before JAX is initialized.
flags = {
    "force_host_platform_device_count": 8,
    "backend_optimization_level": 0,
    "cpu_parallel_codegen_split_count": 1,
}
if version("jaxlib") < "0.11":  # later versions do not know it
    flags["cpu_use_fusion_emitters"] = "false"
given = os.environ.get("XLA_FLAGS", "")
added = [f"--xla_{flag}={x}" for flag, x in flags.items() if flag not in given]
os.environ["XLA_FLAGS"] = " ".join([given, *added])

import jax
import pytest
from hypothesis import HealthCheck, settings

from normpre_optax.linalg import platforms

# Tracing creates millions of objects; collecting garbage at the default interval costs
# a tenth of the run.
gc.set_threshold(100_000, 10, 10)

# Examples are few because a new shape compiles, and deterministic so that a red run can
# be repeated.
calm = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("normpre", max_examples=20, derandomize=True, **calm)
# pytest --hypothesis-profile=thorough
settings.register_profile("thorough", max_examples=1000, **calm)
settings.load_profile("normpre")


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "parity: needs torch, the extra `parity`; CI installs it"
    )


_forgotten = [time.monotonic()]


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """Drop compiled programs after a module.

    A run that keeps all needs 6 GB, and all memory mappings of a process. Clearing
    takes up to a second, so short modules are cleared together.
    """
    yield
    if time.monotonic() - _forgotten[0] > 8:
        jax.clear_caches()
        _forgotten[0] = time.monotonic()


@pytest.fixture(autouse=True)
def _for_cpus(request):
    """Trace platform-dependent code for the CPU only.

    A test that is marked ``every_platform`` traces it for all.
    """
    if request.node.get_closest_marker("every_platform"):
        yield
        return
    with platforms._platform("cpu"):
        yield


@pytest.fixture
def x64():
    """float64 arrays, and an error at every implicit dtype promotion."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        yield
