# SPDX-License-Identifier: Apache-2.0
"""A whole run and its folder: what is in the way, what is stored, what is trained, what is left behind."""

import functools
import json
import shutil
import time
from contextlib import closing, nullcontext
from typing import IO, Any

import jax
import optax
from flax import nnx
from rich.console import Console

from . import cluster, data, logs
from .checkpoint import Checkpoints, Damaged
from .commands import Trained, load
from .config import Config, Diverged, MatrixConfig, RunError, differences, flag, to_dict
from .evaluate import Score
from .generate import generate
from .optimizers import has_setting, parameter_table
from .plot_loss import plot_loss
from .processes import LOCK, lock, on_signals
from .train import Trainer, compute_dtype, first_row_length, warmup_steps

# What rows are to be long at least, and as was best, where weights stay as long as they begin (docs/choosing.md).
SHORT_ROW, BEST_ROW = 0.4, 0.65


def stored(config: Config) -> dict[str, Any] | None:
    """What ``run.json`` says of the run to be continued, None where a run begins.

    Raises:
        RunError: where another run is in the way, or the run is not the one that ``config`` describes.
    """
    folder, file = config.run_folder, config.run_folder / "run.json"
    if not folder.exists():
        if config.resume:
            raise RunError(f"there is no run in {folder}: leave --resume out to begin it, or check --name")
        return None
    if not file.exists() and {path.name for path in folder.iterdir()} <= {LOCK, "run.json.partial"}:
        return None  # stopped before there was anything to go on with
    if config.overwrite:
        if not file.exists() and any(folder.iterdir()):
            raise RunError(f"{folder} is not a run (no run.json in it): --overwrite will not delete it")
        return None
    if not config.resume:
        raise RunError(f"{folder} exists: --resume goes on with it, --overwrite begins it anew, --name starts another")
    try:
        found = json.loads(file.read_text())
        changed = differences(found["config"], config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"cannot resume: {file} is missing or damaged; --overwrite begins the run anew") from error
    if changed:
        longer = changed[0].startswith("--steps ")
        way_out = (
            f" (all learning rates depend on it; --init-from {folder} --name NEW goes on with the weights)" * longer
        )
        raise RunError(f"cannot resume {folder} with other settings: {'; '.join(changed)}{way_out}")
    return found


def train(config: Config, stored: dict[str, Any] | None, console: Console) -> Score:
    """A whole run: text, tokens, updates, plot, sample."""
    began = time.perf_counter()
    dataset = cluster.first_of_all(lambda: data.open_corpus(config.data, console.print))
    fingerprint = dataset.manifest["fingerprint"]
    if len(set(cluster.told(fingerprint))) > 1:
        raise RunError(f"the processes have different texts in {dataset.folder}")
    if stored and stored["fingerprint"] != fingerprint:
        raise RunError(
            f"cannot resume {config.run_folder}: it was trained on other text ({stored['data']['folder']}, "
            f"now {dataset.folder})"
        )
    # What cannot run is refused before anything is touched.
    begun = cluster.together(lambda: beginning(config, dataset))
    trainer = cluster.together(lambda: Trainer(config, dataset, begun and begun.params))
    cluster.together(lambda: logs.check_trackers(config))
    if begun:
        console.print(f"Weights    of {config.init_from} after step {begun.step:,}")
    with cluster.together(lambda: hold(config) if cluster.first() else None) or nullcontext():
        score = train_in_folder(config, stored, dataset, trainer, console)
    console.print(
        f"\nFinal validation loss {score.loss:.4f} ({score.bits_per_byte:.3f} bits per byte) after {config.steps:,} "
        f"steps of {config.optimizer}; {time.perf_counter() - began:.0f} s in all.\n"
        f"Log, plot, sample and checkpoint: {config.run_folder}/"
    )
    return score


def beginning(config: Config, dataset: data.Dataset) -> Trained | None:
    """The model to begin with, where a run of it is named and this one has no checkpoint of its own.

    Raises:
        RunError: where there is none, or its text had another tokenizer.
    """
    own = (config.run_folder / "checkpoints").glob("*") if config.resume else ()
    if config.init_from is None or any(path.name.isdecimal() for path in own):
        return None
    if not cluster.alone():
        raise RunError("--init-from is for one process: leave --coordinator out, and --resume it with several")
    return load(config.init_from, tokens=dataset.folder)


