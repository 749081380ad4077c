# SPDX-License-Identifier: Apache-2.0
"""Ablations: what their rows train, tables and figures.

And the preconditioner built from X.
"""

import dataclasses
import functools
import json
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.pretrain import configs, data, optimizers
from examples.pretrain.checks import check
from examples.pretrain.compare.arms import Arm
from examples.pretrain.compare.study import make_study
from examples.pretrain.config import RunError, read_compare
from examples.pretrain.processes import lock
from examples.research import ablate, ablation_report, command, train
from normpre_optax import normpre_g, normpre_l
from tests import reference
from tests.examples.conftest import ENVIRONMENT, FACTS

FROM_X = {
    name: train.FURTHER[f"{name}_from_x"][0] for name in ("normpre_g", "normpre_l")
}
SMALL = configs.load("nano")
WIDE = configs.load("gpt2_small")


def test_every_row_is_a_run_of_its_own_that_the_program_accepts(capsys):
    for name, ablation in ablate.ablations(WIDE).items():
        arms = ablate.arms(ablation, WIDE, 1)
        names = {arm.name for arm in arms}
        expected = len(ablation.rows) * len(ablation.optimizers)
        assert len(names) == len(arms) == expected
        for arm in arms:
            run = configs.parse(["--config", "gpt2_small", *arm.flags])
            check(dataclasses.replace(run, name=arm.name))  # a folder's name
            optimizers.make_optimizer(run, lambda t: 1.0)
        assert set(ablation.paper) <= set(ablation.rows)
        published = {
            ablation.optimizer(ablation.published, who) for who in ablation.optimizers
        }
        wanted = set(ablation.optimizers)
        if name == "sketch":
            wanted = {"normpre_l,rank=32"}
        assert published == wanted, name
    # The same shares of the width.
    assert list(ablate.ablations(WIDE)["rank"].rows) == ["8", "16", "32", "64"]
    assert list(ablate.ablations(SMALL)["rank"].rows) == ["2", "4", "8", "16"]
    tangent = ablate.some_rows(ablate.ablations(SMALL)["tangent"], "strict")
    assert list(tangent.rows) == list(tangent.paper) == ["strict", "relaxed"]
    with pytest.raises(SystemExit):
        ablate.main(["--help"])
    said = capsys.readouterr().out
    assert all(name in said for name in ablate.ablations(SMALL))


BAD = {
    "": "ablate what? tangent, orientation, source, rank",
    "tangents": "not 'tangents'",
    "tangent --seeds 0": "must be at least 1",
    "tangent --rows strict;weak": (
        "--rows must be of no tangent; strict; relaxed, got 'weak'"
    ),
    "all --optimizer muon": "--optimizer is what `ablate` sets itself",
    "tangent --seed 3": "--seed is what `ablate` sets itself",
    "tangent --replicas 2 --process 0": "ablate runs in one process",
    "tangent --resume": "ablate resumes by itself",
    "tangent --config huge": "--config must be one of",
}


def test_a_bad_ablation_is_one_line_before_anything_is_written(refused_at_once):
    program = functools.partial(command.run, ablate.main)
    for arguments, line in BAD.items():
        refused_at_once(arguments.split(), line, program)


def test_a_folder_belongs_to_one_study_and_a_run_to_one_process(tmp_path, monkeypatch):
    monkeypatch.setattr(
        data,
        "open_corpus",
        lambda *_: SimpleNamespace(manifest={"fingerprint": "text"}),
    )
    options = read_compare(
        ["--config", "tiny", "--runs-folder", str(tmp_path)], ablate.Options
    )
    first = make_study("ablate", options)
    second = make_study("ablate", options)
    with (
        first.begun(),
        pytest.raises(RunError, match="another process is writing"),
        second.begun(),
    ):
        pass
    with second.begun():
        saved = (tmp_path / "ablate-tiny" / "study.json").read_text()
        assert json.loads(saved)["flags"] == ["--config", "tiny"]
    arm = Arm("muon", 1e-3, 0)
    (first.folder / arm.name).mkdir(parents=True)
    with (
        lock(first.folder / arm.name),
        pytest.raises(RunError, match=f"another process is writing .*{arm.name}"),
    ):
        first.run([arm])
    assert not first.results, "it has not failed"


def matrix(shape=(6, 10), seed: int = 1, *, equal_rows: bool = False) -> np.ndarray:
    """Rows of norms from 1 to 30, or all of norm one."""
    x = np.random.default_rng(seed).normal(size=shape)
    x = x * np.geomspace(1, 30, shape[0])[:, None]
    if equal_rows:
        return x / np.linalg.norm(x, axis=1, keepdims=True)
    return x


