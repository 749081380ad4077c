# SPDX-License-Identifier: Apache-2.0
"""Compare what two versions of the library compute: updates, states, ``explain``.

In a clone of each version, with this file from the newer one::

    PYTHONPATH=$PWD python .../equality.py record old.pkl
    PYTHONPATH=$PWD python .../equality.py record new.pkl
    python -m examples.research.equality compare old.pkl new.pkl

A version is a folder in PYTHONPATH, so this script imports nothing else of the project.
``record FILE updates`` records one part; the parts are

- ``updates``: three jitted steps of every optimizer, on one CPU device, and the states;
- ``platforms``: two steps as they are traced for TPUs and GPUs, executed on the CPU;
- ``meshes``: two steps on four virtual devices, with Explicit axes, with Auto axes, and
  with Auto axes and known shardings;
- ``explain``: ``explain``, the groups, row norms and weight decay masks of every tree
  that tests/parameters assigns.
"""

import functools
import inspect
import os
import pickle
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__" and sys.argv[1:2] == ["record"]:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Programs that did not change are not compiled again.
    cache = os.environ.get("EQUALITY_CACHE", "~/.cache/normpre_equality")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.expanduser(cache)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    sys.path.insert(0, os.getcwd())

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import normpre_optax as npo

HYPERBALL = {"norm_control": "hyperball", "adam_learning_rate": 1e-3}


def schatten() -> dict[str, Any]:
    """The option of the Schatten norm, which 0.3.0 calls ``ns_scale``."""
    options = inspect.signature(npo.muon).parameters
    return {"ns_norm" if "ns_norm" in options else "ns_scale": "schatten"}


def schedule(step: Any) -> Any:
    """A learning rate that depends on the step."""
    return 1e-3 * (1 + step)


def stages_in_stages(matrix_dims: Any) -> Any:
    """A direction with another one inside, and a sketch in a metric."""
    return npo.direction(
        npo.two_momenta(0.5, 0.9),
        npo.direction(npo.project_to_tangent(), npo.normalize_rows("both")),
        npo.with_metric(npo.precondition_locally(rank=2), 0.4),
        npo.scale_by_shape(lambda outputs, inputs: outputs / inputs),
        matrix_dims=matrix_dims,
    )


def blocks(path: str, leaf: Any) -> npo.MatrixDims | None:
    """A rule with output blocks: three sizes, and equal ones."""
    if path in ("torch/fc.weight", "torch/fc/weight"):
        return npo.MatrixDims(inputs=1, outputs=0, output_blocks=(8, 8, 8))
    if path.endswith("up/kernel") and leaf.ndim == 2:
        return npo.MatrixDims(inputs=0, outputs=1, output_blocks=4)
    return npo.default_matrix_dims(path, leaf)


