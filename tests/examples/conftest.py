# SPDX-License-Identifier: Apache-2.0
"""A corpus of a few standard packages: real Python, tokenized in about a second."""

import shutil
import sysconfig
from pathlib import Path

import pytest

from examples.pretrain import data
from examples.pretrain.config import DataConfig
from examples.pretrain.prepare import python_source

PACKAGES = ("json", "email", "http", "logging")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder of Python files."""
    folder = tmp_path_factory.mktemp("corpus")
    for package in PACKAGES:
        shutil.copytree(Path(sysconfig.get_path("stdlib")) / package, folder / package)
    return folder


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory) -> Path:
    """Where the session's token files are made."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def data_config(corpus, data_folder) -> DataConfig:
    return DataConfig(source=corpus, folder=data_folder, vocabulary=512, validation_percent=20, validation_tokens=2048)


@pytest.fixture(scope="session")
def dataset(data_config) -> data.Dataset:
    return data.load(python_source.prepare(data_config, lambda line: None))


@pytest.fixture
def flags(data_config, dataset, tmp_path) -> list[str]:
    """Command-line arguments of a tiny run on the session's corpus, in a folder of the test's own."""
    return [
        *("--config", "tiny", "--runs-folder", str(tmp_path / "runs"), "--data.folder", str(data_config.folder)),
        *("--data.source", str(data_config.source), "--data.validation-percent", "20"),
    ]
