# SPDX-License-Identifier: Apache-2.0
"""Which part of the package imports which: one table, bottom up. How large it is, and
how many functions run.
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
    "deprecation": (set(), {"option_table"}),
    "docstrings": (set(), {"option_table"}),
    "checks": ({"jax", "numpy"}, {"option_table"}),
    "linalg": ({"jax", "numpy"}, set()),
    "parameters": (ALL, {"checks"}),
    "options": ({"jax"}, {"checks", "deprecation", "docstrings", "option_table"}),
    "sharding": (ALL, {"linalg", "parameters"}),
    "stages": (ALL, {"checks", "linalg", "parameters", "sharding"}),
    "learning_rates": ({"jax", "optax"}, {"checks", "parameters", "stages"}),
    "hyperball": (
        {"jax", "optax"},
        {"checks", "linalg", "parameters", "stages"},
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
        {"algorithm", "deprecation", "optimizer", "options", "recommended", "stages"},
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
            yield from ((alias.name, node in tree.body) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (
                (f"{'.' * node.level}{node.module}.{alias.name}", node in tree.body)
                for alias in node.names
            )


def violations(file, source):
    packages, parts = TABLE[part_of(file)]
    for module, at_the_top in imports(source):
        top, _, rest = module.partition(".")
        ours = top == "normpre_optax" and rest.split(".")[0] in parts | {part_of(file)}
        allowed = ours or top in sys.stdlib_module_names | packages
        if (
            not at_the_top
            or not allowed
            or module.startswith(("optax._src", "jax._src"))
        ):
            yield module


def test_the_table_is_kept_has_no_cycles_and_every_part():
    assert not [
        (file, x)
        for file in FILES
        for x in violations(file, (PACKAGE / file).read_text())
    ]
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
    """``normpre_optax.threshold`` or ``.shardings`` as a module would be what
    completion offers for an option.
    """
    modules = {
        name for name in dir(npo) if isinstance(getattr(npo, name), types.ModuleType)
    }
    public = [
        getattr(npo, name) for name in npo.__all__ if callable(getattr(npo, name))
    ]
    options = {name for f in public for name in inspect.signature(f).parameters}
    assert modules & options <= {"stages"}  # an argument of `direction`, and no option
    assert set(npo.__all__) & modules == {"presets"}


def test_importing_the_library_loads_nothing_else():
    """In a process of its own: flax, the examples and what they need are installed
    here, and are not loaded.
    """
    command = [
        sys.executable,
        "-c",
        "import sys, normpre_optax; print(*{m.partition('.')[0] for m in sys.modules})",
    ]
    done = subprocess.run(
        command, capture_output=True, check=True, timeout=120, cwd=PACKAGE.parent
    )
    loaded = set(done.stdout.decode().split())
    heavy = {
        "flax",
        "examples",
        "matplotlib",
        "rich",
        "tyro",
        "orbax",
        "grain",
        "tokenizers",
        "tensorstore",
        "torch",
    }
    heavy |= {
        "haiku",
        "equinox",
        "hypothesis",
        "pytest",
        "datasets",
        "transformers",
        "tensorboardX",
    }
    assert not loaded & heavy
    assert {"jax", "optax", "normpre_optax"} <= loaded


def test_the_update_is_traced_through_few_functions():
    """What is reached; optax.contrib.muon has 6 functions, 1 file and 6 frames above a
    matrix product.
    """
    params = {
        "up": {"kernel": jnp.ones((4, 8)), "bias": jnp.ones(8)},
        "down": {"kernel": jnp.ones((8, 4))},
    }
    jax.clear_caches()
    tx = npo.normpre_g(1e-3)
    state = jax.eval_shape(tx.init, params)
    entered = cases.package_calls(
        lambda: jax.make_jaxpr(tx.update)(params, state, params)
    )
    named = {code for code, _ in entered}
    assert 0 < len(named) <= 80, sorted(
        f"{code.co_filename}:{code.co_name}" for code in named
    )
    assert len({code.co_filename for code in named}) <= 20
    assert 0 < max(depth for code, depth in entered if code.co_name == "product") <= 12
