# SPDX-License-Identifier: Apache-2.0
"""The documentation: its code runs, its links and names exist, and the checks of the site find what they should."""

import ast
import importlib.util
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import normpre_optax as npo

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("results/**/*.md"))]
# Python code, and the text block right after it: what it prints.
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)
NOT_RUN = {
    "README.md": "its first block needs a model; get_started.md has one",
    "cpu_hang.md": "the program that never returns",
    "design.md": "an excerpt of algorithm.py",
    "frameworks.md": "tests/test_frameworks.py runs it",
}
WITH_CODE = [page for page in PAGES if page.name not in NOT_RUN and BLOCK.search(page.read_text())]


def load(name):
    """A Sphinx extension of the site, without Sphinx."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "_ext" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(page):
    """The Python code of a page; blocks with torch only where it is installed (the extra `parity`)."""
    found = BLOCK.findall(page.read_text())
    return [block for block in found if "import torch" not in block[0] or importlib.util.find_spec("torch")]


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_the_pages_code_runs(page, capsys):
    scope = {"__name__": page.stem}
    for code, text in blocks(page):
        exec(compile(code, str(page), "exec"), scope)
        said = capsys.readouterr().out
        # Comments after all prints of a block say what they print.
        comments = re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
        if text:
            assert said == text
        elif comments and len(comments) == len(re.findall(r"^print\(", code, re.MULTILINE)):
            assert said.splitlines() == comments


def test_the_pages_that_do_not_run_exist():
    assert {page.name for page in PAGES} >= NOT_RUN.keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_to_files(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#\s]+)(?:#[\w.-]*)?\)", text)
    gone = [link for link in links if not re.match(r"\w+:", link) and not (page.parent / link).exists()]
    assert not gone


def test_tests_that_the_pages_name_exist():
    for page in PAGES:
        for file, test in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text()):
            assert (ROOT / file).exists(), (page.name, file)
            names = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if hasattr(node, "name")}
            assert not test or test in names, (page.name, test)


def test_names_that_the_paper_map_gives_exist():
    text = (DOCS / "paper_map.md").read_text()
    found = re.findall(r"`((?:normpre_optax|examples)(?:\.\w+)+)`", text)
    assert len(found) > 30
    for name in found:
        module, _, last = name.rpartition(".")
        holder = importlib.util.find_spec(name) if _is_module(name) else getattr(importlib.import_module(module), last)
        assert holder is not None, name


def _is_module(name):
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").exists() or path.is_dir()


# The check of public names.

DOCUMENTED = '''
"""A module."""
LIMIT = 3
"""A number."""
def told():
    """It is told."""
class Thing:
    """A thing."""
    def use(self):
        """Use it."""
'''
UNDOCUMENTED = {
    "a function": (DOCUMENTED + "def silent(): pass\n", ["the public name face.silent has no documentation"]),
    "a constant": (DOCUMENTED + "OTHER = 4\n", ["the public name face.OTHER has no documentation"]),
    "a method": (DOCUMENTED + "    def drop(self): pass\n", ["the method face.Thing.drop has no documentation"]),
    "a named tuple": (
        DOCUMENTED + "from typing import NamedTuple\nclass Pair(NamedTuple):\n    a: int\n",
        ["the public name face.Pair has no documentation"],
    ),
    "a hidden one": (DOCUMENTED + "def _own(): pass\n", []),
}


def face(tmp_path, monkeypatch, source):
    """A module of this source."""
    (tmp_path / "face.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "face", raising=False)
    return importlib.import_module("face")


@pytest.mark.parametrize("case", UNDOCUMENTED)
def test_an_undocumented_name_is_a_problem(case, tmp_path, monkeypatch):
    source, expected = UNDOCUMENTED[case]
    module = face(tmp_path, monkeypatch, source)
    check = load("public_names")
    listed = [f"face.{name}" for name in check.public_names(module)]
    assert list(check.problems(module, listed)) == expected


def test_a_name_without_a_page_is_a_problem(tmp_path, monkeypatch):
    module = face(tmp_path, monkeypatch, DOCUMENTED)
    found = load("public_names").problems(module, ["face.LIMIT", "face.Thing"])
    assert list(found) == ["the public name face.told stands on no page"]


def test_the_library_documents_its_public_names():
    check = load("public_names")
    assert check.public_names(npo) == list(npo.__all__)
    listed = [f"normpre_optax.{name}" for name in check.public_names(npo)]
    assert not list(check.problems(npo, listed))
    assert not list(check.problems(types.SimpleNamespace(__all__=[], __name__="empty"), []))


@pytest.mark.slow
@pytest.mark.parametrize(("more", "status"), [("", 0), ("def silent(): pass\n", 1)])
def test_an_undocumented_name_fails_the_build(more, status, tmp_path):
    pytest.importorskip("sphinx")
    source, output = tmp_path / "source", tmp_path / "output"
    source.mkdir()
    (source / "face.py").write_text(DOCUMENTED + more)
    paths = [str(DOCS / "_ext"), str(source)]
    settings = ["extensions = ['sphinx.ext.autodoc', 'public_names']", "public_modules = ('face',)"]
    (source / "conf.py").write_text("\n".join([f"import sys; sys.path += {paths}", *settings]))
    (source / "index.rst").write_text("Face\n====\n\n.. automodule:: face\n   :members:\n   :undoc-members:\n")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(source), str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert ("the public name face.silent has no documentation" in done.stderr) == bool(status)


# Generated pages.


def test_notebooks_are_copied_and_listed(tmp_path):
    pages = load("pages")
    source, target = tmp_path / "notebooks", tmp_path / "docs" / "notebooks"
    target.parent.mkdir()
    pages.copy(source, target)
    assert "There are none" in (target / "index.md").read_text()

    source.mkdir()
    for name in ("zebra", "spectrum", "ablation"):
        (source / f"{name}.ipynb").write_text("{}")
    pages.copy(source, target)
    assert (target / "zebra.ipynb").read_text() == "{}"
    assert "spectrum\nablation\nzebra\n" in (target / "index.md").read_text()

    (source / "zebra.ipynb").unlink()
    pages.copy(source, target)
    assert not (target / "zebra.ipynb").exists()
    assert "zebra" not in (target / "index.md").read_text()


def test_reports_get_a_heading():
    titled = load("pages").titled
    assert titled("results/small_eigh", "`command`\n") == "# small eigh\n\n`command`\n"
    assert titled("results/nano/README", "# Comparison\n") == "# Comparison\n"
