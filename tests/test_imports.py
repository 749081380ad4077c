# SPDX-License-Identifier: Apache-2.0
"""Which part of the package imports which: one table, bottom up.

And how many functions run in an update.
"""

import ast
import inspect
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp

import normpre_optax as npo
from tests import cases

PACKAGE = Path(__file__).parents[1] / "normpre_optax"
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
ALL = {"jax", "numpy", "optax"}

# Folder or top-level file: the third-party packages and the parts of this package that
# it may import. A part may import only parts above it in this table, and itself.
TABLE: dict[str, tuple[set[str], set[str]]] = {
    "option_table": (set(), set()),
    "trees": (set(), set()),
    "deprecation": (set(), {"option_table"}),
    "docstrings": (set(), {"option_table"}),
    "checks": ({"jax", "numpy"}, {"option_table"}),
    "linalg": ({"jax", "numpy"}, set()),
    "parameters": (ALL, {"checks", "trees"}),
    "options": (
        {"jax"},
        {"checks", "deprecation", "docstrings", "option_table", "trees"},
    ),
    "sharding": (ALL, {"linalg", "parameters", "trees"}),
    "stages": (
        ALL,
        {"checks", "deprecation", "linalg", "parameters", "sharding", "trees"},
    ),
    "learning_rates": ({"jax", "optax"}, {"checks", "parameters", "stages", "trees"}),
    "hyperball": (
        {"jax", "optax"},
        {"checks", "linalg", "options", "parameters", "stages"},
    ),
    "optimizer": (
        ALL,
        {"checks", "docstrings", "hyperball", "linalg", "options", "parameters"}
        | {"sharding", "stages"},
    ),
    "algorithm": ({"optax"}, {"optimizer", "options", "stages"}),
    "recommended": ({"optax"}, {"optimizer", "options", "stages"}),
    "relatives": (
        {"optax"},
        {"algorithm", "checks", "deprecation", "optimizer", "options", "recommended"}
        | {"stages"},
    ),
    "__init__": (
        set(),
        {
            "algorithm",
            "hyperball",
            "learning_rates",
            "optimizer",
            "options",
            "parameters",
            "recommended",
            "relatives",
        }
        | {"stages"},
    ),
}


def part_of(file):
    return file.split("/")[0].removesuffix(".py")


def imports(source):
    """(module, whether at the top) for every import of a file."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            prefix = ""
        elif isinstance(node, ast.ImportFrom):
            prefix = f"{'.' * node.level}{node.module}."
        else:
            continue
        for alias in node.names:
            yield prefix + alias.name, node in tree.body


def violations(file, source):
    """The imports of a file that the table does not allow."""
    packages, parts = TABLE[part_of(file)]
    own_parts = parts | {part_of(file)}
    others = sys.stdlib_module_names | packages
    for module, at_the_top in imports(source):
        top, _, rest = module.partition(".")
        allowed = top in others
        if top == "normpre_optax":
            allowed = rest.split(".")[0] in own_parts
        is_private = module.startswith(("optax._src", "jax._src"))
        if is_private or not allowed or not at_the_top:
            yield module


def test_the_table_is_kept_has_no_cycles_and_every_part():
    for file in FILES:
        assert not list(violations(file, (PACKAGE / file).read_text())), file
    above = []
    for part, (_, allowed) in TABLE.items():
        assert allowed <= set(above), part
        above.append(part)
    assert {part_of(file) for file in FILES} == set(TABLE)
    for file, source in (
        ("linalg/rows.py", "import optax"),
        ("linalg/rows.py", "from normpre_optax.stages import scale"),
        ("parameters/rules.py", "def f():\n    import jax"),
        ("parameters/rules.py", "from . import dims"),
        ("algorithm.py", "from optax._src import base"),
        ("algorithm.py", "import examples.pretrain"),
    ):
        assert list(violations(file, source)), source


def test_a_relative_uses_what_a_user_can():
    """No other relative, and no private name."""
    for file in FILES:
        if file.startswith("relatives/") and "__init__" not in file:
            source = (PACKAGE / file).read_text()
            for module, _ in imports(source):
                assert not module.startswith("normpre_optax.relatives"), file
                assert "._" not in module, file


def test_no_module_has_the_name_of_an_option():
    """Completion would offer a module ``normpre_optax.threshold`` for the option."""
    modules = set()
    for name in dir(npo):
        if isinstance(getattr(npo, name), types.ModuleType):
            modules.add(name)
    options = set()
    for name in npo.__all__:
        if callable(getattr(npo, name)):
            options |= inspect.signature(getattr(npo, name)).parameters.keys()
    assert modules & options <= {"stages"}  # an argument of `direction`, and no option
    assert set(npo.__all__) & modules == {"presets"}


HEAVY = {
    "datasets",
    "equinox",
    "examples",
    "flax",
    "grain",
    "haiku",
    "hypothesis",
    "matplotlib",
    "orbax",
    "pytest",
    "rich",
    "tensorboardX",
    "tensorstore",
    "tokenizers",
    "torch",
    "transformers",
    "tyro",
}


def test_importing_the_library_loads_nothing_else():
    """In a process of its own.

    Flax, the examples and what they need are installed here, and are not loaded.
    """
    program = (
        "import sys, normpre_optax; print(*{m.partition('.')[0] for m in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        check=True,
        timeout=120,
        cwd=PACKAGE.parent,
    )
    loaded = set(done.stdout.decode().split())
    assert not loaded & HEAVY
    assert {"jax", "optax", "normpre_optax"} <= loaded


def test_the_update_is_traced_through_few_functions():
    """What is reached is far more than in optax.contrib.muon.

    That has 6 functions, 1 file and 6 frames above a matrix product.
    """
    params = {
        "up": {"kernel": jnp.ones((4, 8)), "bias": jnp.ones(8)},
        "down": {"kernel": jnp.ones((8, 4))},
    }
    jax.clear_caches()
    tx = npo.normpre_g(1e-3)
    state = jax.eval_shape(tx.init, params)

    def trace():
        jax.make_jaxpr(tx.update)(params, state, params)

    entered = cases.package_calls(trace)
    named = {code for code, _ in entered}
    functions = sorted(f"{code.co_filename}:{code.co_name}" for code in named)
    depths = [depth for code, depth in entered if code.co_name == "product"]
    assert 0 < len(named) <= 60, functions
    assert len({code.co_filename for code in named}) <= 14
    assert 0 < max(depths) <= 12
