# SPDX-License-Identifier: Apache-2.0
"""How the arrays of a run are sharded over devices.

The mesh has the axes ``data`` and ``fsdp``. Both split the sequences of a batch.
``fsdp`` also splits every large parameter, with its optimizer state, along the width D
of the model: a layer gathers its weight right before it uses it, and the gradient is
scattered back.

The axes are explicit: the type of an array has its sharding, communication is written
in the code (``whole``, an ``out_sharding``), and JAX refuses any other. On one device
all of it is the identity.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .config import Config, RunError

BATCH = ("data", "fsdp")


def check(config: Config) -> None:
    """Refuse devices that the model or the batch cannot be split over.

    It does not look for devices.

    Raises:
        RunError: naming what does not divide.
    """
    every = "--replicas x --fsdp"
    check_multiple("--micro-batch", config.micro_batch, every, config.devices)
    check_multiple("--batch-size", config.batch_size, every, config.devices)
    check_multiple("--model.width", config.model.width, "--fsdp", config.fsdp)


def check_multiple(flag: str, value: int | None, other: str, parts: int) -> None:
    """Refuse a value that cannot be split into ``parts``, which is that of ``other``.

    Raises:
        RunError: naming both flags.
    """
    if value and value % parts:
        raise RunError(f"{flag} {value} must be a multiple of {other}, {parts}")


@dataclass(frozen=True)
class Layout:
    """Places arrays on the devices of ``mesh``."""

    mesh: jax.sharding.Mesh

    def sharding(self, *axes: Any) -> NamedSharding:
        """The sharding of an array whose axes are split over these of the mesh."""
        if self.mesh.size == 1:
            return NamedSharding(self.mesh, PartitionSpec())
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def bound(self, function: Callable) -> Callable:
        """``function``, called with this mesh as JAX's current one."""

        def run(*arguments: Any) -> Any:
            with jax.set_mesh(self.mesh):
                return function(*arguments)

        return run

    def parameters(self, params: Any) -> Any:
        """Shard every parameter.

        Each process has all of them before, and the shards of its devices after.
        """
        shards = [
            self.known(np.asarray(x), *parameter_axes(name, x.ndim))
            for name, x in by_name(params).items()
        ]
        return jax.tree.structure(params).unflatten(shards)

    def known(self, array: np.ndarray, *axes: Any) -> Any:
        """Shard an array that every process has."""
        return jax.make_array_from_callback(
            array.shape, self.sharding(*axes), lambda index: array[index]
        )

    def batch_part(self, batch_size: int) -> tuple[int, int]:
        """Which part of a batch this process reads, and of how many."""
        parts = self.sharding(BATCH).devices_indices_map((batch_size,))
        starts: dict[int, int] = {}  # the first sequence of every process
        for device, (sequences,) in parts.items():
            start = sequences.start or 0
            process = device.process_index
            starts[process] = min(start, starts.get(process, start))
        own = starts[jax.process_index()]
        return sorted(starts.values()).index(own), len(starts)

    def batch(self, part_BxS: np.ndarray, batch_size: int) -> Any:
        """The global batch, from the part that this process has read."""
        shape = (batch_size, *part_BxS.shape[1:])
        return jax.make_array_from_process_local_data(
            self.sharding(BATCH), part_BxS, shape
        )


def make_layout(replicas: int = 1, fsdp: int = 1) -> Layout:
    """The layout of these sizes.

    The axes of one device are not explicit, so that no code sees them.

    Raises:
        RunError: if there are more or fewer devices.
    """
    if replicas * fsdp == 1:
        automatic = (AxisType.Auto, AxisType.Auto)
        device = jax.local_devices()[:1]
        return Layout(jax.make_mesh((1, 1), BATCH, automatic, devices=device))
    if replicas * fsdp != jax.device_count():
        raise RunError(
            f"--replicas {replicas} x --fsdp {fsdp} must equal the number of devices,"
            f" {jax.device_count()}"
        )
    return Layout(jax.make_mesh((replicas, fsdp), BATCH))


def by_name(tree: Any) -> dict[str, Any]:
    """The leaves of a tree, by their paths: "blocks/0/mlp/up/kernel"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in leaves
    }


def parameter_axes(path: str, ndim: int) -> tuple[str | None, ...]:
    """The mesh's axes that the axes of a parameter are split over.

    The axis of the model's width is split. An axis of stacked layers is not.

    Example:
        >>> parameter_axes("blocks/0/mlp/up/kernel", 2)
        ('fsdp', None)
        >>> parameter_axes("blocks/attention/out/kernel", 3)
        (None, None, 'fsdp')
        >>> parameter_axes("tokens/embedding", 2)
        (None, 'fsdp')
        >>> parameter_axes("final_norm/scale", 1)
        (None,)
    """
    *_, layer, kind = path.split("/")
    if kind not in ("embedding", "kernel"):
        return (None,) * ndim  # norms and biases
    stacked = [None] * (ndim - 2)
    if kind == "embedding" or layer in ("out", "down"):  # their output is the width
        return (*stacked, None, "fsdp")
    return (*stacked, "fsdp", None)


def on_mesh() -> bool:
    """Whether the current computation is on a mesh with explicit axes."""
    return bool(jax.sharding.get_abstract_mesh().explicit_axes)


def spread(x: jax.Array, *axes: Any) -> jax.Array:
    """``x`` with its axes split over these of the mesh."""
    if not on_mesh():
        return x
    return jax.sharding.reshard(x, PartitionSpec(*axes))


def whole(x: jax.Array) -> jax.Array:
    """``x``, unsharded, on every device."""
    return spread(x)


def gather_again(primitive: Any, *_: Any, **__: Any) -> bool:
    """What ``jax.checkpoint`` keeps for the backward pass.

    That is everything but what was resharded, such as weights.
    """
    return primitive.name != "reshard"


def in_parts(tokens_BxS: jax.Array, parts: int) -> jax.Array:
    """The batch in ``parts``, one after the other, each spread over all devices."""
    length = tokens_BxS.shape[-1]
    tokens = whole(tokens_BxS).reshape(parts, -1, length)
    return spread(tokens, None, BATCH)
