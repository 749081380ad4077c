# SPDX-License-Identifier: Apache-2.0
"""Named configurations, one file each; a file's docstring gives its command and the expected result."""

import importlib
import pkgutil

from ..config import Config, RunError

NAMES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "paper"))


def load(name: str) -> Config:
    """The configuration of the file ``name``.

    Raises:
        RunError: where there is no such file.
    """
    if name not in NAMES:
        raise RunError(f"--config must be one of {', '.join(NAMES)}, got {name!r}")
    return importlib.import_module(f"{__name__}.{name}").config
