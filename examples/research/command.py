# SPDX-License-Identifier: Apache-2.0
"""Run a research program from the command line: an error that the user can fix is one
line.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from examples.pretrain.main import exit_status


def run(
    main: Callable[[Sequence[str]], Any], arguments: Sequence[str] | None = None
) -> int:
    """Call ``main`` with the arguments of the command line, or with ``arguments``;
    return the exit status.
    """
    return exit_status(lambda: main(sys.argv[1:] if arguments is None else arguments))
