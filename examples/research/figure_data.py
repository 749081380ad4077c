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

PAPER_SHARES = (
    0.01,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
)  # The paper's checkpoints, as shares of its 10,000 steps.
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
        return tuple(dict.fromkeys(asked)) or (
            modes(self.settings["rank"], self.config.model.width),
        )

    def shown(self, asked: Sequence[int]) -> tuple[int, ...]:
        """The checkpoints of the spectra: those asked for, or those nearest to the
        paper's shares of a run.

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
        nearest = (
            min(self.steps, key=lambda s: abs(s - share * self.config.steps))
            for share in PAPER_SHARES
        )
        return tuple(sorted(set(asked or nearest)))


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
        session, source, count = (
            run.record["sessions"][-1],
            run.record["data"]["source"],
            run.record["parameters"],
        )
        command, device, versions = (
            session["command"],
            session["device"]["kind"],
            session["versions"],
        )
    except (KeyError, IndexError, TypeError) as error:
        raise RunError(
            f"its run.json is of another version or damaged: it has no {error}"
        ) from error
    config = run.config
    params = run.trainer.state.params
    shapes = {name: by_name(params)[name].shape for name in hidden_matrices(params)}
    return {
        "name": run.folder.name,
        "optimizer": config.optimizer.partition(",")[0],
        "learning_rate": config.learning_rate,
        "weight_decay": config.weight_decay,
        "tangent": run.settings["tangent"],
        "model": (
            f"{config.model.family}, {config.model.layers} layers, width"
            f" {config.model.width}"
        ),
        "parameters": count,
        "steps": config.steps,
        "tokens_a_step": config.batch_size * config.model.context,
        "vocabulary": run.record["data"].get("vocabulary"),
        "text": source,
        "command": " ".join(["python -m examples.pretrain", *command[1:]]),
        "device": device,
        "versions": versions,
        "momentum": sorted(
            {
                source
                for source, _ in momenta(
                    params, run.trainer.state.opt_state, params
                ).values()
            }
        ),
        "shapes": {name: list(shape) for name, shape in shapes.items()},
    }


def gradient_norms(folder: Path) -> dict[str, list]:
    """Global norm of the gradient before clipping, by step, and its moving average."""
    records = [
        (r["step"], r["grad_norm"])
        for r in read_lines(folder / "log.jsonl")
        if "grad_norm" in r
    ]
    if not records:
        raise FileNotFoundError(f"no gradient norms in {folder / 'log.jsonl'}")
    steps, norms = zip(*records, strict=True)
    return {
        "steps": list(steps),
        "raw": plain(norms),
        "smoothed": plain(moving_average(np.array(norms), SMOOTHED_STEPS)),
    }


def loss_curves(folder: Path) -> dict[str, list]:
    """Losses in nats per token: of training by step, and of validation where it was
    taken.
    """
    found, lines = {}, read_lines(folder / "log.jsonl")
    for name, key in (("train", "loss"), ("validation", "validation_loss")):
        points = [(line["step"], line[key]) for line in lines if key in line]
        found |= {
            f"{name}_steps": [step for step, _ in points],
            name: plain([loss for _, loss in points]),
        }
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
    """A function from a state and a batch to the update without weight decay that they
    give.
    """
    config = trainer.config
    # Its state is that of the run's.
    optimizer = make_optimizer(replace(config, weight_decay=0.0), schedule(config))
    gradients_of = loss_and_gradients(trainer.graphdef, micro_batches(config))

    @jax.jit
    def update(state: TrainState, tokens_BxS: jax.Array) -> Update:
        _, gradients = gradients_of(state.params, tokens_BxS)
        return Update(
            gradients, *optimizer.update(gradients, state.opt_state, state.params)
        )

    return update


def moments(opt_state: optax.OptState) -> dict[str, tuple[str, jax.Array]]:
    """First moments kept in an optimizer's state, by parameter: the momentum of
    matrices, else Adam's average.

    Returns:
        Parameter name -> name of the field that holds it ("trace", "fast" of
        ``normpre_h``, or "mu"), and the array. An optimizer that keeps nothing for a
        parameter leaves it out.
    """
    found: dict[str, tuple[str, jax.Array]] = {}
    for field in ("trace", "fast", "mu"):

        def is_kept(node, field=field):
            return field in getattr(node, "_fields", ())

        for node in filter(is_kept, jax.tree.leaves(opt_state, is_leaf=is_kept)):
            for name, leaf in by_name(getattr(node, field)).items():
                found.setdefault(name, (field, leaf))
    return found


def momenta(
    params: Any, opt_state: optax.OptState, gradients: Any
) -> dict[str, tuple[str, jax.Array]]:
    """What stands for M of every hidden matrix: the name of a field as ``moments``
    returns, or "gradient".
    """
    kept, gradients = moments(opt_state), by_name(gradients)
    return {
        name: kept.get(name, ("gradient", gradients[name]))
        for name in hidden_matrices(params)
    }


def measure(
    run: OpenRun,
    step: int,
    state: TrainState,
    tokens: np.ndarray,
    ranks: Sequence[int],
    with_spectra: bool,
) -> dict[str, Any]:
    """What one checkpoint says."""
    next_update = run.next_update(state, tokens)
    trees = [
        by_name(tree)
        for tree in (state.params, next_update.gradients, next_update.updates)
    ]
    momentum, dims = (
        momenta(state.params, next_update.opt_state, next_update.gradients),
        hidden_matrices(state.params),
    )
    found = {}
    for name, (_, m) in momentum.items():
        arrays = [m, *(tree[name] for tree in trees)]
        found[name] = jax.device_get(
            diagnose(*arrays, dims[name], tuple(ranks), run.settings["tangent"])
        )
    alignment = np.concatenate([one["alignment"] for one in found.values()]).mean()
    result: dict[str, Any] = {"step": step, "alignment": plain(alignment)}
    for orientation in diagnostics.ORIENTATIONS:
        of = {name: one[orientation] for name, one in found.items()}
        result[orientation] = {"energies": {}}
        for rank in ranks:
            shares = {name: one["energies"][rank].shares() for name, one in of.items()}
            means = zip(*shares.values(), strict=True)  # averaged equally over matrices
            energies = {
                part: plain(np.concatenate(values).mean())
                for part, values in zip(
                    diagnostics.ModeEnergies._fields, means, strict=True
                )
            }
            if with_spectra:
                energies["top_of"] = {
                    name: plain(np.mean(share.top)) for name, share in shares.items()
                }
            result[orientation]["energies"][str(rank)] = energies
        for which in diagnostics.Spectra._fields if with_spectra else ():
            spectra = [
                values
                for one in of.values()
                for values in getattr(one["spectra"], which)
            ]
            result[orientation][which] = by_rank(spectra)
    return result


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
        energies = {
            r: signal(names=["mode_energies"], orientation=orientation, rank=r)[
                "mode_energies"
            ]
            for r in ranks
        }
        found[orientation] = signal(names=["spectra"], orientation=orientation) | {
            "energies": energies
        }
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
    """A number or an array as Python floats of five digits, None for what is no finite
    number: ready for JSON.
    """
    if np.ndim(values):
        return [plain(value) for value in values]
    return float(f"{float(values):.5g}") if math.isfinite(values) else None
