# SPDX-License-Identifier: Apache-2.0
"""Run a research program from the command line.

An error that the user can fix is one line.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from examples.pretrain.main import exit_status


def run(
    main: Callable[[Sequence[str]], Any], arguments: Sequence[str] | None = None
) -> int:
    """Call ``main`` and return the exit status.

    ``arguments`` are those of ``main``; None: those of the command line.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    return exit_status(functools.partial(main, arguments))
