# SPDX-License-Identifier: Apache-2.0
"""Run a research program from the command line: an error that the user can fix is one line."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from examples.pretrain.config import RunError
from examples.pretrain.processes import Stopped


def run(main: Callable[[Sequence[str]], Any], arguments: Sequence[str] | None = None) -> int:
    """Call ``main`` with the arguments of the command line, or with ``arguments``; return the exit status."""
    try:
        main(sys.argv[1:] if arguments is None else arguments)
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return 128 + stopped.signal_number
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0
