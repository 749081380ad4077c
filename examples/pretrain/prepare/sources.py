# SPDX-License-Identifier: Apache-2.0
"""Documents of local files, or of a data set on the Hugging Face hub, in a fixed order.

Text is kept as it is in the file, line endings included, with two exceptions: a byte
order mark at the start of a file is dropped, and halves of surrogate pairs, which UTF-8
cannot store, become "?" and are reported.
"""

import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..config import RunError, one_line
from .problems import Problems, require
from .reading import texts_of

SAMPLE_BYTES = 50_000_000
# Else the client of the hub prints a warning for every retry.
os.environ.setdefault("HF_HUB_VERBOSITY", "error")


class Stream:
    """Documents of ``files`` in a fixed order, and the share that is held out.

    A document is held out by a hash of its text. The position is the number of
    documents taken: resuming reads past those.
    """

    def __init__(
        self,
        read: Callable[[], Iterator[str]],
        held_out: float,
        files: Sequence[Path] = (),
    ):
        self.read = read
        self.held_out = held_out
        self.files = files
        self._done = 0

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that the documents go to."""
        if self.held_out <= 0:
            return ("train",)
        if self.held_out >= 1:
            return ("validation",)
        return ("train", "validation")

    def split_of(self, text: str) -> str:
        """The split of one document."""
        if fraction(text) < self.held_out:
            return "validation"
        return "train"

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
        self._name = dataset
        load = require("datasets").load_dataset
        problems.begin(dataset, "")  # a position in its rows means nothing to the user
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
            raise RunError(
                f"cannot stream {self._name} from the hub ({one_line(error)}): check"
                " the name and the network; the same command resumes, and with paths"
                " it reads local copies"
            ) from error

    def state_dict(self) -> dict[str, Any]:
        """File and row, as `datasets` counts them."""
        return self._rows.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue there; the files before are not read."""
        self._rows.load_state_dict(state)


def fraction(text: str, purpose: bytes = b"split") -> float:
    """A number in [0, 1) that depends on the text and the purpose alone."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "big") / 2**64


def sample(
    read: Callable[[], Iterable[str]], size: int = SAMPLE_BYTES
) -> Iterator[str]:
    """The texts, or about ``size`` bytes of more of them, chosen by hash."""
    total = sum(len(text.encode()) for text in read())
    for text in read():
        if total <= size or fraction(text, b"sample") < size / total:
            yield text
