# SPDX-License-Identifier: Apache-2.0
"""Where documents come from: local files of several formats, or a data set streamed from the Hugging Face hub.

Every source yields its documents in one fixed order and can tell, and return to, its position in it.
"""

import gzip
import hashlib
import io
import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..config import RunError

# What a folder is searched for; a bare .json there is rather a manifest, but may be named itself.
JSON_SUFFIXES = (".jsonl", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst")
TABLE_SUFFIXES = (".parquet", ".arrow")
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".tex")
SAMPLE_BYTES = 50_000_000


class Texts(Protocol):
    """Documents in a fixed order; ``state_dict`` is the position behind the last one taken, ready for JSON."""

    total: int | None

    def __iter__(self) -> Iterator[str]: ...

    def state_dict(self) -> dict[str, Any]:
        """The position."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go there."""
        ...


@dataclass(frozen=True)
class Stream:
    """Documents and the share of them, chosen by a hash of their text, that is held out; 0 and 1 hash nothing."""

    texts: Texts
    held_out: float

    @property
    def feeds(self) -> tuple[str, ...]:
        """The splits that the documents go to."""
        return ("train",) * (self.held_out < 1) + ("validation",) * (self.held_out > 0)

    def split_of(self, text: str) -> str:
        """Where one document goes."""
        if len(self.feeds) == 1:
            return self.feeds[0]
        return "validation" if fraction(text) < self.held_out else "train"


