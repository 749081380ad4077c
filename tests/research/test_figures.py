# SPDX-License-Identifier: Apache-2.0
"""The paper's figures from runs: numbers against NumPy, and files.

And one line for what cannot be drawn.
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

RANK = 4
ORIENTATIONS = ("rows", "columns")
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
    """Random numbers in place of zeros, as if the state came from training.

    They are squares where squares are.
    """
    random = np.random.default_rng(seed)

    def shake(path, leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(np.full_like(leaf, seed))  # steps taken
        decay = np.diag(1 / np.arange(1.0, leaf.shape[-1] + 1))
        noise = random.standard_normal(leaf.shape) @ decay
        if ".nu" in jax.tree_util.keystr(path):
            noise = noise**2
        return jnp.asarray(np.asarray(leaf) + 0.1 * noise, leaf.dtype)

    return jax.tree_util.tree_map_with_path(shake, tree)


def make_run(folder: Path, dataset, optimizer: str) -> Path:
    """A run's folder with checkpoints of steps 4, 8 and 12.

    Nothing is trained, which would take long.
    """
    own = {"optimizer": optimizer, "name": optimizer, "runs_folder": folder}
    config = dataclasses.replace(CONFIG, **own)
    config.run_folder.mkdir()
    trainer = train.Trainer(config, dataset)
    run_module.introduce(config, None, dataset, trainer, Console(quiet=True))
    checkpoints = Checkpoints(
        config.run_folder / "checkpoints", config.keep_checkpoints
    )
    for step in (4, 8, 12):
        for _ in range(4):
            next(trainer.batches)
        state = shaken(trainer.state, step)._asdict()
        checkpoints.save(step, trainer.batches.get_state(), **state)
    checkpoints.close()
    lines = []
    for step in range(1, 13):
        lines.append({"step": step, "loss": 6 - step / 10, "grad_norm": 1 / step})
    for step in (0, 6, 12):
        lines.append({"step": step, "validation_loss": 6 - step / 10})
    log = "".join(json.dumps(line) + "\n" for line in lines)
    (config.run_folder / "log.jsonl").write_text(log)
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
    folders = map(str, runs.values())
    options = f"--out {out} --rank {RANK} 2 --steps 8 12"
    flags = ["--run", *folders, *options.split()]
    assert command.run(figures.main, flags) == 0
    return out, json.loads((out / "figures.json").read_text())


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sum(a * b) / np.sqrt(np.sum(a**2) * np.sum(b**2)))


def checkpoint(content: dict, optimizer: str, step: int) -> dict:
    """What ``figures.json`` has of one checkpoint."""
    (run,) = [run for run in content["runs"] if run["optimizer"] == optimizer]
    (found,) = [found for found in run["checkpoints"] if found["step"] == step]
    return found


def float64(tree) -> dict[str, np.ndarray]:
    leaves = optimizers.by_name(tree)
    return {name: np.asarray(leaf, np.float64) for name, leaf in leaves.items()}


def state_and_gradients(folder: Path, step: int, kind) -> tuple:
    """A checkpoint's weights, its state of that kind, and the gradients that follow.

    These are clipped, of the batch that follows when counted from the first.
    """
    opened = figure_data.open_run(folder)
    found, _ = opened.checkpoints.restore(step, **opened.trainer.state._asdict())
    state = train.TrainState(**found)
    opened.checkpoints.close()
    batches = training_batches(
        load(Path(opened.record["data"]["folder"])), context=32, batch_size=4, seed=0
    )
    *_, last = (next(batches) for _ in range(step + 1))
    tokens = jnp.asarray(last)

    def loss(params):
        return token_losses(opened.trainer.graphdef, params, tokens).mean()

    def is_kind(x):
        return isinstance(x, kind)

    gradients = float64(jax.jit(jax.grad(loss))(state.params))
    norm = np.sqrt(sum(np.sum(g**2) for g in gradients.values()))
    clipped = {name: g * min(1.0, 1 / norm) for name, g in gradients.items()}
    opt_state = state.opt_state[1].inner_states["matrix"]
    nodes = jax.tree.leaves(opt_state, is_leaf=is_kind)
    (node,) = [node for node in nodes if is_kind(node)]
    return state.params, node, clipped


@pytest.fixture(scope="module")
def by_hand(runs) -> dict[str, dict[str, np.ndarray]]:
    """What the run of RMNP does after its second checkpoint.

    By parameter, as (out, in).
    """
    params, node, gradients = state_and_gradients(runs["rmnp"], 8, optax.TraceState)
    weights = float64(params)
    found = {}
    for name, old in float64(node.trace).items():
        g = gradients[name]
        momentum = 0.95 * old + g
        nesterov = g + 0.95 * momentum
        found[name] = {  # kernels are (in, out)
            "momentum": momentum.T,
            "weight": weights[name].T,
            "gradient": g.T,
            "direction": reference.unit_rows(nesterov.T),
        }
    assert len(found) == MATRICES
    return found


@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_spectra_and_energies_are_those_of_the_next_update(drawn, by_hand, orientation):
    """By the functions that ``test_diagnostics`` compares with the reference."""
    found = checkpoint(drawn[1], "rmnp", 8)[orientation]
    signals = {}
    for name, matrix in by_hand.items():
        m = matrix["momentum"]
        w = matrix["weight"]
        if orientation == "columns":
            m, w = m.T, w.T
        signals[name] = diagnostics.normalized(jnp.asarray(m), jnp.asarray(w))
    spectra = [diagnostics.trace_matched_spectra(x) for x, _ in signals.values()]
    before, after = map(np.stack, zip(*spectra, strict=True))
    for which, table in (("before", before), ("after", after)):
        assert found[which]["count"] == [MATRICES] * 16
        # Five digits are kept; float32 leaves 1e-6 of the largest eigenvalue, about 30.
        parts = [found[which][part] for part in ("mean", "low", "high")]
        expected = [table.mean(0), *np.percentile(table, [25, 75], axis=0)]
        np.testing.assert_allclose(parts, expected, rtol=1e-3, atol=1e-4)
    for rank in (RANK, 2):
        shares = {}
        tops = {}
        for name, (_, psi) in signals.items():
            shares[name] = diagnostics.mode_energies(psi, rank).shares()
            tops[name] = pytest.approx(float(shares[name].top), rel=1e-3)
        energies = found["energies"][str(rank)]
        assert energies["top_of"] == tops
        mean = [energies[part] for part in ("top", "remain", "sub")]
        np.testing.assert_allclose(mean, np.mean([*shares.values()], axis=0), rtol=1e-3)
        assert mean[1] > 0.01 or rank > 2


def test_alignment_is_the_cosine_of_gradient_and_direction(drawn, by_hand, runs):
    cosines = [cosine(x["gradient"], x["direction"]) for x in by_hand.values()]
    expected = np.mean(cosines)
    assert abs(expected) > 1e-3
    # The decay that is not there would be half of W, several times the direction.
    alignment = checkpoint(drawn[1], "rmnp", 8)["alignment"]
    assert alignment == pytest.approx(expected, rel=1e-3)


def test_alignment_of_adamw_is_that_of_its_formula(drawn, runs):
    kind = optax.ScaleByAdamState
    params, adam, gradients = state_and_gradients(runs["adamw"], 4, kind)
    assert int(adam.count) == 4
    first = float64(adam.mu)
    second = float64(adam.nu)
    cosines = []
    for name in optimizers.hidden_matrices(params):
        g = gradients[name]
        mean = (0.9 * first[name] + 0.1 * g) / (1 - 0.9**5)
        square = (0.95 * second[name] + 0.05 * g**2) / (1 - 0.95**5)
        cosines.append(cosine(g, mean / (np.sqrt(square) + 1e-8)))
    assert len(cosines) == MATRICES
    alignment = checkpoint(drawn[1], "adamw", 4)["alignment"]
    assert alignment == pytest.approx(np.mean(cosines), rel=1e-3)


@pytest.mark.slow
def test_a_run_from_training_to_figures(flags, tmp_path):
    more = (
        "--steps 6 --warmup-steps 1 --checkpoint-every 3 --keep-checkpoints 9"
        f" --name own --optimizer normpre_l,rank={RANK},weight_decay=0.5"
    )
    assert main.main([*flags, *more.split()]) == 0
    out = tmp_path / "out"
    line = f"--run {tmp_path / 'runs' / 'own'} --out {out}"
    assert command.run(figures.main, line.split()) == 0
    (found,) = json.loads((out / "figures.json").read_text())["runs"]
    assert [c["step"] for c in found["checkpoints"]] == [3, 6]
    assert all(0 < c["alignment"] < 1 for c in found["checkpoints"])
    assert found["ranks"] == [RANK]


def test_curves(drawn, runs):
    _, content = drawn
    for found in content["runs"]:
        lines = read_lines(runs[found["name"]] / "log.jsonl")
        norms = [line["grad_norm"] for line in lines if "grad_norm" in line]
        curve = found["gradient_norm"]
        assert curve["steps"] == list(range(1, 13))
        assert found["losses"]["train_steps"] == list(range(1, 13))
        np.testing.assert_allclose(curve["raw"], norms, rtol=1e-4)
        # There are fewer steps than the window holds.
        averages = [np.mean(norms[:k]) for k in range(1, 13)]
        np.testing.assert_allclose(curve["smoothed"], averages, rtol=1e-4)
        assert found["losses"]["validation_steps"] == [0, 6, 12]
        assert [c["step"] for c in found["checkpoints"]] == [4, 8, 12]
        assert found["shown"] == [8, 12]


def test_files(drawn):
    out, content = drawn
    names = [
        "spectra_rows",
        "spectra_columns",
        "energy_rows",
        "energy_columns",
        *figure_drawing.LINES,
    ]
    pictures = {f"{name}.png" for name in names}
    files = {path.name for path in out.iterdir()}
    assert files == pictures | {"README.md", "figures.json"}
    for picture in pictures:
        assert matplotlib.image.imread(out / picture).std() > 0.01
    text = (out / "README.md").read_text()
    top = checkpoint(content, "rmnp", 12)["rows"]["energies"][str(RANK)]["top"]
    assert f"| rmnp | {RANK} | 12 | {100 * top:.1f} |" in text
    assert "| 32 | 100 to 10,000 | 62-67 |  |  | 55-60 |  |  |" in text
    assert "adamw: AdamW's average of gradients stands for the momentum." in text
    assert content["command"].startswith("python -m examples.research.figures --run ")


def draw_columns(axes, run):
    figure_drawing.draw_energies(axes, run, "columns")


def test_bars(drawn):
    """They add up to 100 %; those on the right are the top modes."""
    _, content = drawn
    run = content["runs"][0]
    (axes,) = figure_drawing.panelled([run], draw_columns).axes
    tops = []
    for step in run["shown"]:
        energies = checkpoint(content, "rmnp", step)["columns"]["energies"]
        tops.append(100 * energies[str(RANK)]["top"])
    ends = []
    right = []
    for bars in axes.containers:
        ends.append([bar.get_y() + bar.get_height() for bar in bars])
        if bars[0].get_x() + bars[0].get_width() / 2 > 0:
            right.append([bar.get_height() for bar in bars])
    np.testing.assert_allclose(np.max(ends, axis=0), 100, atol=0.02)
    (heights,) = right
    np.testing.assert_allclose(heights, tops)


def test_two_runs_of_one_optimizer_have_one_color_and_two_line_styles(drawn):
    _, content = drawn
    run = content["runs"][0]
    one, other = figure_drawing.styles([run, run | {"name": "other"}])
    assert one[0] == "RMNP, rmnp"
    assert other[0] == "RMNP, other"
    assert one[1] == other[1]
    assert one[2] != other[2]


def test_which_checkpoints_ranks_and_eigenvalues_are_shown(runs):
    run = figure_data.open_run(runs["rmnp"])
    # Of 0.12, 0.6, 1.2, 2.4, 6 and 12; 6 is as near to 4 as to 8.
    assert run.shown(()) == (4, 12)
    assert run.shown((8, 4)) == (4, 8)
    assert run.ranks(()) == (16,)  # NormPre-L's 32, of a width of 16
    assert run.ranks((3, 1, 3)) == (3, 1)
    run.checkpoints.close()
    spectra = [np.float32([4.0, 1.0, 1e-20]), np.float32([2.0])]
    found = figure_data.by_rank(spectra)
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
    config = dataclasses.replace(Config(), optimizer=name)
    optimizer = optimizers.make_optimizer(config, lambda t: 1.0)
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
    run = str(runs["rmnp"])
    out = tmp_path / "out"
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
