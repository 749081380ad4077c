# SPDX-License-Identifier: Apache-2.0
"""Documents of one file: plain text, lines of JSON, or a Parquet table."""

import gzip
import io
import json
import re
import shlex
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..config import RunError, one_line
from .encodings import HEAD, NULS, encoding_of, reason
from .problems import Problems, require
from .search import LFS, suffix_of

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
PARQUET = b"PAR1"
# The value of an integer is never used, and `int` refuses more than 4,300 digits.
JSON = json.JSONDecoder(parse_int=lambda digits: 0)


def read_plain(path: Path, cut: int | None, problems: Problems) -> Iterator[str]:
    """A text file as one document, or cut into documents of at most ``cut`` characters.

    Raises:
        RunError: where it cannot be read, or is not UTF-8 and bad documents are not
            skipped.
    """
    with reading(path, problems) as file:
        head = file.peek(HEAD)[:HEAD]
        if cut and b"\0" in head and encoding_of(head):
            # All parts are left out: short ones may have no NULs.
            problems.bad("not UTF-8", reason(head, ""))
            return
        # Bytes that are not UTF-8 become characters that no text has.
        text = io.TextIOWrapper(
            file, encoding="utf-8-sig", errors="surrogateescape", newline=""
        )
        problems.unit = "part"
        with text:
            if cut:
                for problems.number, piece in enumerate(pieces(text, cut), 1):
                    if is_usable(piece, problems):
                        yield piece
            else:
                document = text.read()
                if is_usable(document, problems):
                    yield document


def is_usable(document: str, problems: Problems) -> bool:
    """Whether a document is UTF-8, without NULs, and not blank; else it is counted."""
    what = ""
    if re.search("[\udc80-\udcff]", document):
        what = "not UTF-8"
    elif "\0" in document:
        what = NULS
    if what:
        data = document.encode(errors="surrogateescape")
        problems.bad(what, reason(data, "iconv converts it"))
        return False
    if not document.strip():
        problems.note("blank, left out")
        return False
    return True


def pieces(file: io.TextIOBase, size: int) -> Iterator[str]:
    """Pieces of at most ``size`` characters, one of which is in memory at a time.

    They are cut after the last line end in their second half, else after the last space
    there, else anywhere.
    """
    rest = ""
    while rest := rest + file.read(size - len(rest)):
        end = size
        if len(rest) == size:  # else it is the last one
            half = size // 2
            end = rest.rfind("\n", half) + 1 or rest.rfind(" ", half) + 1 or size
        yield rest[:end]
        rest = rest[end:]


def read_records(path: Path, field: str, problems: Problems) -> Iterator[str]:
    """The texts of a file of records: lines of JSON, or Parquet.

    Raises:
        RunError: where it cannot be read, or has bad records that are not skipped.
    """
    with reading(path, problems, PARQUET) as file:
        if not file.peek(1):
            problems.note("empty, left out")
        if suffix_of(path).startswith((".csv", ".tsv")):
            raise RunError(f"{path} is a CSV file: {CONVERT.format('csv')}")
        if file.peek(4).startswith(PARQUET) or suffix_of(path) == ".parquet":
            problems.unit = "row"
            rows = table_rows(file, field)
            yield from texts_of(rows, field, problems, lambda row: row.as_py())
        elif re.match(rb"(\xef\xbb\xbf)?\s*\[\s*{", file.peek(64)):
            problems.bad(
                "one JSON array, not one object a line",
                f"`jq -c '.[]' {shlex.quote(str(path))}` writes its elements as lines",
            )
        else:
            if file.peek(3).startswith(BYTE_ORDER_MARK):
                file.read(3)
            yield from texts_of(
                file, field, problems, lambda line: parse_line(line, field)
            )


