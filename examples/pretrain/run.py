# SPDX-License-Identifier: Apache-2.0
"""A whole run and its folder: ``main`` checks everything, trains, and writes what is
left behind.
"""

import json
import shutil
import time
from contextlib import closing, nullcontext
from pathlib import Path
from typing import IO, Any

import jax
from rich.console import Console

from . import cluster, data, logs, mesh, optimizers
from .checkpoint import Checkpoints
from .commands import Trained, load
from .config import Config, Diverged, RunError
from .evaluate import Score
from .flat import differences, to_dict
from .processes import LOCK, lock, on_signals
from .train import Trainer, compute_dtype, warmup_steps

Stored = (
    dict[str, Any] | None
)  # run.json of the run to be continued; None if a new one starts
WRITTEN = (
    "parameters.txt",
    "log.jsonl",
    "loss.png",
    "result.json",
    "run.json",
)  # of a run, beside its checkpoints


def main(config: Config) -> None:
    """Train as ``config`` says, alone or with other processes."""
    optimizers.settings_of(config.optimizer)
    mesh.check(config)
    with cluster.joined(config):
        console = Console(
            markup=False, highlight=False, soft_wrap=True, quiet=not cluster.first()
        )
        train(config, cluster.from_the_first(lambda: stored(config)), console)


def stored(config: Config) -> Stored:
    """``run.json`` of the run to be continued, None if a new one starts.

    Raises:
        RunError: if another run is in the way, or the run is not the one that
            ``config`` describes.
    """
    folder, file = config.run_folder, config.run_folder / "run.json"
    if not folder.exists():
        if config.resume:
            raise RunError(
                f"there is no run in {folder}: remove --resume to start it, or check"
                " --name"
            )
        return None
    if not file.exists() and {path.name for path in folder.iterdir()} <= {
        LOCK,
        "run.json.partial",
    }:
        return None  # stopped before there was anything to resume
    if not file.exists():
        raise RunError(
            f"{folder} is not a run (no run.json in it): remove it, or choose another"
            " --name"
        )
    if config.overwrite:
        return None
    if not config.resume:
        raise RunError(
            f"{folder} exists: --resume continues it, --overwrite replaces it, --name"
            " starts another"
        )
    try:
        found = json.loads(file.read_text())
        changed = differences(found["config"], config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"cannot resume: {file} is damaged; remove {folder} to start again"
        ) from error
    if changed:
        way_out = (
            f" (learning rates depend on it; --init-from {folder} --name NEW starts a"
            " new run from its weights)"
        )
        more = way_out if any(x.startswith("--steps ") for x in changed) else ""
        raise RunError(
            f"cannot resume {folder} with other settings: {'; '.join(changed)}{more}"
        )
    return found


def train(config: Config, stored: Stored, console: Console) -> Score:
    """Train: text, tokens, updates, plot."""
    began = time.perf_counter()
    dataset = cluster.first_of_all(lambda: data.open_corpus(config, console))
    fingerprint = dataset.manifest["fingerprint"]
    if len(set(cluster.gathered(fingerprint))) > 1:
        raise RunError(f"the processes have different texts in {dataset.folder}")
    if stored and stored["fingerprint"] != fingerprint:
        other = (
            f"it was trained on other text ({stored['data']['folder']}, now"
            f" {dataset.folder})"
        )
        raise RunError(f"cannot resume {config.run_folder}: {other}")
    # What cannot run is refused before anything is written.
    weights = cluster.together(lambda: other_weights(config, dataset))
    trainer = cluster.together(
        lambda: Trainer(config, dataset, weights and weights.params)
    )
    if weights:
        console.print(f"Weights    of {config.init_from} after step {weights.step:,}")
    with (
        cluster.together(lambda: hold(config) if cluster.first() else None)
        or nullcontext()
    ):
        score = train_in_folder(config, stored, dataset, trainer, console)
    console.print(
        f"\nFinal validation loss {score.loss:.4f} ({score.bits_per_byte:.3f} bits per"
        f" byte) after {config.steps:,} steps of {config.optimizer};"
        f" {time.perf_counter() - began:.0f} s total.\nLog, plot and checkpoint:"
        f" {config.run_folder}/\nGenerate text: python -m examples.pretrain generate"
        f" {config.run_folder} --prompt TEXT"
    )
    return score


def other_weights(config: Config, dataset: data.Dataset) -> Trained | None:
    """The model of ``--init-from``, unless this run has a checkpoint of its own.

    Raises:
        RunError: if there is none, or its text had another tokenizer.
    """
    own = (config.run_folder / "checkpoints").glob("*") if config.resume else ()
    if config.init_from is None or any(path.name.isdecimal() for path in own):
        return None
    if not cluster.alone():
        raise RunError(
            "--init-from works in one process only; --resume the new run with several"
        )
    return load(config.init_from, tokens=dataset.folder)


def hold(config: Config) -> IO[bytes] | None:
    """Make the run's folder, empty with ``--overwrite``, and lock it.

    Raises:
        RunError: if another process has locked it.
    """
    folder = config.run_folder
    folder.mkdir(parents=True, exist_ok=True)
    held = lock(folder)
    steps = [
        path
        for path in folder.glob("checkpoints/*")
        if path.name.partition(".")[0].isdecimal()
    ]
    for path in (
        [*steps, *(folder / name for name in WRITTEN)] if config.overwrite else ()
    ):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return held


