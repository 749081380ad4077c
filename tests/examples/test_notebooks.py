# SPDX-License-Identifier: Apache-2.0
"""The notebooks: what is stored of them, and that they run. The docs build executes them too."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples import pretrain

FOLDER = Path(pretrain.__file__).parents[1] / "notebooks"
NAMES = ("ablation", "equinox", "linen_trainstate", "nnx_switch", "spectrum")
REQUIRED = {"markdown": {"cell_type", "id", "metadata", "source"}}
REQUIRED["code"] = REQUIRED["markdown"] | {"execution_count", "outputs"}

every_notebook = pytest.mark.parametrize("name", NAMES)


def read(name):
    return json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))


def code(name):
    """The code cells, one after the other, as a script."""
    return "\n\n".join("".join(cell["source"]) for cell in read(name)["cells"] if cell["cell_type"] == "code")


def test_all_of_them_are_tested():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == sorted(NAMES)


@every_notebook
def test_the_format_is_that_of_nbformat_4_5(name):
    notebook = read(name)
    assert set(notebook) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"] == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    }
    for cell in notebook["cells"]:
        assert set(cell) == REQUIRED[cell["cell_type"]]
        assert cell["source"], f"cell {cell['id']} is empty"
        assert all(isinstance(line, str) for line in cell["source"])
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", cell["id"])
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)


@every_notebook
def test_nothing_that_a_run_leaves_is_stored(name):
    for cell in read(name)["cells"]:
        assert cell["metadata"] == {}
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None


@every_notebook
def test_it_opens_with_a_title_and_uses_public_names_only(name):
    first = read(name)["cells"][0]
    assert first["cell_type"] == "markdown"
    assert first["source"][0].startswith("# ")
    text = code(name)
    assert "from normpre_optax import" in text
    assert not re.search(r"(?:from|import) (?:normpre_optax\.|examples(?!\.research))", text)


@pytest.mark.thorough
@pytest.mark.timeout(900)
@every_notebook
def test_it_runs_anywhere_prints_no_warning_and_leaves_nothing_behind(name, tmp_path):
    script, folder = tmp_path / "notebook.py", tmp_path / "empty"  # equinox.py would hide the package
    script.write_text(code(name), encoding="utf-8")
    folder.mkdir()
    result = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(FOLDER.parents[1]), "MPLBACKEND": "agg"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "warning" not in result.stderr.lower()
    assert list(folder.iterdir()) == []
