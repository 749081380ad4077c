# SPDX-License-Identifier: Apache-2.0
"""From the folder of a run to the numbers of the paper's figures, as plain lists.

At every checkpoint stands the update that the run takes next, and is not taken: the
gradient of the next batch, the momentum ``M`` with that gradient in it, and the
optimizer's direction without weight decay. ``X`` and ``Psi`` are those of ``M`` and the
weights, with the run's tangent, rows active and columns active; an optimizer without
``X`` and ``Psi`` of its own is looked at as if its momentum were handed to NormPre.
Nothing of the training is repeated.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from examples.pretrain.checkpoint import Checkpoints
from examples.pretrain.commands import read_run
from examples.pretrain.config import Config, RunError
from examples.pretrain.logs import read_lines
from examples.pretrain.optimizers import (
    by_name,
    hidden_matrices,
    make_optimizer,
    settings_of,
)
from examples.pretrain.train import (
    Trainer,
    TrainState,
    loss_and_gradients,
    micro_batches,
    schedule,
)
from examples.research import diagnostics
from examples.research.ablations import modes
from normpre_optax import MatrixDims

# The paper's checkpoints, as shares of its 10,000 steps.
PAPER_SHARES = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0)
SMOOTHED_STEPS = 50  # Length of the paper's moving averages.


class Update(NamedTuple):
    """The next update of a run; trees like the parameters, but for the state."""

    gradients: optax.Updates
    updates: optax.Updates
    opt_state: optax.OptState


@dataclass(frozen=True)
class OpenRun:
    """A run whose checkpoints are read."""

    folder: Path
    record: dict[str, Any]
    config: Config
    trainer: Trainer
    checkpoints: Checkpoints
    next_update: Callable[[TrainState, np.ndarray], Update]

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the optimizer, NormPre-L's for those that it lacks."""
        return settings_of("normpre_l")[1] | settings_of(self.config.optimizer)[1]

    @property
    def steps(self) -> list[int]:
        """Steps of the checkpoints."""
        return self.checkpoints.steps()

    def ranks(self, asked: Sequence[int]) -> tuple[int, ...]:
        """Those asked for, or the run's own; of a share, that of the model's width."""
        if asked:
            return tuple(dict.fromkeys(asked))
        return (modes(self.settings["rank"], self.config.model.width),)

    def shown(self, asked: Sequence[int]) -> tuple[int, ...]:
        """The checkpoints of the spectra: those asked for, or those of the paper.

        These are those nearest to the paper's shares of a run.

        Raises:
            RunError: where one that is asked for is not there.
        """
        for step in asked:
            if step not in self.steps:
                there = ", ".join(map(str, self.steps))
                raise RunError(
                    f"--steps {step}: {self.folder} has no such checkpoint, there are"
                    f" {there}"
                )
        if asked:
            return tuple(sorted(set(asked)))
        steps = np.array(self.steps)
        nearest = set()
        for share in PAPER_SHARES:
            distance = np.abs(steps - share * self.config.steps)
            nearest.add(int(steps[distance.argmin()]))
        return tuple(sorted(nearest))


def open_run(folder: Path, tokens: Path | None = None) -> OpenRun:
    """The run in ``folder``, on one device.

    Raises:
        RunError: naming ``--run``, where there is no such run, or nothing in it yet.
    """
    try:
        record, config, dataset = read_run(folder, tokens)
        trainer = Trainer(replace(config, replicas=1, fsdp=1), dataset)
    except RunError as error:
        raise RunError(f"--run {folder}: {error}") from error
    checkpoints = Checkpoints(folder / "checkpoints")
    if not checkpoints.steps():
        raise RunError(f"--run {folder}: it has no checkpoints")
    return OpenRun(
        folder, record, config, trainer, checkpoints, make_next_update(trainer)
    )


def numbers(run: OpenRun, ranks: Sequence[int], shown: Sequence[int]) -> dict[str, Any]:
    """All numbers of one run: facts, curves of its log, and what its checkpoints say.

    Args:
        run: the run.
        ranks: spectral budgets r of the mode energies.
        shown: steps of the checkpoints whose spectra are wanted; energies and alignment
            are those of all.

    Returns:
        What ``figures.json`` holds of a run.

    Raises:
        RunError: naming ``--run``, where a checkpoint is damaged or of another version,
            or there is no log.
    """
    try:
        found = facts(run) | {
            "ranks": list(ranks),
            "shown": list(shown),
            "gradient_norm": gradient_norms(run.folder),
            "losses": loss_curves(run.folder),
        }
        measured = [measure(run, *at, ranks, at[0] in shown) for at in restored(run)]
    except (RunError, FileNotFoundError) as error:
        raise RunError(f"--run {run.folder}: {error}") from error
    finally:
        run.checkpoints.close()
    return found | {"checkpoints": measured}


