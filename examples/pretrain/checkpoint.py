# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that continue a run exactly: parameters, optimizer state, position in the data, step.

There is no random state to keep: initialisation, data order and sampling are functions of the seed, which is part of
the run's configuration, and of the step. A checkpoint appears on disk whole or not at all: Orbax renames a finished
folder into place. It is written in the background while training goes on.
"""

import atexit
import functools
import gc
import itertools
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from .config import RunError

T = TypeVar("T")


class Damaged(RunError):
    """A checkpoint cannot be read, or is no longer there."""


class Checkpoints:
    """The checkpoints of one run, the last ``keep`` of them; None: they are read only, while the run may go on."""

    def __init__(self, folder: Path, keep: int | None = None):
        quiet()
        self.folder = folder
        reads = keep is None
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, read_only=reads, lightweight_initialize=reads, cleanup_tmp_directories=not reads
        )
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def latest_step(self) -> int | None:
        """Step of the newest checkpoint, None where there is none."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Steps of all checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    def reload(self) -> None:
        """See what another has written, deleted or set aside."""
        self._manager.reload()

    def set_aside(self, step: int) -> Path:
        """Rename a checkpoint, so that nothing takes it for one; returns where it is."""
        places = (self.folder / f"{step}.damaged{number or ''}" for number in itertools.count())
        place = next(place for place in places if not place.exists())
        (self.folder / str(step)).rename(place)
        return place

    def save(self, step: int, state: Any, data_state: dict[str, Any]) -> None:
        """Begin to write ``state`` after ``step`` updates together with the data iterator's state.

        ``state`` may be given up (donated) once this returns.

        Raises:
            OSError: where it, or the one before, cannot be written.
        """
        if jax.default_backend() == "cpu":
            # Orbax copies device memory before it returns, but on CPU it would read these buffers themselves.
            state = jax.tree.map(jnp.copy, state)
        facts = {"data": data_state, "leaves": leaves_of(state), "sums": sums_of(state)}
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), facts=ocp.args.JsonSave(facts))
        with writing(self.folder):
            self._manager.save(step, args=items, force=True)

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """The state and the data position stored at ``step``; ``like`` gives structure, shapes, dtypes and devices.

        Raises:
            Damaged: where it cannot be read.
            RunError: where it belongs to another model or optimizer.
        """
        folder = self.folder / str(step)
        try:
            facts = self._manager.restore(step, args=ocp.args.Composite(facts=ocp.args.JsonRestore()))["facts"]
            stored, expected = facts["leaves"], leaves_of(like)
            if stored == expected:
                abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)  # keeps the sharding
                items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
                state = self._manager.restore(step, args=items)["state"]
                written = facts.get("sums")  # Checkpoints of before 0.2.0 have none.
                found = sums_of(state) if written else {}
                changed = [path for path, total in found.items() if written[path] != total]
                if not changed:
                    return state, facts["data"]
                raise ValueError(f"{changed[0]} is not what was written")
        except Exception as error:  # Orbax, Tensorstore and JSON each have their own
            raise Damaged(f"{folder} is damaged ({first_line(error)})") from error
        name = next(k for k in [*stored, *expected] if stored.get(k) != expected.get(k))
        raise RunError(
            f"cannot restore {folder}, it is of another model or optimizer: {name} is {stored.get(name, 'absent')} "
            f"there, {expected.get(name, 'absent')} here"
        )

    def close(self) -> None:
        """Wait until everything is written.

        Raises:
            OSError: where it cannot be.
        """
        with writing(self.folder):
            self._manager.close()


def leaves_of(state: Any) -> dict[str, str]:
    """Path -> dtype and shape of every array."""
    return _by_path(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", state)


def sums_of(state: Any) -> dict[str, int]:
    """Path -> sum of the bits of every array, modulo 2^32: the same however it lies on devices."""
    return _by_path(sum_of_bits, state)


def _by_path(f: Callable[[Any], T], state: Any) -> dict[str, T]:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): f(leaf) for path, leaf in leaves}


def sum_of_bits(x: jax.Array) -> int:
    """The entries of an array, taken for unsigned integers, summed modulo 2^32."""
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    if x.is_fully_addressable and jax.default_backend() == "cpu":  # Elsewhere this would copy it to the host.
        return int(np.sum(np.asarray(x).reshape(-1).view(unsigned), dtype=np.uint32))
    return int(_sum_of_bits(x, unsigned))


@functools.partial(jax.jit, static_argnums=1)
def _sum_of_bits(x: jax.Array, unsigned: jnp.dtype) -> jax.Array:
    return jnp.sum(jax.lax.bitcast_convert_type(x, unsigned), dtype=jnp.uint32)


@functools.cache
def quiet() -> None:
    """Keep off the terminal what Orbax says beside what it raises, and what Tensorstore says of reads given up."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        coroutine = getattr(unraisable.object, "cr_code", None)
        if str(unraisable.exc_value) != "Event loop is closed" and "orbax" not in getattr(coroutine, "co_filename", ""):
            before(unraisable)

    sys.unraisablehook = hook


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """While inside, whatever Orbax and Tensorstore raise is an OSError that says what the system refused."""
    try:
        yield
    except Exception as error:  # each has its own
        atexit.register(gc.collect)  # writes given up, which complain where they outlive the interpreter
        code = re.search(r"os_error_code='(\d+)'", str(error))
        reason = os.strerror(int(code[1])) if code else getattr(error, "strerror", None) or first_line(error)
        raise OSError(f"cannot write {folder} ({reason})") from error


def first_line(error: Exception) -> str:
    """What an error says, in one short line."""
    lines = str(error).partition(" See full TensorStore details")[0].strip().splitlines()
    return f"{lines[0] if lines else type(error).__name__:.160}"
