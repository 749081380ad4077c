# SPDX-License-Identifier: Apache-2.0
"""The paper's figures from runs: numbers against NumPy, files, and one line for what cannot be drawn."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import optax
import pytest

from examples.analysis import __main__ as analysis
from examples.analysis import figure_data, figure_drawing, figures
from examples.pretrain import main, optimizers
from examples.pretrain.config import Config, RunError
from examples.pretrain.data import load, training_batches
from examples.pretrain.evaluate import token_losses
from examples.pretrain.logs import read_lines
from normpre_optax import diagnostics
from tests import reference

STEPS = ["--steps", "12", "--warmup-steps", "2", "--checkpoint-every", "4", "--evaluate-every", "6"]
SMALLEST = ["--model.layers", "1", "--model.width", "16", "--model.mlp-width", "32", "--batch-size", "4"]
RANK, ORIENTATIONS = 4, ("rows", "columns")
MATRICES = 7  # query, key, value, out, gate, up, down


@pytest.fixture(scope="module")
def runs(tmp_path_factory, data_config, dataset) -> dict[str, Path]:
    """Two runs with all their checkpoints, by optimizer."""
    folder = tmp_path_factory.mktemp("figures")
    common = [
        *("--config", "tiny", "--runs-folder", str(folder), "--data.folder", str(data_config.folder)),
        *("--data.source", str(data_config.source), "--data.validation-percent", "20", *STEPS, *SMALLEST),
        *("--keep-checkpoints", "9", "--matrix.rank", str(RANK), "--sample-tokens", "0", "--weight-decay", "0.5"),
    ]
    for name in ("normpre_l", "adamw"):
        assert main.main([*common, "--optimizer", name, "--name", name]) == 0
    return {name: folder / name for name in ("normpre_l", "adamw")}


@pytest.fixture(scope="module")
def drawn(runs, tmp_path_factory) -> tuple[Path, dict]:
    """The folder of the figures of both runs, and what ``figures.json`` says."""
    out = tmp_path_factory.mktemp("drawn") / "figures"
    flags = [part for folder in runs.values() for part in ("--run", str(folder))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", open(out.parent / "said.txt", "w"))  # noqa: SIM115
        assert (
            analysis.main(["figures", *flags, "--out", str(out), "--rank", str(RANK), "2", "--steps", "8", "12"]) == 0
        )
    return out, json.loads((out / "figures.json").read_text())


def float64(tree) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf, np.float64) for name, leaf in optimizers.by_name(tree).items()}


@pytest.fixture(scope="module")
def by_hand(runs) -> dict:
    """What a run of NormPre-L does next at its second checkpoint, with nothing of ``figure_data`` but the reading."""
    run = figure_data.open_run(runs["normpre_l"])
    config = run.config
    state, position = run.checkpoints.restore(8, run.trainer.state)
    batches = training_batches(load(Path(run.record["data"]["folder"])), context=32, batch_size=4, seed=config.seed)
    tokens = [next(batches) for _ in range(9)][-1]  # eight batches are behind the checkpoint
    batches.set_state(position)
    np.testing.assert_array_equal(next(batches), tokens)
    run.checkpoints.close()

    gradients = jax.grad(lambda p: token_losses(run.trainer.graphdef, p, jnp.asarray(tokens)).mean())(state.params)
    # Of the run's own optimizer, decay included: W <- W - lr (T + wd W).
    own = optimizers.make_optimizer(config, lambda t: 1.0)
    updates, _ = own.update(gradients, state.opt_state, state.params)
    is_trace = lambda x: isinstance(x, optax.TraceState)  # noqa: E731
    (trace,) = [x.trace for x in jax.tree.leaves(state.opt_state, is_leaf=is_trace) if is_trace(x)]

    weights, gradients, updates, trace = map(float64, (state.params, gradients, updates, trace))
    clipping = min(1.0, 1 / np.sqrt(sum(np.sum(g**2) for g in gradients.values())))
    names = sorted(trace)
    assert len(names) == MATRICES
    return {  # kernels are (in, out)
        name: {
            "momentum": (0.95 * trace[name] + clipping * gradients[name]).T,
            "weight": weights[name].T,
            "gradient": gradients[name].T,
            "direction": -(updates[name] + 0.5 * weights[name]).T,
        }
        for name in names
    }


def spectra(matrix: dict, orientation: str) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues before (scaled to trace d) and after normalisation, largest first, all d of them."""
    m, w = (matrix[key] if orientation == "rows" else matrix[key].T for key in ("momentum", "weight"))
    x = reference.tangent_rows(m, w)
    psi = reference.unit_rows(x)
    before = np.linalg.eigvalsh(len(x) / np.trace(x @ x.T) * x @ x.T)[::-1]
    return before, np.linalg.eigvalsh(psi @ psi.T)[::-1]