# Recorded in every dtype, and as traced for every platform.
MAIN: dict[str, Callable[[], Any]] = {
    "normpre_g": lambda: npo.normpre_g(1e-3),
    "normpre_g both": lambda: npo.normpre_g(1e-3, orientation="both", tangent="strict"),
    "normpre_g columns": lambda: npo.normpre_g(
        1e-3, orientation="columns", ns_steps=7, ns_coefficients="you"
    ),
    "normpre_l": lambda: npo.normpre_l(1e-3, rank=4),
    "normpre_l products": lambda: npo.normpre_l(
        1e-3, rank=0.25, method="products", power_iterations=2
    ),
    "normpre_l exact": lambda: npo.normpre_l(
        1e-3, rank=3, method="exact", relative_threshold=1.5
    ),
    "normpre_h": lambda: npo.normpre_h(1.6e-2, 3e-3),
    "muon": lambda: npo.muon(1e-3),
    "muon polar": lambda: npo.muon(
        1e-3, ns_coefficients="polar_express", compute_dtype=jnp.bfloat16
    ),
    "muon schatten": lambda: npo.muon(1e-3, **schatten()),
    "mano": lambda: npo.mano(1e-3),
    "muoneq both": lambda: npo.muoneq(1e-3, mode="both"),
    "normuon": lambda: npo.normuon(1e-2, adam_learning_rate=1e-3),
    "stages in stages": lambda: npo.with_adamw(stages_in_stages, 1e-3),
    "normpre_g blocks": lambda: npo.normpre_g(1e-3, matrix_dims=blocks),
    "normpre_l blocks": lambda: npo.normpre_l(1e-3, rank=3, matrix_dims=blocks),
    "normpre_h blocks": lambda: npo.normpre_h(1e-2, 1e-3, matrix_dims=blocks),
    "normuon blocks": lambda: npo.normuon(
        1e-2, adam_learning_rate=1e-3, matrix_dims=blocks
    ),
    "muon hyperball blocks": lambda: npo.muon(1e-2, matrix_dims=blocks, **HYPERBALL),
}
# Recorded in float32.
FURTHER: dict[str, Callable[[], Any]] = {
    "normpre": lambda: npo.normpre(
        1e-3, npo.precondition_locally(rank=4), nesterov=True
    ),
    "normpre exact": lambda: npo.normpre(1e-3, npo.precondition_globally(None)),
    "normpre_g schedule": lambda: npo.normpre_g(
        schedule, weight_decay=schedule, adam_weight_decay=0.0
    ),
    "normpre_g rows": lambda: npo.normpre_g(
        1e-3, orientation="rows", tangent="none", rms=None
    ),
    "normpre_g mask": lambda: npo.normpre_g(
        1e-3, weight_decay_mask=npo.decay_matrices_only
    ),
    "normpre_g multipliers": lambda: npo.normpre_g(
        1e-3,
        learning_rate_multipliers=lambda params: npo.multipliers_by_width(
            params, params, update="orthogonal"
        ),
    ),
    "normpre_l relative": lambda: npo.normpre_l(
        1e-3, rank=4, relative_threshold=1.2, compute_dtype=jnp.bfloat16
    ),
    "normpre_h options": lambda: npo.normpre_h(
        schedule,
        3e-3,
        row_norms=0.7,
        metric_strength=0.3,
        slow_weight=lambda step: 0.4,
        momentum=0.8,
    ),
    "normpre_h keep": lambda: npo.normpre_h(
        1e-2, 3e-3, row_norms="keep", mu_dtype=jnp.bfloat16
    ),
    "muon keller": lambda: npo.muon(
        0.02, adam_learning_rate=1e-3, convention="keller", nesterov=False
    ),
    "muon exact": lambda: npo.muon(1e-3, ns_steps=None),
    "muon hyperball": lambda: npo.muon(1e-2, **HYPERBALL),
    "muon hyperball keep": lambda: npo.muon(1e-2, row_norms="keep", **HYPERBALL),
    "mano 2": lambda: npo.mano(1e-3, version=2, nesterov=True),
    "rmnp": lambda: npo.rmnp(1e-3),
    "muoneq": lambda: npo.muoneq(1e-3),
    "muoneq columns": lambda: npo.muoneq(1e-3, mode="columns"),
    "with_adamw": lambda: npo.with_adamw(
        functools.partial(npo.scale_by_muon, nesterov=False), 1e-3
    ),
}
# Recorded on meshes; they take the option ``shardings``.
ON_MESHES: dict[str, Callable[..., Any]] = {
    "normpre_g": lambda **more: npo.normpre_g(1e-3, **more),
    "normpre_l": lambda **more: npo.normpre_l(1e-3, rank=4, **more),
    "normpre_h": lambda **more: npo.normpre_h(1.6e-2, 3e-3, **more),
    "normpre_h blocks": lambda **more: npo.normpre_h(
        1.6e-2, 3e-3, matrix_dims=blocks, **more
    ),
    "muon": lambda **more: npo.muon(1e-3, **more),
    "normuon": lambda **more: npo.normuon(1e-3, adam_learning_rate=1e-3, **more),
}


def parameters(dtype: Any, seed: int = 0, scale: float = 0.1) -> Any:
    """A transformer's parameters: vectors, heads, stacked layers, a fused matrix."""
    draw = np.random.default_rng(seed)

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(scale * draw.standard_normal(shape), dtype)

    def layer() -> dict:
        query = {"kernel": array(16, 4, 4), "bias": array(4, 4)}
        out = {"kernel": array(4, 4, 16), "bias": array(16)}
        up = {"kernel": array(16, 64), "bias": array(64)}
        down = {"kernel": array(64, 16), "bias": array(16)}
        norm = {"scale": array(16), "bias": array(16)}
        return {
            "attn": {"query": query, "out": out},
            "mlp": {"up": up, "down": down},
            "ln": norm,
        }

    stacked = {
        "up": {"kernel": array(3, 16, 32), "bias": array(3, 32)},
        "down": {"kernel": array(3, 32, 16)},
    }
    return {
        "wte": {"embedding": array(40, 16)},
        "blocks": {"0": layer(), "1": layer()},
        "layers": stacked,
        "torch": {"fc.weight": array(24, 16), "fc.bias": array(24)},
        "lm_head": {"kernel": array(16, 40)},
    }