def parse_line(line: bytes, field: str) -> Any:
    """The JSON of a line; an empty line is a blank text."""
    if line.isspace():
        return {field: ""}
    return JSON.decode(line.decode())


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
        how = opener(path, known)
        if isinstance(how, str):
            raise RunError(f"{path} is {how}")
        with how(path, "rb") as file:
            yield file
    except (OSError, EOFError, ValueError, zlib.error) as error:
        # Arrow's errors are among them. zstd refuses windows above 128 MiB.
        way_out = ""
        if "too much memory" in str(error):
            name = shlex.quote(str(path))
            way_out = f": decompress it with `zstd -d --long=31 {name}`"
        after = ""
        if problems.number:
            after = f" after {problems.unit} {problems.number:,}"
        raise RunError(
            f"cannot read {path} ({one_line(error)}){after}{way_out}"
        ) from error


def opener(path: Path, known: tuple[bytes, ...]) -> Any:
    """What opens a file by its first bytes; a text on what to do if nothing does."""
    with path.open("rb") as file:
        head = file.read(32)
    for mark, how in FORMATS.items():
        if head.startswith(mark) and mark not in known:
            return how
    return open


def texts_of(
    rows: Iterable[Any],
    field: str,
    problems: Problems,
    parse: Callable[[Any], Any] = lambda row: row,
) -> Iterator[str]:
    """The texts of records. null and blank texts are left out and reported."""
    for problems.number, record in enumerate(rows, 1):
        try:
            row = parse(record)
        except (ValueError, RecursionError) as error:
            what = "not UTF-8"
            detail = one_line(error)
            if problems.unit != "row":
                what = "not JSON"
                detail = reason(record, detail)
            problems.bad(what, detail)
            continue
        if detail := why_no_text(row, field):
            problems.bad(f"no text in the field {field!r}", detail)
        elif "\0" in (row[field] or ""):
            data = row[field].encode(errors="replace")
            problems.bad(f"{NULS} in the field {field!r}", reason(data, ""))
        elif not (row[field] or "").strip():
            problems.note(f"null or blank in the field {field!r}, left out")
        else:
            text = row[field].encode("utf-8", "replace").decode()
            if text != row[field]:
                problems.note('text with half a surrogate pair, replaced by "?"')
            yield text


def why_no_text(row: Any, field: str) -> str:
    """Why a record has neither a text nor null in its field; "" if it has."""
    if not isinstance(row, dict):
        return f"the line is not an object, but of type {type(row).__name__}"
    if field not in row:
        return f"there are: {', '.join(map(str, row))}; choose one with --field"
    if not isinstance(row[field], str | None):
        return f"it has the type {type(row[field]).__name__}"
    return ""


def table_rows(file: Any, field: str) -> Iterator[Any]:
    """The rows of a Parquet file.

    If there is a column of the text, only that is read.
    """
    parquet = require("pyarrow.parquet")
    with parquet.ParquetFile(file, page_checksum_verification=True) as table:
        names = table.schema_arrow.names
        if field in names:
            names = [field]
        for batch in table.iter_batches(1024, columns=names):
            yield from batch.to_struct_array()


def open_zstd(path: Path, mode: str) -> io.BufferedReader:
    """A file compressed by zstd, to read."""
    # An open file: Arrow takes no path that is not UTF-8.
    stream = require("pyarrow").input_stream(path.open("rb"), compression="zstd")
    return io.BufferedReader(stream)


CONVERT = (
    "in Python, `datasets.load_dataset({!r}, data_files='...',"
    " split='train').to_parquet('...')` converts it"
)
ARROW = f"an Arrow file: {CONVERT.format('arrow')}"
# The first bytes of files that are compressed, with what opens them, and of others,
# with what to do.
FORMATS: dict[bytes, Any] = {
    b"\x1f\x8b": gzip.open,
    b"\x28\xb5\x2f\xfd": open_zstd,
    b"\x50\x2a\x4d\x18": open_zstd,
    b"ARROW1": ARROW,
    b"\xff\xff\xff\xff": ARROW,
    PARQUET: "a Parquet file: `prepare jsonl` reads it",
    LFS: "a Git LFS pointer: `git lfs pull` downloads the file itself",
    # Python reads these two, but takes damage between their parts for their end.
    b"BZh": "compressed by bzip2: unpack it with bunzip2",
    b"\xfd7zXZ\0": "compressed by xz: unpack it with unxz",
    b"PK\3\4": "a zip archive: unpack it",
    b"%PDF": "a PDF: extract its text, for example with pdftotext",
}
