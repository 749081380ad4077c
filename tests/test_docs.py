# SPDX-License-Identifier: Apache-2.0
"""The documentation: its code runs, and its links and names exist.

The checks of the site find what they should.
"""

import importlib.util
import inspect
import pkgutil
import re
import sys
from pathlib import Path

import optax
import pytest

import normpre_optax as npo
from tests import cases

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *sorted(DOCS.glob("*.md")),
    *sorted(DOCS.glob("results/**/*.md")),
]
# Python code, and the text block right after it: what it prints.
BLOCK = re.compile(
    r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE
)
NOT_RUN = {
    "README.md": "its first block needs a model; get_started.md has one",
    "cpu_hang.md": "the program that never returns",
    "frameworks.md": "tests/test_frameworks.py runs it",
}
WITH_CODE = [
    page
    for page in PAGES
    if page.name not in NOT_RUN and BLOCK.search(page.read_text())
]


def load(name):
    """A script of the site as a module, without Sphinx."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_the_pages_code_runs(page, capsys):
    """Blocks with torch only where it is installed (the extra `parity`)."""
    scope = {"__name__": page.stem}
    for code, text in BLOCK.findall(page.read_text()):
        if "import torch" in code and not importlib.util.find_spec("torch"):
            continue
        exec(compile(code, str(page), "exec"), scope)
        said = capsys.readouterr().out
        # Comments after all prints of a block say what they print.
        comments = re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
        prints = re.findall(r"^print\(", code, re.MULTILINE)
        if text:
            assert said == text
        elif comments and len(comments) == len(prints):
            assert said.splitlines() == comments


def test_what_the_pages_link_and_name_exists():
    """Files by relative links, and tests."""
    assert {page.name for page in PAGES} >= NOT_RUN.keys()
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        links = re.findall(r"\]\(([^)#\s]+)(?:#[\w.-]*)?\)", text)
        relative = [link for link in links if not re.match(r"\w+:", link)]
        missing = [link for link in relative if not (page.parent / link).exists()]
        assert not missing, page
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text())
        for file, test in named:
            assert (ROOT / file).exists(), (page.name, file)
            source = (ROOT / file).read_text()
            assert not test or f"def {test}(" in source, (page.name, test)


RECOMMENDING = [
    ROOT / "README.md",
    DOCS / "index.md",
    DOCS / "get_started.md",
    DOCS / "choosing.md",
    DOCS / "moving.md",
    DOCS / "frameworks.md",
    ROOT / "examples/quickstart.py",
    ROOT / "examples/notebooks/nnx_switch.ipynb",
]


def test_every_page_recommends_the_same_optimizer_first():
    """And its learning rate by the number of steps.

    The schedules of toys peak at 1e-2 or 1.6e-2.
    """
    called = re.compile(rf"\b({'|'.join(npo.optimizers())})\(")
    for page in RECOMMENDING:
        text = page.read_text()
        assert called.search(text)[1] == "normpre_h", page
        assert "learning_rate_by_length(" in text, page
        peaks = {float(x) for x in re.findall(r"schedule\(0\.0, ([\d.e-]+)", text)}
        assert {x for x in peaks if x > 5e-3} <= {1.6e-2, 1e-2}, page


def test_the_version_is_the_same_everywhere():
    versions = {
        ROOT / "pyproject.toml": r'^version = "(.*)"$',
        DOCS / "CITATION.cff": r"^version: (.*)$",
        DOCS / "changelog.md": r"^## ([\d.]+) \(",  # the newest entry is the first
        DOCS / "get_started.md": r"^normpre_optax @ .*@v(.*)$",
    }
    for path, pattern in versions.items():
        found = re.search(pattern, path.read_text(), re.MULTILINE)
        assert found[1] == npo.__version__, path


def test_every_argument_of_optaxs_muon_has_a_place_here():
    """In the tables of moving.md, each in one row.

    It is next to options of this package's Muon, or none.
    """
    page = (DOCS / "moving.md").read_text()
    _, _, after = page.partition("## From optax's Muon\n")
    section, _, _ = after.partition("\n## ")
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    rows = [line.split(" | ") for line in lines]
    theirs, ours = [], []
    for row in rows:
        theirs += re.findall(r"`(\w+)=", row[0])
        ours += re.findall(r"`(\w+)=", row[1])
    assert sorted(theirs) == sorted(inspect.signature(optax.contrib.muon).parameters)
    assert ours
    assert set(ours) <= inspect.signature(npo.muon).parameters.keys()
    assert all(re.search("`|^none$", row[1]) for row in rows)


def test_names_that_the_paper_map_gives_exist():
    text = (DOCS / "paper_map.md").read_text()
    found = re.findall(r"`((?:normpre_optax|examples)(?:\.\w+)+)`", text)
    assert len(found) > 30
    for name in found:
        assert pkgutil.resolve_name(name) is not None, name


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
PAIR = "from typing import NamedTuple\nclass Pair(NamedTuple):\n    a: int\n"


@cases.rows(
    "more expected",
    ("def silent(): pass\n", ["the public name face.silent has no documentation"]),
    ("OTHER = 4\n", ["the public name face.OTHER has no documentation"]),
    ("    def drop(self): pass\n", ["the method face.Thing.drop has no documentation"]),
    (PAIR, ["the public name face.Pair has no documentation"]),
    ("def _own(): pass\n", []),
)
def test_an_undocumented_name_is_a_problem(more, expected, tmp_path, monkeypatch):
    (tmp_path / "face.py").write_text(DOCUMENTED + more)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "face", raising=False)
    module = importlib.import_module("face")
    check = load("_ext/public_names")
    listed = [f"face.{name}" for name in check.public_names(module)]
    assert list(check.problems(module, listed)) == expected
    without = [name for name in listed if name != "face.told"]
    unlisted = "the public name face.told stands on no page"
    assert sorted(check.problems(module, without)) == sorted([*expected, unlisted])


def test_the_library_documents_its_public_names():
    check = load("_ext/public_names")
    assert check.public_names(npo) == list(npo.__all__)
    listed = [f"normpre_optax.{name}" for name in npo.__all__]
    assert not list(check.problems(npo, listed))


# Generated pages.


def test_notebooks_are_copied_and_listed(tmp_path):
    pages = load("_ext/pages")
    source = tmp_path / "notebooks"
    target = tmp_path / "docs" / "notebooks"
    target.parent.mkdir()

    def index():
        pages.copy(source, target)
        return (target / "index.md").read_text()

    assert "There are none" in index()
    source.mkdir()
    for name in ("zebra", "spectrum", "ablation"):
        (source / f"{name}.ipynb").write_text("{}")
    assert "spectrum\nablation\nzebra\n" in index()
    assert (target / "zebra.ipynb").read_text() == "{}"
    (source / "zebra.ipynb").unlink()
    assert "zebra" not in index()
    assert not (target / "zebra.ipynb").exists()
    titled = pages.titled("results/small_eigh", "`command`\n")
    assert titled == "# small eigh\n\n`command`\n"
    titled = pages.titled("results/nano/README", "# Comparison\n")
    assert titled == "# Comparison\n"


# Measured results.

CITING = """
AdamW ends at 1.6496, Muon at 1.4514, 0.198 ahead ([report](results/r.md)). `code 8.888`

