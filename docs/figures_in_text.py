# SPDX-License-Identifier: Apache-2.0
"""Check that numbers on the pages are in the reports that they cite.

``python docs/figures_in_text.py`` prints each number that is not, and fails.

A paragraph, list item or table that links to reports in ``docs/results/`` may have only
decimal numbers, ms, MB and GB that one of them has, at the precision of the text, or
that are the difference of two such numbers in the same sentence or row. A table without
links is checked against the paragraph before it, or else the one after it. Numbers in
code and in links are not checked, and neither is text that cites no report.
"""

import itertools
import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)#\s]*results/[^)#\s]*\.md)(?:#[^)]*)?\)")
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?(?![\w]|\.\d)")
CODE = re.compile(r"```.*?```", re.DOTALL)
IGNORED = re.compile(r"`[^`\n]*`|\]\([^)]*\)|Python [\d.]+")
BETWEEN_SENTENCES = re.compile(r"(?<=[a-z)][.;:]) |\n(?=\|)")


def without_code(text: str) -> str:
    """The page with empty lines for its code, so that lines keep their numbers."""
    return CODE.sub(lambda code: "\n" * code[0].count("\n"), text)


def begins_block(line: str, before: str) -> bool:
    """Whether a line after ``before`` is a new list item, heading or table."""
    if re.match(r"\s*[-*] |#", line):
        return True
    return line.startswith("|") != before.startswith("|")


def blocks(text: str) -> list[tuple[int, str]]:
    """Paragraphs, list items and tables, each with the number of its first line."""
    found: list[tuple[int, str]] = []
    after_empty_line = True
    for number, line in enumerate(without_code(text).splitlines(), 1):
        if not line.strip():
            after_empty_line = True
        elif after_empty_line or begins_block(line, found[-1][1]):
            found.append((number, line))
            after_empty_line = False
        else:
            first, block = found[-1]
            found[-1] = (first, f"{block}\n{line}")
    return found


def read(number: str) -> float:
    """Its value."""
    return float(number.replace(",", ""))


def half_of_last_digit(number: str) -> float:
    """What rounding can change: 0.05 for 1.6, 0.005 for 1.6e-1."""
    mantissa, _, exponent = number.partition("e")
    decimals = len(mantissa.partition(".")[2])
    return 0.501 * 10.0 ** (int(exponent or 0) - decimals)


def is_one_of(number: str, values: Iterable[float]) -> bool:
    """Whether the number is one of the values, at its own precision."""
    tolerance = half_of_last_digit(number)
    return any(abs(value - read(number)) <= tolerance for value in values)


def is_checked(number: str, sentence: str) -> bool:
    """Whether it is a decimal number or has one of the units that are checked."""
    if "." in number or "e" in number:
        return True
    return bool(re.search(rf"(?<![\d,]){number} (ms|MB|GB)\b", sentence))


def unsupported(sentence: str, values: set[float]) -> list[str]:
    """Checked numbers of a sentence or row that the ``values`` do not have.

    A difference of two numbers that they have is supported, too.
    """
    shown = NUMBER.findall(IGNORED.sub(" ", sentence))
    known = [read(x) for x in shown if is_one_of(x, values)]
    differences = [abs(a - b) for a, b in itertools.permutations(known, 2)]
    supported = values.union(differences)
    checked = [x for x in shown if is_checked(x, sentence)]
    return [x for x in checked if not is_one_of(x, supported)]


def cited_beside(at: int, found: list[tuple[int, str]]) -> list[str]:
    """The reports that a block cites; for a table without links, a neighbor's."""
    _, text = found[at]
    links = LINK.findall(text)
    if links or not text.startswith("|"):
        return links
    for neighbor in (at - 1, at + 1):
        if 0 <= neighbor < len(found):
            links = links or LINK.findall(found[neighbor][1])
    return links


def numbers_in(reports: list[Path]) -> set[float]:
    """Every number in the reports."""
    values = set()
    for report in reports:
        values.update(read(x) for x in NUMBER.findall(report.read_text()))
    return values


def problems(page: Path) -> list[str]:
    """Numbers of the page that the reports cited beside them do not have."""
    found = blocks(page.read_text())
    out = []
    for at, (line, text) in enumerate(found):
        links = cited_beside(at, found)
        if not links:
            continue
        values = numbers_in([page.parent / link for link in links])
        wrong = []
        for sentence in BETWEEN_SENTENCES.split(text):
            wrong += unsupported(sentence, values)
        if wrong:
            reports = ", ".join(dict.fromkeys(links))
            out.append(f"{page.name}:{line}: {', '.join(wrong)} not in {reports}")
    return out


def main() -> int:
    """Print what is wrong; return the exit status."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = []
    for page in pages:
        found += problems(page)
    for problem in found:
        print(problem)
    if not found:
        print(f"the numbers of {len(pages)} pages are in the reports that they cite")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
