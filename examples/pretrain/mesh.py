# SPDX-License-Identifier: Apache-2.0
"""How the arrays of a run are sharded over devices: over a mesh with the axes ``data``
and ``fsdp``.

Both split the sequences of a batch. ``fsdp`` also splits every large parameter, with
its optimizer state, along the width D of the model: a layer gathers its weight right
before it uses it, and the gradient is scattered back.

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
from .flat import flag

BATCH = ("data", "fsdp")


def check(config: Config) -> None:
    """Refuse devices that the model or the batch cannot be split over, before there are
    any.

    Raises:
        RunError: naming what does not divide.
    """
    for key, value, name, parts in (
        ("micro_batch", config.micro_batch, "--replicas x --fsdp", config.devices),
        ("batch_size", config.batch_size, "--replicas x --fsdp", config.devices),
        ("model.width", config.model.width, "--fsdp", config.fsdp),
    ):
        if value and value % parts:
            raise RunError(f"{flag(key)} {value} must be a multiple of {name}, {parts}")


@dataclass(frozen=True)
class Layout:
    """Places arrays on the devices of ``mesh``."""

    mesh: jax.sharding.Mesh

    def sharding(self, *axes: Any) -> NamedSharding:
        """The sharding of an array whose axes are split over these of the mesh."""
        return NamedSharding(
            self.mesh, PartitionSpec(*axes if self.mesh.size > 1 else ())
        )

    def bound(self, function: Callable) -> Callable:
        """``function``, called with this mesh as JAX's current one."""

        def run(*arguments: Any) -> Any:
            with jax.set_mesh(self.mesh):
                return function(*arguments)

        return run

    def parameters(self, params: Any) -> Any:
        """Shard every parameter; each process has all of them before, and its devices'
        shards after.
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
        starts: dict[int, int] = {}
        for device, index in (
            self.sharding(BATCH).devices_indices_map((batch_size,)).items()
        ):
            start = index[0].start or 0
            starts[device.process_index] = min(
                start, starts.get(device.process_index, start)
            )
        return sorted(starts.values()).index(starts[jax.process_index()]), len(starts)

    def batch(self, part_BxS: np.ndarray, batch_size: int) -> Any:
        """The global batch, from the part that this process has read."""
        shape = (batch_size, *part_BxS.shape[1:])
        return jax.make_array_from_process_local_data(
            self.sharding(BATCH), part_BxS, shape
        )


def make_layout(replicas: int = 1, fsdp: int = 1) -> Layout:
    """The layout of these sizes; the axes of one device are not explicit, so that no
    code sees them.

    Raises:
        RunError: if there are more or fewer devices.
    """
    if replicas * fsdp == 1:
        return Layout(
            jax.make_mesh(
                (1, 1), BATCH, (AxisType.Auto,) * 2, devices=jax.local_devices()[:1]
            )
        )
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
    """The mesh's axes that the axes of a parameter are split over; an axis of stacked
    layers is not split.

    Example:
        >>> (
        ...     parameter_axes("blocks/0/mlp/up/kernel", 2),
        ...     parameter_axes("blocks/attention/out/kernel", 3),
        ... )
        (('fsdp', None), (None, None, 'fsdp'))
        >>> parameter_axes("tokens/embedding", 2), parameter_axes("final_norm/scale", 1)
        ((None, 'fsdp'), (None,))
    """
    *_, layer, kind = path.split("/")
    if kind not in ("embedding", "kernel"):
        return (None,) * ndim  # norms and biases
    from_width = kind == "kernel" and layer not in ("out", "down")
    return (*(None,) * (ndim - 2), *(("fsdp", None) if from_width else (None, "fsdp")))


def on_mesh() -> bool:
    """Whether the current computation runs, or is compiled, on a mesh with explicit
    axes.
    """
    return bool(jax.sharding.get_abstract_mesh().explicit_axes)


def spread(x: jax.Array, *axes: Any) -> jax.Array:
    """``x`` with its axes split over these of the mesh."""
    return jax.sharding.reshard(x, PartitionSpec(*axes)) if on_mesh() else x


def whole(x: jax.Array) -> jax.Array:
    """``x``, unsharded, on every device."""
    return spread(x)


def gather_again(primitive: Any, *_: Any, **__: Any) -> bool:
    """What ``jax.checkpoint`` keeps for the backward pass: everything but what was
    resharded, such as weights.
    """
    return primitive.name != "reshard"


def in_parts(tokens_BxS: jax.Array, parts: int) -> jax.Array:
    """The batch in ``parts``, one after the other, each spread over all devices."""
    return spread(
        whole(tokens_BxS).reshape(parts, -1, tokens_BxS.shape[-1]), None, BATCH
    )
