# SPDX-License-Identifier: Apache-2.0
"""Pages that are not written for the site: notebooks of `examples/notebooks`, and reports of measurements.

Notebooks are copied to `docs/notebooks`, which git ignores, and listed. Reports begin with the command that made them
instead of a heading, and get one from the name of their file.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

ORDER = ("nnx_switch", "linen_trainstate", "equinox", "spectrum", "ablation")
TITLE = "# Notebooks\n\n"
FOUND = """Each is run when this site is built, in less than a minute on two CPU cores. Their sources stand in
`examples/notebooks/`, without outputs.

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
    return TITLE + (FOUND.format(names="\n".join(known + others)) if names else NONE)


def copy(source: Path, target: Path) -> None:
    """Make `target` the notebooks of `source` and their list, and touch nothing that is so already.

    Args:
        source: folder of notebooks; it may be missing or empty.
        target: folder that is made.
    """
    target.mkdir(exist_ok=True)
    notebooks = {path.name: path for path in sorted(source.glob("*.ipynb"))}
    for old in target.iterdir():
        if old.name not in notebooks and old.name != "index.md":
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    for name, path in notebooks.items():
        new = target / name
        if not new.exists() or new.read_bytes() != path.read_bytes():
            shutil.copyfile(path, new)
    (target / "index.md").write_text(index([Path(name).stem for name in notebooks]), encoding="utf-8")


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
    return f"# {name.rpartition('/')[2].replace('_', ' ')}\n\n{text}"


def prepare(app, docname: str, source: list[str]) -> None:
    """Give reports their heading; lead links to a notebook's source to its page."""
    if docname.startswith("results/"):
        source[0] = titled(docname, source[0])
    source[0] = source[0].replace("](../examples/notebooks/", "](notebooks/")


def setup(app) -> dict[str, Any]:
    """Copy before sources are looked for, and read reports with headings."""
    root = Path(app.srcdir)
    app.connect("builder-inited", lambda _: copy(root.parent / "examples" / "notebooks", root / "notebooks"))
    app.connect("source-read", prepare)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
