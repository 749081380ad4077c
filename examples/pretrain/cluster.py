# SPDX-License-Identifier: Apache-2.0
"""Processes that train together: they find each other, agree, and end together.

All run the same program; the first writes what there is to write. What only one of them
can know (an error, a signal, what is in the run's folder) they exchange before any of
them acts on it: a process that ends on its own leaves the others waiting. With one
process, nothing is exchanged.
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

# How long a process waits, at its end, for those that should end with it.
SHUTDOWN_SECONDS = 60
RESUME = "the same commands with --resume continue from the last checkpoint"
T = TypeVar("T")


def addressed(config: Config) -> bool:
    """Whether the command line says that this process is one of several."""
    numbered = config.processes is not None or config.process is not None
    return bool(config.coordinator) or numbered


def refuse_several(config: Config, command: str) -> None:
    """Refuse several processes in a command that runs in one.

    Raises:
        RunError: naming the command.
    """
    if addressed(config):
        raise RunError(
            f"{command} runs in one process: remove --coordinator, --processes and"
            " --process"
        )


def several(environment: Mapping[str, str]) -> bool:
    """Whether a cluster's launcher says that this process is one of several."""
    if "JAX_COORDINATOR_ADDRESS" in environment:
        return True
    slurm = "SLURM_STEP_NODELIST" in environment
    if slurm and int(environment.get("SLURM_NTASKS", 1)) > 1:
        return True
    if int(environment.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        return True
    if "," in environment.get("TPU_WORKER_HOSTNAMES", ""):
        return True
    kubernetes = {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"}
    return kubernetes <= environment.keys()


@contextmanager
def joined(config: Config) -> Iterator[None]:
    """While inside, this process trains together with others, if there are several.

    Must be entered before JAX looks for devices. Together they have
    ``config.devices``.

    Raises:
        RunError: if their address is incomplete, or they do not find each other.
    """
    check_address(config)
    if config.devices == 1 or not (addressed(config) or several(os.environ)):
        yield
        return
    find_each_other(config)
    with leaving_at_once():
        yield


def check_address(config: Config) -> None:
    """Refuse an address that is incomplete, or that nobody needs.

    Raises:
        RunError: naming --coordinator.
    """
    if addressed(config) and config.devices == 1:
        raise RunError(
            "--coordinator is for processes that train together: add --fsdp N, their"
            " number of devices"
        )
    _, _, port = config.coordinator.rpartition(":")
    if config.coordinator and not port.isdecimal():
        raise RunError(f"--coordinator must be host:port, got {config.coordinator!r}")


def find_each_other(config: Config) -> None:
    """Connect the processes that train together.

    Raises:
        RunError: if they do not find each other.
    """
    # Its handler of SIGTERM would replace the program's.
    jax.config.update("jax_enable_preemption_service", False)
    detection = None
    if addressed(config):
        detection = "deactivate"
    try:
        jax.distributed.initialize(
            config.coordinator or None,
            config.processes,
            config.process,
            cluster_detection_method=detection,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        raise RunError(
            f"the processes did not find each other ({error}): pass --coordinator"
            " host:port --processes N --process I"
        ) from error


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """End the process at an error that the other processes do not know of.

    It prints a line or a traceback. The others notice that it is gone; if it ended in
    the ordinary way, it would wait for them, and they for it.
    """
    try:
        yield
    except (RunError, Stopped):
        raise
    except BaseException as error:
        if alone():
            raise
        if isinstance(error, jax.errors.JaxRuntimeError | OSError):
            # Another process is gone, or a disk is full.
            first_line = str(error).splitlines()[0]
            print(f"error: {first_line:.160}: {RESUME}", file=sys.stderr)
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


def gathered(text: str) -> list[str]:
    """The texts of all processes, in their order."""
    if alone():
        return [text]
    # Arrays of one length can be gathered: first the lengths, then the padded bytes.
    own = np.frombuffer(text.encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.int32(len(own)))
    padded = np.resize(np.append(own, 0).astype(np.uint8), int(np.max(lengths)) + 1)
    lines = np.asarray(multihost_utils.process_allgather(padded))
    return [
        bytes(line[:length]).decode()
        for line, length in zip(lines, lengths, strict=True)
    ]


def together(function: Callable[[], T]) -> T:
    """``function()``, in every process; an error in one is an error in all.

    Raises:
        RunError: with the message of that process.
    """
    result = None
    failure = None
    message = ""
    try:
        result = function()
    except (RunError, OSError) as error:
        failure = error
        message = str(error) or repr(error)
    messages = gathered(message)
    if failure is not None:
        raise failure
    for number, message in enumerate(messages):
        if message:
            raise RunError(f"process {number}: {message}")
    return result  # pyright: ignore[reportReturnType]


def first_of_all(function: Callable[[], T]) -> T:
    """``function()`` in the first process, and once that is done in the others."""
    if not first():
        together(lambda: None)
    result = together(function)
    if first():
        together(lambda: None)
    return result


def from_the_first(function: Callable[[], T]) -> T:
    """The result, JSON, of ``function()`` in the first process.

    The others do not call it.
    """
    if alone():
        return function()
    result = together(lambda: only_first(function))
    return json.loads(gathered(json.dumps(result))[0])


def only_first(function: Callable[[], T]) -> T | None:
    """``function()`` in the first process, None in the others."""
    if first():
        return function()
    return None


class Vote:
    """The largest number that any process has passed, one call late.

    By then the devices have long computed it: a call waits for the step before the one
    they work on.
    """

    def __init__(self) -> None:
        self._largest: jax.Array | None = None
        if not alone():
            mesh = jax.make_mesh((jax.device_count(),), ("all",))
            axes = jax.sharding.PartitionSpec("all")
            self._sharding = jax.sharding.NamedSharding(mesh, axes)
            self._max = jax.jit(lambda votes: votes.max())

    def __call__(self, mine: int | None) -> int | None:
        """The largest number that a process passed the last time, or None."""
        if alone():
            return mine
        before = None
        if self._largest is not None:
            before = int(self._largest) or None  # 0 is a vote of None
        local = np.full(jax.local_device_count(), mine or 0, np.int32)
        votes = jax.make_array_from_process_local_data(self._sharding, local)
        self._largest = self._max(votes)
        return before
