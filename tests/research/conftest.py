# SPDX-License-Identifier: Apache-2.0
"""The corpus of the pretraining program's tests."""

from tests.examples.conftest import (  # noqa: F401
    corpus,
    dataset,
    flags,
    refused_at_once,
)
