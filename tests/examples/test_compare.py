# SPDX-License-Identifier: Apache-2.0
"""The matched comparison: arms, resuming, failures, tables, figures."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from examples.pretrain import arms, compare, comparison_report, configs, main
from examples.pretrain.config import RunError
from examples.pretrain.optimizers import OPTIMIZERS
from examples.pretrain.variants import Variant, read_variants

ROOT = Path(__file__).parents[2]


def arm(optimizer: str, learning_rate: float, seed: int, loss: float, **more) -> dict:
    validation = [[0, 6.0], [5, loss + 1], [10, loss]]
    return {
        "optimizer": optimizer,
        "learning_rate": learning_rate,
        "seed": seed,
        "status": "finished",
        "best_validation_loss": loss,
        "validation": validation,
        "train": [[step, value + 0.1] for step, value in validation[1:]],
        "row_norm": [[step, 0.5, 0.0] for step, _ in validation],
        "events": [],
        **more,
    }


@pytest.fixture
def content() -> dict:
    lost = {"optimizer": "mano", "seed": 0, "status": "diverged", "diverged": "the loss became nan at step 3"}
    return {
        "settings": "nano --steps 10",
        "command": "python -m examples.pretrain compare",
        "date": "2026-01-01",
        "machine": {"kind": "cpu", "cores": 1},
        "versions": {"python": "3.11", "jax": "0.10"},
        "config": {
            **{"config": "nano", "steps": 10, "batch_size": 2, "model.context": 4, "model.family": "gpt2"},
            **{"model.layers": 1, "model.width": 8},
        },
        "parameters": 1000,
        "text": {"source": "text"},
        "best": {"adamw": 0.1, "muon": 0.2, "normpre_g": 0.2, "normpre_l": 0.2},
        "arms": [
            arm("adamw", 0.1, 0, 3.0),
            arm("adamw", 0.1, 1, 3.2),
            arm("adamw", 0.2, 0, 3.5),
            arm("muon", 0.1, 0, 2.9),
            arm("muon", 0.2, 0, 2.7),
            arm("muon", 0.4, 0, 2.8),
            arm("normpre_g", 0.2, 0, 2.6),
            arm("normpre_l", 0.2, 0, 2.75, events=[{"step": 4, "event": "loss spike"}]),
            {**lost, "learning_rate": 0.1},
        ],
        "efficiency": {
            "rows": {
                "adamw": {
                    **{"optimizer_ms": 1.0, "optimizer_mean_ms": 1.2, "step_ms": 10.0, "step_mean_ms": 11.0},
                    **{"tokens_per_second": 2e4, "peak_gib": 1.5},
                },
            },
            "warmup": 20,
            "steps": 100,
            "how": "in turns",
        },
    }


def test_table_one(content):
    lines = comparison_report.losses_table(content).splitlines()
    assert lines[2:] == [
        "| AdamW | 0.1 | 3.1000 | 0.1414 | 2 |",
        "| Muon | 0.2 | <u>2.7000</u> |  | 1 |",
        "| MANO | | none of its runs came to an end | | |",
        "| NormPre-G | 0.2 | **2.6000** |  | 1 |",
        "| NormPre-L | 0.2 | 2.7500 |  | 1 |",
    ]


def test_without_a_baseline_nobody_beats_it(content):
    content["arms"] = [arm("normpre_g", 0.2, 0, 2.6)]
    assert "| NormPre-G | 0.2 | 2.6000 |  | 1 |" in comparison_report.losses_table(content)


def test_the_other_tables_and_the_remarks(content):
    sweep = comparison_report.sweep_table(content).splitlines()
    assert sweep[0] == "| optimizer | 0.1 | 0.2 | 0.4 |"
    assert sweep[2] == "| AdamW | 3.0000 | 3.5000 |  |"
    assert sweep[4] == "| MANO | diverged |  |  |"
    assert "| AdamW | 1.00 (1.20) | 10.0 (11.0) | 20.00 | 1.500 |" in comparison_report.efficiency_table(content)
    remarks = comparison_report.remarks(content)
    assert remarks[0] == "AdamW is best at the smallest learning rate tried: its optimum may lie beyond."
    assert "MANO at 0.1, seed 0 diverged: the loss became nan at step 3." in remarks
    assert "1 loss spike(s)" in remarks[-1]
    assert not any(line.startswith("Muon is best") for line in remarks)


def test_a_report_can_be_drawn_again(content, tmp_path, capsys):
    comparison_report.write(tmp_path, content)
    names = {path.name for path in tmp_path.iterdir()}
    figures = {f"{name}.png" for name in comparison_report.FIGURES}
    assert names == {"README.md", "comparison.json", *figures}
    text = (tmp_path / "README.md").read_text()
    for heading in ("# Comparison: nano --steps 10", "## Validation loss", "## By learning rate", "## Time and memory"):
        assert heading in text
    (tmp_path / "README.md").unlink()
    assert comparison_report.main([str(tmp_path)]) == 0
    assert (tmp_path / "README.md").read_text() == text
    assert comparison_report.main([str(tmp_path / "nowhere")]) == 1
    assert "no comparison.json" in capsys.readouterr().err


def test_every_optimizer_has_a_name_and_a_colour_of_its_own():
    assert set(comparison_report.NAMES) == set(OPTIMIZERS)
    assert len(set(comparison_report.NAMES.values())) == len(OPTIMIZERS)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--optimizers", "adam"], "--optimizers must be of adamw, normpre_g"),
        (["--optimizers", ","], "--optimizers must name at least one"),
        (["--optimizers", "muon:8"], "settings of one are written muon:matrix.rank=8, got 'muon:8'"),
        (["--optimizers", "muon:steps=8"], "settings of one are written muon:matrix.rank=8"),
        (["--optimizers", "muon:matrix.rank="], "settings of one are written muon:matrix.rank=8"),
        (["--optimizers", "normpre_l:matrix.rank=0"], "--matrix.rank must be at least 1"),
        (["--optimizers", "muon:matrix.rank=8"], "muon has no matrix.rank, got 'muon:matrix.rank=8'"),
        (["--optimizers", "adamw:matrix.muon_ratio=8"], "adamw has no matrix.muon_ratio"),
        (["--optimizers", "muon:matrix.rang=8"], "there is no setting matrix.rang; matrix. has momentum, nesterov"),
        (["--optimizers", "muon:weight_decays=8"], "settings of one are written muon:matrix.rank=8"),
        (["--optimizers", "muon:matrix.ns_steps=many"], "has a value that its setting does not take"),
        (["--optimizers", "muon,adamw,muon"], "--optimizers: muon is there twice"),
        (["--learning-rates", "1e-3;2e-3"], "--learning-rates: numbers separated by commas"),
        (["--learning-rates", "-1"], "--learning-rates must be positive"),
        (["--learning-rates", "lion:1"], "'lion' is none of the optimizers adamw, muon"),
        (["--resume"], "goes on where it was by itself"),
        (["--seeds", "0"], "must be at least 1"),
        (["--name", "a/b"], "plain folder name"),
        (["--config", "huge"], "--config must be one of"),
        (["--model.heads", "3"], "--model.heads 3 must divide"),
    ],
)
def test_a_bad_comparison_is_one_line_before_anything_is_written(arguments, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main.main(["compare", *arguments]) == 1
    said = capsys.readouterr()
    assert line in said.err
    assert said.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_every_optimizer_can_be_compared(tmp_path):
    wanted = ",".join(OPTIMIZERS)
    planned = compare.plan(compare.Options(config="nano", optimizers=wanted, runs_folder=tmp_path), [])
    assert [str(variant) for variant in planned.variants] == list(OPTIMIZERS)
    assert len({arms.Arm(variant, 1e-3, 0).name for variant in planned.variants}) == len(OPTIMIZERS)


def test_an_optimizer_with_settings_of_its_own():
    plain, own = read_variants("normpre_l, normpre_l:matrix.rank=8:matrix.bfloat16", [])
    assert plain == Variant("normpre_l")
    assert str(own) == "normpre_l:matrix.rank=8:matrix.bfloat16"
    config = configs.parse(own.flags)
    assert (config.optimizer, config.matrix.rank, config.matrix.bfloat16) == ("normpre_l", 8, True)
    assert arms.Arm(own, 1e-3, 2).name == "normpre_l,matrix.rank=8,matrix.bfloat16-lr0.001-seed2"
    assert comparison_report.label(str(own)) == "NormPre-L, rank 8, bfloat16"
    (held,) = read_variants("muon:matrix.norm_control=hyperball:weight_decay=0:model.hidden_std=0.1", [])
    config = configs.parse(held.flags)
    assert (config.weight_decay, config.model.hidden_std, config.matrix.norm_control) == (0, 0.1, "hyperball")
    assert comparison_report.label(str(held)) == "Muon, norm control hyperball, weight decay 0, hidden std 0.1"


def test_variants_of_one_optimizer_stand_together_and_look_different(content):
    tuned = "normpre_g:matrix.tangent=none"
    content["arms"] = [arm(tuned, 0.2, 0, 2.5), *content["arms"]]
    content["best"][tuned] = 0.2
    names = comparison_report.optimizers(content)
    assert names[-3:] == ["normpre_g", tuned, "normpre_l"]
    assert "| NormPre-G, tangent none | 0.2 | **2.5000** |" in comparison_report.losses_table(content)
    looks = [comparison_report.style(name, content) for name in names]
    assert len({(look["color"], look["linestyle"]) for look in looks}) == len(names)


def test_learning_rates_for_all_and_for_one():
    adamw, muon, scaled = Variant("adamw"), Variant("muon"), Variant("muon", ("matrix.muon_ratio=2",))
    found = compare.learning_rates("2e-3, 1e-3,muon:8e-3,muon:1e-3", [adamw, muon], 5.0)
    assert found == {adamw: [1e-3, 2e-3], muon: [1e-3, 2e-3, 8e-3]}
    found = compare.learning_rates("muon:matrix.muon_ratio=2:8e-3", [muon, scaled], 5.0)
    assert found == {muon: [5.0], scaled: [8e-3]}


def test_settings_are_tuned_one_after_the_other_with_one_budget_for_all(tmp_path, monkeypatch):
    """Losses of a known bowl: its minimum is at a rate of 2e-3, a ratio of 2 and a decay of 0."""

    def ran(study, found, console):
        for one in found:
            adam, decay = one.adam_ratio or 1.0, 0.1 if one.weight_decay is None else one.weight_decay
            loss = abs(one.learning_rate - 2e-3) * 100 + abs(adam - 2) + decay + (one.variant.optimizer == "muon")
            study.results[one] = arm("", one.learning_rate, one.seed, loss) | {"optimizer": None}

    reports = []
    monkeypatch.setattr(arms.Study, "run", ran)
    monkeypatch.setattr(compare.data, "open_corpus", lambda *_: None)
    monkeypatch.setattr(compare, "report", lambda study, best, *_: reports.append((study, best)))
    options = compare.Options(
        **{"config": "nano", "optimizers": "adamw,muon", "learning_rates": "1e-3,2e-3,4e-3", "seeds": 3},
        **{"adam_ratios": "0.5,2,4", "weight_decays": "0,0.3", "runs_folder": tmp_path, "efficiency": False},
    )
    compare.run(compare.plan(options, ["--seed", "5"]), "", Console(quiet=True))
    ((study, best),) = reports
    for variant in (Variant("adamw"), Variant("muon")):
        assert best[variant] == arms.Arm(variant, 2e-3, 5, adam_ratio=2.0, weight_decay=0.0)
        assert [one.seed for one in study.results if one.variant == variant] == [5] * (3 + 3 + 2) + [6, 7]
    flags = best[Variant("muon")].flags
    assert flags[flags.index("--adam-learning-rate") + 1] == "0.004"
    assert flags[flags.index("--weight-decay") + 1] == "0.0"
    assert len({one.name for one in study.results}) == len(study.results)


def test_the_report_of_tuned_settings(content):
    tuned = [arm("muon", 0.2, 0, 2.2, adam_ratio=0.5), arm("muon", 0.2, 0, 2.1, adam_ratio=0.5, weight_decay=0.0)]
    seed = arm("muon", 0.2, 1, 2.3, adam_ratio=0.5, weight_decay=0.0)
    content["arms"] += [*tuned, seed]
    content["tuned"] = {"muon": {"adam_ratio": 0.5, "weight_decay": 0.0}}
    content["config"] |= {"weight_decay": 0.1, "learning_rate": 0.1}
    table = comparison_report.losses_table(content)
    assert "| Muon | 0.2 | 0.5 | 0 | <u>2.2000</u> | 0.1414 | 2 | 6 |" in table
    assert "| AdamW | 0.1 | 1 | 0.1 | 3.1000 | 0.1414 | 2 | 3 |" in table
    assert len({line.count("|") for line in table.splitlines()}) == 1
    text = comparison_report.markdown(content, table, [])
    assert "| Muon | weight decay | 0 | 2.1000 |" in text
    assert "| Muon | AdamW's rate / the matrices' | 0.5 | 2.2000 |" in text
    assert "2.2" not in comparison_report.sweep_table(content)


@pytest.mark.parametrize(("name", "text"), [("weight_decay", "-1"), ("adam_ratio", "0"), ("adam_ratio", "a,b")])
def test_what_cannot_be_tuned(name, text):
    with pytest.raises(RunError, match=f"--{name.replace('_', '-')}s"):
        compare.numbers_of(name, text)


@pytest.mark.parametrize(("cores", "jobs"), [(4, 2), (2, 2), (2, 3), (8, 3)])
def test_jobs_share_the_cores(monkeypatch, cores, jobs):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    shares = [arms.cores_of(place, jobs) for place in range(jobs)]
    assert all(len(share) == max(cores // jobs, 1) for share in shares)
    if jobs <= cores:
        assert len(set().union(*shares)) == sum(map(len, shares))
    assert arms.cores_of(0, 1) == set()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_comparison_from_end_to_end(flags, tmp_path):
    """Stopped, continued, with an arm that diverges; nothing is done twice."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "examples.pretrain", "compare", *flags, "--optimizers", "adamw,normpre_g"]
    command += ["--learning-rates", "1e-2,1e30", "--seeds", "2", "--jobs", "2", "--efficiency-steps", "5"]
    command += ["--steps", "200", "--checkpoint-every", "10", "--log-every", "5"]

    def start() -> subprocess.Popen:
        return subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)

    folder = tmp_path / "runs" / "compare-tiny"
    first = folder / "normpre_g-lr0.01-seed0"
    process = start()
    deadline = time.monotonic() + 200
    while arms.last_step(first / "log.jsonl") < 20:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 143
    begun = json.loads((first / "run.json").read_text())["sessions"]
    said, _ = start().communicate()
    assert len(json.loads((first / "run.json").read_text())["sessions"]) == len(begun) + 1
    content = json.loads((folder / "report" / "comparison.json").read_text())
    found = {(a["optimizer"], a["learning_rate"], a["seed"]): a["status"] for a in content["arms"]}
    assert {key for key, status in found.items() if status == "finished"} == {
        (optimizer, 1e-2, seed) for optimizer in ("adamw", "normpre_g") for seed in (0, 1)
    }
    assert found["adamw", 1e30, 0] == "diverged"
    assert content["best"] == {"adamw": 1e-2, "normpre_g": 1e-2}
    assert set(content["efficiency"]["rows"]) == {"adamw", "normpre_g"}
    assert "| NormPre-G | 0.01 |" in said
    again, _ = start().communicate()
    assert again.count("was there: ") == len(content["arms"])
    other = subprocess.run(
        [*command, "--batch-size", "4"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert other.returncode == 1
    assert "other settings" in other.stderr
