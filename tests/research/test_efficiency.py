# SPDX-License-Identifier: Apache-2.0
"""Time and memory of a training step."""

import functools
import io
import json

import pytest
from rich.console import Console

from examples.pretrain import configs, data
from examples.research import command, efficiency


def test_random_tokens_replace_a_corpus_that_is_not_prepared(tmp_path):
    line = f"--config gpt2_small --tokens {tmp_path} --batch-size 2 --micro-batch 2"
    config = configs.parse(line.split())
    said = io.StringIO()
    dataset = efficiency.corpus(config, Console(file=said))
    assert "random tokens" in said.getvalue()
    batch = next(data.training_batches(dataset, context=1024, batch_size=2, seed=0))
    assert batch.shape == (2, 1025)
    assert batch.min() >= 0
    assert batch.max() < 50_304
    assert dataset.manifest["largest_token"] < dataset.manifest["vocabulary"] == 50_304


@pytest.mark.slow
def test_every_optimizer_has_a_row(flags, tmp_path, capsys):
    output = tmp_path / "efficiency.json"
    line = f"--optimizers adamw,normpre_l,rank=8 --steps 2 --output {output}"
    words = [*flags, *line.split()]
    assert command.run(efficiency.main, words) == 0
    rows = json.loads(output.read_text())["rows"]
    assert list(rows) == ["adamw", "normpre_l,rank=8"]
    assert rows["adamw"]["step_over_adamw"] == 1
    for row in rows.values():
        assert row["optimizer_ms"] > 0
        assert row["peak_gib"] > 0
    assert "normpre_l,rank=8 optimizer" in capsys.readouterr().out


def test_what_is_refused_is_one_line(refused_at_once):
    program = functools.partial(command.run, efficiency.main)
    flags = ["--config", "tiny", "--steps", "0"]
    refused_at_once(flags, "--steps must be at least 1", program)
    flags = ["--config", "tiny", "--replicas", "2", "--process", "0"]
    refused_at_once(flags, "efficiency runs in one process", program)
