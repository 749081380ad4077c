# SPDX-License-Identifier: Apache-2.0
"""Processes that train together: they find each other, agree, and leave together.

All of them run the same program; the first writes what there is to write. Whatever only one of them can know (an
error, a signal, what lies in the run's folder) they tell each other before any of them acts on it, since a process that
leaves on its own leaves the others waiting. A process by itself has nobody to tell.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from .config import Config, RunError
from .processes import Stopped

SHUTDOWN_SECONDS = 60  # for a process to wait, at its end, for those that should end with it
T = TypeVar("T")


def check(config: Config) -> None:
    """Refuse half an address.

    Raises:
        RunError: naming the flag that is missing.
    """
    count, number = config.processes, config.process
    if not config.coordinator and count is None and number is None:
        return
    if not config.coordinator or count is None or number is None:
        raise RunError("--coordinator host:port, --processes N and --process I belong together")
    if not config.mesh:
        raise RunError("--coordinator is for processes that train together: --mesh says how")
    if not config.coordinator.rpartition(":")[2].isdecimal():
        raise RunError(f"--coordinator must be host:port, got {config.coordinator!r}")
    if number >= count:
        raise RunError(f"--process {number} must be smaller than --processes {count}")


def refuse_several(config: Config, command: str) -> None:
    """Refuse several processes in a command that is made for one.

    Raises:
        RunError: naming the command.
    """
    if config.coordinator or config.processes is not None or config.process is not None:
        raise RunError(f"{command} runs in one process: leave --coordinator, --processes and --process out")


def several(environment: Mapping[str, str]) -> bool:
    """Whether a cluster's launcher says that this process is one of several."""
    return (
        ("SLURM_STEP_NODELIST" in environment and int(environment.get("SLURM_NTASKS", 1)) > 1)
        or int(environment.get("OMPI_COMM_WORLD_SIZE", 1)) > 1
        or "," in environment.get("TPU_WORKER_HOSTNAMES", "")
        or ("KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment)
        or "JAX_COORDINATOR_ADDRESS" in environment
    )


@contextmanager
def joined(config: Config) -> Iterator[None]:
    """While inside, this process is one of those that train on ``config.mesh`` together, if there are several.

    Comes before anything that wakes JAX's devices.

    Raises:
        RunError: where they do not find each other.
    """
    if not config.mesh or not (config.coordinator or several(os.environ)):
        yield
        return
    # Its handler of SIGTERM would stand in the way of the program's own.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            config.coordinator or None,
            config.processes,
            config.process,
            cluster_detection_method="deactivate" if config.coordinator else None,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        raise RunError(
            f"the processes did not find each other ({error}): --coordinator host:port --processes N --process I "
            "says where they are"
        ) from error
    with leaving_at_once():
        yield


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """An error that the other processes do not know of ends this one here, with a line or traceback.

    They notice that it is gone; were it to end in the ordinary way, it would wait for them, and they for it.
    """
    try:
        yield
    except (RunError, Stopped):
        raise
    except BaseException as error:
        if alone():
            raise
        if isinstance(error, jax.errors.JaxRuntimeError):
            way_out = "if another process is gone, the same commands with --resume go on from the last checkpoint"
            print(f"error: {str(error).splitlines()[0]:.160}: {way_out}", file=sys.stderr)
        elif isinstance(error, OSError):  # a full disk
            print(f"error: {error}: the same commands with --resume go on from the last checkpoint", file=sys.stderr)
        else:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def alone() -> bool:
    """Whether this process trains by itself."""
    return not jax.distributed.is_initialized()


def first() -> bool:
    """Whether this is the process that writes."""
    return alone() or jax.process_index() == 0


def told(text: str) -> list[str]:
    """What every process says, in their order."""
    if alone():
        return [text]
    said = np.frombuffer(text.encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.int32(len(said)))
    padded = np.resize(np.append(said, 0).astype(np.uint8), int(np.max(lengths)) + 1)
    everything = np.asarray(multihost_utils.process_allgather(padded))
    return [bytes(line[:length]).decode() for line, length in zip(everything, lengths, strict=True)]


def together(function: Callable[[], T]) -> T:
    """``function()``, in every process; where it fails in one it has failed in all.

    Raises:
        RunError: what it says there.
    """
    result, failure = None, None
    try:
        result = function()
    except (RunError, OSError) as error:
        failure = error
    for number, said in enumerate(told("" if failure is None else str(failure) or repr(failure))):
        if said and failure is None:
            raise RunError(f"process {number}: {said}")
    if failure is not None:
        raise failure
    return result  # pyright: ignore[reportReturnType]


def first_of_all(function: Callable[[], T]) -> T:
    """``function()`` in the first process, and once that is done in the others."""
    if first():
        result = together(function)
        together(lambda: None)
        return result
    together(lambda: None)
    return together(function)


def from_the_first(function: Callable[[], T]) -> T:
    """What ``function()``, JSON, is in the first process; the others do not call it."""
    result = together(lambda: function() if first() else None)
    return result if alone() else json.loads(told(json.dumps(result))[0])  # pyright: ignore[reportReturnType]


class Vote:
    """Agreement of all processes on a number: what any of them asks for is known to all of them one call later.

    By then the devices have long counted: a call waits for the step before the one they work on.
    """

    def __init__(self) -> None:
        self._counted: jax.Array | None = None
        if not alone():
            mesh = jax.make_mesh((jax.device_count(),), ("all",))
            self._sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("all"))
            self._largest = jax.jit(lambda votes: votes.max())

    def __call__(self, mine: int | None) -> int | None:
        """The largest number that a process called with the last time, None where there was none."""
        if alone():
            return mine
        before = None if self._counted is None else int(self._counted)
        local = np.full(jax.local_device_count(), mine or 0, np.int32)
        self._counted = self._largest(jax.make_array_from_process_local_data(self._sharding, local))
        return before or None
