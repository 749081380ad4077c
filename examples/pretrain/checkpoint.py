# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that continue a run exactly.

They hold parameters, optimizer state, position in the data, and step. There is no
random state to store: initialization, data order and sampling are functions of the
seed, which is part of the run's configuration, and of the step. A checkpoint is
complete or absent on disk: Orbax renames a finished folder. It is written in the
background while training continues, except the first one, which is read back.
"""

import atexit
import functools
import gc
import logging
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from .config import RunError, one_line
from .mesh import by_name
from .paths import check_readable, check_writable, full_path


class Checkpoints:
    """The checkpoints of one run, the last ``keep`` of them.

    With None they are read only, while the run may continue.

    Raises:
        RunError: if the path of the folder is one that Orbax misreads.
    """

    def __init__(self, folder: Path, keep: int | None = None):
        quiet()
        self.folder = folder
        self._read_back = False
        reads = keep is None
        check_path = check_writable
        if reads:
            check_path = check_readable
        check_path(folder)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            read_only=reads,
            lightweight_initialize=reads,
            cleanup_tmp_directories=not reads,
        )
        self._manager = ocp.CheckpointManager(full_path(folder), options=options)

    def steps(self) -> list[int]:
        """Steps of all checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, data_state: dict[str, Any], **trees: Any) -> None:
        """Start to write ``trees`` after ``step`` updates, which may then be donated.

        Args:
            step: number of updates.
            data_state: state of the data iterator.
            trees: pytrees of arrays, by name.

        The first one is written before this returns, and its description is read back.

        Raises:
            OSError: if it, or the one before, cannot be written, or the first one
                cannot be read.
        """
        if jax.default_backend() == "cpu":
            # Orbax copies device memory before it returns, but on CPU it would read
            # these buffers themselves.
            trees = jax.tree.map(jnp.copy, trees)
        facts = {"data": data_state, "leaves": leaves_of(trees)}
        items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        arguments = ocp.args.Composite(facts=ocp.args.JsonSave(facts), **items)
        with writing(self.folder):
            self._manager.save(step, args=arguments, force=True)
            if not self._read_back:
                self._manager.wait_until_finished()
        if not self._read_back:
            self._check_written(step, trees)
            self._read_back = True

    def _check_written(self, step: int, names: Iterable[str]) -> None:
        """Read a checkpoint that was just written, but not the data of its arrays.

        Raises:
            OSError: if it cannot be read.
        """
        folder = self.folder / str(step)
        message = f"stopped: {folder} was written, but cannot be read back"
        try:
            self._restore_facts(step)
            found = self._manager.item_metadata(step)
        except Exception as error:  # each library has its own
            raise OSError(f"{message} ({first_line(error)})") from error
        for name in names:
            if found.get(name) is None:  # Orbax found no arrays in it
                raise OSError(f"{message} (no arrays in {name})")

    def restore(self, step: int, **like: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The trees of these names and the data position stored at ``step``.

        ``like`` gives structure, shapes, dtypes and devices.

        Raises:
            RunError: if it cannot be read, or is of another model or optimizer.
        """
        folder = self.folder / str(step)
        try:
            facts = self._restore_facts(step)
            stored = {
                path: leaf
                for path, leaf in facts["leaves"].items()
                if path.partition("/")[0] in like
            }
            different = difference(stored, leaves_of(like))
            if not different:
                return self._restore_trees(step, like), facts["data"]
        except Exception as error:  # Orbax, Tensorstore and JSON each have their own
            raise RunError(
                f"{folder} is damaged, or cannot be read here ({first_line(error)}): to"
                f" use the checkpoint before it, move it out of {self.folder}"
            ) from error
        raise RunError(
            f"cannot restore {folder}, which belongs to another model or optimizer:"
            f" {different}"
        )

    def _restore_facts(self, step: int) -> dict[str, Any]:
        """Position in the data, and dtypes and shapes of all arrays."""
        arguments = ocp.args.Composite(facts=ocp.args.JsonRestore())
        return self._manager.restore(step, args=arguments)["facts"]

    def _restore_trees(self, step: int, like: dict[str, Any]) -> dict[str, Any]:
        """The trees of these names, with the shardings of ``like``."""
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        items = {
            name: ocp.args.StandardRestore(tree) for name, tree in abstract.items()
        }
        found = self._manager.restore(step, args=ocp.args.Composite(**items))
        return dict(found.items())

    def close(self) -> None:
        """Wait until everything is written.

        Raises:
            OSError: if it cannot be.
        """
        with writing(self.folder):
            self._manager.close()


def leaves_of(tree: Any) -> dict[str, str]:
    """Dtype and shape of every array of a tree, by its path."""
    return {
        path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in by_name(tree).items()
    }


def difference(there: dict[str, Any], here: dict[str, Any]) -> str:
    """The first entry that differs, in words; "" if there is none."""
    for name in dict.fromkeys([*there, *here]):
        stored = there.get(name, "absent")
        own = here.get(name, "absent")
        if stored != own:
            return f"{name} is {stored} there, {own} here"
    return ""


@functools.cache
def quiet() -> None:
    """Silence what Orbax logs besides what it raises.

    And Tensorstore's complaints about reads that were given up.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        closed = str(unraisable.exc_value) == "Event loop is closed"
        coroutine = getattr(unraisable.object, "cr_code", None)
        file = getattr(coroutine, "co_filename", "")
        if not closed and "orbax" not in file:
            before(unraisable)

    sys.unraisablehook = hook


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """While inside, whatever Orbax and Tensorstore raise is an OSError.

    Its message has the reason of the operating system.
    """
    try:
        yield
    except Exception as error:  # each has its own
        # Writes given up complain where they outlive the interpreter.
        atexit.register(gc.collect)
        raise OSError(f"cannot write {folder} ({system_error(error)})") from error


def system_error(error: Exception) -> str:
    """What the operating system says of a failed write, else the error's first line."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    if code:
        return os.strerror(int(code[1]))
    return getattr(error, "strerror", None) or first_line(error)


def first_line(error: Exception) -> str:
    """The message of an error, in one short line."""
    line, _, _ = one_line(error).partition(" See full TensorStore details")
    return textwrap.shorten(line, 240, placeholder=" ...")
