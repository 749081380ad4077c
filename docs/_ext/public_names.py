# SPDX-License-Identifier: Apache-2.0
"""Every public name is documented and stands on a page.

Otherwise the build warns, and with `-W` fails.
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
        names += [name for name in _assigned(node) if name.isupper()]
    return [name for name in names if not name.startswith("_")]


def _assigned(node: ast.stmt) -> list[str]:
    """The names that a statement assigns."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def documentation(module: types.ModuleType, name: str) -> str:
    """The docstring of a name of a module.

    That of a constant is the string that follows its assignment.

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
    if made_by_python:
        return ""
    return inspect.cleandoc(doc)


def _constants_docstring(module: types.ModuleType, name: str) -> str:
    """The string after the assignment of a constant, where it is defined."""
    body = ast.parse(inspect.getsource(module)).body
    for node, following in zip(body, [*body[1:], None], strict=True):
        source = _module_of_import(node, name)
        if source:
            return _constants_docstring(importlib.import_module(source), name)
        value = getattr(following, "value", None)
        if not (isinstance(following, ast.Expr) and isinstance(value, ast.Constant)):
            continue
        if name in _assigned(node):
            return inspect.cleandoc(str(value.value))
    return ""


def _module_of_import(node: ast.stmt, name: str) -> str | None:
    """The module that a statement imports a name from; None if it does not."""
    if not isinstance(node, ast.ImportFrom):
        return None
    names = [alias.name for alias in node.names]
    if name not in names:
        return None
    return node.module


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
        full = f"{module.__name__}.{name}"
        thing = getattr(module, name)
        if not documentation(module, name):
            yield f"the public name {full} has no documentation"
        names = {full}
        if inspect.ismodule(thing):
            names.add(thing.__name__)  # a module is listed by its own name
        if not listed & names:
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
    package = app.config.public_modules[0]
    public = set(public_names(importlib.import_module(package)))

    def link(found: re.Match) -> str:
        mentioned = found[1].removesuffix("()")
        if mentioned not in public or name.endswith(f".{mentioned}"):
            return found[0]
        return f":py:obj:`{found[1]} <{package}.{mentioned}>`"

    lines[:] = [re.sub(r"``(\w+(?:\(\))?)``", link, line) for line in lines]


def leave_out_fields(app, what, name, obj, skip, options) -> bool | None:
    """Leave out fields of named tuples, which stand in the class's docstring."""
    doc = getattr(obj, "__doc__", None) or ""
    if doc.startswith("Alias for field number"):  # what Python says of a field
        return True
    return None


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
        if text is None:
            return None
        for alias, annotation in aliases.items():
            written = stringify_annotation(annotation, "smart")
            text = text.replace(written, alias)
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
