# SPDX-License-Identifier: Apache-2.0
"""Ablations: what their rows train, the preconditioner built from X, tables and figures."""

import dataclasses
import functools
import json
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from examples.pretrain import configs, optimizers
from examples.pretrain.arms import Arm, environment
from examples.pretrain.compare import make_study
from examples.pretrain.config import RunError, check
from examples.pretrain.processes import lock
from examples.pretrain.variants import Variant
from examples.research import ablate, ablation_report, ablations, command, train
from normpre_optax import decay_matrices_only, normpre_g, normpre_l
from tests import reference

FROM_X = {name: train.FURTHER[f"{name}_from_x"][0] for name in ("normpre_g", "normpre_l")}
SMALL, WIDE = (configs.load(name) for name in ("nano", "gpt2_small"))


parse = functools.cache(lambda *flags: configs.parse(flags))  # seeds share their flags, and ablations a row


@pytest.mark.parametrize("config", [SMALL, WIDE], ids=lambda config: config.config)
@pytest.mark.parametrize("name", ablate.ablations(SMALL))
def test_every_row_is_a_run_of_its_own_that_can_be_asked_for(config, name):
    ablation = ablate.ablations(config)[name]
    arms = ablate.arms(ablation, config, 2)
    assert len({arm.name for arm in arms}) == len(arms) == 2 * len(ablation.rows) * len(ablation.optimizers)
    for arm in arms:
        run = parse("--config", config.config, *arm.variant.flags)
        check(dataclasses.replace(run, name=arm.name))  # a folder's name
    assert ablation.published in ablation.rows
    assert set(ablation.paper) <= set(ablation.rows)
    assert {len(losses) for losses in ablation.paper.values()} <= {len(ablation.optimizers)}


def test_the_published_rows_share_one_run():
    found = ablate.ablations(WIDE)
    for name, ablation in found.items():
        published = {str(ablation.variant(ablation.published, who)) for who in ablation.optimizers}
        rank = {"sketch": "normpre_l:matrix.rank=32"}.get(name)
        assert published == ({rank} if rank else set(ablation.optimizers)), name


def test_ranks_have_the_share_that_the_issue_of_width_asks_for():
    assert list(ablate.ablations(WIDE)["rank"].rows) == ["8", "16", "32", "64"]
    assert list(ablate.ablations(SMALL)["rank"].rows) == ["2", "4", "8", "16"]


def test_help_names_them_all(capsys):
    with pytest.raises(SystemExit) as left:
        ablate.main(["--help"])
    assert left.value.code == 0
    said = capsys.readouterr().out
    assert "ablate NAME" in said
    assert all(name in said for name in ablate.ablations(SMALL))


