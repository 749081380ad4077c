# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run at a small size and write what they promise; what they measure is not judged here."""

import importlib.util
import json
import math

import pytest

from examples.research import accuracy, optimizer_step, shapes
from examples.research import benchmarks as everything
from normpre_optax import families

pytestmark = pytest.mark.slow


def written(folder, stem):
    """The JSON report, after a look at its table."""
    table = (folder / f"{stem}.md").read_text()
    result = json.loads((folder / f"{stem}.json").read_text())
    assert all(name.split(",")[0] in table for name in result["rows"] if isinstance(name, str))
    assert {"command", "date", "machine", "versions"} <= set(result)
    return result


def test_optimizer_step(tmp_path):
    optimizer_step.main(optimizer_step.Options(model="tiny", repeats=2, out=tmp_path))
    result = written(tmp_path, "optimizer_step_tiny_cpu")
    assert set(result["rows"]) == set(optimizer_step.OPTIMIZERS)
    assert result["rows"]["optax_muon"]["over_optax_muon"] == 1
    assert all(math.isfinite(value) for row in result["rows"].values() for value in row.values())
    assert (tmp_path / "optimizer_step_tiny_cpu.png").stat().st_size > 1000


def test_compile_only(tmp_path):
    options = optimizer_step.Options(model="tiny", compile_only=True, optimizers=("normpre_l", "adamw"), out=tmp_path)
    optimizer_step.main(options)
    result = written(tmp_path, "optimizer_step_tiny_cpu_compile")
    assert list(result["rows"]["normpre_l"]) == ["compile_s", "temporaries_per_parameter_byte"]
    assert "--compile-only --optimizers normpre_l adamw" in result["command"]


def test_relatives_take_part_and_say_what_they_keep(tmp_path):
    names = ("adamw", "adamuon", "rmnp", "swan")
    optimizer_step.main(optimizer_step.Options(model="tiny", repeats=1, optimizers=names, out=tmp_path))
    rows = written(tmp_path, "optimizer_step_tiny_cpu")["rows"]
    kept = {name: round(row["state_per_parameter_byte"], 2) for name, row in rows.items()}  # counters are a few bytes
    assert kept == {"adamw": 2.0, "adamuon": 2.0, "rmnp": 1.0, "swan": 0.0}
    assert set(optimizer_step.KNOWN) > set(families())


def test_torch_takes_part_where_it_is_installed(tmp_path):
    pytest.importorskip("torch")
    optimizer_step.main(
        optimizer_step.Options(model="tiny", repeats=1, optimizers=("adamw", "torch_muon"), out=tmp_path)
    )
    assert written(tmp_path, "optimizer_step_tiny_cpu")["rows"]["torch_muon"]["median_ms"] > 0


def test_an_unknown_model_or_optimizer_is_named(tmp_path):
    with pytest.raises(SystemExit, match="gpt3"):
        optimizer_step.main(optimizer_step.Options(model="gpt3", out=tmp_path))
    with pytest.raises(SystemExit, match="adamv"):
        optimizer_step.main(optimizer_step.Options(optimizers=("adamv",), out=tmp_path))


def test_the_shapes_are_the_papers():
    count = {name: layers * len(matrices) for name, (layers, matrices) in shapes.MODELS.items()}
    assert (count["gpt2_small"], count["llama_1p3b"], count["qwen3_1p7b"]) == (48, 168, 196)


def test_accuracy(tmp_path):
    accuracy.main(accuracy.Options(rows=48, columns=96, rank=4, oversample=2, out=tmp_path))
    table = (tmp_path / "accuracy_cpu.md").read_text()
    result = json.loads((tmp_path / "accuracy_cpu.json").read_text())
    assert all(row["path"] in table for row in result["rows"])
    rounding = [row for row in result["rows"] if "float32" in row["path"] and "sketch" in row["path"]]
    assert rounding
    assert all(row["gaussian"] < 1e-4 for row in rounding)


TINY_GPT2 = ["--model.layers", "1", "--model.width", "32", "--model.heads", "2", "--model.mlp-width", "64"]
TINY_GPT2 += ["--model.context", "16", "--data.vocabulary", "300"]


def test_train_step_against_torch(tmp_path):
    pytest.importorskip("torch")
    from examples.research import train_step

    options = train_step.Options(batch_size=2, repeats=2, warmup=1, torch_compile="off", out=tmp_path)
    train_step.main(options, TINY_GPT2)
    result = written(tmp_path, "train_step_gpt2_10m_cpu")
    assert set(result["rows"]) == {"torch_adamw", "adamw", "normpre_g", "normpre_l"}
    assert all(row[f"{part}_ms"] > 0 for row in result["rows"].values() for part in ("update", "step"))
    # Six updates of each: the same AdamW with the same schedule, too.
    assert result["last_loss"]["adamw"] == pytest.approx(result["last_loss"]["torch_adamw"], abs=1e-4)
    assert result["torch_is"] == "eager"
    assert "--batch-size 2" in result["command"]
    assert "--model.layers 1" in result["command"]


def test_other_work_than_torchs_is_refused(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    from examples.research import train_step

    gelu = torch.nn.functional.gelu
    monkeypatch.setattr(torch.nn.functional, "gelu", lambda x: gelu(x, approximate="tanh"))
    options = train_step.Options(batch_size=2, torch_compile="off", out=tmp_path)
    with pytest.raises(AssertionError, match="not the same"):
        train_step.main(options, TINY_GPT2)
    with pytest.raises(SystemExit, match="gpt2"):
        train_step.main(options, [*TINY_GPT2, "--model.family", "llama"])


def test_all_of_them(tmp_path, monkeypatch):
    seen = []

    def record(options):
        seen.append(options)

    monkeypatch.setattr(everything, "suite", lambda *_: [(record, 1), (record, 2)])
    everything.main(everything.Options(out=tmp_path))
    assert seen == [1, 2]


def test_without_torch_the_train_step_is_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(everything.importlib.util, "find_spec", lambda name: None)
    assert everything.against_torch(everything.Options(out=tmp_path), True) == []
    monkeypatch.setattr(everything, "suite", lambda *_: [])
    everything.main(everything.Options(out=tmp_path))
    assert "torch is not installed" in capsys.readouterr().out


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("tiny", [True, False])
def test_the_suite_is_made_of_runs_that_exist(tmp_path, tiny, on_cpu):
    runs = everything.suite(everything.Options(out=tmp_path, tiny=tiny), on_cpu)
    expected = {"optimizer_step", "accuracy"}
    if importlib.util.find_spec("torch"):
        expected.add("train_step")
    assert {run.__module__.rpartition(".")[2] for run, _ in runs} == expected
    assert all(options.out == tmp_path for _, options in runs)
    models = {options.model for _, options in runs if isinstance(options, optimizer_step.Options)}
    assert models <= set(shapes.MODELS)