| optimizer | loss |
|---|---|
| AdamW | 1.65 ± 0.0068 |

- A list item that cites nothing has 7.7777.
- Rounding was 2.5e-6, of 1,234.5 ms and 2,178 ms ([report](results/r.md)).
"""
REPORT = (
    "| AdamW | 1.64961 | 0.0068 |\n| Muon | 1.45140 |\n\n2.5e-06, 1,234.5 ms, 2,178 ms"
)


def test_a_number_that_no_cited_report_has_is_found(tmp_path):
    """Any changed digit is a problem, at its line.

    Text without a report, and code, are not checked.
    """
    check = load("figures_in_text")
    page = tmp_path / "page.md"
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "r.md").write_text(REPORT)
    page.write_text(CITING)
    assert check.problems(page) == []
    for right, wrong, line in (
        ("ahead", "9.9999", 2),
        ("1.6496", "1.6469", 2),
        ("1.4514", "1.4515", 2),
        ("0.198", "0.197", 2),
        ("1.65", "1.66", 4),
        ("0.0068", "0.0069", 4),
        ("2.5e-6", "2.6e-6", 9),
        ("1,234.5", "1,234.6", 9),
        ("2,178", "2,179", 9),
    ):
        page.write_text(CITING.replace(right, wrong))
        (problem,) = check.problems(page)
        assert f"page.md:{line}: " in problem
        assert wrong in problem


def test_the_numbers_on_the_pages_are_in_the_reports_that_they_cite(capsys):
    assert load("figures_in_text").main() == 0, capsys.readouterr().out


def test_every_report_is_in_the_index_or_cited_by_a_page():
    """The index has reports whose program exists; pages cite some older ones."""
    folder = DOCS / "results"
    index = (folder / "index.md").read_text()
    listed = re.findall(r"^\| \[[^\]]*\]\(([^)]+)\)", index, re.MULTILINE)
    assert len(listed) == len({*listed})
    reports = {str(path.relative_to(folder)) for path in folder.glob("**/*.md")}
    assert {*listed} <= reports
    pages = "".join(page.read_text() for page in DOCS.glob("*.md"))
    cited = {*re.findall(r"\]\(results/([^)#]+\.md)[)#]", pages)}
    assert reports - {"index.md"} <= {*listed} | cited


def test_the_programs_of_the_index_exist():
    index = (DOCS / "results" / "index.md").read_text()
    modules = {*re.findall(r"`((?:examples|tests)\.[\w.]+)", index)}
    missing = {name for name in modules if not importlib.util.find_spec(name)}
    assert not missing


# The address of the repository, and advice.


def test_every_place_with_the_placeholder_of_the_address_is_listed(tmp_path):
    check = load("placeholders")
    (tmp_path / "docs").mkdir()
    for name in check.SEARCHED:
        path = tmp_path / name
        if path.suffix:
            path.touch()
    assert check.places(tmp_path) == []
    line = f"see https://{check.PLACEHOLDER}/normpre_optax"
    (tmp_path / "docs" / "page.md").write_text(f"# Page\n\n{line}\n")
    assert check.places(tmp_path) == [f"docs/page.md:3: {line}"]


def test_the_address_of_the_repository_is_the_same_everywhere():
    """Every address of this repository, and the name of its authors."""
    authors = "The normpre_optax authors"
    assert f'name = "{authors}"' in (ROOT / "pyproject.toml").read_text()
    assert f'name: "{authors}"' in (DOCS / "CITATION.cff").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    (address,) = set(re.findall(r'"https://(github\.com/\w+/normpre_optax)', project))
    for file in load("placeholders").files(ROOT):
        found = re.findall(r"github\.com/\w+/normpre_optax", file.read_text())
        assert set(found) <= {address}, file


def test_advice_on_words_never_fails(capsys):
    """It prints what exceeds a guideline, and leaves the decision to the author."""
    advice = load("plain_words")
    advice.main()
    assert "get_started" in capsys.readouterr().out
    long = "word " * 36 + "end. It travels over the mesh.\n"
    found = advice.advice("page", long, is_guide=True)
    assert len(found) == 2
    assert "37 words in a sentence" in found[0]
    assert "'travels': write is communicated" in found[1]