class LocalTexts:
    """Documents of local files: a position is their number, and going there means reading past the ones before."""

    def __init__(self, read: Callable[[], Iterator[str]], total: int | None = None):
        self.read, self.total = read, total
        self._done = 0

    def __iter__(self) -> Iterator[str]:
        for text in itertools.islice(self.read(), self._done, None):
            self._done += 1
            yield text

    def state_dict(self) -> dict[str, Any]:
        """The number of documents taken."""
        return {"documents": self._done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go behind that many documents."""
        self._done = state["documents"]


class HubTexts:
    """Documents of a hub data set, streamed: nothing is kept on disk.

    Args:
        dataset: its id, such as "allenai/c4", or a format and ``files`` for the same code on local files.
        subset: its configuration, such as "en"; empty for the default one.
        split: the split to stream.
        field: the column that holds the text.
        options: further arguments of ``datasets.load_dataset``.

    Raises:
        RunError: where it cannot be reached or has no such column.
    """

    def __init__(self, dataset: str, subset: str, split: str, field: str, **options: Any):
        try:
            import datasets
        except ImportError as error:
            raise RunError(
                "streaming from the hub needs the package `datasets`: pip install 'normpre_optax[corpora]'"
            ) from error
        quiet_hub()
        self._name, self._field = dataset, field
        try:
            self._rows = datasets.load_dataset(dataset, subset or None, split=split, streaming=True, **options)
        except Exception as error:  # of many kinds: network, unknown id, unknown split
            raise self._unreachable(error) from error
        splits = self._rows.info.splits or {}
        self.total = splits[split].num_examples or None if split in splits else None

    def __iter__(self) -> Iterator[str]:
        rows = iter(self._rows)
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except Exception as error:
                raise self._unreachable(error) from error
            yield text_of(row, self._field, self._name)

    def state_dict(self) -> dict[str, Any]:
        """File and row, as `datasets` counts them."""
        return self._rows.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go there without the files before."""
        self._rows.load_state_dict(state)

    def _unreachable(self, error: Exception) -> RunError:
        offline = ", which cannot be reached: is there a network?" * without_network(error)
        return RunError(
            f"cannot stream {self._name} from the Hugging Face hub{offline} ({one_line(error)}): the same command goes "
            "on where it stopped, and --files takes local copies (.jsonl, .json.gz, .parquet, .arrow)"
        )


NO_NETWORK = frozenset(
    {
        "ConnectError",
        "ConnectionError",
        "TimeoutException",
        "Timeout",
        "LocalEntryNotFoundError",
        "OfflineModeIsEnabled",
    }
)
"""What the hub's client and those below it raise where they cannot reach it."""


def without_network(error: BaseException | None) -> bool:
    """Whether an error, or one that it comes from, says that the hub cannot be reached, not that it lacks a name."""
    while error is not None:
        if NO_NETWORK.intersection(kind.__name__ for kind in type(error).__mro__):
            return True
        error = error.__cause__ or error.__context__
    return False


def quiet_hub() -> None:
    """Keep the retries of the hub's client off the terminal: what failed is said once, at the end."""
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()


def one_line(error: BaseException) -> str:
    """An error's first line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def fraction(text: str, purpose: bytes = b"split") -> float:
    """A number in [0, 1) that depends on the text (and the purpose) alone."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "big") / 2**64


def sample(read: Callable[[], Iterable[str]], size: int = SAMPLE_BYTES) -> Iterator[str]:
    """The texts, or where they are larger than ``size`` bytes about that much of them, chosen by hash."""
    total = sum(len(text.encode()) for text in read())
    if total <= size:
        return iter(read())
    return (text for text in read() if fraction(text, b"sample") < size / total)


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
        found |= dict.fromkeys(p for p in inside if p.is_file() and not is_hidden(p.relative_to(path)))
    if not found:
        raise RunError(f"no files to read: give files, or folders with {', '.join(suffixes)} files")
    return list(found)


def is_hidden(path: Path) -> bool:
    """Whether a name on the path begins with a dot, as unfinished folders' names do."""
    return any(part.startswith(".") for part in path.parts)


class LeftOut:
    """What is left out of local files; with ``bad`` also what cannot be read. A file that is read again counts anew."""

    def __init__(self, *, bad: bool = False):
        self.bad = bad
        self._found: dict[Path, dict[str, tuple[int, int]]] = {}

    def begin(self, path: Path) -> None:
        """A file is read from its beginning."""
        self._found[path] = {}

    def add(self, path: Path, what: str, number: int = 0) -> None:
        """Something in line ``number`` of it."""
        count, first = self._found[path].get(what, (0, number))
        self._found[path][what] = count + 1, first

    def lines(self) -> Iterator[str]:
        """What there is to say, file by file."""
        for path, found in self._found.items():
            for what, (count, first) in found.items():
                yield f"{path}: {count:,} {what}, the first in line {first:,}" if first else f"{path}: {what}"


def is_utf8(path: Path) -> bool:
    """Whether a file can be read so."""
    try:
        with path.open(encoding="utf-8") as file:
            return all(True for _ in file)
    except UnicodeDecodeError:
        return False


def read_plain(path: Path, cut: int | None, not_utf8: str, left_out: LeftOut) -> Iterator[str]:
    """A text file as one document, or cut at the ends of lines into documents of about ``cut`` characters.

    Raises:
        RunError: where it cannot be read as UTF-8, and ``not_utf8`` says neither "skip" nor "replace".
    """
    left_out.begin(path)
    try:
        if not_utf8 != "refuse" and not is_utf8(path):
            left_out.add(
                path, {"skip": "is not UTF-8, skipped", "replace": "is not UTF-8, U+FFFD in its place"}[not_utf8]
            )
            if not_utf8 == "skip":
                return
        with path.open(encoding="utf-8", errors="replace" if not_utf8 == "replace" else "strict") as file:
            if cut is None:
                yield file.read()
                return
            while piece := "".join(file.readlines(cut)):
                yield piece
    except UnicodeDecodeError as error:
        way_out = "--not-utf8 skip leaves such files out, --not-utf8 replace what cannot be read in them"
        raise RunError(f"cannot read {path} as UTF-8 text ({one_line(error)}): {way_out}") from error
    except OSError as error:
        raise RunError(f"cannot read {path} ({one_line(error)})") from error


def read_field(path: Path, field: str, left_out: LeftOut) -> Iterator[str]:
    """The texts of a file of records: lines of JSON (plain, .gz or .zst), Parquet or Arrow.

    Raises:
        RunError: where it cannot be read, or has no such field.
    """
    left_out.begin(path)
    tables = {".parquet": parquet_rows, ".arrow": arrow_rows}
    rows = enumerate(tables[path.suffix](path), 1) if path.suffix in tables else json_rows(path, left_out)
    try:
        for number, row in rows:
            try:
                text = text_of(row, field, str(path))
            except RunError:
                if not left_out.bad:
                    raise
                left_out.add(path, f"without text in the field {field!r}, skipped", number)
                continue
            if row[field] is None:
                left_out.add(path, f"null in the field {field!r}, left out", number)
            yield text
    except (OSError, EOFError, ValueError, zlib.error) as error:  # Arrow's errors are among them
        raise RunError(f"cannot read {path} ({one_line(error)})") from error


def json_rows(path: Path, left_out: LeftOut) -> Iterator[tuple[int, Any]]:
    """One JSON value a line, and the line's number."""
    with open_bytes(path) as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                if not left_out.bad:
                    way_out = "--skip-bad leaves such lines out"
                    raise RunError(f"{path}, line {number}, is not JSON ({one_line(error)}): {way_out}") from error
                left_out.add(path, "not JSON, skipped", number)
                continue
            yield number, row


def open_bytes(path: Path) -> io.BufferedIOBase:
    """A file, decompressed by its suffix."""
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    if path.suffix == ".zst":
        return io.BufferedReader(import_arrow().input_stream(str(path), compression="zstd"))
    return path.open("rb")


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet file."""
    import_arrow()
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=1024):
            yield from batch.to_pylist()


def arrow_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of an Arrow file, in the stream format (as `datasets` writes it) or the file format."""
    arrow = import_arrow()
    with arrow.memory_map(str(path)) as file:
        try:
            batches = arrow.ipc.open_stream(file)
        except arrow.ArrowInvalid:
            reader = arrow.ipc.open_file(file)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        for batch in batches:
            yield from batch.to_pylist()


def import_arrow() -> Any:
    """The package `pyarrow`, which comes with `datasets`."""
    try:
        import pyarrow
    except ImportError as error:
        raise RunError("this file needs the package `pyarrow`: pip install 'normpre_optax[corpora]'") from error
    return pyarrow


def text_of(row: Any, field: str, where: str) -> str:
    """The text of a record; none counts as empty, and halves of surrogate pairs, which UTF-8 lacks, become "?"."""
    if isinstance(row, dict) and field in row and not isinstance(row[field], str | None):
        raise RunError(f"{where} has no text in the field {field!r}, but a {type(row[field]).__name__}")
    if not isinstance(row, dict) or field not in row:
        fields = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
        raise RunError(f"{where} has no text in the field {field!r} (there are: {fields}); --field names another")
    return (row[field] or "").encode("utf-8", "replace").decode()
