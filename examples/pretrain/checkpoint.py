# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that continue a run exactly: parameters, optimizer state, position in the data, step.

There is no random state to keep: initialisation, data order and sampling are functions of the seed, which is part of
the run's configuration, and of the step. A checkpoint appears on disk whole or not at all: Orbax renames a finished
folder into place. It is written in the background while training goes on.
"""

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from .config import RunError


class Checkpoints:
    """The checkpoints of one run, the last ``keep`` of them."""

    def __init__(self, folder: Path, keep: int):
        logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports every save as a warning or an info line
        self.folder = folder
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def latest_step(self) -> int | None:
        """Step of the newest checkpoint, None where there is none."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Steps of all checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, data_state: dict[str, Any]) -> None:
        """Begin to write ``state`` after ``step`` updates together with the data iterator's state.

        ``state`` may be given up (donated) once this returns.
        """
        if jax.default_backend() == "cpu":
            # Orbax copies device memory before it returns, but on CPU it would read these buffers themselves.
            state = jax.tree.map(jnp.copy, state)
        facts = {"data": data_state, "leaves": leaves_of(state)}
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), facts=ocp.args.JsonSave(facts))
        self._manager.save(step, args=items, force=True)

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """The state and the data position stored at ``step``; ``like`` gives structure, shapes, dtypes and devices.

        Raises:
            RunError: where the checkpoint is damaged or belongs to another model or optimizer.
        """
        folder = self.folder / str(step)
        try:
            facts = self._manager.restore(step, args=ocp.args.Composite(facts=ocp.args.JsonRestore()))["facts"]
            stored, expected = facts["leaves"], leaves_of(like)
            if stored == expected:
                abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)  # keeps the sharding
                items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
                return self._manager.restore(step, args=items)["state"], facts["data"]
        except Exception as error:  # Orbax, Tensorstore and JSON each have their own
            more = len(self.steps()) > 1
            way_out = "delete it to go back to an earlier one" if more else "there is no other, the run must begin anew"
            raise RunError(f"cannot restore {folder}, it is damaged ({first_line(error)}): {way_out}") from error
        name = next(k for k in [*stored, *expected] if stored.get(k) != expected.get(k))
        raise RunError(
            f"cannot restore {folder}, it is of another model or optimizer: {name} is {stored.get(name, 'absent')} "
            f"there, {expected.get(name, 'absent')} here"
        )

    def close(self) -> None:
        """Wait until everything is written."""
        self._manager.wait_until_finished()
        self._manager.close()


def leaves_of(state: Any) -> dict[str, str]:
    """Path -> dtype and shape of every array."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in leaves
    }


def first_line(error: Exception) -> str:
    """What an error says, in one short line."""
    lines = str(error).strip().splitlines()
    return f"{lines[0] if lines else type(error).__name__:.160}"
