# SPDX-License-Identifier: Apache-2.0
"""Documents of local files, or of a data set on the Hugging Face hub, in one fixed
order.

Text is kept as it is in the file, line endings included, with two exceptions: a byte
order mark at the start of a file is dropped, and halves of surrogate pairs, which UTF-8
cannot store, become "?" and are reported.
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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..config import RunError

PACKED = (".gz", ".zst")
# A folder is searched for these. A bare .json in it is rather a manifest, but you can
# name it.
RECORDS = (
    ".jsonl",
    ".parquet",
    *(kind + packed for kind in (".jsonl", ".json") for packed in PACKED),
)
TEXT = tuple(
    kind + packed
    for kind in (".txt", ".md", ".rst", ".tex")
    for packed in ("", *PACKED)
)
SUFFIXES = {
    "python": (".py",),
    "text": TEXT,
    **dict.fromkeys(("jsonl", "openwebtext", "c4", "pile"), RECORDS),
}
SAMPLE_BYTES = 50_000_000
LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
}
PARQUET, LFS, LFS_BYTES = b"PAR1", b"version https://git-lfs", 1024
LeftOut = dict[
    Path, str
]  # files and folders that a search leaves out, and what it counts them as
os.environ.setdefault(
    "HF_HUB_VERBOSITY", "error"
)  # else its client prints a warning for every retry


class Stream:
    """Documents of ``files`` in a fixed order, and the share of them that is held out,
    chosen by a hash of the text.

    The position is the number of documents taken: resuming reads past those.
    """

    def __init__(
        self,
        read: Callable[[], Iterator[str]],
        held_out: float,
        files: Sequence[Path] = (),
    ):
        self.read, self.held_out, self.files = read, held_out, files
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
    """What is left out of folders and files, or replaced in them. A file that is read
    again is counted anew.

    Args:
        skip: whether what cannot be read is skipped, not refused.
    """

    def __init__(self, skip: bool):
        self.skip = skip
        self.left_out: LeftOut = {}
        self._found: dict[tuple[str, str], tuple[int, str, int]] = {}

    def begin(self, name: str, unit: str = "line") -> None:
        """Go to the beginning of a file: ``number`` is that of the line, or row, that
        was read last.
        """
        self.name, self.unit, self.number = name, unit, 0
        self._found = {
            key: found for key, found in self._found.items() if key[0] != name
        }

    def note(self, what: str) -> None:
        """Count something in the current line."""
        count, unit, first = self._found.get(
            (self.name, what), (0, self.unit, self.number)
        )
        self._found[self.name, what] = count + 1, unit, first

    def bad(self, what: str, detail: str) -> None:
        """Count the current line, which is skipped.

        Raises:
            RunError: if bad lines are not skipped.
        """
        if not self.skip:
            where = f", {self.unit} {self.number}" if self.unit and self.number else ""
            raise RunError(
                f"{self.name}{where}: {what} ({detail}); --skip-bad skips it"
            )
        self.note(f"{what}, skipped")

    def lines(self) -> Iterator[str]:
        """One line for every file and problem."""
        for (name, what), (count, unit, first) in self._found.items():
            yield f"{name}: {what}" + (
                f" ({unit}s: {count:,}, the first is {first:,})"
                if unit and first
                else ""
            )


def summary(left_out: LeftOut) -> str:
    """What searches left out, in one line."""
    counts = Counter(left_out.values()).most_common()
    return (
        "left out:"
        f" {', '.join(f'{kind} {count:,}' for kind, count in counts) or 'nothing'}"
    )


class HubStream(Stream):
    """Documents of a hub data set: nothing is kept on disk.

    Args:
        dataset: its id, such as "allenai/c4", or a format such as "json", with
            ``data_files`` among the options.
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
        self,
        dataset: str,
        subset: str,
        split: str,
        field: str,
        problems: Problems,
        held_out: float,
        **options: Any,
    ):
        super().__init__(lambda: texts_of(self._rows, field, problems), held_out)
        self._name, load = dataset, require("datasets").load_dataset
        problems.begin(
            dataset, ""
        )  # a position in its rows has no meaning for the user
        with self._reachable():
            self._rows = load(
                dataset, subset or None, split=split, streaming=True, **options
            )

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
            way_out = (
                "check the name and the network; the same command resumes, and with"
                " paths it reads local copies"
            )
            raise RunError(
                f"cannot stream {self._name} from the hub ({one_line(error)}):"
                f" {way_out}"
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


def sample(
    read: Callable[[], Iterable[str]], size: int = SAMPLE_BYTES
) -> Iterator[str]:
    """The texts; where they are larger than ``size`` bytes, about that much of them,
    chosen by hash.
    """
    total = sum(len(text.encode()) for text in read())
    return (
        text
        for text in read()
        if total <= size or fraction(text, b"sample") < size / total
    )


def find_files(
    paths: Iterable[Path], suffixes: tuple[str, ...], left_out: LeftOut, seen: set[Path]
) -> list[Path]:
    """The files named and those below the folders named, without those in ``seen``, to
    which they are added.

    Raises:
        RunError: where a path does not exist, or there are no such files.
    """
    found: list[Path] = []
    for path in paths:
        found += files_below(existing(path), suffixes, left_out, seen)
    check_found(found, suffixes, left_out)
    return found


def existing(path: Path) -> Path:
    """A path that was named, which must be that of a file or folder."""
    if not path.is_file() and not path.is_dir():
        why = "is neither a file nor a folder" if path.exists() else "does not exist"
        raise RunError(f"{path} {why}")
    return path


def check_found(
    found: Sequence[Any], suffixes: tuple[str, ...], left_out: LeftOut
) -> None:
    """Raise a RunError where a search has found nothing."""
    if not found:
        kinds = ", ".join(suffix for suffix in suffixes if suffix.count(".") == 1)
        raise RunError(
            f"no files to read: give files, or folders with {kinds} files;"
            f" {summary(left_out)}"
        )


def files_below(
    path: Path, suffixes: tuple[str, ...], left_out: LeftOut, seen: set[Path]
) -> Iterator[Path]:
    """A file, or those of a folder with a suffix in order of their paths, through
    links, each once.
    """
    if (real := path.resolve()) in seen:
        return
    seen.add(real)
    if path.is_file():
        yield path
    for inside in sorted(path.iterdir()) if path.is_dir() else ():
        if kind := left_out_as(inside, suffixes):
            left_out[inside] = kind
        else:
            yield from files_below(inside, suffixes, left_out, seen)


def left_out_as(path: Path, suffixes: tuple[str, ...]) -> str:
    """What a search counts a file or folder as that it leaves out; "" for others."""
    if path.name.startswith("."):
        return "hidden"
    if not path.exists():
        return "broken links"
    if not os.access(path, os.R_OK):
        return "without permission to read"
    if path.is_dir():
        return ""
    kind = suffix_of(path) if path.is_file() else "pipes or devices"
    if kind in suffixes:
        pointer = path.stat().st_size < LFS_BYTES and path.read_bytes().startswith(LFS)
        return "Git LFS pointers (git lfs pull)" * pointer
    return kind or "no suffix"


def suffix_of(path: Path) -> str:
    """The suffix of a file in lower case, with the one before that of a compression:
    ".jsonl.gz".
    """
    suffixes = Path(path.name.lower()).suffixes
    return "".join(suffixes[-2 if suffixes and suffixes[-1] in PACKED else -1 :])


def python_streams(
    folders: Sequence[Path], installed: bool, percent: float, left_out: LeftOut
) -> list[Stream]:
    """Python files of the folders, or of the standard library and the ``installed``
    packages.

    Left out: tests (many distributions ship without them), tables of characters, help
    texts, files that the installation wrote, files that are not UTF-8, second copies of
    a text, and of packages tables. A file is in training or validation by a hash of its
    path: the same on every machine.
    """
    files, seen = [], set[bytes]()
    for folder in map(existing, folders or [Path(sysconfig.get_path("stdlib"))]):
        root = folder if folder.is_dir() else folder.parent
        files += [
            (path.relative_to(root).as_posix(), path)
            for path in python_files(folder, seen, left_out)
        ]
    for folder in site_packages() if installed else ():
        found = python_files(folder, seen, left_out, tables=False)
        files += [
            (f"site-packages/{path.relative_to(folder).as_posix()}", path)
            for path in found
        ]

    check_found(files, SUFFIXES["python"], left_out)

    def stream(held: bool) -> Stream:
        chosen = [
            path
            for name, path in files
            if (zlib.crc32(name.encode()) % 100 < percent) == held
        ]
        return Stream(lambda: map(read_source, chosen), float(held), chosen)

    return [stream(False), stream(True)]


def site_packages() -> list[Path]:
    """Where the running interpreter keeps installed packages."""
    return list(
        dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib"))
    )


def python_files(
    folder: Path, seen: set[bytes], left_out: LeftOut, *, tables: bool = True
) -> Iterator[Path]:
    """Files in order of path; ``seen`` collects digests of their texts."""
    for path in files_below(folder, SUFFIXES["python"], left_out, set()):
        skipped = LEFT_OUT.intersection(
            path.relative_to(folder).parts
        ) or path.name.startswith("_sysconfigdata")
        with suppress(UnicodeDecodeError):
            text = "" if skipped else read_source(path)
            digest = hashlib.sha256(text.encode()).digest()
            if text.strip() and digest not in seen and (tables or not is_table(text)):
                seen.add(digest)
                yield path
                continue
        left_out[path] = (
            "Python files that are tests, copies, tables, empty or not UTF-8"
        )


def read_source(path: Path) -> str:
    """The text of a file, line endings as they are."""
    return path.read_bytes().decode("utf-8-sig")


def is_table(text: str) -> bool:
    """Whether a file is huge, has lines of 200 characters on average, or consists of
    digits by a third.
    """
    huge = len(text) > min(1_000_000, 200 * (text.count("\n") + 5))
    return huge or sum(map(text.count, "0123456789")) > len(text) / 3


def read_plain(path: Path, cut: int | None, problems: Problems) -> Iterator[str]:
    """A text file as one document, or cut into documents of at most ``cut`` characters.

    Raises:
        RunError: where it cannot be read, or is not UTF-8 and bad documents are not
            skipped.
    """
    options: Any = {"encoding": "utf-8-sig", "errors": "surrogateescape", "newline": ""}
    with reading(path, problems) as file, io.TextIOWrapper(file, **options) as text:
        problems.unit = "part"
        for problems.number, document in enumerate(
            pieces(text, cut) if cut else [text.read()], bool(cut)
        ):
            if re.search("[\udc80-\udcff]", document):
                problems.bad("not UTF-8", "iconv converts it")
            elif document.strip():
                yield document
            else:
                problems.note("blank, left out")


def pieces(file: io.TextIOBase, size: int) -> Iterator[str]:
    """Pieces of at most ``size`` characters, cut after the last line end in their
    second half, else after the last space there, else anywhere. One piece is in memory
    at a time.
    """
    rest = ""
    while rest := rest + file.read(size - len(rest)):
        half = size // 2
        end = rest.rfind("\n", half) + 1 or rest.rfind(" ", half) + 1 or size
        end = end if len(rest) == size else size
        yield rest[:end]
        rest = rest[end:]


def read_records(path: Path, field: str, problems: Problems) -> Iterator[str]:
    """The texts of a file of records: lines of JSON, or Parquet.

    Raises:
        RunError: where it cannot be read, or has bad records that are not skipped.
    """
    with reading(path, problems, PARQUET) as file:
        if not file.peek(1):
            problems.note("empty")
        if suffix_of(path).startswith((".csv", ".tsv")):
            raise RunError(f"{path} is a CSV file: {CONVERT.format('csv')}")
        if file.peek(4).startswith(PARQUET) or suffix_of(path) == ".parquet":
            problems.unit = "row"
            yield from texts_of(
                table_rows(file, field), field, problems, lambda row: row.as_py()
            )
        elif re.match(rb"(\xef\xbb\xbf)?\s*\[\s*{", file.peek(64)):
            problems.bad(
                "one JSON array, not one object a line",
                f"`jq -c '.[]' {path}` writes its elements as lines",
            )
        else:
            file.read(3 * file.peek(3).startswith(b"\xef\xbb\xbf"))
            # An empty line is a blank text.
            yield from texts_of(
                file,
                field,
                problems,
                lambda x: {field: ""} if x.isspace() else json.loads(x.decode()),
            )


@contextmanager
def reading(path: Path, problems: Problems, *known: bytes) -> Iterator[Any]:
    """A file, opened, and decompressed if its first bytes say so.

    Args:
        path: the file.
        problems: counts from the beginning of the file.
        known: first bytes in ``FORMATS`` of files that the caller reads itself.

    Raises:
        RunError: where it cannot be read, with the last line or row that could, or has
            another format.
    """
    problems.begin(str(path))
    try:
        with path.open("rb") as file:
            head = file.read(32)
        how = next(
            (
                FORMATS[mark]
                for mark in FORMATS
                if head.startswith(mark) and mark not in known
            ),
            open,
        )
        if isinstance(how, str):
            raise RunError(f"{path} is {how}")
        with how(path, "rb") as file:
            yield file
    except (
        OSError,
        EOFError,
        ValueError,
        zlib.error,
    ) as error:  # Arrow's errors are among them
        # zstd refuses windows above 128 MiB.
        way_out = f": decompress it with `zstd -d --long=31 {path}`" * (
            "too much memory" in str(error)
        )
        after = f" after {problems.unit} {problems.number:,}" if problems.number else ""
        raise RunError(
            f"cannot read {path} ({one_line(error)}){after}{way_out}"
        ) from error


def texts_of(
    rows: Iterable[Any], field: str, problems: Problems, parse: Any = lambda row: row
) -> Iterator[str]:
    """The texts of records. null and blank texts are left out and reported."""
    what = f"no text in the field {field!r}"
    for problems.number, record in enumerate(rows, 1):
        try:
            row = parse(record)
        except (ValueError, RecursionError) as error:
            problems.bad(
                "not UTF-8" if problems.unit == "row" else "not JSON", one_line(error)
            )
            continue
        if not isinstance(row, dict):
            problems.bad(
                what, f"the line is not an object, but of type {type(row).__name__}"
            )
        elif field not in row:
            problems.bad(
                what, f"there are: {', '.join(map(str, row))}; choose one with --field"
            )
        elif not isinstance(row[field], str | None):
            problems.bad(what, f"it has the type {type(row[field]).__name__}")
        elif not (row[field] or "").strip():
            problems.note(f"null or blank in the field {field!r}, left out")
        else:
            text = row[field].encode("utf-8", "replace").decode()
            if text != row[field]:
                problems.note('text with half a surrogate pair, replaced by "?"')
            yield text


def table_rows(file: Any, field: str) -> Iterator[Any]:
    """The rows of a Parquet file, of which only the column of the text is read if there
    is one.
    """
    with require("pyarrow.parquet").ParquetFile(
        file, page_checksum_verification=True
    ) as table:
        names = table.schema_arrow.names
        for batch in table.iter_batches(
            1024, columns=[field] if field in names else names
        ):
            yield from batch.to_struct_array()


def open_zstd(path: Path, mode: str) -> io.BufferedReader:
    """A file compressed by zstd, to read."""
    return io.BufferedReader(
        require("pyarrow").input_stream(str(path), compression="zstd")
    )


def require(package: str) -> Any:
    """A package of the extra ``corpora``.

    Raises:
        RunError: where it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise RunError(
            f"this needs the package `{package}`: run `pip install -e '.[corpora]'` in"
            " the clone"
        ) from error


CONVERT = (
    "in Python, `datasets.load_dataset({!r}, data_files='...',"
    " split='train').to_parquet('...')` converts it"
)
# The first bytes of files that are compressed, with what opens them, and of others,
# with what to do.
FORMATS: dict[bytes, Any] = {
    b"\x1f\x8b": gzip.open,
    **dict.fromkeys((b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18"), open_zstd),
    **dict.fromkeys(
        (b"ARROW1", b"\xff\xff\xff\xff"), f"an Arrow file: {CONVERT.format('arrow')}"
    ),
    PARQUET: "a Parquet file: `prepare jsonl` reads it",
    LFS: "a Git LFS pointer: `git lfs pull` downloads the file itself",
    # Python reads these two, but takes damage between their parts for their end.
    **{
        b"BZh": "compressed by bzip2: unpack it with bunzip2",
        b"\xfd7zXZ\0": "compressed by xz: unpack it with unxz",
    },
    b"PK\3\4": "a zip archive: unpack it",
    b"%PDF": "a PDF: extract its text, for example with pdftotext",
}