def facts(run: OpenRun) -> dict[str, Any]:
    """What the run was.

    Raises:
        RunError: where ``run.json`` does not say what it says today.
    """
    try:
        session = run.record["sessions"][-1]
        recorded = {
            "text": run.record["data"]["source"],
            "parameters": run.record["parameters"],
            "command": session["command"],
            "device": session["device"]["kind"],
            "versions": session["versions"],
        }
    except (KeyError, IndexError, TypeError) as error:
        raise RunError(
            f"its run.json is of another version or damaged: it has no {error}"
        ) from error
    config = run.config
    model = config.model
    params = run.trainer.state.params
    weights = by_name(params)
    sources = momenta(params, run.trainer.state.opt_state, params).values()
    return {
        "name": run.folder.name,
        "optimizer": config.optimizer.partition(",")[0],
        "learning_rate": config.learning_rate,
        "weight_decay": config.weight_decay,
        "tangent": run.settings["tangent"],
        "model": f"{model.family}, {model.layers} layers, width {model.width}",
        "parameters": recorded["parameters"],
        "steps": config.steps,
        "tokens_a_step": config.batch_size * model.context,
        "vocabulary": run.record["data"].get("vocabulary"),
        "text": recorded["text"],
        "command": " ".join(["python -m examples.pretrain", *recorded["command"][1:]]),
        "device": recorded["device"],
        "versions": recorded["versions"],
        "momentum": sorted({source for source, _ in sources}),
        "shapes": {name: list(weights[name].shape) for name in hidden_matrices(params)},
    }


def gradient_norms(folder: Path) -> dict[str, list]:
    """Global norm of the gradient before clipping, by step, and its moving average."""
    steps = []
    norms = []
    for line in read_lines(folder / "log.jsonl"):
        if "grad_norm" in line:
            steps.append(line["step"])
            norms.append(line["grad_norm"])
    if not steps:
        raise FileNotFoundError(f"no gradient norms in {folder / 'log.jsonl'}")
    return {
        "steps": steps,
        "raw": plain(norms),
        "smoothed": plain(moving_average(np.array(norms), SMOOTHED_STEPS)),
    }