def train_in_folder(
    config: Config, stored: dict[str, Any] | None, dataset: data.Dataset, trainer: Trainer, console: Console
) -> Score:
    """Train, and leave everything in the run's folder, which is there and held."""
    begin = functools.partial(introduce, config, stored, dataset, trainer, console)
    cluster.first_of_all(begin if cluster.first() else functools.partial(shared, config))
    checkpoints = Checkpoints(config.run_folder / "checkpoints", config.keep_checkpoints)
    resume(trainer, checkpoints, console)
    if stored:
        console.print(f"Going on after step {trainer.start:,}" if trainer.start else "No checkpoint: from the start")
    log = cluster.first_of_all(lambda: open_log(config, trainer.start))
    try:
        with closing(log), closing(checkpoints), on_signals(trainer.stop), cluster.leaving_at_once():
            score = trainer.run(log, checkpoints, console)
        params = trainer.layout.local(trainer.state.params)
        if cluster.first():
            store_result(config, {"validation_loss": score.loss, "bits_per_byte": score.bits_per_byte})
            finish(config, dataset, trainer.graphdef, params, console)
    except Diverged as error:
        if cluster.first():
            store_result(config, {"diverged": str(error)})
        raise
    except OSError as error:
        if not cluster.alone():
            raise  # the others would wait: this process ends in ``cluster.joined``
        raise RunError(f"{error}; {way_on(config, checkpoints)}") from error
    return score


def resume(trainer: Trainer, checkpoints: Checkpoints, console: Console) -> None:
    """Go to the newest checkpoint that every process can read, where there is one, and set those behind it aside.

    Raises:
        RunError: where there are checkpoints, but none can be read, or they are not this run's.
    """
    damaged: dict[int, str] = {}

    def attempt(step: int) -> str:
        try:
            trainer.resume(checkpoints, step)
        except Damaged as error:
            return str(error)
        return ""

    for step in reversed(checkpoints.steps()):
        said = next(filter(None, cluster.told(cluster.together(functools.partial(attempt, step)))), "")
        if not said:
            break
        damaged[step] = said
    else:
        if damaged:
            raise RunError(f"{next(iter(damaged.values()))}, and there is no whole one: --overwrite begins anew")
    for step, said in damaged.items():
        place = cluster.from_the_first(lambda step=step: str(checkpoints.set_aside(step)))
        console.print(f"{said}: set aside as {place}")
    checkpoints.reload()


def way_on(config: Config, checkpoints: Checkpoints) -> str:
    """What is safe where the run's folder cannot be written, and how to go on."""
    checkpoints.reload()
    saved, free = checkpoints.steps(), shutil.disk_usage(config.run_folder).free / 1e6
    there = f"after step {saved[-1]:,}, which is saved" if saved else "from the start, as nothing is saved yet"
    return f"{free:,.1f} MB are free in {config.run_folder}: the same command with --resume goes on {there}"


def open_log(config: Config, start: int) -> logs.Log:
    """The log and what else takes its records; only the first process writes."""
    file, writes = config.run_folder / "log.jsonl", cluster.first()
    return logs.Log(file, start, logs.trackers(config, start) if writes else (), writes=writes)


def shared(config: Config) -> None:
    """Refuse a folder that this process does not see.

    Raises:
        RunError: naming it.
    """
    if not (config.run_folder / "run.json").exists():
        raise RunError(f"the first process writes {config.run_folder}, which must lie where all processes see it")


def hold(config: Config) -> IO[bytes] | None:
    """Make the run's folder, empty with ``--overwrite``, and keep other processes out of it.

    Raises:
        RunError: where another process is at work in it.
    """
    folder = config.run_folder
    folder.mkdir(parents=True, exist_ok=True)
    held = lock(folder)
    if config.overwrite:
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()
    return held


