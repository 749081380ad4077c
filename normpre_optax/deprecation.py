# SPDX-License-Identifier: Apache-2.0
"""Former names: they work for one version, with a DeprecationWarning.

A function keeps its former name with ``deprecated``; an option keeps it with the field
``formerly`` of its entry in ``option_table.OPTIONS``.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Collection
from typing import Any, ParamSpec, TypeVar

from normpre_optax.option_table import OPTIONS

P = ParamSpec("P")
T = TypeVar("T")


def _renamed_options() -> dict[str, tuple[str, str]]:
    """Return the present name, and the version of removal, by former name."""
    renamed = {}
    for name, option in OPTIONS.items():
        for former in option.formerly:
            renamed[former.name] = (name, former.removed_in)
    return renamed


_RENAMED = _renamed_options()


def deprecated(use: str, removed_in: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator of a function that has a successor.

    Args:
        use: what to write instead, such as ``"optimizers()"``.
        removed_in: the version that removes the function.

    Example:
        >>> import warnings
        >>> from normpre_optax.deprecation import deprecated
        >>> @deprecated("area()", removed_in="2.0")
        ... def size(a, b):
        ...     return a * b
        >>> with warnings.catch_warnings(record=True) as seen:
        ...     warnings.simplefilter("always")
        ...     size(2, 3)
        6
        >>> print(seen[0].message)
        size() is now area(): the former name will be removed in version 2.0
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def former(*args: P.args, **kwargs: P.kwargs) -> T:
            _warn(f"{function.__name__}()", use, removed_in, stacklevel=3)
            return function(*args, **kwargs)

        return former

    return decorate


def accepts_former_names(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that also takes its options under their former names.

    ``options.checked`` does so for optimizers; this is for stages.
    """
    accepted = inspect.signature(function).parameters

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        name = function.__name__
        present = with_present_names(name, kwargs, accepted, stacklevel=3)
        return function(*args, **present)  # pyright: ignore[reportCallIssue]

    return called


def with_present_names(
    function: str,
    options: dict[str, Any],
    accepted: Collection[str],
    stacklevel: int,
) -> dict[str, Any]:
    """Return options with present names instead of former ones; warn of each.

    Args:
        function: its name, for the error.
        options: the keyword arguments of a call.
        accepted: the names of all arguments of the function.
        stacklevel: of the warning; 2 is the caller of this function.

    Raises:
        TypeError: if an option is given under both names.
    """
    present = dict(options)
    for given in options:
        if given in accepted or given not in _RENAMED:
            continue
        name, removed_in = _RENAMED[given]
        if name not in accepted:
            continue
        if name in options:
            raise TypeError(f"{function}() got {name!r} and its former name {given!r}")
        _warn(f"{given}=", f"{name}=", removed_in, stacklevel + 1)
        present[name] = present.pop(given)
    return present


def _warn(former: str, present: str, removed_in: str, stacklevel: int) -> None:
    """Warn of a former name; ``stacklevel`` 2 is the caller of this function."""
    warnings.warn(
        f"{former} is now {present}: the former name will be removed in version"
        f" {removed_in}",
        DeprecationWarning,
        stacklevel=stacklevel,
    )
