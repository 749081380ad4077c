# SPDX-License-Identifier: Apache-2.0
"""Check that numbers on the pages are in the reports that they cite: ``python
docs/figures_in_text.py``.

A paragraph, list item or table that links to reports in ``docs/results/`` may have only
decimal numbers, ms, MB and GB that one of them has, at the precision of the text, or
that are the difference of two such numbers in the same sentence or row. A table without
links is checked against the paragraph before it, or else the one after it. Numbers in
code and in links are not checked, and neither is text that cites no report.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)#\s]*results/[^)#\s]*\.md)(?:#[^)]*)?\)")
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?(?![\w]|\.\d)")
IGNORED = re.compile(r"`[^`\n]*`|\]\([^)]*\)|Python [\d.]+")


def blocks(text: str) -> list[tuple[int, str]]:
    """Paragraphs, list items and tables, each with the number of its first line."""
    found, new = [], True
    text = re.sub(
        r"```.*?```", lambda code: "\n" * code[0].count("\n"), text, flags=re.DOTALL
    )
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            new = True
        elif (
            new
            or re.match(r"\s*[-*] |#", line)
            or line.startswith("|") != found[-1][1].startswith("|")
        ):
            found.append((number, line))
            new = False
        else:
            found[-1] = (found[-1][0], found[-1][1] + "\n" + line)
    return found


def read(number: str) -> float:
    """Its value."""
    return float(number.replace(",", ""))


def half_of_last_digit(number: str) -> float:
    """What rounding can change: 0.05 for 1.6, 0.005 for 1.6e-1."""
    mantissa, _, exponent = number.partition("e")
    return 0.501 * 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))


def unsupported(sentence: str, values: set[float]) -> list[str]:
    """Decimal numbers of a sentence or row that are none of the ``values``, and no
    difference of two that are.
    """
    shown = NUMBER.findall(IGNORED.sub(" ", sentence))
    half = {x: half_of_last_digit(x) for x in shown}
    known = [x for x in shown if any(abs(v - read(x)) <= half[x] for v in values)]
    differences = [abs(read(a) - read(b)) for a in known for b in known if a != b]
    checked = {
        x
        for x in shown
        if "." in x or "e" in x or re.search(rf"(?<![\d,]){x} (ms|MB|GB)\b", sentence)
    }
    unknown = (x for x in shown if x in checked and x not in known)
    return [
        x for x in unknown if not any(abs(v - read(x)) <= half[x] for v in differences)
    ]


def problems(page: Path) -> list[str]:
    """Numbers of the page that the reports cited beside them do not have."""
    found = blocks(page.read_text())
    cited = [LINK.findall(text) for _, text in found]
    out = []
    for at, (line, text) in enumerate(found):
        links = cited[at]
        if text.startswith("|") and not links:
            links = next(
                (
                    cited[i]
                    for i in (at - 1, at + 1)
                    if 0 <= i < len(found) and cited[i]
                ),
                [],
            )
        values = {
            read(x)
            for link in links
            for x in NUMBER.findall((page.parent / link).read_text())
        }
        sentences = re.split(r"(?<=[a-z)][.;:]) |\n(?=\|)", text) if links else []
        if wrong := [
            x for sentence in sentences for x in unsupported(sentence, values)
        ]:
            out.append(
                f"{page.name}:{line}: {', '.join(wrong)} not in"
                f" {', '.join(dict.fromkeys(links))}"
            )
    return out


def main() -> int:
    """Print what is wrong; returns the exit status."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = [problem for page in pages for problem in problems(page)]
    print(
        "\n".join(found)
        or f"the numbers of {len(pages)} pages are in the reports that they cite"
    )
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