def checkpoint(content: dict, optimizer: str, step: int) -> dict:
    (run,) = [run for run in content["runs"] if run["optimizer"] == optimizer]
    (found,) = [c for c in run["checkpoints"] if c["step"] == step]
    return found


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_spectra_are_those_of_the_next_update(drawn, by_hand, orientation):
    found = checkpoint(drawn[1], "normpre_l", 8)[orientation]
    for place, which in enumerate(("before", "after")):
        full = [spectra(matrix, orientation)[place] for matrix in by_hand.values()]
        for matrix, values in zip(by_hand.values(), full, strict=True):
            rows, columns = matrix["weight"].shape
            np.testing.assert_allclose(values.sum(), rows if orientation == "rows" else columns)  # the trace is d
        table = np.array([values[:16] for values in full])  # the short side; there are no other nonzero ones
        assert found[which]["count"] == [MATRICES] * 16
        # Five digits are kept; float32 leaves 1e-6 of the largest eigenvalue, about 30.
        close = {"rtol": 1e-3, "atol": 1e-4}
        np.testing.assert_allclose(found[which]["mean"], table.mean(0), **close)
        np.testing.assert_allclose(found[which]["low"], np.percentile(table, 25, axis=0), **close)
        np.testing.assert_allclose(found[which]["high"], np.percentile(table, 75, axis=0), **close)


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("rank", [RANK, 2])
def test_energies_are_shares_of_what_msign_would_change(drawn, by_hand, orientation, rank):
    found = checkpoint(drawn[1], "normpre_l", 8)[orientation]["energies"][str(rank)]
    shares = {"top": [], "remain": [], "sub": []}
    for name, matrix in by_hand.items():
        values = np.sqrt(np.maximum(spectra(matrix, orientation)[1][:16], 0))
        energy = (values - 1) ** 2
        above = values > 1
        parts = energy[above][:rank].sum(), energy[above][rank:].sum(), energy[~above].sum()
        for key, part in zip(shares, parts, strict=True):
            shares[key].append(part / energy.sum())
        np.testing.assert_allclose(found["top_of"][name], parts[0] / energy.sum(), rtol=1e-3)
    for key, values in shares.items():
        np.testing.assert_allclose(found[key], np.mean(values), rtol=1e-3, err_msg=key)
    assert found["top"] + found["remain"] + found["sub"] == pytest.approx(1, abs=1e-4)
    assert found["remain"] > 0.01 or rank > 2


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sum(a * b) / np.sqrt(np.sum(a**2) * np.sum(b**2)))


def test_alignment_is_the_cosine_of_gradient_and_direction(drawn, by_hand):
    expected = np.mean([cosine(matrix["gradient"], matrix["direction"]) for matrix in by_hand.values()])
    assert 0 < expected < 1
    # The decay that was taken out is half of W; what is left is rounded to 1e-6 of it.
    assert checkpoint(drawn[1], "normpre_l", 8)["alignment"] == pytest.approx(expected, rel=1e-3)


def test_alignment_of_adamw_by_its_formula(drawn, runs):
    run = figure_data.open_run(runs["adamw"])
    assert figure_data.sources(run) == ["mu"]
    (step, state, tokens), *_ = figure_data.restored(run)
    gradients = jax.grad(lambda p: token_losses(run.trainer.graphdef, p, jnp.asarray(tokens)).mean())(state.params)
    run.checkpoints.close()
    is_adam = lambda x: isinstance(x, optax.ScaleByAdamState)  # noqa: E731
    (adam,) = [x for x in jax.tree.leaves(state.opt_state, is_leaf=is_adam) if is_adam(x)]
    assert int(adam.count) == step == 4
    gradients, first, second = map(float64, (gradients, adam.mu, adam.nu))
    clipping = min(1.0, 1 / np.sqrt(sum(np.sum(g**2) for g in gradients.values())))
    cosines = []
    for name in optimizers.hidden_matrices(state.params):
        g = clipping * gradients[name]
        mean, square = (0.9 * first[name] + 0.1 * g) / (1 - 0.9**5), (0.95 * second[name] + 0.05 * g**2) / (1 - 0.95**5)
        cosines.append(cosine(g, mean / (np.sqrt(square) + 1e-8)))
    assert len(cosines) == MATRICES
    assert checkpoint(drawn[1], "adamw", 4)["alignment"] == pytest.approx(np.mean(cosines), rel=1e-3)


