# SPDX-License-Identifier: Apache-2.0
"""Every public name is documented and stands on a page: otherwise the build warns, and
with `-W` fails.

The public names are those of `__all__` and, in `presets`, what it defines without an
underscore.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

MODULES = ("normpre_optax", "normpre_optax.parameters.presets")


def public_names(module: types.ModuleType) -> list[str]:
    """What a module offers.

    Args:
        module: any.

    Returns:
        Its `__all__`; without one, the functions and classes that it defines and the
        upper-case names that it assigns, in the order of its source.
    """
    if hasattr(module, "__all__"):
        return list(module.__all__)
    names: list[str] = []
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [
                target.id
                for target in targets
                if isinstance(target, ast.Name) and target.id.isupper()
            ]
    return [name for name in names if not name.startswith("_")]


def documentation(module: types.ModuleType, name: str) -> str:
    """The docstring of a name of a module; of a constant, the string that follows its
    assignment.

    Args:
        module: the one that shows the name, by defining or by importing it.
        name: a function, class, module or constant.

    Returns:
        The docstring; empty if there is none, or only the one that Python makes for a
        tuple or a dataclass.
    """
    thing = getattr(module, name)
    if not (callable(thing) or inspect.ismodule(thing)):
        return _constants_docstring(module, name)
    doc = (thing.__doc__ or "").strip()
    made_by_python = inspect.isclass(thing) and doc.startswith(f"{thing.__name__}(")
    return "" if made_by_python else inspect.cleandoc(doc)


def _constants_docstring(module: types.ModuleType, name: str) -> str:
    body = ast.parse(inspect.getsource(module)).body
    for node, following in zip(body, [*body[1:], None], strict=True):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and any(a.name == name for a in node.names)
        ):
            return _constants_docstring(importlib.import_module(node.module), name)
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [getattr(node, "target", None)]
        )
        if not any(
            isinstance(target, ast.Name) and target.id == name for target in targets
        ):
            continue
        if isinstance(following, ast.Expr) and isinstance(
            following.value, ast.Constant
        ):
            return inspect.cleandoc(str(following.value.value))
    return ""


def public_methods(thing: Any) -> list[str]:
    """Methods without an underscore that a class itself defines.

    Args:
        thing: anything; what is no class has none.

    Returns:
        Their names.
    """
    if not inspect.isclass(thing):
        return []
    made_by_python = {"_make", "_replace", "_asdict", "count", "index"}
    return [
        name
        for name, value in vars(thing).items()
        if inspect.isfunction(value)
        and not name.startswith("_")
        and name not in made_by_python
    ]


def problems(module: types.ModuleType, listed: Iterable[str]) -> Iterator[str]:
    """What is wrong with a module's public names.

    Args:
        module: the one that shows them.
        listed: full names of everything that stands on a page.

    Yields:
        A line for every public name or method without documentation or without a page.
    """
    listed = set(listed)
    for name in public_names(module):
        full, thing = f"{module.__name__}.{name}", getattr(module, name)
        if not documentation(module, name):
            yield f"the public name {full} has no documentation"
        own = (
            {thing.__name__} if inspect.ismodule(thing) else set()
        )  # a module is listed by its own name
        if not listed & {full, *own}:
            yield f"the public name {full} stands on no page"
        for method in public_methods(thing):
            if not (getattr(thing, method).__doc__ or "").strip():
                yield f"the method {full}.{method} has no documentation"


def check(app, env) -> None:
    """Warn of every problem with the public names."""
    from sphinx.util import logging

    logger = logging.getLogger(__name__)
    listed = {name for name, *_ in env.domains["py"].get_objects()}
    for module in app.config.public_modules:
        for line in problems(importlib.import_module(module), listed):
            logger.warning(line, type="public_names")


def document_constants(app, what, name, obj, options, lines) -> None:
    """Give autodoc the docstring of a constant that was imported."""
    module, _, constant = name.rpartition(".")
    if what in ("data", "attribute") and module in app.config.public_modules:
        lines[:] = [*documentation(sys.modules[module], constant).splitlines(), ""]


def link_names(app, what, name, obj, options, lines) -> None:
    """Make links of the public names that docstrings mention, but for a thing's own."""
    public = set(public_names(importlib.import_module(app.config.public_modules[0])))

    def link(found: re.Match) -> str:
        mentioned = found[1].removesuffix("()")
        known = mentioned in public and not name.endswith(f".{mentioned}")
        return (
            f":py:obj:`{found[1]} <{app.config.public_modules[0]}.{mentioned}>`"
            if known
            else found[0]
        )

    lines[:] = [re.sub(r"``(\w+(?:\(\))?)``", link, line) for line in lines]


def leave_out_fields(app, what, name, obj, skip, options) -> bool | None:
    """Fields of named tuples stand in the class's docstring; what Python says of them
    tells nothing.
    """
    made_by_python = (getattr(obj, "__doc__", None) or "").startswith(
        "Alias for field number"
    )
    return True if made_by_python else None


def shorten_types(app, what, name, obj, options, signature, returned):
    """Write jax's and optax's unions by their names."""
    import jax
    import optax
    from sphinx.util.typing import stringify_annotation

    aliases = {
        "ScalarOrSchedule": optax.ScalarOrSchedule,
        "DTypeLike": jax.typing.DTypeLike,
        "ArrayLike": jax.typing.ArrayLike,
    }

    def short(text: str | None) -> str | None:
        for alias, annotation in aliases.items():
            written = stringify_annotation(annotation, "smart")
            text = text.replace(written, alias) if text else text
        return text

    return short(signature), short(returned)


def setup(app) -> dict[str, Any]:
    """Connect the check, and what makes autodoc's pages readable."""
    app.add_config_value("public_modules", MODULES, "env")
    app.connect("env-check-consistency", check)
    app.connect("autodoc-process-docstring", document_constants)
    app.connect("autodoc-process-docstring", link_names)
    app.connect("autodoc-skip-member", leave_out_fields)
    app.connect("autodoc-process-signature", shorten_types)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
