# SPDX-License-Identifier: Apache-2.0
"""The matched comparison: arms, resuming, failures, tables, figures."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import matplotlib.figure
import pytest
from rich.console import Console

from examples.pretrain import arms, compare, comparison_report, configs, main
from examples.pretrain.config import RunError
from examples.pretrain.logs import read_lines
from examples.pretrain.optimizers import OPTIMIZERS
from examples.pretrain.variants import Variant, read_variants

NO_TANGENT = "normpre_g:matrix.tangent=none"


def arm(optimizer: str, learning_rate: float, seed: int, loss: float, **more) -> dict:
    validation = [[0, 6.0], [5, loss + 1], [10, loss]]
    return {
        **{"optimizer": optimizer, "learning_rate": learning_rate, "seed": seed, "status": "finished"},
        **{"best_validation_loss": loss, "validation": validation, "events": []},
        "train": [[step, loss + 12 / step] for step in range(1, 11)],
        "row_norm": [[step, 0.5, 0.0] for step, _ in validation],
        "norms": {"row_norm": 0.5, "column_norm": 0.25, "row_norm/mlp/up": 1.0},
        **more,
    }


@pytest.fixture
def content() -> dict:
    tuned = {"adam_ratio": 0.5, "weight_decay": 0.0}
    return {
        **{"settings": "nano --steps 10", "command": "python -m examples.pretrain compare", "date": "2026-01-01"},
        "machine": {"kind": "cpu", "cores": 1},
        "versions": {"python": "3.11", "jax": "0.10"},
        "config": {
            **{"config": "nano", "steps": 10, "batch_size": 2, "model.context": 4, "model.family": "gpt2"},
            **{"model.layers": 1, "model.width": 8},
        },
        "parameters": 1000,
        "text": {"source": "text"},
        "arms": [
            arm(NO_TANGENT, 0.2, 0, 2.6),
            *(arm("adamw", 0.1, 0, 3.0), arm("adamw", 0.1, 1, 3.2), arm("adamw", 0.2, 0, 9.5)),
            *(arm("muon", 0.1, 0, 2.9), arm("muon", 0.2, 0, 2.7), arm("muon", 0.4, 0, 2.8)),
            *(arm("muon", 0.2, 0, 2.2, adam_ratio=0.5), arm("muon", 0.2, 0, 2.1, **tuned)),
            *(arm("muon", 0.2, 1, 2.35, **tuned), arm("normpre_g", 0.2, 0, 2.65)),
            {"optimizer": "mano", "seed": 0, "status": "diverged", "learning_rate": 0.1},
        ],
    }


def test_the_tables(content):
    losses = comparison_report.losses_table(content).splitlines()
    assert losses[2:] == [
        "| AdamW | 0.1 (smallest) |  |  | 3.1000 | 0.1414 | 2 | 0.50 | 0.25 |",
        "| Muon | 0.2 | 0.5 | 0 | **2.2250** | 0.1768 | 2 | 0.50 | 0.25 |",
        "| NormPre-G | 0.2 |  |  | 2.6500 |  | 1 | 0.50 | 0.25 |",
        "| NormPre-G, no tangent | 0.2 |  |  | 2.6000 |  | 1 | 0.50 | 0.25 |",
    ]
    assert comparison_report.differences_table(content).splitlines()[2:] == ["| AdamW | 0.875 ± 0.025 |"]
    runs = comparison_report.runs_table(content).splitlines()
    assert runs[0] == "| optimizer | AdamW group's lr ratio | weight decay | seed | 0.1 | 0.2 | 0.4 |"
    assert "| AdamW |  |  | 0 | 3.0000 | 9.5000 |  |" in runs
    assert "| Muon | 0.5 | 0 | 1 |  | 2.3500 |  |" in runs
    assert "| MANO |  |  | 0 | diverged |  |  |" in runs
    assert len(comparison_report.swept(content, "muon")) == 3


def test_a_report_can_be_drawn_again(content, tmp_path, capsys):
    comparison_report.write(tmp_path, content)
    figures = {f"{name}.png" for name in comparison_report.FIGURES}
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "comparison.json", *figures}
    text = (tmp_path / "README.md").read_text()
    for part in ("# Comparison: nano --steps 10", "tokens (80)", f"- NormPre-G, no tangent: `{NO_TANGENT}`"):
        assert part in text
    without_curves = {key: x for key, x in arm("adamw", 0.1, 0, 3.0).items() if key not in ("train", "row_norm")}
    content["arms"] = [without_curves]
    (tmp_path / "comparison.json").write_text(json.dumps(content))
    assert comparison_report.main([str(tmp_path)]) == 0
    assert ".png" not in (tmp_path / "README.md").read_text()
    assert comparison_report.main([str(tmp_path / "nowhere")]) == 1
    assert "no comparison.json" in capsys.readouterr().err


def painted(paint, content):
    axes = matplotlib.figure.Figure(figsize=(6.0, 3.6), layout="constrained").add_subplot()
    assert paint(axes, content)
    comparison_report.frame(axes, legend="below")
    return axes


def test_the_axes_show_what_differs(content):
    """The range of losses has the training losses, and a hopeless learning rate does not set that of the others."""
    axes = painted(comparison_report.paint_losses, content)
    bottom, top = axes.get_ylim()
    assert bottom < min(line.get_ydata().min() for line in axes.lines)
    assert max(line.get_ydata().max() for line in axes.lines) < top < 6
    assert painted(comparison_report.paint_learning_rates, content).get_ylim()[1] < 3.5


def test_a_legend_is_no_wider_than_its_figure_and_every_variant_looks_different(content):
    long = [f"normpre_g:matrix.rank=8:matrix.threshold=0.{i}25:model.hidden_std=0.1" for i in range(9)]
    content["arms"] += [arm(name, 0.2, 0, 2.5) for name in long]
    figure = painted(comparison_report.paint_rows, content).figure
    figure.canvas.draw()
    (box,), width = [legend.get_window_extent() for legend in figure.legends], figure.bbox.width
    assert 0 <= box.x0 < box.x1 <= width
    assert figure.axes[0].get_window_extent().height > 0.4 * figure.dpi * 3.6
    looks = [comparison_report.style(name, content) for name in comparison_report.optimizers(content)]
    assert len({(look["color"], look["linestyle"], look["marker"]) for look in looks}) == len(looks)


def test_optimizers_have_names_and_colours_of_their_own_and_new_ones_are_drawn():
    names = comparison_report.NAMES
    assert set(names) <= set(OPTIMIZERS)
    assert len(set(names.values())) == len(names)
    content = {"arms": [{"optimizer": name} for name in ("scion", "muon", "scion:matrix.rank=8")]}
    assert comparison_report.optimizers(content) == ["muon", "scion", "scion:matrix.rank=8"]
    assert comparison_report.style("scion", content)["label"] == "scion"


def test_a_bad_comparison_is_one_line_before_anything_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for arguments, line in {
        "--optimizers adam": "--optimizers must be of adamw, normpre_g",
        "--weight-decays -1": "--weight-decays must be 0 or more",
        "--resume": "compare goes on where it was by itself",
        "--seeds 0": "must be at least 1",
        "--name a/b": "plain folder name",
    }.items():
        assert main.main(["compare", "--config", "tiny", *arguments.split()]) == 1
        said = capsys.readouterr().err
        assert line in said
        assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_compared():
    for text, line in {
        ",": "--optimizers must name at least one",
        "muon:8": "settings of one are written muon:matrix.rank=8, got 'muon:8'",
        "muon:matrix.rank=": "settings of one are written muon:matrix.rank=8",
        "normpre_l:matrix.rank=0": "--matrix.rank must be at least 1",
        "muon:matrix.rank=8": "muon has no matrix.rank, got 'muon:matrix.rank=8'",
        "muon:matrix.rang=8": "there is no setting matrix.rang; matrix. has momentum, nesterov",
        "muon:matrix.ns_steps=many": "has a value that its setting does not take",
        "muon,muon": "--optimizers: muon is there twice",
    }.items():
        with pytest.raises(RunError, match=re.escape(line)):
            read_variants(text, [])
    for text, line in {
        "1e-3;2e-3": "--learning-rates: numbers separated by commas",
        "-1": "--learning-rates must be positive",
        "lion:1": "'lion' is none of the optimizers muon",
    }.items():
        with pytest.raises(RunError, match=line):
            compare.learning_rates(text, [Variant("muon")], 1.0)


def test_an_optimizer_with_settings_of_its_own():
    plain, own = read_variants("normpre_l, normpre_l:matrix.rank=8:matrix.bfloat16", [])
    assert plain == Variant("normpre_l")
    config = configs.parse(own.flags)
    assert (config.optimizer, config.matrix.rank, config.matrix.bfloat16) == ("normpre_l", 8, True)
    assert arms.Arm(own, 1e-3, 2).name == "normpre_l,matrix.rank=8,matrix.bfloat16-lr0.001-seed2"
    assert comparison_report.label(str(own)) == "NormPre-L, rank 8, bfloat16"
    (held,) = read_variants("muon:matrix.norm_control=hyperball:weight_decay=0:model.hidden_std=0.1", [])
    config = configs.parse(held.flags)
    assert (config.weight_decay, config.model.hidden_std, config.matrix.norm_control) == (0, 0.1, "hyperball")
    assert comparison_report.label(str(held)) == "Muon, Hyperball, decay 0, std 0.1"


def test_a_folder_holds_arms_of_one_setting(tmp_path):
    first, other = (compare.make_study("compare", "tiny", more, tmp_path, "", 1) for more in ([], ["--steps", "4"]))
    with first.begun():
        pass
    with pytest.raises(RunError, match=r"other settings \(--config tiny\)"), other.begun():
        pass


def test_learning_rates_for_all_and_for_one():
    adamw, muon, scaled = Variant("adamw"), Variant("muon"), Variant("muon", ("matrix.muon_ratio=2",))
    found = compare.learning_rates("2e-3, 1e-3,muon:8e-3,muon:1e-3", [adamw, muon], 5.0)
    assert found == {adamw: [1e-3, 2e-3], muon: [1e-3, 2e-3, 8e-3]}
    found = compare.learning_rates("muon:matrix.muon_ratio=2:8e-3", [muon, scaled], 5.0)
    assert found == {muon: [5.0], scaled: [8e-3]}


def test_settings_are_tuned_one_after_the_other_with_one_budget_for_all(tmp_path, monkeypatch):
    """Losses of a known bowl: its minimum is at a learning rate of 2e-3, a ratio of 2 and a decay of 0."""

    def ran(study, found, console):
        for one in found:
            adam, decay = one.adam_ratio or 1.0, 0.1 if one.weight_decay is None else one.weight_decay
            loss = abs(one.learning_rate - 2e-3) * 100 + abs(adam - 2) + decay + (one.variant.optimizer == "muon")
            study.results[one] = {"status": "finished", "best_validation_loss": loss}

    monkeypatch.setattr(arms.Study, "run", ran)
    monkeypatch.setattr(compare.data, "open_corpus", lambda *_: None)
    study = compare.make_study("compare", "nano", ["--seed", "5"], tmp_path, "", 1)
    variants = Variant("adamw"), Variant("muon")
    tuned = {"adam_ratio": [0.5, 2.0, 4.0], "weight_decay": [0.0, 0.3]}
    compare.run(study, {one: [1e-3, 2e-3, 4e-3] for one in variants}, tuned, 3, Console(quiet=True))
    best = compare.best_arms(study.results, 5)
    for variant in variants:
        assert best[variant] == arms.Arm(variant, 2e-3, 5, adam_ratio=2.0, weight_decay=0.0)
        assert [one.seed for one in study.results if one.variant == variant] == [5] * (3 + 3 + 2) + [6, 7]
    flags = best[Variant("muon")].flags
    assert flags[flags.index("--adam-learning-rate") + 1] == "0.004"
    assert flags[flags.index("--weight-decay") + 1] == "0.0"
    assert len({one.name for one in study.results}) == len(study.results)


@pytest.mark.parametrize(("cores", "jobs"), [(4, 2), (2, 3)])
def test_jobs_share_the_cores(monkeypatch, cores, jobs):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    shares = [arms.cores_of(place, jobs) for place in range(jobs)]
    assert all(len(share) == max(cores // jobs, 1) for share in shares)
    assert len(set().union(*shares)) == cores
    assert arms.cores_of(0, 1) == set()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_comparison_from_end_to_end(flags, tmp_path):
    """Stopped, resumed, with an arm that diverges; nothing is done twice."""
    command = [sys.executable, "-m", "examples.pretrain", "compare", *flags, "--optimizers", "adamw,normpre_g"]
    command += ["--learning-rates", "1e-2,1e30", "--seeds", "2", "--jobs", "2"]
    command += ["--steps", "200", "--checkpoint-every", "10", "--log-every", "5"]

    def start() -> subprocess.Popen:
        return subprocess.Popen(command, cwd=tmp_path, env=arms.environment(), stdout=subprocess.PIPE, text=True)

    folder = tmp_path / "runs" / "compare-tiny"
    first = folder / "normpre_g-lr0.01-seed0"
    process, deadline = start(), time.monotonic() + 200
    while not (lines := read_lines(first / "log.jsonl")) or lines[-1]["step"] < 20:
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
    assert "| NormPre-G | 0.01 (smallest) |" in said
    again, _ = start().communicate()
    assert again.count("was there: ") == len(content["arms"])
