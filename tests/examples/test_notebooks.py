# SPDX-License-Identifier: Apache-2.0
"""The notebooks: what is stored of them, and that they run.

The docs build executes them too.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def code(notebook):
    """The code cells, one after the other, as a script."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return "\n\n".join("".join(cell["source"]) for cell in cells)


PYTHON = {"display_name": "Python 3", "language": "python", "name": "python3"}


@every_notebook
def test_it_is_stored_without_what_a_run_leaves(path):
    notebook = read(path)
    cells = notebook["cells"]
    assert notebook == {
        "cells": cells,
        "metadata": {"kernelspec": PYTHON},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    for cell in cells:
        expected = {name: cell[name] for name in ("cell_type", "id", "source")}
        expected["metadata"] = {}
        if cell["cell_type"] == "code":
            expected |= {"outputs": [], "execution_count": None}
        assert cell == expected
        assert cell["source"], f"cell {cell['id']} is empty"
        assert all(isinstance(line, str) for line in cell["source"])


@every_notebook
def test_its_cells_have_names_of_their_own(path):
    names = [cell["id"] for cell in read(path)["cells"]]
    for name in names:
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name)
    assert len(set(names)) == len(names)


@every_notebook
def test_it_begins_with_its_title_and_uses_public_names_only(path):
    notebook = read(path)
    private = r"(?:from|import) (?:normpre_optax\.|examples(?!\.research))"
    assert notebook["cells"][0]["source"][0].startswith("# ")
    assert "from normpre_optax import" in code(notebook)
    assert not re.search(private, code(notebook))


@pytest.mark.thorough
@pytest.mark.timeout(900)
@every_notebook
def test_it_runs_anywhere_prints_no_warning_and_leaves_nothing_behind(path, tmp_path):
    script = tmp_path / "notebook.py"  # equinox.py would hide the package
    folder = tmp_path / "empty"
    script.write_text(code(read(path)), encoding="utf-8")
    folder.mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": str(FOLDER.parents[1]),
        "MPLBACKEND": "agg",
    }
    result = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert result.returncode == 0, result.stderr
    assert "warning" not in result.stderr.lower()
    assert list(folder.iterdir()) == []
