# SPDX-License-Identifier: Apache-2.0
"""A corpus of a few standard packages: real Python, tokenized in about a second."""

import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.pretrain import data
from examples.pretrain.config import RunError
from examples.pretrain.prepare import command

PACKAGES = ("json", "email", "http", "logging")


def refuses(message: str, call: Callable, *arguments, **options) -> None:
    """Assert that a call is refused with one line."""
    with pytest.raises(RunError, match=message) as error:
        call(*arguments, **options)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder of Python files."""
    folder = tmp_path_factory.mktemp("corpus")
    for package in PACKAGES:
        shutil.copytree(Path(sysconfig.get_path("stdlib")) / package, folder / package)
    return folder


@pytest.fixture(scope="session")
def dataset(corpus, tmp_path_factory) -> data.Dataset:
    folder = tmp_path_factory.mktemp("data") / "tokens"
    options = ["--vocabulary", "512", "--validation-percent", "20", "--output", str(folder)]
    command.main(["python", str(corpus), *options])
    return data.load(folder)


@pytest.fixture
def flags(dataset, tmp_path) -> list[str]:
    """Command-line arguments of a tiny run on the session's corpus, in a folder of the test's own."""
    return ["--config", "tiny", "--runs-folder", str(tmp_path / "runs"), "--tokens", str(dataset.folder)]
