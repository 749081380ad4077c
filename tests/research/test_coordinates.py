# SPDX-License-Identifier: Apache-2.0
"""The coordinate check: its table and figure from known numbers, and one real measurement."""

import pytest

from examples.pretrain import configs, data
from examples.research import coordinates


@pytest.fixture
def content():
    """Changes that grow with the width, and changes that do not."""
    steps = [0.1, 0.2, 0.3, 0.4]
    grows = {str(width): [x * width / 64 for x in steps] for width in (64, 128, 256)}
    return {"moves": {"AdamW": grows, "MuonEq, Hyperball": dict.fromkeys(grows, steps)}}


def test_the_exponent_of_the_width(content):
    lines = coordinates.table(content).splitlines()
    assert lines[2:] == [
        "| AdamW | 0.400 | 0.800 | 1.600 | +1.00 |",
        "| MuonEq, Hyperball | 0.400 | 0.400 | 0.400 | +0.00 |",
    ]


def test_a_panel_a_variant_with_a_line_a_step(content):
    panels = coordinates.draw(content).axes
    assert [axes.get_title() for axes in panels] == list(content["moves"])
    assert [len(axes.get_lines()) for axes in panels] == [4, 4]


@pytest.mark.slow
def test_a_step_that_changes_nothing_moves_nothing(data_config):
    """A rate near zero: the streams of two programs, compared by the code that compares any."""
    flags = ["--config", "tiny", "--model.family", "gpt2", "--learning-rate", "1e-30", "--steps", "2"]
    config = configs.parse(
        [*flags, "--warmup-steps", "0", "--weight-decay", "0", "--data.folder", str(data_config.folder)]
    )
    found = coordinates.moves(config, data.open_corpus(config.data, lambda _: None))
    assert found == [0.0, 0.0]
