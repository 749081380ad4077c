# SPDX-License-Identifier: Apache-2.0
"""Pages that are generated: notebooks, reports of measurements, the list of relatives.

Notebooks of `examples/notebooks` are copied to `docs/notebooks`, which git ignores, and
listed. Reports begin with the command that made them instead of a heading, and get one
from the name of their file. The API page of relatives lists all optimizers of
`optimizers()`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

ORDER = ("nnx_switch", "linen_trainstate", "equinox", "spectrum", "ablation")
TITLE = "# Notebooks\n\n"
FOUND = """Each is run when this site is built, in less than a minute on two CPU cores.
Their sources stand in `examples/notebooks/`, without outputs.

```{{toctree}}
:maxdepth: 1

{names}
```
"""
NONE = "There are none in this version.\n"


def index(names: list[str]) -> str:
    """The page that lists the notebooks.

    Args:
        names: of the notebooks, without `.ipynb`.

    Returns:
        Its text: those of `ORDER` first, and all others after them by name.
    """
    known = [name for name in ORDER if name in names]
    others = sorted(set(names) - set(known))
    if not names:
        return TITLE + NONE
    return TITLE + FOUND.format(names="\n".join(known + others))


def copy(source: Path, target: Path) -> None:
    """Make `target` the notebooks of `source` and their list.

    Files that are so already are not touched, so that Sphinx does not read them again.

    Args:
        source: folder of notebooks; it may be missing or empty.
        target: folder that is made.
    """
    target.mkdir(exist_ok=True)
    notebooks = {path.name: path for path in sorted(source.glob("*.ipynb"))}
    for old in target.iterdir():
        if old.name in notebooks or old.name == "index.md":
            continue
        if old.is_dir():
            shutil.rmtree(old)
        else:
            old.unlink()
    for name, path in notebooks.items():
        new = target / name
        if not new.exists() or new.read_bytes() != path.read_bytes():
            shutil.copyfile(path, new)
    names = [Path(name).stem for name in notebooks]
    (target / "index.md").write_text(index(names), encoding="utf-8")


def titled(name: str, text: str) -> str:
    """A report with a heading.

    Args:
        name: of the page, with its folders: `results/collectives`.
        text: of the page.

    Returns:
        The text; with a heading before it if it has none.
    """
    if text.lstrip().startswith("# "):
        return text
    heading = name.rpartition("/")[2].replace("_", " ")
    return f"# {heading}\n\n{text}"


def with_relatives(text: str) -> str:
    """Replace the two comments of the API page by directives for every relative.

    Args:
        text: of the page.

    Returns:
        Its text with one `autofunction` per optimizer but NormPre, and per direction.
    """
    from normpre_optax import optimizers

    names = [name for name in optimizers() if not name.startswith("normpre")]
    prefixes = {".. all relatives": "", ".. all directions of relatives": "scale_by_"}
    for comment, prefix in prefixes.items():
        lines = "\n".join(f".. autofunction:: {prefix}{name}" for name in names)
        text = text.replace(f"{comment}\n", f"{lines}\n")
    return text


def prepare(app, docname: str, source: list[str]) -> None:
    """Add headings to reports, relatives to their page, links to notebooks' pages."""
    if docname.startswith("results/"):
        source[0] = titled(docname, source[0])
    if docname == "api/family":
        source[0] = with_relatives(source[0])
    source[0] = source[0].replace("](../examples/notebooks/", "](notebooks/")


def setup(app) -> dict[str, Any]:
    """Copy before sources are looked for, and read reports with headings."""
    root = Path(app.srcdir)
    app.connect(
        "builder-inited",
        lambda _: copy(root.parent / "examples" / "notebooks", root / "notebooks"),
    )
    app.connect("source-read", prepare)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
