# SPDX-License-Identifier: Apache-2.0
"""Advice on the pages: which ones are long or not plain.

``python docs/plain_words.py`` prints what exceeds a guideline, and always exits with
status 0: whoever writes a page decides.

User guides and research notes have a guideline for their words in total. A sentence has
at most 35 words. A table of a guide has at most six columns and ten rows. Words of a
private vocabulary have a common term instead.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
GUIDES = (
    "get_started",
    "choosing",
    "moving",
    "parameters",
    "frameworks",
    "scaling",
    "running",
    "pretraining",
    "method",
    "family",
    "reliability",
    "index",
)
NOTES = (
    "why",
    "comparison",
    "ablations",
    "performance",
    "conventions",
    "paper_map",
    "cpu_hang",
)
WORDS = {GUIDES: 15_000, NOTES: 10_000}
SENTENCE = 35
COLUMNS = 6
ROWS = 10
# Pattern of a private word -> the common term.
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


README_WORDS = 900  # read in two minutes
CODE = re.compile(r"```.*?```|^---.*?^---", re.DOTALL | re.MULTILINE)
NO_PROSE = re.compile(r"\s*(\||#|!\[|    )")  # a table, heading, picture or code
BETWEEN_BLOCKS = re.compile(r"\n\s*\n|\n(?=\s*[-*] |\s*\d+\. )")
CODE_OR_LINK = re.compile(r"`[^`]*`|\[([^\]]*)\]\([^)]*\)")
BETWEEN_SENTENCES = re.compile(r"(?<=[.:!?]) (?=[A-Z`*\"(])")
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)


def words_of(match: re.Match) -> str:
    """The text of a link; "code" for code."""
    return match[1] or "code"


def prose(text: str) -> list[str]:
    """The paragraphs and list items of a page.

    Code, tables, headings and pictures are left out; a link is its text.
    """
    lines = CODE.sub("", text).splitlines()
    for i, line in enumerate(lines):
        if NO_PROSE.match(line):
            lines[i] = ""
    blocks = BETWEEN_BLOCKS.split("\n".join(lines))
    plain = [CODE_OR_LINK.sub(words_of, block) for block in blocks if block.strip()]
    return [" ".join(block.split()) for block in plain]


def tables(text: str) -> list[list[str]]:
    """The tables of a page, each as its lines."""
    return [table.strip().splitlines() for table in TABLE.findall(text + "\n")]


def long_sentences(block: str) -> list[str]:
    """A warning for each sentence of a paragraph that is too long."""
    found = []
    for sentence in BETWEEN_SENTENCES.split(block):
        words = len(sentence.split())
        if words > SENTENCE:
            found.append(f"{words} words in a sentence: {sentence[:90]}...")
    return found


def private_words(block: str) -> list[str]:
    """A warning for each word of a paragraph that has a common term."""
    found = []
    for private, term in INSTEAD.items():
        for match in re.finditer(private, block):
            found.append(f"{match[0]!r}: write {term}")
    return found


def large_tables(text: str) -> list[str]:
    """A warning for each table of a page that is too large."""
    found = []
    for table in tables(text):
        columns = table[0].count(" | ") + 1
        rows = len(table) - 2  # without the header and the line below it
        if columns > COLUMNS or rows > ROWS:
            size = f"{columns} columns and {rows} rows"
            found.append(f"a table of {size}: {table[0][:80]}")
    return found


def advice(name: str, text: str, is_guide: bool) -> list[str]:
    """What exceeds a guideline on one page; tables count in guides only."""
    found = []
    for block in prose(text):
        found += long_sentences(block)
        found += private_words(block)
    if is_guide:
        found += large_tables(text)
    return [f"{name}: {warning}" for warning in found]


def advice_on(names: tuple[str, ...], limit: int) -> list[str]:
    """Print the words of these pages; return what exceeds a guideline."""
    pages = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in names}
    counts = {name: len(text.split()) for name, text in pages.items()}
    total = sum(counts.values())
    print(*(f"{name} {n:,}," for name, n in counts.items()), end=" ")
    print(f"total {total:,} of {limit:,}")

    found = []
    if total > limit:
        found.append(f"{total:,} words, the guideline is {limit:,}")
    for name, text in pages.items():
        found += advice(name, text, is_guide=names == GUIDES)
    return found


def main() -> None:
    """Print the words of every page, and the advice."""
    found = []
    for names, limit in WORDS.items():
        found += advice_on(names, limit)
    readme = (ROOT / "README.md").read_text()
    words = len(readme.split())
    if words > README_WORDS:
        found.append(f"README: {words} words, the guideline is {README_WORDS}")
    found += advice("README", readme, is_guide=True)
    for warning in found:
        print(f"advice: {warning}")
    if not found:
        print("every page is within the guidelines")


if __name__ == "__main__":
    main()
