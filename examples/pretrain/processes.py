# SPDX-License-Identifier: Apache-2.0
"""Signals that ask to stop, and folders that only one process may write to."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from .config import RunError

LOCK = "lock"
_PR_SET_PDEATHSIG = 1


class Stopped(Exception):
    """A signal asked to stop, all is saved, and the text says how to continue."""

    def __init__(self, what: str, signal_number: int):
        super().__init__(what)
        self.signal_number = signal_number


@contextmanager
def on_signals(stop: Callable[[int], None]) -> Iterator[None]:
    """While inside, SIGTERM and a first Ctrl-C call ``stop`` with their number.

    A second Ctrl-C ends at once.
    """
    seen: list[int] = []

    def handle(number: int, frame: Any) -> None:
        if seen and number == signal.SIGINT:
            raise KeyboardInterrupt
        seen.append(number)
        stop(number)

    before = {
        number: signal.signal(number, handle)
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def lock(folder: Path) -> IO[bytes] | None:
    """Lock the folder for this process until the file that is returned is closed.

    On Windows, which lacks such locks, do nothing and return None.

    Raises:
        RunError: if another process has locked it.
    """
    if os.name != "posix":
        return None
    import fcntl

    file = (folder / LOCK).open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise RunError(
            f"another process is writing {folder}: wait until it has ended, or stop it"
        ) from error
    return file


def begin_as_child(cores: set[int]) -> None:
    """Set the cores of a child process, if any; on Linux end it with its parent.

    Called in the child, before its program starts.
    """
    if cores:
        os.sched_setaffinity(0, cores)
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
