# SPDX-License-Identifier: Apache-2.0
"""Check that the pages stay short and plain: ``python docs/plain_words.py`` prints what
breaks a limit.

User guides and research notes have a limit of words in total. No sentence has more than
35 words. A table of a guide has at most six columns and ten rows. Words of a private
vocabulary have a common term instead.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
GUIDES = (
    *(
        "get_started",
        "choosing",
        "moving",
        "parameters",
        "frameworks",
        "scaling",
        "pretraining",
        "method",
        "why",
    ),
    *("family", "reliability", "index"),
)
NOTES = (
    "comparison",
    "ablations",
    "performance",
    "conventions",
    "paper_map",
    "cpu_hang",
)
WORDS = {GUIDES: 15_000, NOTES: 10_000}
SENTENCE, COLUMNS, ROWS = 35, 6, 10
INSTEAD = {
    r"dearer|cheaper at the price": "more expensive; at the cost of",
    r"(held|free) (weights|matrices)": "norm-constrained or unconstrained weights",
    r"AdamW's part|AdamW for the rest|what is no matrix|matrices' rate": (
        "the AdamW group; the matrix group"
    ),
    r"(parameters?|weights|arrays?|it|they) lies?\b": "is stored, is sharded as",
    r"travels?\b|is sent to": "is communicated",
    r"who treats|treats (a|the|every) matri": "which device computes which matrix",
    r"told apart|tells? \w+ apart": "distinguish",
    r"is turned|are turned": "transposed",
    r"\bgoes? with the\b": "depends on, scales as",
    r"no number|not a number": "non-finite, NaN",
    r"what won\b|\bin ours\b": "best in our benchmarks; in our runs",
    r"shorter side|longer side": "smaller dimension, larger dimension",
    r"pair of seeds differs": "seed-to-seed standard deviation",
    r"\bmeter\b": "compile-time cost estimate",
    r"\bhybrid\b|\bresolve\(": "with_adamw, assign",
}


def prose(text: str) -> list[str]:
    """The paragraphs and list items of a page, without code, tables, headings, links
    and pictures.
    """
    text = re.sub(r"```.*?```|^---.*?^---", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = [
        "" if re.match(r"\s*(\||#|!\[|    )", line) else line
        for line in text.splitlines()
    ]
    blocks = re.split(r"\n\s*\n|\n(?=\s*[-*] |\s*\d+\. )", "\n".join(lines))
    plain = (
        re.sub(r"`[^`]*`|\[([^\]]*)\]\([^)]*\)", lambda link: link[1] or "code", block)
        for block in blocks
    )
    return [" ".join(block.split()) for block in plain if block.strip()]


def tables(text: str) -> list[list[str]]:
    """The tables of a page, each as its lines."""
    return [
        table.strip().splitlines()
        for table in re.findall(r"(?:^\|.*\n)+", text + "\n", re.MULTILINE)
    ]


def problems(name: str, text: str, guide: bool) -> list[str]:
    """What breaks a limit on one page."""
    found = []
    for block in prose(text):
        for sentence in re.split(r"(?<=[.:!?]) (?=[A-Z`*\"(])", block):
            if len(sentence.split()) > SENTENCE:
                found.append(
                    f"{name}: {len(sentence.split())} words in a sentence:"
                    f" {sentence[:90]}..."
                )
        found += [
            f"{name}: {x[0]!r}: write {term}"
            for old, term in INSTEAD.items()
            for x in re.finditer(old, block)
        ]
    for table in tables(text) if guide else []:
        columns, rows = table[0].count(" | ") + 1, len(table) - 2
        if columns > COLUMNS or rows > ROWS:
            found.append(
                f"{name}: a table of {columns} columns and {rows} rows: {table[0][:80]}"
            )
    return found


def main() -> int:
    """Print the words of every page and what breaks a limit; return how many do."""
    found = []
    for names, limit in WORDS.items():
        pages = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in names}
        counts = {name: len(text.split()) for name, text in pages.items()}
        print(
            ", ".join(f"{name} {n:,}" for name, n in counts.items()),
            f"total {sum(counts.values()):,} of {limit:,}",
        )
        if sum(counts.values()) > limit:
            found.append(f"{sum(counts.values()):,} words, the limit is {limit:,}")
        found += [
            x
            for name, text in pages.items()
            for x in problems(name, text, names == GUIDES)
        ]
    found += problems("README", (ROOT / "README.md").read_text(), True)
    print("\n".join(found) or "every page is within the limits")
    return len(found)


if __name__ == "__main__":
    sys.exit(bool(main()))