def test_curves_are_those_of_the_log(drawn, runs):
    for run in drawn[1]["runs"]:
        lines = read_lines(runs[run["name"]] / "log.jsonl")
        norms = [line["grad_norm"] for line in lines if "grad_norm" in line]
        assert run["gradient_norm"]["steps"] == run["losses"]["train_steps"] == list(range(1, 13))
        np.testing.assert_allclose(run["gradient_norm"]["raw"], norms, rtol=1e-4)
        averages = [np.mean(norms[:k]) for k in range(1, 13)]  # fewer steps than the window holds
        np.testing.assert_allclose(run["gradient_norm"]["smoothed"], averages, rtol=1e-4)
        assert run["losses"]["validation_steps"] == [0, 6, 12]
        assert [c["step"] for c in run["checkpoints"]] == [4, 8, 12]
        assert run["shown"] == [8, 12]


def test_files(drawn, tmp_path):
    out, content = drawn
    names = [f"{kind}_{o}" for kind in ("spectra", "energy") for o in ORIENTATIONS] + [*figure_drawing.LINES]
    expected = {f"{name}.{suffix}" for name in names for suffix in ("png", "svg")} | {"README.md", "figures.json"}
    assert {path.name for path in out.iterdir()} == expected
    assert figure_drawing.draw(tmp_path, content["runs"]) == names
    for name in names:
        again = (tmp_path / f"{name}.svg").read_bytes()
        assert again == (out / f"{name}.svg").read_bytes()
        assert b"<dc:date>" not in again
        assert matplotlib.image.imread(out / f"{name}.png").std() > 0.01
    report = (out / "README.md").read_text()
    top = checkpoint(content, "normpre_l", 12)["rows"]["energies"][str(RANK)]["top"]
    assert f"| normpre_l | {RANK} | 12 | {100 * top:.1f} |" in report
    assert "| 32 | 100 to 10,000 | 62-67 | | | 55-60 | | |" in report
    assert "adamw: AdamW's average of gradients stands for the momentum." in report
    assert content["command"].startswith("python -m examples.analysis figures --run ")
    assert f"({content['machine']['device']}, jax {jax.__version__})" in report


def test_the_bars_are_the_energies(drawn):
    run = drawn[1]["runs"][0]
    figure = figure_drawing.panelled([run], lambda axes, r: figure_drawing.draw_energies(axes, r, "columns"))
    (axes,) = figure.axes
    tops = [
        100 * checkpoint(drawn[1], "normpre_l", step)["columns"]["energies"][str(RANK)]["top"] for step in run["shown"]
    ]
    totals = np.max([[bar.get_y() + bar.get_height() for bar in bars] for bars in axes.containers], axis=0)
    local = [bars for bars in axes.containers if bars[0].get_x() + bars[0].get_width() / 2 > 0]
    np.testing.assert_allclose(totals, 100, atol=0.02)
    assert len(local) == 1
    np.testing.assert_allclose([bar.get_height() for bar in local[0]], tops)


def test_checkpoints_nearest_to_the_papers_are_shown(runs):
    run = figure_data.open_run(runs["normpre_l"])
    assert run.steps == [4, 8, 12]
    assert run.shown(()) == (4, 12)  # of 0.12, 0.6, 1.2, 2.4, 6 and 12; 6 is as near to 4 as to 8
    assert run.shown((8, 4)) == (4, 8)
    assert run.ranks(()) == (RANK,)
    assert run.ranks((3, 1, 3)) == (3, 1)
    run.checkpoints.close()


def test_runs_of_one_optimizer_are_told_apart(drawn):
    first, second = drawn[1]["runs"]
    assert [label for label, _, _ in figure_drawing.styles([first, second])] == ["NormPre-L", "AdamW"]
    one, other = figure_drawing.styles([first, {**first, "name": "other"}])
    assert (one[0], other[0]) == ("NormPre-L, normpre_l", "NormPre-L, other")
    assert one[1] == other[1]
    assert one[2] != other[2]


def test_spectra_of_unequal_lengths():
    found = figure_data.by_rank([np.array([4.0, 1.0, 1e-20], np.float32), np.array([2.0], np.float32)])
    assert found == {"mean": [3.0, 1.0], "low": [2.5, 1.0], "high": [3.5, 1.0], "count": [2, 1]}