def loss_curves(folder: Path) -> dict[str, list]:
    """Losses in nats per token: of training by step, and of validations."""
    lines = read_lines(folder / "log.jsonl")
    found: dict[str, list] = {}
    for name, key in (("train", "loss"), ("validation", "validation_loss")):
        having = [line for line in lines if key in line]
        found[f"{name}_steps"] = [line["step"] for line in having]
        found[name] = plain([line[key] for line in having])
    return found


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of each value and the ``window - 1`` before it, or as many as there are."""
    totals = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(totals))
    starts = np.maximum(ends - window, 0)
    return (totals[ends] - totals[starts]) / (ends - starts)


def restored(run: OpenRun) -> Iterator[tuple[int, TrainState, np.ndarray]]:
    """Step, state and next batch of every checkpoint, oldest first."""
    for step in run.steps:
        found, data_state = run.checkpoints.restore(step, **run.trainer.state._asdict())
        run.trainer.batches.set_state(data_state)
        yield step, TrainState(**found), next(run.trainer.batches)


def make_next_update(trainer: Trainer) -> Callable[[TrainState, np.ndarray], Update]:
    """A function from a state and a batch to their update without weight decay."""
    config = trainer.config
    # Its state has the form of the run's, which it continues.
    optimizer = make_optimizer(replace(config, weight_decay=0.0), schedule(config))
    gradients_of = loss_and_gradients(trainer.graphdef, micro_batches(config))

    @jax.jit
    def update(state: TrainState, tokens_BxS: jax.Array) -> Update:
        _, gradients = gradients_of(state.params, tokens_BxS)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        return Update(gradients, updates, opt_state)

    return update


def moments(opt_state: optax.OptState) -> dict[str, tuple[str, jax.Array]]:
    """First moments kept in an optimizer's state, by parameter.

    They are the momentum of matrices, else Adam's average.

    Returns:
        Parameter name -> name of the field that holds it ("trace", "fast" of
        ``normpre_h``, or "mu"), and the array. An optimizer that keeps nothing for a
        parameter leaves it out.
    """
    found: dict[str, tuple[str, jax.Array]] = {}
    for field in ("trace", "fast", "mu"):
        for node in _nodes_with(field, opt_state):
            for name, leaf in by_name(getattr(node, field)).items():
                found.setdefault(name, (field, leaf))
    return found


def _nodes_with(field: str, opt_state: optax.OptState) -> list[Any]:
    """States within a state that have this field."""

    def has_field(node):
        return field in getattr(node, "_fields", ())

    nodes = jax.tree.leaves(opt_state, is_leaf=has_field)
    return [node for node in nodes if has_field(node)]


def momenta(
    params: Any, opt_state: optax.OptState, gradients: Any
) -> dict[str, tuple[str, jax.Array]]:
    """What stands for M of every hidden matrix.

    Returns:
        Parameter name -> name of a field, as ``moments`` returns, or "gradient", and
        the array.
    """
    kept = moments(opt_state)
    gradients = by_name(gradients)
    found = {}
    for name in hidden_matrices(params):
        found[name] = kept.get(name, ("gradient", gradients[name]))
    return found


def measure(
    run: OpenRun,
    step: int,
    state: TrainState,
    tokens: np.ndarray,
    ranks: Sequence[int],
    with_spectra: bool,
) -> dict[str, Any]:
    """What one checkpoint says."""
    found = diagnose_all(run, state, tokens, ranks)
    alignment = np.concatenate([one["alignment"] for one in found.values()]).mean()
    result: dict[str, Any] = {"step": step, "alignment": plain(alignment)}
    for orientation in diagnostics.ORIENTATIONS:
        oriented = {name: one[orientation] for name, one in found.items()}
        energies = {}
        for rank in ranks:
            shares = {
                name: one["energies"][rank].shares() for name, one in oriented.items()
            }
            energies[str(rank)] = mean_shares(shares)
            if with_spectra:
                tops = {name: plain(np.mean(one.top)) for name, one in shares.items()}
                energies[str(rank)]["top_of"] = tops
        result[orientation] = {"energies": energies}
        if with_spectra:
            spectra = [one["spectra"] for one in oriented.values()]
            for which in diagnostics.Spectra._fields:
                values: list[np.ndarray] = []
                for one in spectra:
                    values += list(getattr(one, which))
                result[orientation][which] = by_rank(values)
    return result


def diagnose_all(
    run: OpenRun, state: TrainState, tokens: np.ndarray, ranks: Sequence[int]
) -> dict[str, dict[str, Any]]:
    """What ``diagnose`` returns of every hidden matrix, by name."""
    following = run.next_update(state, tokens)
    weights = by_name(state.params)
    gradients = by_name(following.gradients)
    updates = by_name(following.updates)
    momentum = momenta(state.params, following.opt_state, following.gradients)
    dims = hidden_matrices(state.params)
    found = {}
    for name, (_, m) in momentum.items():
        arrays = (m, weights[name], gradients[name], updates[name])
        found[name] = jax.device_get(
            diagnose(*arrays, dims[name], tuple(ranks), run.settings["tangent"])
        )
    return found


def mean_shares(shares: dict[str, diagnostics.ModeEnergies]) -> dict[str, Any]:
    """Shares of the energy, averaged equally over all matrices of all parameters."""
    means = {}
    for part in diagnostics.ModeEnergies._fields:
        values = [np.asarray(getattr(one, part)) for one in shares.values()]
        means[part] = plain(np.concatenate(values).mean())
    return means


@functools.partial(jax.jit, static_argnums=(4, 5, 6))
def diagnose(
    momentum: jax.Array,
    weight: jax.Array,
    gradient: jax.Array,
    update: jax.Array,
    dims: MatrixDims,
    ranks: tuple[int, ...],
    tangent: str,
) -> dict[str, Any]:
    """All diagnostics of one parameter, compiled once for those that are alike."""
    signal = functools.partial(
        diagnostics.measure, momentum, weight, dims, tangent=tangent
    )
    found = signal(names=["alignment"], gradient=gradient, update=update)
    for orientation in diagnostics.ORIENTATIONS:
        of_side = functools.partial(signal, orientation=orientation)
        energies = {}
        for rank in ranks:
            measured = of_side(names=["mode_energies"], rank=rank)
            energies[rank] = measured["mode_energies"]
        found[orientation] = of_side(names=["spectra"]) | {"energies": energies}
    return found


def by_rank(spectra: Sequence[np.ndarray]) -> dict[str, list]:
    """Mean and quartiles of the nonzero eigenvalues over matrices, rank by rank.

    At ranks that only matrices with a longer short side have, those alone are counted;
    ``count`` says how many. An eigenvalue counts as zero below ``(s eps)^2`` times its
    matrix's largest, ``s`` being the number of eigenvalues and ``eps`` their precision:
    below that, its square root is rounding.
    """
    table = np.full((len(spectra), max(map(len, spectra))), np.nan)
    for row, values in zip(table, spectra, strict=True):
        noise = (len(values) * np.finfo(values.dtype).eps) ** 2 * values[0]
        row[: len(values)] = np.where(values > noise, values, np.nan)
    table = table[:, : int(np.isfinite(table).any(0).sum())]
    low, high = np.nanpercentile(table, (25, 75), axis=0)
    return {
        "mean": plain(np.nanmean(table, axis=0)),
        "low": plain(low),
        "high": plain(high),
        "count": np.isfinite(table).sum(0).tolist(),
    }


def plain(values: Any) -> Any:
    """A number or an array as Python floats of five digits, ready for JSON.

    None stands for what is no finite number.
    """
    if np.ndim(values):
        return [plain(value) for value in values]
    if not math.isfinite(values):
        return None
    return float(f"{float(values):.5g}")