def store_result(config: Config, result: dict[str, Any]) -> None:
    """How the run ended, for ``compare`` to read; its seconds are those of all steps, in whatever sessions."""
    lines = logs.read_lines(config.run_folder / "log.jsonl")
    validation = [line["validation_loss"] for line in lines if "validation_loss" in line]
    tokens = config.batch_size * config.model.context
    seconds = sum(tokens / line["tokens_per_second"] for line in lines if "tokens_per_second" in line)
    best = {"best_validation_loss": min(validation) if validation else None, "train_seconds": round(seconds, 1)}
    logs.write_json(config.run_folder / "result.json", {**result, **best})


def introduce(
    config: Config, stored: dict[str, Any] | None, dataset: data.Dataset, trainer: Trainer, console: Console
) -> None:
    """Say what is about to be trained, and on what, and store it with the run."""
    params = trainer.state.params
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    table, totals = parameter_table(params, config)
    (config.run_folder / "parameters.txt").write_text(table + "\n")
    environment = logs.environment()
    run = {
        "config": to_dict(config),
        "fingerprint": dataset.manifest["fingerprint"],
        "data": {"folder": str(dataset.folder), **dataset.manifest},
        "parameters": count,
        "dtype": str(compute_dtype(config)),
        "sessions": [*(stored["sessions"] if stored else []), environment],
    }
    logs.write_json(config.run_folder / "run.json", run)
    model, texts, tokens = config.model, dataset.manifest, config.steps * config.batch_size * config.model.context
    devices = f"{trainer.layout.devices} x {environment['device']['kind']} ({config.mesh})"
    parts = f", {config.micro_batch} at a time," if config.micro_batch else ""
    chosen = {name: value for name, value in changed(config).items() if has_setting(config.optimizer, name)}
    chosen |= {"AdamW's rate": f"{config.adam_learning_rate:g}"} if config.adam_learning_rate else {}
    settings = "".join(f", {name.replace('_', ' ')} {value}" for name, value in chosen.items())
    console.print(
        f"Text       {texts['source']}: {texts['train']['documents']:,} documents ({texts['train']['tokens']:,} tokens "
        f"of {dataset.vocabulary:,} kinds) to train on, {texts['validation']['documents']:,} others to validate\n"
        f"Model      {model.family}, {model.layers} layers, width {model.width}, context {model.context}: "
        f"{count:,} parameters\n"
        f"Optimizer  {config.optimizer}, learning rate {config.learning_rate:g}{settings}; {totals}\n"
        f"Run        {config.steps:,} steps of {config.batch_size} x {model.context} tokens{parts} "
        f"({tokens / 1e6:,.2f} M) on {devices if config.mesh else environment['device']['kind']} in {run['dtype']}\n"
        + "".join(f"{note}\n" for note in remarks(config))
    )


def changed(config: Config) -> dict[str, Any]:
    """Settings of the matrix optimizer that are not the usual ones."""
    usual = MatrixConfig()
    return {name: value for name, value in vars(config.matrix).items() if value != getattr(usual, name)}


def remarks(config: Config) -> list[str]:
    """What is not as somebody who wrote these flags may think."""
    warmup, row = warmup_steps(config), first_row_length(config)
    unused = [name for name in changed(config) if not has_setting(config.optimizer, name)]
    notes = [f"Warm-up    {warmup} of these steps, not {config.warmup_steps}"] * (warmup != config.warmup_steps)
    notes += [f"Not used   {flag(f'matrix.{name}')}, which {config.optimizer} does not have" for name in unused]
    if config.matrix.norm_control == "hyperball" and row < SHORT_ROW:
        std = config.model.hidden_std * BEST_ROW / row
        notes.append(f"Rows       begin and stay {row:.2f} long; 0.5 to 0.8 is better: --model.hidden-std {std:.2g}")
    return notes


def finish(
    config: Config, dataset: data.Dataset, graphdef: nnx.GraphDef, params: optax.Params, console: Console
) -> None:
    """Draw the losses, and let the model write."""
    plot_loss([config.run_folder], config.run_folder / "loss.png")
    if not config.sample_tokens:
        return
    text = generate(
        graphdef,
        params,
        dataset.tokenizer,
        config.prompt,
        context=config.model.context,
        new_tokens=config.sample_tokens,
        temperature=config.temperature,
        seed=config.seed,
    )
    (config.run_folder / "sample.txt").write_text(text + "\n")
    console.print(f"\nThe model, given {config.prompt!r}:\n\n{text}")