def test_some_rows_and_the_published_one():
    tangent = ablate.some_rows(ablate.ablations(SMALL)["tangent"], "strict")
    assert list(tangent.rows) == list(tangent.paper) == ["strict", "relaxed"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "ablate what? tangent, orientation, source, rank"),
        (["tangents"], "not 'tangents'"),
        (["tangent", "--seeds", "0"], "must be at least 1"),
        (["tangent", "--rows", "strict;weak"], "--rows must be of no tangent; strict; relaxed, got 'weak'"),
        (["tangent", "--matrix.tangent", "none"], "--matrix.tangent is what `ablate tangent` sets itself"),
        (["rank", "--matrix.rank=8"], "--matrix.rank is what `ablate rank` sets itself"),
        (["all", "--optimizer", "muon"], "--optimizer is what `ablate tangent` sets itself"),
        (["tangent", "--seed", "3"], "--seed is what `ablate tangent` sets itself"),
        (["tangent", "--mesh", "data=2", "--process", "0"], "ablate runs in one process"),
        (["tangent", "--resume"], "goes on where it was by itself"),
        (["tangent", "--config", "huge"], "--config must be one of"),
    ],
)
def test_a_bad_ablation_is_one_line_before_anything_is_written(arguments, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command.run(ablate.main, arguments) == 1
    said = capsys.readouterr()
    assert line in said.err
    assert said.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def matrices(shape, seed: int, *, equal_rows: bool = False) -> np.ndarray:
    x = np.random.default_rng(seed).normal(size=shape) * np.geomspace(1, 30, shape[0])[:, None]
    return x / np.linalg.norm(x, axis=1, keepdims=True) if equal_rows else x


def from_x(x: np.ndarray, name: str, rank: int) -> np.ndarray:
    """The two preconditioners in float64, by full decompositions."""
    psi = x / np.linalg.norm(x, axis=1, keepdims=True)
    if name == "normpre_l":
        values, vectors = np.linalg.eigh(x @ x.T * len(x) / np.trace(x @ x.T))
        p = np.eye(len(x))
        for value, u in list(zip(values, vectors.T, strict=True))[::-1][:rank]:
            p += (value**-0.5 - 1) * np.outer(u, u) if value > 1 else 0
        return p @ psi
    y, p = x / np.linalg.norm(x), np.eye(len(x))
    for _ in range(5):
        gram = y @ y.T
        factor = 3.4445 * np.eye(len(x)) - 4.7750 * gram + 2.0315 * gram @ gram
        y, p = factor @ y, factor @ p
    inside = x @ np.linalg.pinv(x)  # onto the range of x: all of it unless x is tall
    return p @ inside @ psi


@pytest.mark.parametrize("name", FROM_X)
@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8)])
def test_the_preconditioner_from_x(name, shape):
    x = matrices(shape, seed=1)
    kernel = jnp.asarray(x.T, jnp.float32)
    settings = {"rank": 3} if name == "normpre_l" else {}
    tx = FROM_X[name](1.0, tangent="none", weight_decay=0.0, **settings)
    params = {"dense": {"kernel": jnp.zeros_like(kernel)}}
    update, _ = tx.update({"dense": {"kernel": kernel}}, tx.init(params), params)
    expected = from_x(x, name, 3)
    expected *= -0.2 / np.sqrt(np.mean(expected**2))
    # float32: an SVD, and five steps that enlarge small singular values up to 3.4^5 = 485 fold.
    np.testing.assert_allclose(update["dense"]["kernel"].T, expected, atol=2e-4)


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("normpre_g", functools.partial(normpre_g, 1.0)),
        ("normpre_l", functools.partial(normpre_l, 1.0, rank=32, method="exact")),
    ],
)
def test_rows_of_equal_length_make_no_difference(name, same):
    x = matrices((6, 10), seed=2, equal_rows=True)
    grads = {"dense": {"kernel": jnp.asarray(x.T, jnp.float32)}}
    params = jax.tree.map(jnp.zeros_like, grads)
    settings = {"tangent": "none", "weight_decay": 0.0}
    both = FROM_X[name](1.0, **settings), same(**settings)
    updates = [tx.update(grads, tx.init(params), params)[0]["dense"]["kernel"] for tx in both]
    np.testing.assert_allclose(*updates, atol=2e-4)  # as above


def test_the_preconditioner_from_x_survives_zeros_and_any_scale():
    x = matrices((6, 10), seed=3)
    params = {"dense": {"kernel": jnp.zeros((10, 6))}}
    for factory in FROM_X.values():
        tx = factory(1.0)
        state = tx.init(params)

        def update(scale, tx=tx, state=state):
            grads = {"dense": {"kernel": jnp.asarray(x.T * scale, jnp.float32)}}
            return tx.update(grads, state, params)[0]["dense"]["kernel"]

        assert not update(0.0).any()
        for scale in (1e-15, 1e15):
            np.testing.assert_allclose(update(scale), update(1.0), atol=2e-4)


def test_a_folder_belongs_to_one_study_at_a_time(tmp_path):
    first, second = (make_study("ablate", "tiny", [], tmp_path, "", 1) for _ in range(2))
    with first.begun(), pytest.raises(RunError, match="another process is writing"), second.begun():
        pass
    with second.begun():
        assert json.loads((tmp_path / "ablate-tiny" / "study.json").read_text()) == {"flags": ["--config", "tiny"]}


def test_an_arm_that_another_process_is_at_has_not_failed(tmp_path):
    study, arm = make_study("ablate", "tiny", [], tmp_path, "", 1), Arm(Variant("muon"), 1e-3, 0)
    (study.folder / arm.name).mkdir(parents=True)
    with lock(study.folder / arm.name), pytest.raises(RunError, match=f"another process is writing .*{arm.name}"):
        study.run([arm], Console(quiet=True))
    assert not study.results


@pytest.mark.parametrize("name", ["normpre_g", "normpre_l"])
def test_the_source_reaches_the_optimizer(name):
    grads = {"dense": {"kernel": jnp.asarray(matrices((6, 10), seed=5).T, jnp.float32)}}
    params = jax.tree.map(jnp.ones_like, grads)
    updates = {}
    for source, suffix in {"psi": "", "x": "_from_x"}.items():
        config = configs.parse(["--config", "tiny", "--optimizer", name + suffix, "--clip", "none"])
        tx = optimizers.make_optimizer(config, lambda t: jnp.float32(0.1))
        updates[source] = tx.update(grads, tx.init(params), params)[0]["dense"]["kernel"]
    direct = FROM_X[name](0.1)
    expected = direct.update(grads, direct.init(params), params)[0]["dense"]["kernel"]
    np.testing.assert_allclose(updates["x"], expected, atol=1e-6)
    assert np.abs(updates["x"] - updates["psi"]).max() > 1e-3


