# SPDX-License-Identifier: Apache-2.0
"""The guide "Add an optimizer" of docs/contributing.md, followed on a copy of the tree.

Its four edits and its commands are taken as they stand on the page.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "contributing.md").read_text()
GUIDE = PAGE.partition("## Add an optimizer\n")[2].partition("\n## ")[0]
# The step's number, the sentence before its first block, and the block.
STEP = re.compile(
    r"^\*\*(\d)\. (.*?)\n\n```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE
)


class Edit(NamedTuple):
    """What a step adds, and where: a sentence names the file, and what it follows."""

    sentence: str
    added: str

    @property
    def file(self):
        """The last path in the sentence."""
        return re.findall(r"`(\w+/[\w/]+\.\w+)`", self.sentence)[-1]

    def apply(self, root):
        """Add the block: as a file, at the end of one, of a tuple or of a table."""
        path = root / self.file
        old = path.read_text() if path.exists() else ""
        path.write_text(self.inserted(old))

    def inserted(self, old):
        of_tuple = re.search(r"at the end of `(\w+)` in", self.sentence)
        of_table = re.search(r'at the end of the table "(.*)" in', self.sentence)
        if of_tuple:
            return insert(old, f"\n{of_tuple[1]} = (", "\n)", "\n" + self.added[:-1])
        if of_table:
            return insert(old, f"| {of_table[1]} |", "\n\n", "\n" + self.added[:-1])
        if old:
            return f"{old}\n\n{self.added}"
        return self.added


def insert(text, start, end, added):
    """``text`` with an addition before the first ``end`` after ``start``."""
    assert text.count(start) == 1, start
    place = text.index(end, text.index(start))
    return text[:place] + added + text[place:]


def steps():
    """The blocks of the guide's steps, by number."""
    found = {}
    for number, sentence, _, block in STEP.findall(GUIDE):
        found[int(number)] = Edit(sentence, block)
    return found


def copy_tree(target):
    """The parts of the repository that the guide's commands read."""
    left_out = shutil.ignore_patterns("__pycache__", "_build", "results", "notebooks")
    for folder in ("normpre_optax", "tests", "docs", "examples"):
        shutil.copytree(ROOT / folder, target / folder, ignore=left_out)
    shutil.copyfile(ROOT / "pyproject.toml", target / "pyproject.toml")


def run(command, root):
    """A command of the guide, in the copy, with this interpreter's programs."""
    words = command.split()
    program = Path(sys.executable).parent / Path(words[0]).name
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run(
        [str(program), *words[1:]],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )


def test_the_guide_has_four_edits_and_commands():
    found = steps()
    assert list(found) == [1, 2, 3, 4, 5]
    files = [found[number].file for number in (1, 2, 3, 4)]
    assert files == [
        "normpre_optax/relatives/scion.py",
        "normpre_optax/relatives/__init__.py",
        "tests/reference_family.py",
        "docs/family.md",
    ]
    assert found[2].inserted("\nREGISTRY = (\n    a,\n)\n").endswith('tive"),\n)\n')
    for command in found[5].added.splitlines():
        assert command.startswith(".venv/bin/"), command


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_who_follows_the_guide_succeeds_and_who_leaves_out_a_step_does_not(tmp_path):
    copy_tree(tmp_path)
    found = steps()
    commands = found[5].added.splitlines()
    (compared,) = [line for line in commands if "tests/test_relatives.py" in line]

    found[1].apply(tmp_path)
    found[2].apply(tmp_path)
    failed = run(compared, tmp_path)
    assert failed.returncode == 1, failed.stdout
    assert "tests/reference_family.py has no transcription of scion" in failed.stdout
    assert "of docs/family.md has no row of scion" in failed.stdout

    found[3].apply(tmp_path)
    found[4].apply(tmp_path)
    edited = {found[n].file for n in (1, 2, 3, 4)}
    before = {file: (tmp_path / file).read_text() for file in edited}
    for command in commands:
        done = run(command, tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    # The formatter had nothing to do.
    assert before == {file: (tmp_path / file).read_text() for file in edited}
    # The names reach the package, its stub and the pretraining program's labels.
    stub = (tmp_path / "normpre_optax" / "__init__.pyi").read_text()
    assert "def scion(" in stub
    assert "def scale_by_scion(" in stub