def to_numpy(tree: Any) -> list[np.ndarray]:
    """The arrays of a tree; bfloat16 as float32, which holds it exactly."""
    half = jnp.bfloat16
    leaves = jax.tree.leaves(tree)
    return [np.asarray(x.astype(jnp.float32) if x.dtype == half else x) for x in leaves]


def structure(tree: Any) -> list[tuple[str, tuple[int, ...], str]]:
    """Path, shape and dtype of every array."""
    return [
        (jax.tree_util.keystr(path), x.shape, str(x.dtype))
        for path, x in jax.tree.leaves_with_path(tree)
    ]


def steps(
    tx: Any,
    params: Any,
    count: int,
    traced: Callable = lambda update: update,
    placed: Callable = lambda tree: tree,
) -> dict[str, Any]:
    """Updates of some steps on drawn gradients, and the last state."""
    update = jax.jit(traced(tx.update))
    state, found = tx.init(params), []
    dtype = jax.tree.leaves(params)[0].dtype
    for step in range(count):
        grads = placed(parameters(dtype, seed=10 + step, scale=1e-3))
        updates, state = update(grads, state, params)
        found.append(to_numpy(updates))
    return {"updates": found, "state": to_numpy(state), "structure": structure(state)}


def record_updates() -> dict[str, Any]:
    """Every optimizer on one device."""
    found = {}
    for dtype, makers in (("float32", MAIN | FURTHER), ("bfloat16", MAIN)):
        params = parameters(jnp.dtype(dtype))
        for name, make in makers.items():
            found[f"{name}, {dtype}"] = steps(make(), params, 3)
    return found


def record_platforms() -> dict[str, Any]:
    """The programs for TPUs and GPUs, on a CPU."""
    try:
        from normpre_optax.linalg.platforms import on
    except ImportError:  # 0.3.0
        from normpre_optax.linalg.precision import on  # pyright: ignore
    params, found = parameters(jnp.float32), {}
    for platform in ("tpu", "gpu"):
        traced = functools.partial(functools.partial, on, platform)
        for name, make in MAIN.items():
            found[f"{name}, {platform}"] = steps(make(), params, 2, traced)
    return found


def sharding_of(keys: Any, x: jax.Array) -> PartitionSpec:
    """Rows, columns, layers, or nothing, so that every case of a mesh occurs."""
    path = jax.tree_util.keystr(keys)
    if x.ndim < 2 or "wte" in path or "head" in path:
        return PartitionSpec()
    if "layers" in path and "down" in path:
        return PartitionSpec(None, "fsdp")
    if x.ndim == 2 and x.shape[1] % 2 == 0:
        return PartitionSpec(None, "fsdp")
    return PartitionSpec("fsdp") if x.shape[0] % 2 == 0 else PartitionSpec()


def record_meshes() -> dict[str, Any]:
    """Meshes of two by two devices."""
    specs, found = jax.tree.map_with_path(sharding_of, parameters(jnp.float32)), {}
    for kind in ("explicit", "auto", "known"):
        axes = AxisType.Explicit if kind == "explicit" else AxisType.Auto
        mesh = jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=(axes, axes))

        def placed(tree: Any, mesh: Any = mesh) -> Any:
            shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
            return jax.device_put(tree, shardings)

        more = {"shardings": specs} if kind == "known" else {}
        params = placed(parameters(jnp.float32))
        for name, make in ON_MESHES.items():
            tx = make(**more)
            found[f"{name}, {kind}"] = steps(tx, params, 2, placed=placed)
    return found


