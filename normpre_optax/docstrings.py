# SPDX-License-Identifier: Apache-2.0
"""Docstrings that are made of parts: sections, and descriptions of shared options."""

import inspect
import re
import textwrap
from collections.abc import Iterable

from normpre_optax.option_table import OPTIONS

# In the order in which a docstring has them, after the text.
SECTIONS = ("Args", "Returns", "Raises", "Example", "References")
RETURNS = (
    "    The direction, for matrices only. Its updates point uphill, like those of"
    " ``optax.scale_by_*``."
)
WIDTH = 84  # of a description; a docstring is indented by four


def split_sections(doc: str | None) -> dict[str, str]:
    """Split a docstring into its text ("") and its sections ("Args", ...)."""
    heading = rf"^({'|'.join(SECTIONS)}):\n"
    text, *rest = re.split(heading, inspect.cleandoc(doc or ""), flags=re.MULTILINE)
    found = {"": text.rstrip()}
    for name, body in zip(rest[::2], rest[1::2], strict=True):
        found[name] = body.rstrip()
    return found


def join_sections(sections: dict[str, str]) -> str:
    """Join what ``split_sections`` returns to a docstring; empty sections are left out.

    A docstring without a section "Returns" gets that of a direction.
    """
    found = {"": "", "Returns": RETURNS} | sections
    parts = [found[""]]
    for name in SECTIONS:
        if found.get(name):
            parts.append(f"{name}:\n{found[name]}")
    return "\n\n".join(parts)


def describe(args: str, names: Iterable[str]) -> str:
    """Return a section "Args" with descriptions of the shared options among ``names``.

    A function's own description of an option, in ``args``, takes precedence.
    """
    lines = [args.rstrip()] if args.strip() else []
    for name in names:
        shared = name in OPTIONS and OPTIONS[name].description is not None
        if shared and not re.search(rf"^    {name}: ", args, re.MULTILINE):
            lines.append(_entry(name))
    return "\n".join(lines)


def _entry(name: str) -> str:
    """Return the lines of one shared option in a section "Args"."""
    text = f"{name}: {OPTIONS[name].description}"
    return textwrap.fill(text, WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8)
