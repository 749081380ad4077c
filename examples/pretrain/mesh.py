# SPDX-License-Identifier: Apache-2.0
"""How the arrays of a run are sharded over devices: over a mesh with three axes, of one device without ``--mesh``.

``data`` and ``fsdp`` split the sequences of a batch. ``fsdp`` also splits every large parameter, with its optimizer
state, along the width D of the model: a layer gathers its weight right before it uses it, and the gradient is scattered
back. ``tensor`` splits the work of a layer: attention by heads, an MLP by its hidden width. The first matrix of a
branch is split by columns, the last by rows, and a sum over ``tensor`` follows.

The axes are explicit: the type of an array has its sharding, communication is written in the code (``gathered``,
``whole``, an ``out_sharding``), and JAX refuses any other. On one device all of it is the identity.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .config import Config, RunError, flag

AXES = ("data", "fsdp", "tensor")
BATCH = ("data", "fsdp")

# Layers by name: the first matrix of a branch is split over ``tensor`` by columns (outputs), the last by rows (inputs).
COLUMNS = frozenset({"qkv", "query", "key", "value", "gate", "up"})
ROWS = frozenset({"out", "down"})


def sizes(text: str) -> dict[str, int]:
    """Devices along each axis, of ``"data=2,fsdp=4"``.

    Raises:
        RunError: if ``text`` has another form.

    Example:
        >>> sizes("fsdp=4,data=2")
        {'data': 2, 'fsdp': 4, 'tensor': 1}
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if name not in AXES:
            raise RunError(f"--mesh has the axes {', '.join(AXES)}, got {name!r}: --mesh data=2,fsdp=4")
        if name in found:
            raise RunError(f"--mesh names {name} twice: {text!r}")
        if not size.isdecimal() or int(size) < 1:
            raise RunError(f"--mesh needs a number of devices for {name}, 1 or more, got {size!r}")
        found[name] = int(size)
    return {name: found.get(name, 1) for name in AXES}


def check(config: Config) -> None:
    """Refuse a mesh that the model or the batch cannot be split over, before there are devices.

    Raises:
        RunError: naming what does not divide.
    """
    if not config.mesh:
        return
    axes, model = sizes(config.mesh), config.model
    tensor = axes["tensor"]
    for key, value, name, parts in (
        ("micro_batch", config.micro_batch, "data x fsdp", axes["data"] * axes["fsdp"]),
        ("batch_size", config.batch_size, "data x fsdp", axes["data"] * axes["fsdp"]),
        ("model.width", model.width, "fsdp", axes["fsdp"]),
        ("model.heads", model.heads, "tensor", tensor),
        ("model.kv_heads", model.kv_heads, "tensor", tensor),
        ("model.mlp_width", model.mlp_width, "tensor", tensor),
    ):
        if value and value % parts:
            raise RunError(f"--mesh {config.mesh}: {flag(key)} {value} must be a multiple of {name}, {parts}")


@dataclass(frozen=True)
class Layout:
    """Places arrays on the devices of ``mesh``."""

    mesh: jax.sharding.Mesh

    def sharding(self, *axes: Any) -> NamedSharding:
        """The sharding of an array whose axes are split over these of the mesh."""
        return NamedSharding(self.mesh, PartitionSpec(*axes if self.mesh.size > 1 else ()))

    def bound(self, function: Callable) -> Callable:
        """``function``, called with this mesh as JAX's current one."""

        def run(*arguments: Any) -> Any:
            with jax.set_mesh(self.mesh):
                return function(*arguments)

        return run

    def parameters(self, params: Any) -> Any:
        """Shard every parameter; each process has all of them before, and its devices' shards after."""
        shards = [self.known(np.asarray(x), *parameter_axes(name, x.ndim)) for name, x in by_name(params).items()]
        return jax.tree.structure(params).unflatten(shards)

    def known(self, array: np.ndarray, *axes: Any) -> Any:
        """Shard an array that every process has."""
        return jax.make_array_from_callback(array.shape, self.sharding(*axes), lambda index: array[index])

    def batch_part(self, batch_size: int) -> tuple[int, int]:
        """Which part of a batch this process reads, and of how many; processes that share sequences read the same.

        Raises:
            RunError: if the processes' shares are no equal parts.
        """
        rows: dict[int, set[int]] = {}
        for device, index in self.sharding(BATCH).devices_indices_map((batch_size,)).items():
            rows.setdefault(device.process_index, set()).update(range(*index[0].indices(batch_size)))
        parts = sorted({tuple(sorted(held)) for held in rows.values()})
        if len({len(part) for part in parts}) > 1 or sum(map(len, parts)) != batch_size:
            raise RunError("--mesh splits the batch so that processes share parts of it: let data or fsdp be larger")
        return parts.index(tuple(sorted(rows[jax.process_index()]))), len(parts)

    def batch(self, part_BxS: np.ndarray, batch_size: int) -> Any:
        """The global batch, from the part that this process has read."""
        shape = (batch_size, *part_BxS.shape[1:])
        return jax.make_array_from_process_local_data(self.sharding(BATCH), part_BxS, shape)