@pytest.mark.parametrize("side", ["rows", "columns"])
def test_the_tangent_acts_on_the_steps_of_one_side_only(side):
    """Rows first: there the step of rows is the published one and that of columns has no tangent, or the reverse."""
    grads = {"dense": {"kernel": jnp.asarray(matrices((6, 10), seed=5).T, jnp.float32)}}
    params = jax.tree.map(lambda g: jnp.full_like(g, 0.5), grads)

    def first_two(*flags: str) -> list[jax.Array]:
        config = configs.parse(["--config", "tiny", "--clip", "none", *flags])
        tx = optimizers.make_optimizer(config, lambda t: jnp.float32(0.1))
        one, state = tx.update(grads, tx.init(params), params)
        two, _ = tx.update(grads, state, params)
        return [updates["dense"]["kernel"] for updates in (one, two)]

    chosen = first_two("--optimizer", f"normpre_g_tangent_on_{side}")
    published, free = first_two(), first_two("--matrix.tangent", "none")
    expected = (published, free) if side == "rows" else (free, published)
    np.testing.assert_allclose(chosen[0], expected[0][0], atol=1e-6)
    np.testing.assert_allclose(chosen[1], expected[1][1], atol=1e-6)
    assert all(np.abs(a - b).max() > 1e-3 for a, b in zip(published, free, strict=True))


@pytest.mark.parametrize(
    "variant", [*FROM_X.values(), functools.partial(ablations.normpre_g_tangent_on, tangent_on="rows")]
)
def test_variants_obey_what_every_optimizer_does(variant):
    """Decay that spares gains, a rate of AdamW's part, and no orientation but their own."""
    params = {"dense": {"kernel": jnp.ones((10, 6)), "bias": jnp.ones(6)}}
    tx = variant(0.1, weight_decay_mask=decay_matrices_only, adam_learning_rate=0.0)
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    assert updates["dense"]["kernel"].any()
    assert not updates["dense"]["bias"].any()
    with pytest.raises(ValueError, match="orientation='rows' is not one of"):
        variant(0.1, orientation="rows")


def test_the_reference_is_the_papers():
    """With X = Psi the float64 rules above are those of the reference transcription."""
    psi = matrices((6, 10), seed=4, equal_rows=True)
    start = psi / np.linalg.norm(psi)  # what Newton-Schulz itself is applied to
    np.testing.assert_allclose(from_x(start, "normpre_g", 3) / np.sqrt(6), reference.newton_schulz(psi), atol=1e-9)
    np.testing.assert_allclose(from_x(psi, "normpre_l", 3), reference.precondition_exact(psi, 3), atol=1e-9)


@pytest.fixture
def content() -> dict:
    def arm(row: str, optimizer: str, seed: int, loss: float | None) -> dict:
        found = {"row": row, "optimizer": optimizer, "seed": seed, "status": "diverged", "diverged": "nan"}
        if loss is None:
            return found
        return {**found, "status": "finished", "best_validation_loss": loss, "row_norm": [[0, 0.3, 0.0], [9, 0.5, 0.1]]}

    losses = {
        ("none", "normpre_g"): (3.0, 3.2),
        ("strict", "normpre_g"): (3.9, 4.1),
        ("relaxed", "normpre_g"): (3.4, 3.6),
        ("none", "normpre_l"): (3.5, None),
        ("strict", "normpre_l"): (None, None),
        ("relaxed", "normpre_l"): (3.6, 3.6),
    }
    return {
        **{"name": "tangent", "title": "Momentum", "rows": ["none", "strict", "relaxed"], "published": "relaxed"},
        **{"optimizers": ["normpre_g", "normpre_l"], "axis": "", "cost": None},
        "paper": {"none": (3.09, 3.11), "strict": (3.18, 3.12), "relaxed": (3.07, 3.08)},
        **{"settings": "nano", "command": "python -m examples.research.ablate", "date": "2026-01-01"},
        **{"machine": {"kind": "cpu", "cores": 1}, "versions": {"python": "3.11", "jax": "0.10"}},
        "config": {
            **{"steps": 10, "batch_size": 2, "learning_rate": 0.1, "model.context": 4, "model.family": "gpt2"},
            **{"model.layers": 1, "model.width": 8},
        },
        **{"parameters": 1000, "text": {"source": "text"}},
        "arms": [arm(*key, seed, loss) for key, found in losses.items() for seed, loss in enumerate(found)],
    }


