# SPDX-License-Identifier: Apache-2.0
"""The matched comparison: arms, resuming, failures, tables, figures."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import warnings
from types import SimpleNamespace

import matplotlib.figure
import pytest

from examples.pretrain import configs
from examples.pretrain.compare import command, plots, report, results, study, tables
from examples.pretrain.compare.arms import Arm, finished
from examples.pretrain.config import Compare, RunError, read_compare
from examples.pretrain.optimizers import OPTIMIZERS
from tests import cases
from tests.examples.conftest import ENVIRONMENT, FACTS, wait_for, words

NO_TANGENT = "normpre_g,tangent=none"


def arm(optimizer: str, learning_rate: float, seed: int, loss: float, **more) -> dict:
    validation = [[0, 6.0], [5, loss + 1], [10, loss]]
    return {
        "optimizer": optimizer,
        "learning_rate": learning_rate,
        "seed": seed,
        "status": "finished",
        "best_validation_loss": loss,
        "validation": validation,
        "train": [[step, loss + 12 / step] for step in range(1, 11)],
        "row_norm": [[step, 0.5, 0.0] for step, _ in validation],
        "norms": {"row_norm": 0.5, "column_norm": 0.25, "row_norm/mlp/up": 1.0},
        **more,
    }


@pytest.fixture
def content() -> dict:
    return {
        **FACTS,
        "arms": [
            arm(NO_TANGENT, 0.2, 0, 2.6),
            arm("adamw", 0.1, 0, 3.0),
            arm("adamw", 0.1, 1, 3.2),
            arm("adamw", 0.2, 0, 9.5),
            arm("muon", 0.1, 0, 2.9),
            arm("muon", 0.2, 0, 2.7, adam_learning_rate=0.4),
            arm("muon", 0.4, 0, 2.8),
            arm("muon", 0.2, 1, 2.95),
            arm("normpre_g", 0.2, 0, 2.65),
            {
                "optimizer": "mano",
                "seed": 0,
                "status": "diverged",
                "learning_rate": 0.1,
            },
        ],
    }


def arms_of(content: dict, optimizer: str) -> list[dict]:
    """The arms of an optimizer."""
    return [arm for arm in content["arms"] if arm["optimizer"] == optimizer]


def without_normpre(content: dict) -> dict:
    """The same report without two of its optimizers."""
    arms = [arm for arm in content["arms"] if "normpre" not in arm["optimizer"]]
    return content | {"arms": arms}


def test_the_table_of_losses(content):
    _, _, *rows = tables.losses_table(content).splitlines()
    assert rows == [
        "| AdamW | 0.1 (smallest) | 0.1 | 3.1000 | 0.1414 | 2 | 0.50 | 0.25 |",
        "| Muon | 0.2 | 0.4 | 2.8250 | 0.1768 | 2 | 0.50 | 0.25 |",
        "| NormPre-G | 0.2 | 0.2 | 2.6500 |  | 1 | 0.50 | 0.25 |",
        "| NormPre-G, tangent=none | 0.2 | 0.2 | **2.6000** |  | 1 | 0.50 | 0.25 |",
        "",
        "Runs are missing: these means are of different seeds.",
    ]


H = "normpre_h"  # of 10 steps: the rule is 0.054


@cases.rows(
    "name losses line",
    (H, {0.01: 3.0, 0.02: 2.9}, "0.02, is the largest tried, and the rule by length"),
    (H, {0.1: 2.9, 0.2: 3.0}, "0.1, is the smallest tried, and the rule by length"),
    ("muon,norm_control=hyperball", {0.01: 3.0, 0.02: 2.9}, "0.02, is the largest"),
    ("normpre_h,hidden_std=0.1", {0.01: 3.0, 0.02: 2.9}, "0.02, is the largest"),
    # The rule lies inside, or is an end.
    (H, {0.01: 2.9, 0.02: 3.0}, ""),
    (H, {0.1: 3.0, 0.2: 2.9}, ""),
    (H, {0.054: 2.9, 0.2: 3.0}, ""),
    (H, {0.01: 3.0, 0.054: 2.9}, ""),
    (H, {0.01: 2.9, 0.1: 2.9}, ""),
    # The best is no end, there is no sweep, or the rule is for others.
    (H, {0.01: 3.0, 0.02: 2.9, 0.03: 3.0}, ""),
    (H, {0.02: 2.9}, ""),
    ("muon", {0.01: 3.0, 0.02: 2.9}, ""),
)
def test_a_rule_by_length_beyond_the_sweep_is_said(
    content, tmp_path, name, losses, line
):
    content["arms"] = [arm(name, rate, 0, loss) for rate, loss in losses.items()]
    content["arms"].append(arm("adamw", 0.001, 0, 3.0))
    with warnings.catch_warnings(action="error"):  # it says enough
        said = report.write(tmp_path, content)
    for text in (said, (tmp_path / "README.md").read_text()):
        found = [one for one in text.splitlines() if "learning_rate_by_length" in one]
        if not line:
            assert found == []
            continue
        (one,) = found
        assert one.startswith(f"{results.label(name)}: the best learning rate, {line}")
        assert one.endswith("(`learning_rate_by_length`), 0.054, lies beyond it.")


def test_a_long_comparison_has_no_warning_of_the_rule(content):
    content["config"] = content["config"] | {"steps": 10**6}
    content["arms"] = [arm(H, rate, 0, 2 + rate) for rate in (0.01, 0.02)]
    with warnings.catch_warnings(action="error"):
        assert "smallest tried" in tables.losses_table(content)


def test_the_table_of_differences(content):
    head, _, adamw, muon, *_ = tables.differences_table(content).splitlines()
    best = "NormPre-G, tangent=none"
    assert head == f"| optimizer | {best} is ahead by | and has its loss at step |"
    # 3.0 of seed 0, between 3.6 at step 5 and 2.6 at 10.
    assert adamw == "| AdamW | 0.4000 | 8 (20% fewer) |"
    assert muon == "| Muon | 0.1000 | 10 (5% fewer) |"
    content = without_normpre(content)
    _, _, adamw, *_ = tables.differences_table(content).splitlines()
    assert adamw == "| AdamW | 0.2750 ± 0.0250 | 9 (14% fewer) |"
    content["arms"] = arms_of(content, "muon")
    assert tables.differences_table(content) == ""


def test_the_table_of_runs(content):
    content = without_normpre(content)
    runs = tables.runs_table(content).splitlines()
    assert runs[0] == "| optimizer | seed | 0.1 | 0.2 | 0.4 |"
    assert "| AdamW | 0 | 3.0000 | 9.5000 |  |" in runs
    assert "| Muon | 1 |  | 2.9500 |  |" in runs
    assert "| MANO | 0 | diverged |  |  |" in runs
    failure = {"status": "failed", "reason": "no memory"}
    content["arms"].append(arm("mano", 0.2, 1, 0.0, **failure))
    assert tables.runs_table(content).endswith("\nMANO, seed 1, failed: no memory\n")


def test_means_of_different_seeds_are_not_called_a_gain_in_steps(content):
    content["arms"] = [
        arm("adamw", 0.1, 0, 2.0),
        arm("adamw", 0.1, 1, 4.0),
        arm("muon", 0.1, 0, 2.1),
        arm("muon", 0.1, 2, 2.1),
    ]
    assert "Runs are missing" in tables.losses_table(content)
    row = "| AdamW | -0.1000 | not reached, or a log is damaged |"
    assert row in tables.differences_table(content)
    lines = painted(plots.paint_losses, content).lines
    assert not any(line.get_label().endswith("next best") for line in lines)


def test_a_report_is_drawn(content, tmp_path):
    report.write(tmp_path, content)
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {"README.md", "comparison.json", "losses.png", "learning_rates.png"}
    text = (tmp_path / "README.md").read_text()
    assert "# Comparison: nano --steps 10" in text
    assert "tokens (80)" in text
    assert "| NormPre-G, tangent=none | 0 |" in text


def test_a_report_says_what_its_text_is(content, tmp_path):
    content["text"] = {"source": "a book", "passes": 3.53}
    report.write(tmp_path, content)
    text = (tmp_path / "README.md").read_text()
    assert "tokens (80) of a book, 3.5 passes over it." in text


def test_a_report_without_curves_has_no_figures(content, tmp_path):
    without_curves = arm("adamw", 0.1, 0, 3.0)
    del without_curves["train"], without_curves["row_norm"]
    content["arms"] = [without_curves]
    report.write(tmp_path, content)
    assert ".png" not in (tmp_path / "README.md").read_text()


def test_a_report_of_arms_whose_logs_were_damaged(content, tmp_path):
    best = [arm for arm in arms_of(content, "muon") if arm["learning_rate"] == 0.2]
    best[1]["validation"].pop(1)
    assert "| Muon | 0.1000 | 10 (5% fewer) |" in tables.differences_table(content)
    row = "| AdamW | 0.2750 ± 0.0250 | not reached, or a log is damaged |"
    assert row in tables.differences_table(without_normpre(content))
    report.write(tmp_path, content)
    best[0] |= {"validation": [], "norms": {}}
    report.write(tmp_path, content)
    text = (tmp_path / "README.md").read_text()
    assert "| Muon | 0.2 | 0.4 | 2.8250 | 0.1768 | 2 |  |  |" in text
    assert "losses.png" not in text


def painted(paint, content):
    figure = matplotlib.figure.Figure(figsize=(6.0, 3.6), layout="constrained")
    axes = figure.add_subplot()
    assert paint(axes, content)
    plots.frame(axes, legend="below")
    return axes


def test_the_axes_show_what_differs(content):
    """The range of losses has the training losses, too.

    A hopeless learning rate does not set the range of the others.
    """
    axes = painted(plots.paint_losses, content)
    steps_saved = axes.lines[-1]
    assert steps_saved.get_label().endswith("fewer steps than the next best")
    # 2.65 between 3.6 at step 5 and 2.6 at step 10.
    assert steps_saved.get_xdata() == pytest.approx([9.75, 10])
    bottom, top = axes.get_ylim()
    lowest = min(line.get_ydata().min() for line in axes.lines)
    highest = max(line.get_ydata().max() for line in axes.lines)
    assert bottom < lowest
    # The validation losses at step 0, which are 6, are beyond the top.
    assert highest < top < 6
    _, top = painted(plots.paint_learning_rates, content).get_ylim()
    assert top < 3.5


def test_a_legend_is_no_wider_than_its_figure_and_variants_look_different(content):
    long = [f"normpre_g,rank=8,threshold=0.{i}25,hidden_std=0.1" for i in range(9)]
    content["arms"] += [arm(name, 0.2, 0, 2.5) for name in long]
    figure = painted(plots.paint_losses, content).figure
    figure.canvas.draw()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width
    (axes,) = figure.axes
    assert axes.get_window_extent().height > 0.4 * figure.bbox.height
    looks = [plots.style(name, content) for name in results.optimizers(content)]
    seen = {(look["color"], look["linestyle"], look["marker"]) for look in looks}
    assert len(seen) == len(looks)


def test_optimizers_have_names_and_colors_of_their_own_and_new_ones_are_drawn():
    names = results.NAMES
    assert set(names) <= set(OPTIMIZERS)
    assert len(set(names.values())) == len(names)
    arms = [{"optimizer": name} for name in ("scion", "muon", "scion,rank=8")]
    content = {"arms": arms}
    assert results.optimizers(content) == ["muon", "scion", "scion,rank=8"]
    assert plots.style("scion", content)["label"] == "scion"


@cases.rows(
    "arguments line",
    ("--optimizers adam", "--optimizer must be one of adamw, normpre_h"),
    ("--optimizers ,", "--optimizers must name at least one"),
    ("--optimizers normpre_l,rank=0", "rank must be at least 1"),
    ("--optimizers muon,rank=8", "muon has no setting 'rank'"),
    ("--optimizers muon,ns_steps=many", "ns_steps must be an int"),
    (
        "--optimizers muon,muon",
        "--optimizers: muon with learning rate 0.01 is listed twice",
    ),
    (
        "--optimizers muon --optimizer adamw",
        "--optimizer is what `compare` sets itself: remove it",
    ),
    (
        "--optimizers muon --optimizer=adamw",
        "--optimizer is what `compare` sets itself: remove it",
    ),
    (
        "--learning-rates 1e-3;2e-3",
        "--learning-rates: numbers separated by commas",
    ),
    ("--learning-rates=-1", "--learning-rate must be a positive number"),
    ("--resume", "compare resumes by itself"),
    ("--seeds 0", "must be at least 1"),
    ("--seeds 2147483648", "--seeds must be in 1..10000, got"),
    ("--jobs 2147483647", "--jobs must be in 1..10000, got"),
    ("--name a/b", "plain folder name"),
)
def test_a_bad_comparison_is_one_line_before_anything_is_written(
    refused_at_once, arguments, line
):
    command = ["compare", "--config", "tiny", *words(arguments)]
    refused_at_once(command, line)


def study_of(options: Compare) -> study.Study:
    return study.make_study("compare", options)


def text_of(fingerprint: str):
    """A stand-in for ``open_corpus``."""
    corpus = SimpleNamespace(manifest={"fingerprint": fingerprint})
    return lambda config, console: corpus


def test_learning_rates_for_all_and_for_one():
    options = read_compare(
        ["--config", "nano", "--learning-rates", "2e-3, 1e-3", "--weight-decay", "0"]
    )
    own = "normpre_l,rank=8,mu_dtype=bfloat16"
    names = f"adamw,muon,learning_rate=8e-3,{own},muon,learning_rate=4e-3"
    options = dataclasses.replace(options, optimizers=names)
    found = command.learning_rates(options, study_of(options))
    assert found == {"adamw": [1e-3, 2e-3], "muon": [4e-3, 8e-3], own: [1e-3, 2e-3]}
    options = dataclasses.replace(options, optimizers="muon", learning_rates="")
    assert command.learning_rates(options, study_of(options)) == {
        "muon": [configs.load("nano").learning_rate]
    }
    assert Arm(own, 1e-3, 2).name == f"{own}-lr0.001-seed2"
    assert results.label(own) == "NormPre-L, rank=8, mu_dtype=bfloat16"


def refuse_to_begin(begun: study.Study, message: str) -> None:
    with pytest.raises(RunError, match=message), begun.begun():
        pass


def test_a_folder_holds_arms_of_one_setting(tmp_path, monkeypatch):
    monkeypatch.setattr(study.data, "open_corpus", text_of("text"))
    arguments = ["--config", "tiny", "--runs-folder", str(tmp_path)]
    first = study_of(read_compare(arguments))
    other = study_of(read_compare([*arguments, "--steps", "4"]))
    with first.begun():
        pass
    refuse_to_begin(other, r"other settings \(--config tiny\)")
    monkeypatch.setattr(study.data, "open_corpus", text_of("other"))
    refuse_to_begin(first, "was begun with another text")
    (first.folder / "study.json").write_text("{")
    refuse_to_begin(first, "study.json is damaged")
    (first.folder / "study.json").unlink()
    (first.folder / "arm").mkdir()
    (first.folder / "arm" / "run.json").write_text("{}")
    refuse_to_begin(first, "holds runs but no study.json")


def test_an_arm_that_was_killed_is_no_fault_of_the_settings(tmp_path):
    options = read_compare(["--config", "tiny", "--runs-folder", str(tmp_path)])
    begun = study_of(options)
    begun.folder.mkdir()
    killed = Arm("muon", 0.1, 0)
    (begun.folder / f"{killed.name}.txt").write_text("step 400 validation loss 2.6\n")
    message = r"killed by signal 9 .* the same command resumes it"
    with pytest.raises(RunError, match=message):
        begun.ended(killed, SimpleNamespace(returncode=-9))


@pytest.mark.parametrize("text", ["", "{}", "[]", "null"])
def test_a_damaged_result_is_no_result(tmp_path, text):
    (tmp_path / "result.json").write_text(text)
    assert finished(tmp_path) is None


def test_every_optimizer_has_the_same_budget(tmp_path, monkeypatch):
    """Losses of a known bowl, lowest at a learning rate of 2e-3."""

    def ran(study, found):
        for one in found:
            loss = abs(one.learning_rate - 2e-3) * 100
            if one.optimizer == "muon":
                loss += 1
            study.results[one] = {"status": "finished", "best_validation_loss": loss}

    def write(folder, content):
        written.append(content)

    written = []
    monkeypatch.setattr(study.Study, "run", ran)
    monkeypatch.setattr(study.Study, "facts", lambda study, command: {})
    monkeypatch.setattr(report, "write", write)
    monkeypatch.setattr(study.data, "open_corpus", text_of("text"))
    options = (
        "--config nano --seed 5 --seeds 3 --optimizers adamw,muon"
        " --learning-rates 1e-3,2e-3,4e-3"
    )
    arguments = [*words(options), "--runs-folder", str(tmp_path)]
    command.main(read_compare(arguments))
    (content,) = written
    sweep = [(1e-3, 5), (2e-3, 5), (4e-3, 5)]
    best = [(2e-3, 6), (2e-3, 7)]
    for name in ("adamw", "muon"):
        arms = arms_of(content, name)
        settings = [(arm["learning_rate"], arm["seed"]) for arm in arms]
        assert settings == sweep + best


@pytest.mark.parametrize(("cores", "jobs"), [(4, 2), (2, 3)])
def test_jobs_share_the_cores(monkeypatch, cores, jobs):
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda _: set(range(cores)), raising=False
    )
    shares = [study.cores_of(place, jobs) for place in range(jobs)]
    assert all(len(share) == max(cores // jobs, 1) for share in shares)
    assert len(set().union(*shares)) == cores
    assert study.cores_of(0, 1) == set()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_comparison_from_end_to_end(flags, tmp_path):
    """Stopped, resumed, with an arm that diverges; nothing is done twice."""
    options = (
        "--optimizers adamw,normpre_g --learning-rates 1e-2,1e30 --seeds 2 --jobs 2"
        " --steps 200 --checkpoint-every 10 --log-every 5"
    )
    program = [sys.executable, "-m", "examples.pretrain", "compare"]
    command = [*program, *flags, *words(options)]

    def start() -> subprocess.Popen:
        return subprocess.Popen(
            command,
            cwd=tmp_path,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            text=True,
        )

    def sessions() -> list[dict]:
        return json.loads((first / "run.json").read_text())["sessions"]

    folder = tmp_path / "runs" / "compare-tiny"
    first = folder / "normpre_g-lr0.01-seed0"
    process = start()
    wait_for(first, 20, process)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 143
    begun = len(sessions())
    said, _ = start().communicate()
    assert len(sessions()) == begun + 1
    content = json.loads((folder / "report" / "comparison.json").read_text())
    found = {}
    for one in content["arms"]:
        key = one["optimizer"], one["learning_rate"], one["seed"]
        found[key] = one["status"]
    ended = {key for key, status in found.items() if status == "finished"}
    assert ended == {
        ("adamw", 1e-2, 0),
        ("adamw", 1e-2, 1),
        ("normpre_g", 1e-2, 0),
        ("normpre_g", 1e-2, 1),
    }
    assert found["adamw", 1e30, 0] == "diverged"
    assert "| NormPre-G | 0.01 (smallest) |" in said
    again, _ = start().communicate()
    assert again.count("was there: ") == len(content["arms"])