def make_layout(mesh: str = "") -> Layout:
    """The layout that ``--mesh`` asks for; empty: one device, whose axes are not explicit, so that no code sees them.

    Raises:
        RunError: if the number of devices is not that of the mesh.
    """
    if not mesh:
        return Layout(jax.make_mesh((1, 1, 1), AXES, (AxisType.Auto,) * 3, devices=jax.local_devices()[:1]))
    axes = sizes(mesh)
    wanted, there = math.prod(axes.values()), jax.device_count()
    if wanted != there:
        hosts = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
        raise RunError(f"--mesh {mesh} is made of {wanted} devices, there are {there}{hosts}")
    return Layout(jax.make_mesh(tuple(axes.values()), tuple(axes)))


def by_name(tree: Any) -> dict[str, Any]:
    """The leaves of a tree, by their paths: "blocks/0/mlp/up/kernel"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def parameter_axes(path: str, ndim: int) -> tuple[str | None, ...]:
    """The mesh's axes that the axes of a parameter are split over; an axis of stacked layers is not split.

    Example:
        >>> parameter_axes("blocks/0/mlp/up/kernel", 2), parameter_axes("blocks/attention/out/kernel", 3)
        (('fsdp', 'tensor'), (None, 'tensor', 'fsdp'))
        >>> parameter_axes("tokens/embedding", 2), parameter_axes("final_norm/scale", 1)
        ((None, 'fsdp'), (None,))
    """
    *_, layer, kind = path.split("/")
    if kind == "embedding":
        axes = (None, "fsdp")
    elif kind != "kernel":
        return (None,) * ndim  # norms and biases
    elif layer in ROWS:
        axes = ("tensor", "fsdp")
    else:
        axes = ("fsdp", "tensor" if layer in COLUMNS else None)
    return (*(None,) * (ndim - 2), *axes)


def on_mesh() -> bool:
    """Whether the current computation runs, or is compiled, on a mesh with explicit axes."""
    return bool(jax.sharding.get_abstract_mesh().explicit_axes)


def spread(x: jax.Array, *axes: Any) -> jax.Array:
    """``x`` with its axes split over these of the mesh."""
    return jax.sharding.reshard(x, PartitionSpec(*axes)) if on_mesh() else x


def whole(x: jax.Array) -> jax.Array:
    """``x``, unsharded, on every device."""
    return spread(x)


def gathered(weight: jax.Array) -> jax.Array:
    """A parameter as a layer uses it: gathered over ``fsdp``; what ``tensor`` splits stays split."""
    if not on_mesh():
        return weight
    axes = (None if axis == "fsdp" else axis for axis in jax.typeof(weight).sharding.spec)
    return spread(weight, *axes)


def gather_again(primitive: Any, *_: Any, **__: Any) -> bool:
    """What ``jax.checkpoint`` keeps for the backward pass: everything but what was resharded, such as weights."""
    return primitive.name != "reshard"


def product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """The product x @ weight; where ``tensor`` splits the summed axis, its devices' sums are added."""
    if not on_mesh():
        return jnp.dot(x, weight)
    weight = gathered(weight)
    axes = (*jax.typeof(x).sharding.spec[:-1], jax.typeof(weight).sharding.spec[-1])
    return jnp.dot(x, weight, out_sharding=PartitionSpec(*axes))


def in_parts(tokens_BxS: jax.Array, parts: int) -> jax.Array:
    """The batch in ``parts``, one after the other, each spread over all devices."""
    return spread(whole(tokens_BxS).reshape(parts, -1, tokens_BxS.shape[-1]), None, BATCH)