def test_what_is_no_number_is_none():
    assert figure_data.plain(np.array([1.0, np.nan, np.inf])) == [1.0, None, None]
    assert figures.percent(None) == figures.span([None]) == "no number"
    assert figures.span([0.25, None, 0.5]) == "25.0-50.0"


@pytest.mark.parametrize("name", sorted(optimizers.OPTIMIZERS))
def test_the_momentum_of_every_optimizer_is_found(name):
    params = {"blocks": {"0": {"up": {"kernel": jnp.ones((4, 6))}}}, "tokens": {"embedding": jnp.ones((8, 4))}}
    optimizer = optimizers.make_optimizer(dataclasses.replace(Config(), optimizer=name), lambda t: 1.0)
    kept = figure_data.moments(jax.eval_shape(optimizer.init, params))
    expected = {"adamw": "mu", "swan": None}.get(name, "trace")
    field, moment = kept.get("blocks/0/up/kernel", (None, None))
    assert field == expected
    if expected:
        assert moment.shape == (4, 6)
    assert kept["tokens/embedding"][0] == "mu"


def test_an_optimizer_without_momentum_is_looked_at_by_its_gradient():
    dims = optimizers.hidden_matrices({"up": {"kernel": jnp.ones((4, 6))}})["up/kernel"]
    params, gradients = {"up": {"kernel": jnp.ones((4, 6))}}, {"up": {"kernel": jnp.eye(4, 6)}}
    update = figure_data.Update(gradients, gradients, optax.EmptyState())
    (matrix,) = figure_data.matrices(figure_data.TrainState(params, optax.EmptyState()), update).values()
    assert matrix.dims == dims
    assert matrix.momentum is gradients["up"]["kernel"]


def test_the_librarys_orientations_are_these():
    assert diagnostics.ORIENTATIONS == ORIENTATIONS


def refused(arguments: list[str], capsys) -> str:
    """The one line that a command ends with."""
    assert analysis.main(arguments) == 1
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    return said.err


def test_bad_input_is_one_line(runs, tmp_path, capsys):
    good = ["figures", "--run", str(runs["normpre_l"]), "--out"]
    out = str(tmp_path / "out")
    assert "--run must name the folder of a run" in refused(["figures"], capsys)
    assert "--run" in (line := refused(["figures", "--run", str(tmp_path), "--out", out], capsys))
    assert "is not the folder of a run" in line
    assert "--rank must be at least 1, got 0" in refused([*good, out, "--rank", "0"], capsys)
    assert "--steps 5: " in (line := refused([*good, out, "--steps", "5"], capsys))
    assert "there are 4, 8, 12" in line
    assert "is not a folder" in refused([*good, str(runs["normpre_l"] / "run.json")], capsys)
    assert not Path(out).exists()


def edited(run: Path, folder: Path, **changes) -> Path:
    """A copy of a run whose configuration says something else."""
    copy = folder / run.name
    shutil.copytree(run, copy)
    record = json.loads((copy / "run.json").read_text())
    record["config"] |= changes
    (copy / "run.json").write_text(json.dumps(record))
    return copy


def test_a_run_without_checkpoints_or_of_another_version_is_one_line(runs, tmp_path, capsys):
    none = edited(runs["normpre_l"], tmp_path / "none")
    shutil.rmtree(none / "checkpoints")
    line = refused(["figures", "--run", str(none), "--out", str(tmp_path / "out")], capsys)
    assert line == f"error: --run {none}: it has no checkpoints\n"
    other = edited(runs["normpre_l"], tmp_path / "other", **{"model.width": 32})
    line = refused(["figures", "--run", str(other), "--out", str(tmp_path / "out")], capsys)
    assert line.startswith(f"error: --run {other}: cannot restore ")
    assert "it is of another model or optimizer" in line
    unknown = edited(runs["normpre_l"], tmp_path / "unknown", optimizer="sophia")
    with pytest.raises(RunError, match=r"--run .*another version, with an optimizer 'sophia'"):
        figure_data.open_run(unknown)


def test_the_commands(capsys, runs, tmp_path):
    assert analysis.main([]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in analysis.COMMANDS)
    assert "there is no command 'figure': it must be one of figures, " in refused(["figure"], capsys)
    image = tmp_path / "losses.png"
    assert analysis.main(["plot_loss", str(runs["adamw"]), "--output", str(image)]) == 0
    assert image.exists()
    assert analysis.main(["comparison_report", str(tmp_path)]) == 1
    assert "no comparison.json" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        analysis.main(["theorem", "--help"])
    assert ended.value.code == 0
    assert "--horizons" in capsys.readouterr().out