def train_in_folder(
    config: Config,
    stored: Stored,
    dataset: data.Dataset,
    trainer: Trainer,
    console: Console,
) -> Score:
    """Train, and write everything to the run's folder, which exists and is locked."""

    def begin() -> None:
        if cluster.first():
            introduce(config, stored, dataset, trainer, console)
        elif not (config.run_folder / "run.json").exists():
            raise RunError(
                f"the first process writes {config.run_folder}, which all processes"
                " must see"
            )

    cluster.first_of_all(begin)
    checkpoints = Checkpoints(
        config.run_folder / "checkpoints", config.keep_checkpoints
    )
    if steps := checkpoints.steps():
        cluster.together(lambda: trainer.resume(checkpoints, steps[-1]))
    if stored:
        console.print(
            f"Resuming from step {trainer.start:,}"
            if trainer.start
            else "No checkpoint: from the start"
        )
    log = cluster.first_of_all(
        lambda: logs.Log(config.run_folder, trainer.start, writes=cluster.first())
    )
    try:
        with (
            closing(log),
            closing(checkpoints),
            on_signals(trainer.stop),
            cluster.leaving_at_once(),
        ):
            score = trainer.run(log, checkpoints, console)
        if cluster.first():
            store_result(
                config,
                {"validation_loss": score.loss, "bits_per_byte": score.bits_per_byte},
            )
            plot_losses(config.run_folder)
    except Diverged as error:
        if cluster.first():
            store_result(config, {"diverged": str(error)})
        raise
    return score


def introduce(
    config: Config,
    stored: Stored,
    dataset: data.Dataset,
    trainer: Trainer,
    console: Console,
) -> None:
    """Print and store what is about to be trained, and on what."""
    params, model, texts = trainer.state.params, config.model, dataset.manifest
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    table, totals = optimizers.parameter_table(params, config)
    environment = logs.environment()
    passes = (
        config.steps
        * config.batch_size
        / len(data.Sequences(dataset, "train", model.context))
    )
    run = {
        **{
            "config": to_dict(config),
            "fingerprint": texts["fingerprint"],
            "parameters": count,
        },
        **{
            "data": {"folder": str(dataset.folder), "passes": passes, **texts},
            "dtype": str(compute_dtype(config)),
        },
        "sessions": [*(stored["sessions"] if stored else []), environment],
    }
    logs.write_json(
        config.run_folder / "run.json", run
    )  # first: a folder without it is no run
    (config.run_folder / "parameters.txt").write_text(table + "\n")
    kind, tokens = (
        environment["device"]["kind"],
        config.steps * config.batch_size * model.context,
    )
    devices = (
        kind
        if jax.device_count() == 1
        else f"{config.devices} of {jax.device_count()} x {kind}"
    )
    devices += f" ({config.replicas} x {config.fsdp} FSDP)" * (config.devices > 1)
    parts = f", {config.micro_batch} at a time," if config.micro_batch else ""
    adam = (
        f", AdamW learning rate {config.adam_learning_rate:g}"
        if config.adam_learning_rate
        else ""
    )
    console.print(
        f"Text       {texts['source']}: {texts['train']['documents']:,} training"
        f" documents ({texts['train']['tokens']:,} tokens),"
        f" {texts['validation']['documents']:,} validation documents; vocabulary"
        f" {texts['vocabulary']:,}\nModel      {model.family}, {model.layers} layers,"
        f" width {model.width}, context {model.context}: {count:,}"
        f" parameters\nOptimizer  {config.optimizer}, learning rate"
        f" {config.learning_rate:g}{adam}; {totals}\nRun        {config.steps:,} steps"
        f" ({warmup_steps(config):,} of warm-up) of {config.batch_size} x"
        f" {model.context} tokens{parts} ({tokens / 1e6:,.2f} M, {passes:.2g} passes"
        f" over the text) on {devices} in {run['dtype']}\n"
    )


def store_result(config: Config, result: dict[str, Any]) -> None:
    """Write how the run ended, for ``compare`` to read; its seconds are those of all
    steps, in all sessions.
    """
    lines = logs.read_lines(config.run_folder / "log.jsonl")
    validation = [
        line["validation_loss"] for line in lines if "validation_loss" in line
    ]
    tokens = config.batch_size * config.model.context
    seconds = sum(
        tokens / line["tokens_per_second"]
        for line in lines
        if "tokens_per_second" in line
    )
    result = {
        **result,
        "best_validation_loss": min(validation, default=result.get("validation_loss")),
    }
    logs.write_json(
        config.run_folder / "result.json",
        {**result, "train_seconds": round(seconds, 1)},
    )


def plot_losses(folder: Path) -> None:
    """Draw the losses of the run in ``folder`` as ``loss.png``."""
    from matplotlib.figure import Figure  # which a refusal should not wait for

    figure, lines = Figure(layout="constrained"), logs.read_lines(folder / "log.jsonl")
    axes = figure.add_subplot()
    for name, look, opacity in (("loss", "-", 0.4), ("validation_loss", "-o", 1)):
        points = [(line["step"], line[name]) for line in lines if name in line]
        axes.plot(
            *zip(*points, strict=True),
            look,
            color="C0",
            alpha=opacity,
            label=name.replace("_", " "),
        )
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.legend(frameon=False)
    figure.savefig(folder / "loss.png", dpi=150)
