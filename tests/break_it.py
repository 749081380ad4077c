# SPDX-License-Identifier: Apache-2.0
"""Small faults, put into the library one at a time: the default tests must catch every one of them.

    python -m tests.break_it                    # all of them
    python -m tests.break_it tangent_sign ...   # these

Each fault is a line of the library, changed in a copy of the working tree, and the test files that are to notice. They
run as the default run does, without what is marked slow, and stop at the first failure, which is the report. A fault
that survives, or that no longer finds its line, fails the script.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Fault(NamedTuple):
    """``old`` stands once in ``file`` of the package, and becomes ``new``; ``tests`` are to notice."""

    file: str
    old: str
    new: str
    tests: str


FAULTS = {}


def caught_by(fault: Fault, tree: Path) -> str:
    """The first test that fails with the fault in ``tree``; "" if all pass."""
    path = tree / "normpre_optax" / fault.file
    source = path.read_text()
    if source.count(fault.old) != 1:
        raise SystemExit(f"{fault.file}: {fault.old!r} stands there {source.count(fault.old)} times, not once")
    path.write_text(source.replace(fault.old, fault.new))
    command = [sys.executable, "-m", "pytest", "-q", "-x", *fault.tests.split()]
    try:
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False, timeout=600)
    finally:
        path.write_text(source)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode and not failed:
        raise SystemExit(f"pytest failed without a test that did:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return failed[1] if failed else ""


def main(names: list[str]) -> int:
    """Try the faults of those names, or all; the number of those that survived."""
    unknown = set(names) - FAULTS.keys()
    if unknown:
        raise SystemExit(f"no such fault: {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        unwanted = shutil.ignore_patterns(".git", ".venv*", ".pytest_cache", "__pycache__", "results", "_build", "runs")
        shutil.copytree(ROOT, tree, ignore=unwanted)
        for name in names or FAULTS:
            start = time.perf_counter()
            test = caught_by(FAULTS[name], tree)
            survivors += not test
            print(f"{name:28} {time.perf_counter() - start:5.0f} s  {test or 'SURVIVED'}", flush=True)
    print(f"{survivors} of {len(names or FAULTS)} survived")
    return survivors


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