def test_the_table_stands_beside_the_papers(content):
    lines = ablation_report.table(content).splitlines()
    assert lines[0].count("|") == 10
    assert lines[2].startswith("| none | 3.1000 ± 0.1414 | -0.4000 | 3.0900 | +0.0200 | 3.5000 (1 lost) | -0.1000 |")
    assert lines[3] == "| strict | 4.0000 ± 0.1414 | +0.5000 | 3.1800 | +0.1100 |  (2 lost) |  | 3.1200 | +0.0400 |"
    assert lines[4].startswith("| **relaxed** | 3.5000 ± 0.1414 |  | 3.0700 |  |")


def test_the_verdict_is_pair_by_pair(content):
    g, l = ablation_report.verdicts(content)
    assert g.startswith("NormPre-G: 2 of 3 pairs in the paper's order.")
    assert "none - strict -0.9000 (clear), the paper -0.0900: as in the paper" in g
    assert "none - relaxed -0.4000 (clear), the paper +0.0200: other than in the paper" in g
    assert l == (
        "NormPre-L: 0 of 1 pairs in the paper's order. "
        "none - relaxed -0.1000 (one seed each), the paper +0.0300: other than in the paper."
    )
    content["arms"][0]["best_validation_loss"] = 3.0 + 0.78
    assert "none - relaxed -0.0100 (within the noise)" in ablation_report.verdicts(content)[0]


def test_a_page_can_be_drawn_again(content, tmp_path, capsys):
    ablation_report.write(tmp_path, content)
    assert {path.name for path in tmp_path.iterdir()} == {f"tangent.{suffix}" for suffix in ("json", "md", "png")}
    text = (tmp_path / "tangent.md").read_text()
    assert "learning rate 0.1, 2 seed(s)" in text
    (tmp_path / "tangent.md").unlink()
    assert ablation_report.main([str(tmp_path / "tangent.json")]) == 0
    assert (tmp_path / "tangent.md").read_text() == text
    assert ablation_report.main([str(tmp_path / "tangent.png")]) == 1
    assert "no ablation's data" in capsys.readouterr().err


def test_rows_that_are_numbers_with_their_cost(content, tmp_path):
    content |= {"rows": ["2", "8"], "published": "8", "axis": "rank", "optimizers": ["normpre_l"], "name": "rank"}
    content |= {"cost": {"2/normpre_l": 1.5, "8/normpre_l": 2.5}, "paper": {"2": (3.1,), "8": (3.0,)}}
    content |= {"paper_rows": {"2": "16", "8": "64"}}
    for arm, row in zip(content["arms"], ["2", "2", "8", "8"], strict=False):
        arm |= {"row": row, "optimizer": "normpre_l"}
    shown = ablation_report.write(tmp_path, content)
    assert "| rank | NormPre-L | - published | paper's rank | paper | - published | optimizer, ms |" in shown
    assert "| **8** | 4.0000 ± 0.1414 |  | 64 | 3.0000 |  | 2.50 |" in shown
    here, paper, _ = ablation_report.draw(content).axes
    assert [label.get_text() for axes in (here, paper) for label in axes.get_xticklabels()] == ["2", "8", "16", "64"]


def test_a_single_seed_has_no_error(content):
    content["arms"] = [arm for arm in content["arms"] if arm["seed"] == 0]
    assert math.isnan(ablation_report.cells(content, "normpre_g")["none"].error)
    assert "(one seed each)" in ablation_report.verdicts(content)[0]


@pytest.mark.thorough  # as comparisons are, of which CI runs one
@pytest.mark.timeout(900)
def test_an_ablation_from_end_to_end(flags, tmp_path):
    """Two rows of a table; what has run once is not run again."""
    command = [sys.executable, "-m", "examples.research.ablate", "rank", "--rows", "1", *flags, "--jobs", "2"]
    command += ["--seeds", "1", "--steps", "20", "--warmup-steps", "2", "--efficiency-steps", "3"]
    said = []
    for _ in range(2):
        done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert [text.count("was there: ") for text in said] == [0, 2]
    content = json.loads((tmp_path / "runs" / "ablate-tiny" / "report" / "rank.json").read_text())
    assert [arm["row"] for arm in content["arms"] if arm["status"] == "finished"] == ["1", "4"]
    assert content["cost"].keys() == {"1/normpre_l", "4/normpre_l"}
    other = subprocess.run(
        [*command, "--batch-size", "4"], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert other.returncode == 1
    assert "holds runs with other settings" in other.stderr