def from_x(x: np.ndarray, name: str, rank: int) -> np.ndarray:
    """The two preconditioners in float64, by full decompositions."""
    psi = x / np.linalg.norm(x, axis=1, keepdims=True)
    if name == "normpre_l":
        trace_matched = x @ x.T * len(x) / np.trace(x @ x.T)
        modes = reference.active_modes(trace_matched, rank)
        return reference.local_preconditioner(*modes) @ psi
    y = x / np.linalg.norm(x)
    p = np.eye(len(x))
    for _ in range(5):
        gram = y @ y.T
        factor = 3.4445 * np.eye(len(x)) - 4.7750 * gram + 2.0315 * gram @ gram
        y = factor @ y
        p = factor @ p
    # On the range of x: all of it unless x is tall.
    return p @ (x @ np.linalg.pinv(x)) @ psi


def first_update(tx, kernel):
    """Of a momentum (out, in), as (out, in)."""
    grads = {"dense": {"kernel": jnp.asarray(kernel.T, jnp.float32)}}
    params = jax.tree.map(jnp.zeros_like, grads)
    updates, _ = tx.update(grads, tx.init(params), params)
    return updates["dense"]["kernel"].T


@pytest.mark.parametrize("name", FROM_X)
@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_the_preconditioner_from_x(name, shape):
    x = matrix(shape)
    options = {"tangent": "none", "weight_decay": 0.0}
    if name == "normpre_l":
        options["rank"] = 3
    tx = FROM_X[name](1.0, **options)
    expected = from_x(x, name, 3)
    expected *= -0.2 / np.sqrt(np.mean(expected**2))
    # float32: an SVD, and five steps that enlarge small singular values up to 3.4^5 =
    # 485 fold.
    np.testing.assert_allclose(first_update(tx, x), expected, atol=2e-4)
    if shape == (6, 10):
        assert not first_update(tx, 0 * x).any()
        for scale in (1e-15, 1e15):
            np.testing.assert_allclose(first_update(tx, x * scale), expected, atol=2e-4)


def test_rows_of_equal_norm_make_no_difference():
    x = matrix(seed=2, equal_rows=True)
    settings = {"tangent": "none", "weight_decay": 0.0}
    usual = {
        "normpre_g": normpre_g(1.0, **settings),
        "normpre_l": normpre_l(1.0, method="exact", **settings),
    }
    for name, tx in usual.items():
        got = first_update(FROM_X[name](1.0, **settings), x)
        np.testing.assert_allclose(got, first_update(tx, x), atol=2e-4)
    # With X = Psi the float64 rule above is that of the reference transcription.
    start = x / np.linalg.norm(x)  # what Newton-Schulz itself is applied to
    got = from_x(start, "normpre_g", 3) / np.sqrt(6)
    np.testing.assert_allclose(got, reference.newton_schulz(x), atol=1e-9)


def test_the_further_optimizers_train():
    """X in place of Psi is another update. Optax's Muon is that of its own package."""
    grads = {"dense": {"kernel": jnp.asarray(matrix(seed=5).T, jnp.float32)}}
    params = jax.tree.map(lambda g: jnp.full_like(g, 0.5), grads)

    def first_of(tx) -> jax.Array:
        updates, _ = tx.update(grads, tx.init(params), params)
        return updates["dense"]["kernel"]

    def first(optimizer: str) -> jax.Array:
        config = configs.parse(
            ["--config", "tiny", "--clip-norm", "1e9", "--optimizer", optimizer]
        )
        return first_of(optimizers.make_optimizer(config, lambda t: jnp.float32(0.1)))

    expected = first_of(FROM_X["normpre_g"](0.1))
    np.testing.assert_allclose(first("normpre_g_from_x"), expected, atol=1e-6)
    assert np.abs(expected - first("normpre_g")).max() > 1e-3
    expected = first_of(optax.contrib.muon(0.1, weight_decay=0.1))
    np.testing.assert_allclose(first("optax_muon"), expected, atol=1e-6)


# Losses by seed; None has diverged.
LOSSES = {
    ("none", "normpre_g"): (3.0, 3.2),
    ("strict", "normpre_g"): (3.9, 4.1),
    ("relaxed", "normpre_g"): (3.4, 3.6),
    ("none", "normpre_l"): (3.5, None),
    ("strict", "normpre_l"): (None, None),
    ("relaxed", "normpre_l"): (3.6, 3.6),
}


def arm(row, optimizer, seed, loss) -> dict:
    """What a report has of one run."""
    return {
        "row": row,
        "optimizer": optimizer,
        "seed": seed,
        "status": "diverged" if loss is None else "finished",
        "best_validation_loss": loss,
        "row_norm": [[0, 0.3, 0.0], [9, 0.5, 0.1]],
    }


