# SPDX-License-Identifier: Apache-2.0
"""Who imports whom: the table of docs/design.md, read off the source with `ast` and held."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "normpre_optax"
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
THIRD_PARTY = {"jax", "optax", "numpy"}

# Folder or file: (third-party packages it may import, parts of the package it may import). The longest match counts.
# `transforms/batches.py` carries out what the wrappers arrange, and so may know layouts as they do.
TABLE = {
    "platforms.py": ({"jax"}, set()),
    "linalg/": ({"jax"}, {"linalg", "platforms"}),
    "parameters/": (THIRD_PARTY, {"parameters"}),
    "parameters/explain.py": (THIRD_PARTY, {"parameters", "meshes.plan", "meshes.specs"}),
    "meshes/specs.py": ({"jax"}, {"parameters.dims"}),
    "meshes/plan.py": ({"jax", "numpy"}, {"meshes.specs"}),
    "meshes/exchange.py": (
        {"jax", "optax"},
        {"meshes.plan", "platforms", "transforms.checks", "transforms.oriented"},
    ),
    "meshes/small.py": ({"jax"}, {"meshes.specs"}),
    "meshes/run.py": (
        {"jax"},
        {"meshes.specs", "parameters.dims", "platforms", "transforms.batches", "transforms.oriented"},
    ),
    "transforms/": (
        THIRD_PARTY,
        {"linalg", "platforms", "transforms.checks", "transforms.draws", "transforms.oriented"},
    ),
    "transforms/precondition.py": (
        THIRD_PARTY,
        {"linalg", "meshes.small", "platforms", "transforms.checks", "transforms.draws", "transforms.oriented"},
    ),
    **{
        f"transforms/{name}.py": (
            THIRD_PARTY,
            {"linalg", "transforms.checks", "transforms.oriented", "transforms.row_scaling"},
        )
        for name in ("tangent", "normalize")
    },
    "transforms/row_scaling.py": (THIRD_PARTY, {"linalg", "transforms.oriented"}),
    "transforms/wrappers.py": (
        THIRD_PARTY,
        {
            "meshes.run",
            "meshes.specs",
            "parameters",
            "platforms",
            "transforms.batches",
            "transforms.blocks",
            "transforms.checks",
            "transforms.oriented",
        },
    ),
    "transforms/blocks.py": ({"jax", "optax"}, {"meshes.specs", "parameters"}),
    "transforms/monitor.py": (
        THIRD_PARTY,
        {"diagnostics", "meshes.specs", "parameters", "transforms.blocks", "transforms.checks"},
    ),
    "transforms/quantized.py": ({"jax", "optax"}, {"meshes.specs", "transforms.checks"}),
    "transforms/draws.py": ({"jax"}, set()),
    "transforms/batches.py": (THIRD_PARTY, {"parameters", "platforms", "transforms.oriented"}),
    "options.py": ({"jax", "optax"}, {"transforms.checks"}),
    "directions.py": ({"jax", "optax"}, {"meshes.exchange", "options", "transforms"}),
    "transfer.py": ({"jax", "optax"}, {"parameters", "transforms.checks"}),
    "norm_control.py": (
        {"jax", "optax"},
        {
            "meshes.specs",
            "parameters",
            "transforms.blocks",
            "transforms.checks",
            "transforms.oriented",
            "transforms.wrappers",
        },
    ),
    "finish.py": (
        THIRD_PARTY,
        {
            "meshes.specs",
            "norm_control",
            "options",
            "parameters",
            "transforms.checks",
            "transforms.scale",
            "transforms.wrappers",
        },
    ),
    "algorithm.py": ({"jax", "optax"}, {"directions", "finish", "meshes.exchange", "options", "transforms"}),
    "recipes/": ({"jax", "optax"}, {"directions", "finish", "meshes.exchange", "options", "transforms"}),
    "family.py": ({"optax"}, {"algorithm", "options", "recipes"}),
    "diagnostics.py": ({"jax"}, {"linalg", "parameters.dims"}),
    "__init__.py": (
        set(),
        {
            "algorithm",
            "diagnostics",
            "directions",
            "family",
            "finish",
            "linalg",
            "meshes",
            "norm_control",
            "options",
            "parameters",
            "recipes",
            "transfer",
            "transforms",
        },
    ),
}
LAZY = {"parameters/nnx.py": {"flax"}}  # inside functions only


def rule(file):
    """The entry of the table for a file."""
    return TABLE[max((key for key in TABLE if file.startswith(key)), key=len, default="__init__.py")]


def imports(source, file="x.py"):
    """(module, inside a function) for every import of a file; TYPE_CHECKING blocks count as inside."""
    found = []

    def visit(node, inside):
        if isinstance(node, ast.Import):
            found.extend((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            # `from package import part` may name a module.
            found.extend((f"{node.module}.{alias.name}", inside) for alias in node.names)
        deeper = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            deeper = True
        for child in ast.iter_child_nodes(node):
            visit(child, inside or deeper)

    visit(ast.parse(source), False)
    return found


def violations(file, source):
    packages, parts = rule(file)
    out = []
    for module, inside in imports(source, file):
        top, _, rest = module.partition(".")
        if module.startswith(("optax._src", "jax._src")):
            out.append(f"{module}: private")
        elif top == "normpre_optax":
            if not any(rest == part or rest.startswith(part + ".") for part in parts) and rest:
                out.append(f"{module}: not in the table")
        elif top not in sys.stdlib_module_names | set(packages) and not (inside and top in LAZY.get(file, ())):
            out.append(f"{module}: not in the table")
    return out


@pytest.mark.parametrize("file", FILES)
def test_the_table_is_held(file):
    assert violations(file, (PACKAGE / file).read_text()) == []


@pytest.mark.parametrize("file", [f for f in FILES if f.startswith("recipes/")])
def test_recipes_do_not_import_each_other(file):
    modules = [module for module, _ in imports((PACKAGE / file).read_text())]
    assert not any(module.startswith("normpre_optax.recipes") for module in modules)


@pytest.mark.parametrize("file", [f for f in FILES if f.startswith("recipes/")])
def test_a_recipe_imports_nothing_that_a_user_could_not(file):
    import normpre_optax as npo

    found = {module for module, _ in imports((PACKAGE / file).read_text()) if module.startswith("normpre_optax.")}
    names = {module.rpartition(".")[2] for module in found if not module.startswith("normpre_optax.options.")}
    assert names <= set(npo.__all__)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("linalg/rows.py", "import optax"),
        ("platforms.py", "from normpre_optax.linalg import rows"),
        ("recipes/muon.py", "from normpre_optax.platforms import by_platform"),
        ("linalg/rows.py", "from normpre_optax.transforms import scale"),
        ("transforms/scale.py", "from normpre_optax.parameters.dims import MatrixDims"),
        ("transforms/scale.py", "from normpre_optax.transforms.tangent import project_to_tangent"),
        ("transforms/scale.py", "from normpre_optax.transforms.row_scaling import row_scaling"),
        ("transforms/row_scaling.py", "from normpre_optax.transforms.tangent import project_to_tangent"),
        ("transforms/wrappers.py", "from normpre_optax.linalg.rows import unit_rows"),
        ("algorithm.py", "from normpre_optax.linalg import rows"),
        ("finish.py", "from normpre_optax.recipes import muon"),
        ("parameters/rules.py", "from normpre_optax.linalg.rows import unit_rows"),
        ("parameters/dims.py", "from normpre_optax.meshes.specs import matrix_spec"),
        ("meshes/plan.py", "from normpre_optax.transforms.batches import run"),
        ("transforms/scale.py", "from normpre_optax.meshes.specs import mesh_of"),
        ("parameters/nnx.py", "import flax"),
        ("parameters/rules.py", "def f():\n    import flax"),
        ("algorithm.py", "from optax._src import base"),
        ("algorithm.py", "import matplotlib"),
        ("algorithm.py", "import examples.pretrain"),
    ],
)
def test_the_walker_sees_what_is_forbidden(file, source):
    assert violations(file, source)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("transforms/wrappers.py", "from normpre_optax.parameters.dims import MatrixDims"),
        ("transforms/scale.py", "from normpre_optax.linalg.rows import unit_rows"),
        ("parameters/nnx.py", "def f():\n    from flax import nnx"),
        ("recipes/muon.py", "from normpre_optax.finish import hybrid"),
    ],
)
def test_the_walker_lets_pass_what_is_allowed(file, source):
    assert violations(file, source) == []


def test_importing_the_library_pulls_in_nothing_else():
    """In a process of its own: flax, the examples and what they need are installed here, and stay out."""
    code = "import json, sys, normpre_optax; print(json.dumps(sorted({m.partition('.')[0] for m in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120, cwd=PACKAGE.parent
    )
    loaded = set(json.loads(done.stdout))
    heavy = {"flax", "examples", "matplotlib", "rich", "tyro", "orbax", "grain", "tokenizers", "tensorstore", "torch"}
    heavy |= {"haiku", "equinox", "hypothesis", "pytest", "datasets", "transformers", "tensorboardX", "wandb"}
    assert not loaded & heavy
    assert {"jax", "optax", "normpre_optax"} <= loaded
