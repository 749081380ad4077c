# SPDX-License-Identifier: Apache-2.0
"""Measured results: their index, and the check that numbers on the pages are in the reports that they cite."""

import importlib.util
import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def load():
    """`docs/figures_in_text.py` as a module."""
    spec = importlib.util.spec_from_file_location("figures_in_text", DOCS / "figures_in_text.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGE = """
AdamW ends at 1.6496 and Muon at 1.4514, 0.198 ahead ([report](results/r.md)). 9.9999 is in `code 8.888`.

| optimizer | loss |
|---|---|
| AdamW | 1.65 ± 0.0068 |

- A list item that cites nothing has 7.7777.
- Rounding was 2.5e-6, of 1,234.5 ms ([report](results/r.md)).
"""
REPORT = "| AdamW | 1.64961 | 0.0068 |\n| Muon | 1.45140 |\n\n2.5e-06, 1,234.5 ms"


def test_a_number_that_no_cited_report_has_is_found(tmp_path):
    """Any changed digit is a problem, at its line; text without a report, and code, are not checked."""
    check, page = load(), tmp_path / "page.md"
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "r.md").write_text(REPORT)
    page.write_text(PAGE)
    assert check.problems(page) == ["page.md:2: 9.9999 not in results/r.md"]
    page.write_text(PAGE.replace("9.9999", "This"))
    assert check.problems(page) == []
    for right, wrong, line in (
        *(("1.6496", "1.6469", 2), ("1.4514", "1.4515", 2), ("0.198", "0.197", 2)),
        *(("1.65", "1.66", 4), ("0.0068", "0.0069", 4), ("2.5e-6", "2.6e-6", 9), ("1,234.5", "1,234.6", 9)),
    ):
        page.write_text(PAGE.replace("9.9999", "This").replace(right, wrong))
        (problem,) = check.problems(page)
        assert f"page.md:{line}: " in problem
        assert wrong in problem


def test_the_numbers_on_the_pages_are_in_the_reports_that_they_cite(capsys):
    assert load().main() == 0, capsys.readouterr().out


def test_the_index_lists_every_report():
    listed = re.findall(r"^\| \[[^\]]*\]\(([^)]+)\)", (DOCS / "results" / "index.md").read_text(), re.MULTILINE)
    reports = {str(path.relative_to(DOCS / "results")) for path in DOCS.glob("results/**/*.md")} - {"index.md"}
    assert sorted(listed) == sorted(reports)