def content() -> dict:
    """What a report has of an ablation."""
    arms = []
    for (row, optimizer), losses in LOSSES.items():
        arms += [arm(row, optimizer, seed, loss) for seed, loss in enumerate(losses)]
    return {
        "name": "tangent",
        "title": "Momentum",
        "rows": ["none", "strict", "relaxed"],
        "published": "relaxed",
        "optimizers": ["normpre_g", "normpre_l"],
        "axis": "",
        "cost": None,
        "arms": arms,
        "paper": {
            "none": (3.09, 3.11),
            "strict": (3.18, 3.12),
            "relaxed": (3.07, 3.08),
        },
        **FACTS,
    }


def test_the_report_compares_with_the_papers_table_pair_by_pair(tmp_path):
    found = content()
    lines = ablation_report.write(tmp_path, found).splitlines()
    assert lines[0].count("|") == 10
    none = (
        "| none | 3.1000 ± 0.1414 | -0.4000 | 3.0900 | +0.0200 | 3.5000 (1 lost) |"
        " -0.1000 |"
    )
    strict = (
        "| strict | 4.0000 ± 0.1414 | +0.5000 | 3.1800 | +0.1100 |  (2 lost) |  |"
        " 3.1200 | +0.0400 |"
    )
    assert lines[2].startswith(none)
    assert lines[3] == strict
    assert lines[4].startswith("| **relaxed** | 3.5000 ± 0.1414 |  | 3.0700 |  |")
    g, l = ablation_report.verdicts(found)
    assert g.startswith("NormPre-G: 2 of 3 pairs in the paper's order.")
    clear = "none - strict -0.9000 (clear), the paper -0.0900: as in the paper"
    other = "none - relaxed -0.4000 (clear), the paper +0.0200: other than in the paper"
    assert clear in g
    assert other in g
    assert l == (
        "NormPre-L: 0 of 1 pairs in the paper's order. none - relaxed -0.1000 (one"
        " seed each), the paper +0.0300: other than in the paper."
    )
    found["arms"][0]["best_validation_loss"] = 3.0 + 0.78
    g, _ = ablation_report.verdicts(found)
    assert "none - relaxed -0.0100 (within the noise)" in g
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"tangent.json", "tangent.md", "tangent.png"}
    page = (tmp_path / "tangent.md").read_text()
    said = "mean over 2 seed(s) and sample standard deviation, at learning rate 0.1;"
    assert said in page


def test_rows_that_are_numbers_with_their_cost():
    found = content() | {
        "rows": ["2", "8"],
        "published": "8",
        "axis": "rank",
        "optimizers": ["normpre_l"],
        "name": "rank",
        "cost": {"2/normpre_l": 1.5, "8/normpre_l": 2.5},
        "paper": {"2": (3.1,), "8": (3.0,)},
        "paper_rows": {"2": "16", "8": "64"},
    }
    for arm, row in zip(found["arms"], ["2", "2", "8", "8"], strict=False):
        arm |= {"row": row, "optimizer": "normpre_l"}
    shown = ablation_report.table(found)
    head = (
        "| rank | NormPre-L | - published | paper's rank | paper | - published |"
        " optimizer, ms |"
    )
    assert head in shown
    assert "| **8** | 4.0000 ± 0.1414 |  | 64 | 3.0000 |  | 2.50 |" in shown
    ours, paper, _ = ablation_report.draw(found).axes
    labels = [*ours.get_xticklabels(), *paper.get_xticklabels()]
    assert [label.get_text() for label in labels] == ["2", "8", "16", "64"]


@pytest.mark.thorough  # as comparisons are, of which CI runs one
@pytest.mark.timeout(900)
def test_an_ablation_from_end_to_end(flags, tmp_path):
    """Two rows of a table; what has run once is not run again."""
    program = [sys.executable, "-m", "examples.research.ablate", "rank"]
    options = "--jobs 2 --seeds 1 --steps 20 --warmup-steps 2 --efficiency-steps 3"

    def run(*more):
        return subprocess.run(
            [*program, "--rows", "1", *flags, *options.split(), *more],
            cwd=tmp_path,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
        )

    said = [run(), run()]
    assert [one.stdout.count("was there: ") for one in said] == [0, 2], said[0].stderr
    report = tmp_path / "runs" / "ablate-tiny" / "report"
    found = json.loads((report / "rank.json").read_text())
    finished = [arm["row"] for arm in found["arms"] if arm["status"] == "finished"]
    assert finished == ["1", "4"]
    assert found["cost"].keys() == {"1/normpre_l", "4/normpre_l"}
    other = run("--batch-size", "4")
    assert other.returncode == 1
    assert "has other settings" in other.stderr
