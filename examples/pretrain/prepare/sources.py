# SPDX-License-Identifier: Apache-2.0
"""Documents of local files, or of a data set on the Hugging Face hub, in one fixed order.

Text is kept as it is in the file, line endings included, with two exceptions: a byte order mark at the start of a file
is dropped, and halves of surrogate pairs, which UTF-8 cannot store, become "?" and are reported.
"""

import gzip
import hashlib
import importlib
import io
import itertools
import json
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..config import RunError

RECORDS = (".jsonl", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst", ".parquet")
# A folder is searched for these. A bare .json in it is rather a manifest, but you can name it.
SUFFIXES = {
    **{"python": (".py",), "text": (".txt", ".md", ".rst", ".tex")},
    **dict.fromkeys(("jsonl", "openwebtext", "c4", "pile"), RECORDS),
}
SAMPLE_BYTES = 50_000_000
LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"}
os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # else its client prints a warning for every retry


class Stream:
    """Documents of local files in a fixed order, and the share of them that is held out, chosen by a hash of the text.

    The position is the number of documents taken: resuming reads past those.
    """

    def __init__(self, read: Callable[[], Iterator[str]], held_out: float):
        self.read, self.held_out = read, held_out
        self._done = 0

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that the documents go to."""
        return ("train",) * (self.held_out < 1) + ("validation",) * (self.held_out > 0)

    def split_of(self, text: str) -> str:
        """The split of one document."""
        return "validation" if fraction(text) < self.held_out else "train"

    def __iter__(self) -> Iterator[str]:
        for text in itertools.islice(self.read(), self._done, None):
            self._done += 1
            yield text

    def state_dict(self) -> dict[str, Any]:
        """The position."""
        return {"documents": self._done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at that position."""
        self._done = state["documents"]


class Problems:
    """What is left out or replaced in each file. A file that is read again is counted anew.

    Args:
        skip: whether what cannot be read is skipped, not refused.
    """

    def __init__(self, skip: bool):
        self.skip = skip
        self._found: dict[tuple[str, str], tuple[int, int]] = {}

    def begin(self, name: str) -> None:
        """Count a file from its beginning."""
        self._found = {key: found for key, found in self._found.items() if key[0] != name}

    def note(self, name: str, what: str, number: int = 0) -> None:
        """Count something in line ``number`` of a file; 0: in the file as a whole."""
        count, first = self._found.get((name, what), (0, number))
        self._found[name, what] = count + 1, first

    def bad(self, name: str, what: str, number: int, detail: str) -> None:
        """Count a line that is skipped.

        Raises:
            RunError: if bad lines are not skipped.
        """
        if not self.skip:
            where = f"{name}, line {number}" if number else name
            raise RunError(f"{where}: {what} ({detail}); --skip-bad skips it")
        self.note(name, f"{what}, skipped", number)

    def lines(self) -> Iterator[str]:
        """One line for every file and problem."""
        for (name, what), (count, first) in self._found.items():
            yield f"{name}: {what}" + (f" (lines: {count:,}, the first is {first:,})" if first else "")


class HubStream(Stream):
    """Documents of a hub data set: nothing is kept on disk.

    Args:
        dataset: its id, such as "allenai/c4", or a format such as "json", with ``data_files`` among the options.
        subset: its configuration, such as "en"; empty for the default.
        split: the split to stream.
        field: the column of the text.
        problems: collects what is skipped.
        held_out: share that is held out.
        options: further arguments of ``datasets.load_dataset``.

    Raises:
        RunError: if it cannot be reached or has no such column.
    """

    def __init__(
        self, dataset: str, subset: str, split: str, field: str, problems: Problems, held_out: float, **options: Any
    ):
        super().__init__(lambda: texts_of(((0, row) for row in self._rows), dataset, field, problems), held_out)
        self._name, load = dataset, require("datasets").load_dataset
        with self._reachable():
            self._rows = load(dataset, subset or None, split=split, streaming=True, **options)

    def __iter__(self) -> Iterator[str]:
        with self._reachable():
            yield from self.read()

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        try:
            yield
        except RunError:
            raise
        except Exception as error:  # of many types: network, unknown id, unknown split
            raise RunError(
                f"cannot stream {self._name} from the Hugging Face hub ({one_line(error)}): check the name and the "
                "network; the same command resumes, and with paths it reads local copies (.jsonl, .json.gz, .parquet)"
            ) from error

    def state_dict(self) -> dict[str, Any]:
        """File and row, as `datasets` counts them."""
        return self._rows.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue there; the files before are not read."""
        self._rows.load_state_dict(state)


def one_line(error: BaseException) -> str:
    """An error's first line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def fraction(text: str, purpose: bytes = b"split") -> float:
    """A number in [0, 1) that depends on the text and the purpose alone."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "big") / 2**64


def sample(read: Callable[[], Iterable[str]], size: int = SAMPLE_BYTES) -> Iterator[str]:
    """The texts; where they are larger than ``size`` bytes, about that much of them, chosen by hash."""
    total = sum(len(text.encode()) for text in read())
    return (text for text in read() if total <= size or fraction(text, b"sample") < size / total)


def find_files(paths: Iterable[Path], suffixes: tuple[str, ...]) -> list[Path]:
    """The files named, and the visible ones with a suffix below the folders named, sorted folder by folder.

    Raises:
        RunError: where a path does not exist, or there are no such files.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise RunError(f"{path} does not exist")
        inside = sorted(p for p in path.rglob("*") if p.name.endswith(suffixes)) if path.is_dir() else [path]
        hidden = {p for p in inside if any(part.startswith(".") for part in p.relative_to(path).parts)}
        found |= dict.fromkeys(p for p in inside if p.is_file() and p not in hidden)
    if not found:
        raise RunError(f"no files to read: give files, or folders with {', '.join(suffixes)} files")
    return list(found)


def python_streams(folders: Sequence[Path], installed: bool, validation_percent: float) -> list[Stream]:
    """Python files of the folders, or of the standard library and the ``installed`` packages.

    Left out: tests (many distributions ship without them), tables of characters, help texts, files that the
    installation wrote, files that are not UTF-8, second copies of a text, and of packages tables. A file is in training
    or validation by a hash of its path: the same on every machine.
    """
    files, seen = [], set[bytes]()
    for folder in folders or [Path(sysconfig.get_path("stdlib"))]:
        files += [(path.relative_to(folder).as_posix(), path) for path in python_files(folder, seen)]
    for folder in site_packages() if installed else ():
        found = python_files(folder, seen, tables=False)
        files += [(f"site-packages/{path.relative_to(folder).as_posix()}", path) for path in found]
    held = [zlib.crc32(name.encode()) % 100 < validation_percent for name, _ in files]
    streams = []
    for split in (False, True):
        chosen = [path for (_, path), is_held in zip(files, held, strict=True) if is_held == split]
        streams.append(Stream(lambda chosen=chosen: map(read_source, chosen), float(split)))
    return streams


def site_packages() -> list[Path]:
    """Where the running interpreter keeps installed packages."""
    return list(dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")))


def python_files(folder: Path, seen: set[bytes], *, tables: bool = True) -> Iterator[Path]:
    """Files in order of path; ``seen`` collects digests of their texts."""
    for path in sorted(folder.rglob("*.py")):
        if LEFT_OUT.intersection(path.relative_to(folder).parts) or path.name.startswith("_sysconfigdata"):
            continue
        try:
            text = read_source(path)
        except (UnicodeDecodeError, OSError):
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if text.strip() and digest not in seen and (tables or not is_table(text)):
            seen.add(digest)
            yield path


def read_source(path: Path) -> str:
    """The text of a file, line endings as they are."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        return file.read()


def is_table(text: str) -> bool:
    """Whether a file is huge, has lines of 200 characters on average, or consists of digits by a third."""
    if len(text) > 1_000_000 or len(text) > 200 * (text.count("\n") + 5):
        return True
    return sum(map(text.count, "0123456789")) > len(text) / 3


def read_plain(path: Path, cut: int | None, problems: Problems) -> Iterator[str]:
    """A text file as one document, or cut into documents of at most ``cut`` characters.

    Raises:
        RunError: where it cannot be read, or is not UTF-8 and bad files are not skipped.
    """
    name = str(path)
    problems.begin(name)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from [file.read()] if cut is None else pieces(file, cut)
    except UnicodeDecodeError as error:
        if not problems.skip:
            way_out = "convert it with iconv, or skip such files with --skip-bad"
            raise RunError(f"cannot read {path} as UTF-8 text ({one_line(error)}): {way_out}") from error
        problems.note(name, "not UTF-8, skipped" if cut is None else "not UTF-8, skipped from there on")
    except OSError as error:
        raise RunError(f"cannot read {path} ({one_line(error)})") from error


def pieces(file: io.TextIOBase, size: int) -> Iterator[str]:
    """Pieces of at most ``size`` characters, cut after the last line end in their second half, else after the last
    space there, else anywhere. One piece is in memory at a time.
    """
    rest = ""
    while rest := rest + file.read(size - len(rest)):
        half = size // 2
        end = rest.rfind("\n", half) + 1 or rest.rfind(" ", half) + 1 or size
        end = end if len(rest) == size else size
        yield rest[:end]
        rest = rest[end:]


def read_records(path: Path, field: str, problems: Problems) -> Iterator[str]:
    """The texts of a file of records: lines of JSON (plain, .gz or .zst), or Parquet.

    Raises:
        RunError: where it cannot be read, or has bad lines that are not skipped.
    """
    name = str(path)
    problems.begin(name)
    rows = enumerate(table_rows(path), 1) if path.suffix == ".parquet" else json_rows(path, problems)
    try:
        yield from texts_of(rows, name, field, problems)
    except (OSError, EOFError, ValueError, zlib.error) as error:  # Arrow's errors are among them
        window = "too much memory" in str(error)  # zstd's, above 128 MiB
        way_out = f": decompress it with `zstd -d --long=31 {path}`" if window else ""
        raise RunError(f"cannot read {path} ({one_line(error)}){way_out}") from error


def texts_of(rows: Iterable[tuple[int, Any]], name: str, field: str, problems: Problems) -> Iterator[str]:
    """The texts of numbered records. null is left out and reported."""
    what = f"no text in the field {field!r}"
    for number, row in rows:
        if not isinstance(row, dict):
            problems.bad(name, what, number, f"the line is not an object, but of type {type(row).__name__}")
        elif field not in row:
            problems.bad(name, what, number, f"there are: {', '.join(map(str, row))}; choose one with --field")
        elif row[field] is None:
            problems.note(name, f"null in the field {field!r}, left out", number)
        elif not isinstance(row[field], str):
            problems.bad(name, what, number, f"it has the type {type(row[field]).__name__}")
        else:
            text = row[field].encode("utf-8", "replace").decode()
            if text != row[field]:
                problems.note(name, 'text with half a surrogate pair, replaced by "?"', number)
            yield text


def json_rows(path: Path, problems: Problems) -> Iterator[tuple[int, Any]]:
    """The JSON value of each line, and the line's number."""
    with open_bytes(path) as file:
        if re.match(rb"(\xef\xbb\xbf)?\s*\[\s*{", file.peek(64)):
            way_out = f"`jq -c '.[]' {path}` writes its elements as lines"
            problems.bad(str(path), "one JSON array, not one object a line", 1, way_out)
            return
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                problems.bad(str(path), "not JSON", number, one_line(error))
            else:
                yield number, row


def open_bytes(path: Path) -> io.BufferedReader | gzip.GzipFile:
    """A file, decompressed by its suffix."""
    if path.suffix == ".gz":
        return gzip.GzipFile(path)
    if path.suffix == ".zst":
        return io.BufferedReader(require("pyarrow").input_stream(str(path), compression="zstd"))
    return path.open("rb")


def table_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet file."""
    with require("pyarrow.parquet").ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=1024):
            yield from batch.to_pylist()


def require(package: str) -> Any:
    """A package of the extra ``corpora``.

    Raises:
        RunError: where it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise RunError(f"this needs the package `{package}`: run `pip install -e '.[corpora]'` in the clone") from error
