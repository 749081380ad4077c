# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run at a small size and write what they promise.

What they measure is not judged here.
"""

import json
import math

import pytest

from examples.research import accuracy, optimizer_step, shapes

pytestmark = pytest.mark.slow


def written(folder, stem):
    """The JSON report, after a look at its table."""
    table = (folder / f"{stem}.md").read_text()
    result = json.loads((folder / f"{stem}.json").read_text())
    for row in result["rows"]:
        name = row["path"] if isinstance(row, dict) else row
        assert name in table
    assert {"command", "date", "machine", "versions"} <= set(result)
    return result


def test_optimizer_step(tmp_path):
    names = ("adamw", "optax_muon", "clean_muon", "normpre_h", "rmnp")
    options = {"model": "tiny", "out": tmp_path}
    optimizer_step.main(optimizer_step.Options(repeats=2, optimizers=names, **options))
    rows = written(tmp_path, "optimizer_step_tiny_cpu")["rows"]
    assert rows["optax_muon"]["over_optax_muon"] == 1
    kept = {}
    for name, row in rows.items():
        assert all(map(math.isfinite, row.values()))
        kept[name] = round(row["state_per_parameter_byte"], 2)  # counters are few bytes
    assert kept == {
        "adamw": 2.0,
        "optax_muon": 1.0,
        "clean_muon": 1.0,
        "normpre_h": 2.02,
        "rmnp": 1.0,
    }
    assert (tmp_path / "optimizer_step_tiny_cpu.png").stat().st_size > 1000


def test_optimizer_step_without_running_it(tmp_path):
    options = optimizer_step.Options(
        model="tiny", compile_only=True, optimizers=("normpre_l", "adamw"), out=tmp_path
    )
    optimizer_step.main(options)
    result = written(tmp_path, "optimizer_step_tiny_cpu_compile")
    assert list(result["rows"]["normpre_l"]) == [
        "compile_s",
        "temporaries_per_parameter_byte",
    ]
    assert result["command"].endswith(
        "optimizer_step --model tiny --optimizers normpre_l adamw --compile-only"
    )


def test_a_model_or_optimizer_that_is_not_known_is_named(tmp_path):
    for unknown, options in (
        ("gpt3", {"model": "gpt3"}),
        ("adamv", {"optimizers": ("adamv",)}),
    ):
        with pytest.raises(SystemExit, match=unknown):
            optimizer_step.main(optimizer_step.Options(**options, out=tmp_path))


def test_the_shapes_are_the_papers():
    count = {}
    for name, (layers, matrices) in shapes.MODELS.items():
        count[name] = layers * len(matrices)
    assert count["gpt2_small"] == 48
    assert count["llama_1p3b"] == 168
    assert count["qwen3_1p7b"] == 196


def test_accuracy(tmp_path):
    options = accuracy.Options(rows=48, columns=96, rank=4, oversample=2, out=tmp_path)
    accuracy.main(options)
    rounding = []
    for row in written(tmp_path, "accuracy_cpu")["rows"]:
        if "float32" in row["path"] and "sketch" in row["path"]:
            rounding.append(row["gaussian"])
    assert rounding
    assert max(rounding) < 1e-4