class Recorder:
    """A plugin of pytest that records what ``explain`` says of every assigned tree."""

    def __init__(self) -> None:
        from normpre_optax.parameters import rules

        self.found: dict[str, set[str]] = {}
        self.test, self.busy = "", False
        self.assign, self.explain = rules.assign, npo.explain
        rules.assign = functools.partial(self.called, self.assign)
        npo.explain = functools.partial(self.called, self.explain)

    def pytest_runtest_setup(self, item: Any) -> None:
        """Remember the test."""
        self.test = item.nodeid

    def called(
        self, function: Callable, params: Any, matrix_dims: Any = None, **more: Any
    ) -> Any:
        """Record, then call the function."""
        if not self.busy:
            self.busy = True
            found = self.found.setdefault(self.test, set())
            found.update(map(self.attempt, self.questions(params, matrix_dims)))
            self.busy = False
        return function(params, matrix_dims, **more)

    def questions(self, params: Any, matrix_dims: Any) -> list[Callable[[], Any]]:
        """What is asked of a tree."""
        from normpre_optax.parameters.roles import row_norms_by_role

        def assigned() -> Any:
            return self.assign(params, matrix_dims)

        return [
            lambda: self.explain(params, matrix_dims, every_layer=True),
            lambda: self.explain(params, matrix_dims),
            lambda: sorted(row_norms_by_role(assigned()).items()),
            lambda: {path: spec.dims for path, spec in assigned().items()},
            lambda: npo.decay_matrices_only(params),
        ]

    def attempt(self, question: Callable[[], Any]) -> str:
        """The answer as text, or the error."""
        try:
            answer = str(question())
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        return re.sub(r" at 0x[0-9a-f]+", "", answer)


def record_explain() -> dict[str, Any]:
    """What tests/parameters asks about. One of its tests counts functions entered."""
    import pytest

    recorder = Recorder()
    options = ["-q", "-x", "-p", "no:cacheprovider", "-o", "addopts="]
    selected = ["-m", "not slow and not thorough", "-k", "not enters_few_functions"]
    status = pytest.main(["tests/parameters", *options, *selected], plugins=[recorder])
    if status != 0:
        raise RuntimeError(f"tests/parameters failed: {status}")
    return {test: sorted(texts) for test, texts in recorder.found.items()}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "updates": record_updates,
    "platforms": record_platforms,
    "meshes": record_meshes,
    "explain": record_explain,
}


def difference(old: dict[str, Any], new: dict[str, Any]) -> float:
    """Largest difference, relative to the largest entry of its array; or 0."""
    lists = [old["state"], *old["updates"]], [new["state"], *new["updates"]]
    pairs = [
        pair for a, b in zip(*lists, strict=True) for pair in zip(a, b, strict=True)
    ]
    found = 0.0
    for a, b in pairs:
        if np.array_equal(a, b, equal_nan=a.dtype.kind == "f"):
            continue
        apart = np.max(np.abs(a.astype(np.float64) - b.astype(np.float64)))
        largest = np.max(np.abs(a)).astype(np.float64)
        found = max(found, float(apart / max(largest, 1e-300)), 1e-300)
    return found


def compare(old: dict[str, dict], new: dict[str, dict]) -> int:
    """Print what differs; return how many records do."""
    count = 0
    for part in old.keys() & new.keys():
        missing = old[part].keys() - new[part].keys()
        common = [key for key in old[part] if key in new[part]]
        different = [f"{part}: {key} is missing" for key in missing]
        for key in common:
            a, b = old[part][key], new[part][key]
            if part == "explain":
                texts = sorted(set(a) ^ set(b))
                different += [f"explain: {key}: {text}" for text in texts]
            elif a["structure"] != b["structure"]:
                different.append(f"{part}: {key}: another state")
            elif (apart := difference(a, b)) > 0:
                different.append(f"{part}: {key}: {apart:.1e} of the largest entry")
        print(*different, sep="\n", end="\n" if different else "")
        print(f"{part}: {len(common)} compared, {len(different)} differences")
        count += len(different)
    return count


def main(arguments: list[str]) -> int:
    """Record or compare."""
    if arguments[:1] == ["record"]:
        warnings.simplefilter("ignore")
        print(f"normpre_optax {npo.__version__} of {npo.__file__}")
        chosen = arguments[2:] or list(PARTS)
        found = {part: PARTS[part]() for part in chosen}
        Path(arguments[1]).write_bytes(pickle.dumps(found))
        return 0
    old, new = (pickle.loads(Path(name).read_bytes()) for name in arguments[1:3])
    return min(1, compare(old, new))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
