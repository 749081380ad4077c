# SPDX-License-Identifier: Apache-2.0
"""Which part of the package imports which: one table, bottom up, compared with the source."""

import ast
import inspect
import json
import subprocess
import sys
import types
from pathlib import Path

import normpre_optax as npo

PACKAGE = Path(__file__).parents[1] / "normpre_optax"
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
ALL = {"jax", "numpy", "optax"}

# Folder or top-level file: the third-party packages and the parts of this package that it may import. A part may import
# only parts above it in this table, and itself.
TABLE: dict[str, tuple[set[str], set[str]]] = {
    "checks": ({"jax", "numpy"}, set()),
    "linalg": ({"jax", "numpy"}, set()),
    "parameters": (ALL, set()),
    "sharding": (ALL, {"linalg", "parameters"}),
    "stages": (ALL, {"checks", "linalg", "parameters", "sharding"}),
    "options": ({"jax"}, {"checks"}),
    "hyperball": ({"jax", "optax"}, {"checks", "linalg", "parameters", "stages"}),
    "optimizer": (ALL, {"checks", "hyperball", "options", "parameters", "sharding", "stages"}),
    "algorithm": ({"optax"}, {"optimizer", "options", "stages"}),
    "recommended": ({"optax"}, {"algorithm", "optimizer", "options"}),
    "relatives": ({"optax"}, {"algorithm", "optimizer", "options", "stages"}),
    "learning_rates": ({"jax", "optax"}, {"parameters", "relatives"}),
    "__init__": (
        set(),
        {"algorithm", "hyperball", "learning_rates", "optimizer", "options", "parameters", "recommended", "relatives"}
        | {"stages"},
    ),
}


def part_of(file):
    return file.split("/")[0].removesuffix(".py")


def imports(source):
    """(module, inside a function) for every import of a file."""

    def visit(node, inside):
        if isinstance(node, ast.Import):
            yield from ((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from ((f"{node.module}.{alias.name}", inside) for alias in node.names)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside or isinstance(node, ast.FunctionDef | ast.Lambda))

    return visit(ast.parse(source), False)


def violations(file, source):
    packages, parts = TABLE[part_of(file)]
    for module, inside in imports(source):
        top, _, rest = module.partition(".")
        if inside:
            yield f"{module}: inside a function"
        elif module.startswith(("optax._src", "jax._src")):
            yield f"{module}: private"
        elif top == "normpre_optax":
            if rest.split(".")[0] not in parts | {part_of(file)}:
                yield f"{module}: not in the table"
        elif top not in sys.stdlib_module_names | packages:
            yield f"{module}: not in the table"


def test_the_table_is_kept_has_no_cycles_and_every_part():
    assert not [x for file in FILES for x in violations(file, (PACKAGE / file).read_text())]
    above = []
    for part, (_, allowed) in TABLE.items():
        assert allowed <= set(above), part
        above.append(part)
    assert {part_of(file) for file in FILES} == set(TABLE)


def test_a_relative_is_short_and_uses_what_a_user_can():
    """At most 60 lines with license, imports and docstring; no other relative, and no private name."""
    for file in FILES:
        if file.startswith("relatives/") and "__init__" not in file:
            source = (PACKAGE / file).read_text()
            modules = [module for module, _ in imports(source)]
            assert not any(module.startswith("normpre_optax.relatives") for module in modules), file
            assert not any(part.startswith("_") for module in modules for part in module.split(".")), file
            assert len(source.splitlines()) <= 60, file


def test_what_is_forbidden_is_seen():
    for file, source in (
        ("linalg/rows.py", "import optax"),
        ("linalg/rows.py", "from normpre_optax.stages import scale"),
        ("parameters/rules.py", "def f():\n    import jax"),
        ("algorithm.py", "from optax._src import base"),
        ("algorithm.py", "import examples.pretrain"),
    ):
        assert list(violations(file, source)), source


def test_no_module_has_the_name_of_an_option():
    """``normpre_optax.threshold`` or ``.shardings`` as a module would be what completion offers for an option."""
    modules = {name for name in dir(npo) if isinstance(getattr(npo, name), types.ModuleType)}
    public = [getattr(npo, name) for name in npo.__all__ if callable(getattr(npo, name))]
    options = {name for f in public for name in inspect.signature(f).parameters} - {
        "stages"
    }  # of `direction`: no option
    assert not modules & options
    assert set(npo.__all__) & modules == {"presets"}


def test_importing_the_library_loads_nothing_else():
    """In a process of its own: flax, the examples and what they need are installed here, and are not loaded."""
    code = "import json, sys, normpre_optax; print(json.dumps(sorted({m.partition('.')[0] for m in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, timeout=120, cwd=PACKAGE.parent
    )
    loaded = set(json.loads(done.stdout))
    heavy = {"flax", "examples", "matplotlib", "rich", "tyro", "orbax", "grain", "tokenizers", "tensorstore", "torch"}
    heavy |= {"haiku", "equinox", "hypothesis", "pytest", "datasets", "transformers", "tensorboardX"}
    assert not loaded & heavy
    assert {"jax", "optax", "normpre_optax"} <= loaded
