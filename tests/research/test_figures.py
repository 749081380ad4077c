# SPDX-License-Identifier: Apache-2.0
"""The paper's figures from runs: numbers against NumPy, files, and one line for what
cannot be drawn.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import optax
import pytest
from rich.console import Console

from examples.pretrain import main, optimizers, train
from examples.pretrain import run as run_module
from examples.pretrain.checkpoint import Checkpoints
from examples.pretrain.config import Config, ModelConfig
from examples.pretrain.data import load, training_batches
from examples.pretrain.evaluate import token_losses
from examples.pretrain.logs import read_lines
from examples.research import command, diagnostics, figure_data, figure_drawing, figures
from normpre_optax import optimizers as all_optimizers
from normpre_optax import with_adamw
from tests import reference
from tests.reference_family import PROPERTIES

RANK, ORIENTATIONS = 4, ("rows", "columns")
MATRICES = 7  # query, key, value, out, gate, up, down
CONFIG = Config(
    config="tiny",
    steps=12,
    warmup_steps=2,
    batch_size=4,
    weight_decay=0.5,
    keep_checkpoints=9,
    model=ModelConfig(layers=1, width=16, heads=2, mlp_width=32, context=32),
)


def shaken(tree, seed: int):
    """Random numbers in place of zeros, as if the state came from training; squares
    where squares are.
    """
    random = np.random.default_rng(seed)

    def shake(path, leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(np.full_like(leaf, seed))  # steps taken
        noise = random.standard_normal(leaf.shape) @ np.diag(
            1 / np.arange(1.0, leaf.shape[-1] + 1)
        )
        noise = noise**2 if ".nu" in jax.tree_util.keystr(path) else noise
        return jnp.asarray(np.asarray(leaf) + 0.1 * noise, leaf.dtype)

    return jax.tree_util.tree_map_with_path(shake, tree)


def make_run(folder: Path, dataset, optimizer: str) -> Path:
    """A run's folder with checkpoints of steps 4, 8 and 12, without the time that
    training takes.
    """
    config = dataclasses.replace(
        CONFIG, optimizer=optimizer, name=optimizer, runs_folder=folder
    )
    config.run_folder.mkdir()
    trainer = train.Trainer(config, dataset)
    run_module.introduce(config, None, dataset, trainer, Console(quiet=True))
    checkpoints = Checkpoints(
        config.run_folder / "checkpoints", config.keep_checkpoints
    )
    for step in (4, 8, 12):
        for _ in range(4):
            next(trainer.batches)
        checkpoints.save(
            step, trainer.batches.get_state(), **shaken(trainer.state, step)._asdict()
        )
    checkpoints.close()
    lines = [
        {"step": step, "loss": 6 - step / 10, "grad_norm": 1 / step}
        for step in range(1, 13)
    ]
    lines += [{"step": step, "validation_loss": 6 - step / 10} for step in (0, 6, 12)]
    (config.run_folder / "log.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    return config.run_folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory, dataset) -> dict[str, Path]:
    """Two runs with all their checkpoints, by optimizer."""
    folder = tmp_path_factory.mktemp("figures")
    return {name: make_run(folder, dataset, name) for name in ("rmnp", "adamw")}


@pytest.fixture(scope="module")
def drawn(runs, tmp_path_factory) -> tuple[Path, dict]:
    """The folder of the figures of both runs, and what ``figures.json`` says."""
    out = tmp_path_factory.mktemp("drawn") / "figures"
    flags = [
        "--run",
        *map(str, runs.values()),
        "--out",
        str(out),
        "--rank",
        str(RANK),
        "2",
        "--steps",
        "8",
        "12",
    ]
    assert command.run(figures.main, flags) == 0
    return out, json.loads((out / "figures.json").read_text())


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sum(a * b) / np.sqrt(np.sum(a**2) * np.sum(b**2)))


def checkpoint(content: dict, optimizer: str, step: int) -> dict:
    (found,) = (
        c
        for one in content["runs"]
        if one["optimizer"] == optimizer
        for c in one["checkpoints"]
        if c["step"] == step
    )
    return found


def float64(tree) -> dict[str, np.ndarray]:
    return {
        name: np.asarray(leaf, np.float64)
        for name, leaf in optimizers.by_name(tree).items()
    }


def state_and_gradients(folder: Path, step: int, kind) -> tuple:
    """A checkpoint's weights and node of that kind; clipped gradients of the batch that
    follows, from the first on.
    """
    opened = figure_data.open_run(folder)
    found, _ = opened.checkpoints.restore(step, **opened.trainer.state._asdict())
    state = train.TrainState(**found)
    opened.checkpoints.close()
    batches = training_batches(
        load(Path(opened.record["data"]["folder"])), context=32, batch_size=4, seed=0
    )
    tokens = jnp.asarray([next(batches) for _ in range(step + 1)][-1])
    gradients = jax.jit(
        jax.grad(lambda p: token_losses(opened.trainer.graphdef, p, tokens).mean())
    )(state.params)
    gradients = float64(gradients)
    norm = np.sqrt(sum(np.sum(g**2) for g in gradients.values()))
    opt_state = state.opt_state[1].inner_states["matrix"]
    (node,) = (
        x
        for x in jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kind))
        if isinstance(x, kind)
    )
    return (
        state.params,
        node,
        {name: g * min(1.0, 1 / norm) for name, g in gradients.items()},
    )


@pytest.fixture(scope="module")
def by_hand(runs) -> dict[str, dict[str, np.ndarray]]:
    """What the run of RMNP does after its second checkpoint, by parameter, as (out,
    in).
    """
    params, node, gradients = state_and_gradients(runs["rmnp"], 8, optax.TraceState)
    trace, weights, found = float64(node.trace), float64(params), {}
    for name, old in trace.items():
        g = gradients[name]
        momentum = 0.95 * old + g
        direction = reference.unit_rows(
            (g + 0.95 * momentum).T
        )  # Nesterov; kernels are (in, out)
        found[name] = {
            "momentum": momentum.T,
            "weight": weights[name].T,
            "gradient": g.T,
            "direction": direction,
        }
    assert len(found) == MATRICES
    return found


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_spectra_and_energies_are_those_of_the_next_update(drawn, by_hand, orientation):
    """By the functions that ``test_diagnostics`` compares with the reference."""
    found, signals = checkpoint(drawn[1], "rmnp", 8)[orientation], {}
    for name, matrix in by_hand.items():
        m, w = (
            matrix[key] if orientation == "rows" else matrix[key].T
            for key in ("momentum", "weight")
        )
        signals[name] = diagnostics.normalized(jnp.asarray(m), jnp.asarray(w))
    spectra = [diagnostics.trace_matched_spectra(x) for x, _ in signals.values()]
    for which, table in zip(
        ("before", "after"), map(np.stack, zip(*spectra, strict=True)), strict=True
    ):
        assert found[which]["count"] == [MATRICES] * 16
        # Five digits are kept; float32 leaves 1e-6 of the largest eigenvalue, about 30.
        parts, expected = (
            [found[which][part] for part in ("mean", "low", "high")],
            np.percentile(table, [25, 75], axis=0),
        )
        np.testing.assert_allclose(
            parts, [table.mean(0), *expected], rtol=1e-3, atol=1e-4
        )
    for rank in (RANK, 2):
        shares = {
            name: diagnostics.mode_energies(psi, rank).shares()
            for name, (_, psi) in signals.items()
        }
        energies = found["energies"][str(rank)]
        assert energies["top_of"] == {
            name: pytest.approx(float(x.top), rel=1e-3) for name, x in shares.items()
        }
        mean = [energies[part] for part in ("top", "remain", "sub")]
        np.testing.assert_allclose(mean, np.mean([*shares.values()], axis=0), rtol=1e-3)
        assert mean[1] > 0.01 or rank > 2


def test_alignment_is_the_cosine_of_gradient_and_direction(drawn, by_hand, runs):
    expected = np.mean(
        [cosine(matrix["gradient"], matrix["direction"]) for matrix in by_hand.values()]
    )
    assert abs(expected) > 1e-3
    # The decay that is not there would be half of W, several times the direction.
    assert checkpoint(drawn[1], "rmnp", 8)["alignment"] == pytest.approx(
        expected, rel=1e-3
    )
    # AdamW by its formula.
    params, adam, gradients = state_and_gradients(
        runs["adamw"], 4, optax.ScaleByAdamState
    )
    assert int(adam.count) == 4
    first, second, cosines = float64(adam.mu), float64(adam.nu), []
    for name in optimizers.hidden_matrices(params):
        g = gradients[name]
        mean, square = (
            (0.9 * first[name] + 0.1 * g) / (1 - 0.9**5),
            (0.95 * second[name] + 0.05 * g**2) / (1 - 0.95**5),
        )
        cosines.append(cosine(g, mean / (np.sqrt(square) + 1e-8)))
    assert len(cosines) == MATRICES
    assert checkpoint(drawn[1], "adamw", 4)["alignment"] == pytest.approx(
        np.mean(cosines), rel=1e-3
    )


@pytest.mark.slow
def test_a_run_from_training_to_figures(flags, tmp_path):
    more = (
        "--steps 6 --warmup-steps 1 --checkpoint-every 3 --keep-checkpoints 9"
        " --name own"
    )
    assert (
        main.main(
            [
                *flags,
                *more.split(),
                "--optimizer",
                f"normpre_l,rank={RANK},weight_decay=0.5",
            ]
        )
        == 0
    )
    out = tmp_path / "out"
    assert (
        command.run(
            figures.main, ["--run", str(tmp_path / "runs" / "own"), "--out", str(out)]
        )
        == 0
    )
    (found,) = json.loads((out / "figures.json").read_text())["runs"]
    assert [(c["step"], 0 < c["alignment"] < 1) for c in found["checkpoints"]] == [
        (3, True),
        (6, True),
    ]
    assert found["ranks"] == [RANK]


def test_curves_files_and_bars(drawn, runs):
    out, content = drawn
    for found in content["runs"]:
        norms = [
            line["grad_norm"]
            for line in read_lines(runs[found["name"]] / "log.jsonl")
            if "grad_norm" in line
        ]
        assert (
            found["gradient_norm"]["steps"]
            == found["losses"]["train_steps"]
            == list(range(1, 13))
        )
        np.testing.assert_allclose(found["gradient_norm"]["raw"], norms, rtol=1e-4)
        averages = [
            np.mean(norms[:k]) for k in range(1, 13)
        ]  # fewer steps than the window holds
        np.testing.assert_allclose(
            found["gradient_norm"]["smoothed"], averages, rtol=1e-4
        )
        assert found["losses"]["validation_steps"] == [0, 6, 12]
        assert [c["step"] for c in found["checkpoints"]] == [4, 8, 12]
        assert found["shown"] == [8, 12]
    names = [f"{kind}_{o}" for kind in ("spectra", "energy") for o in ORIENTATIONS] + [
        *figure_drawing.LINES
    ]
    assert {path.name for path in out.iterdir()} == {
        f"{name}.png" for name in names
    } | {"README.md", "figures.json"}
    assert all(
        matplotlib.image.imread(out / f"{name}.png").std() > 0.01 for name in names
    )
    text = (out / "README.md").read_text()
    top = checkpoint(content, "rmnp", 12)["rows"]["energies"][str(RANK)]["top"]
    assert f"| rmnp | {RANK} | 12 | {100 * top:.1f} |" in text
    assert "| 32 | 100 to 10,000 | 62-67 |  |  | 55-60 |  |  |" in text
    assert "adamw: AdamW's average of gradients stands for the momentum." in text
    assert content["command"].startswith("python -m examples.research.figures --run ")

    run = content["runs"][0]
    (axes,) = figure_drawing.panelled(
        [run], lambda axes, r: figure_drawing.draw_energies(axes, r, "columns")
    ).axes
    tops = [
        100 * checkpoint(content, "rmnp", step)["columns"]["energies"][str(RANK)]["top"]
        for step in run["shown"]
    ]
    totals = np.max(
        [[bar.get_y() + bar.get_height() for bar in bars] for bars in axes.containers],
        axis=0,
    )
    np.testing.assert_allclose(totals, 100, atol=0.02)
    (local,) = (
        bars
        for bars in axes.containers
        if bars[0].get_x() + bars[0].get_width() / 2 > 0
    )
    np.testing.assert_allclose([bar.get_height() for bar in local], tops)
    one, other = figure_drawing.styles(
        [run, {**run, "name": "other"}]
    )  # of one optimizer
    assert (one[0], other[0], one[1] == other[1], one[2] == other[2]) == (
        "RMNP, rmnp",
        "RMNP, other",
        True,
        False,
    )


def test_which_checkpoints_ranks_and_eigenvalues_are_shown(runs):
    run = figure_data.open_run(runs["rmnp"])
    assert run.shown(()) == (
        4,
        12,
    )  # of 0.12, 0.6, 1.2, 2.4, 6 and 12; 6 is as near to 4 as to 8
    assert run.shown((8, 4)) == (4, 8)
    assert run.ranks(()) == (16,)  # NormPre-L's 32, of a width of 16
    assert run.ranks((3, 1, 3)) == (3, 1)
    run.checkpoints.close()
    found = figure_data.by_rank(
        [np.array([4.0, 1.0, 1e-20], np.float32), np.array([2.0], np.float32)]
    )
    assert found == {
        "mean": [3.0, 1.0],
        "low": [2.5, 1.0],
        "high": [3.5, 1.0],
        "count": [2, 1],
    }
    assert figure_data.plain(np.array([1.0, np.nan, np.inf])) == [1.0, None, None]
    assert figures.percent(None) == figures.span([None]) == "NaN"
    assert figures.span([0.25, None, 0.5]) == "25.0-50.0"


@pytest.mark.parametrize("name", ["adamw", "sgd", *all_optimizers()])
def test_the_momentum_of_every_optimizer_is_found(name, monkeypatch):
    def sgd(learning_rate):
        return with_adamw(lambda matrix_dims: optax.identity(), learning_rate)

    monkeypatch.setitem(optimizers.OPTIMIZERS, "sgd", sgd)
    params = {
        "blocks": {"0": {"up": {"kernel": jnp.ones((4, 6))}}},
        "tokens": {"embedding": jnp.ones((8, 4))},
    }
    optimizer = optimizers.make_optimizer(
        dataclasses.replace(Config(), optimizer=name), lambda t: 1.0
    )
    state = jax.eval_shape(optimizer.init, params)
    ((field, moment),) = figure_data.momenta(params, state, params).values()
    without_momentum = {"sgd"}
    without_momentum |= {name for name, x in PROPERTIES.items() if not x.state}
    fields = {"adamw": "mu", "normpre_h": "fast"}
    fields |= dict.fromkeys(without_momentum, "gradient")
    assert field == fields.get(name, "trace")
    assert moment.shape == (4, 6)
    assert figure_data.moments(state)["tokens/embedding"][0] == "mu"


def edited(run: Path, folder: Path, **changes) -> Path:
    """A copy of a run whose configuration says something else."""
    copy = folder / run.name
    shutil.copytree(run, copy)
    record = json.loads((copy / "run.json").read_text())
    record["config"] |= changes
    (copy / "run.json").write_text(json.dumps(record))
    return copy


def test_bad_input_is_one_line(runs, tmp_path, capsys):
    run, out = str(runs["rmnp"]), tmp_path / "out"
    none = edited(runs["rmnp"], tmp_path / "none")
    shutil.rmtree(none / "checkpoints")
    other = edited(runs["rmnp"], tmp_path / "other", **{"model.width": 32})
    unknown = edited(runs["rmnp"], tmp_path / "unknown", optimizer="sophia")
    older = edited(runs["rmnp"], tmp_path / "older")
    record = json.loads((older / "run.json").read_text())
    del record["sessions"]
    (older / "run.json").write_text(json.dumps(record))
    for arguments, lines in (
        ([], ["--run must name the folders of runs"]),
        (
            ["--run", str(tmp_path)],
            [f"--run {tmp_path}: ", "is not the folder of a run"],
        ),
        (["--run", run, "--rank", "0"], ["--rank must be at least 1, got 0"]),
        (["--run", run, "--steps", "5"], ["--steps 5: ", "there are 4, 8, 12"]),
        (["--run", run, "--out", f"{run}/run.json"], ["is not a folder"]),
        (["--run", str(none)], [f"error: --run {none}: it has no checkpoints\n"]),
        (
            ["--run", str(other)],
            [
                f"error: --run {other}: cannot restore ",
                "which belongs to another model or optimizer",
            ],
        ),
        (
            ["--run", str(older)],
            ["its run.json is of another version or damaged: it has no 'sessions'\n"],
        ),
        (["--run", str(unknown)], ["--optimizer must be one of adamw"]),
    ):
        assert command.run(figures.main, ["--out", str(out), *arguments]) == 1
        said = capsys.readouterr().err
        assert all(line in said for line in lines), said
        assert said.count("\n") == 1
    assert not out.exists()
