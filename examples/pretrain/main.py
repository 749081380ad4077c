# SPDX-License-Identifier: Apache-2.0
"""The command line: read the configuration, refuse what cannot run, prepare, train, show."""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import tyro
from rich.console import Console

from examples.analysis.plot_loss import plot_loss

from . import configs, data, logs
from .checkpoint import Checkpoints
from .config import Config, RunError, check, differences, to_dict
from .evaluate import Score
from .generate import generate
from .optimizers import parameter_table
from .prepare import python_source
from .train import Trainer, compute_dtype


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    console = Console(markup=False, highlight=False, soft_wrap=True)
    try:
        config = parse(sys.argv[1:] if arguments is None else arguments)
        check(config)
        stored = stored_run(config)
        train(config, stored, console)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command with --resume goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


def parse(arguments: Sequence[str]) -> Config:
    """The configuration that ``--config`` names, with every other flag put over it."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", nargs="?", default="first_run")
    named, _ = first.parse_known_args(arguments)
    return tyro.cli(
        Config,
        default=configs.load(named.config),
        args=list(arguments),
        prog="python -m examples.pretrain",
        config=(tyro.conf.FlagCreatePairsOff,),
    )


def stored_run(config: Config) -> dict[str, Any] | None:
    """What ``run.json`` says of the run to be continued, None where a run begins.

    Raises:
        RunError: where another run is in the way, or the run is not the one that ``config`` describes.
    """
    folder, file = config.run_folder, config.run_folder / "run.json"
    if not folder.exists():
        if config.resume:
            raise RunError(f"there is no run in {folder}: leave --resume out to begin it, or check --name")
        return None
    if config.overwrite:
        if not file.exists() and any(folder.iterdir()):
            raise RunError(f"{folder} is not a run (no run.json in it): --overwrite will not delete it")
        return None
    if not config.resume:
        raise RunError(f"{folder} exists: --resume goes on with it, --overwrite begins it anew, --name starts another")
    try:
        stored = json.loads(file.read_text())
        changed = differences(stored["config"], config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"cannot resume: {file} is missing or damaged; --overwrite begins the run anew") from error
    if changed:
        raise RunError(f"cannot resume {folder} with other settings: {'; '.join(changed)}")
    return stored


def train(config: Config, stored: dict[str, Any] | None, console: Console) -> Score:
    """A whole run: text, tokens, updates, plot, sample."""
    began = time.perf_counter()
    dataset = data.load(python_source.prepare(config.data, console.print))
    fingerprint = dataset.manifest["fingerprint"]
    if stored and stored["fingerprint"] != fingerprint:
        raise RunError(
            f"cannot resume {config.run_folder}: it was trained on other text ({stored['data']['folder']}, "
            f"now {dataset.folder})"
        )
    if config.overwrite:
        shutil.rmtree(config.run_folder, ignore_errors=True)
    config.run_folder.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(config.run_folder / "checkpoints", config.keep_checkpoints)
    trainer = Trainer(config, dataset, checkpoints)
    introduce(config, stored, dataset, trainer, console)
    trainer.resume()
    if config.resume:
        console.print(f"Going on after step {trainer.start:,}" if trainer.start else "No checkpoint: from the start")
    log = logs.Log(config.run_folder / "log.jsonl", trainer.start)
    score = trainer.run(log, console)
    log.close()
    checkpoints.close()
    finish(config, dataset, trainer, console)
    console.print(
        f"\nFinal validation loss {score.loss:.4f} ({score.bits_per_byte:.3f} bits per byte) after {config.steps:,} "
        f"steps of {config.optimizer}; {time.perf_counter() - began:.0f} s in all.\n"
        f"Log, plot, sample and checkpoint: {config.run_folder}/"
    )
    return score


def introduce(
    config: Config, stored: dict[str, Any] | None, dataset: data.Dataset, trainer: Trainer, console: Console
) -> None:
    """Say what is about to be trained, and store it with the run."""
    params = trainer.state.params
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    table, totals = parameter_table(params, config.optimizer)
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
    partial = config.run_folder / "run.json.partial"
    partial.write_text(json.dumps(run, indent=2) + "\n")
    partial.replace(config.run_folder / "run.json")
    model, texts, tokens = config.model, dataset.manifest, config.steps * config.batch_size * config.model.context
    console.print(
        f"Text       {texts['source']}: {texts['train']['documents']} files ({texts['train']['tokens']:,} tokens of "
        f"{dataset.vocabulary:,} kinds) to train on, {texts['validation']['documents']} others to validate\n"
        f"Model      {model.family}, {model.layers} layers, width {model.width}, context {model.context}: "
        f"{count:,} parameters\n"
        f"Optimizer  {config.optimizer}, learning rate {config.learning_rate:g}; {totals}\n"
        f"Run        {config.steps:,} steps of {config.batch_size} x {model.context} tokens ({tokens / 1e6:.2f} M) "
        f"on {environment['device']['kind']} in {run['dtype']}\n"
    )


def finish(config: Config, dataset: data.Dataset, trainer: Trainer, console: Console) -> None:
    """Draw the losses, and let the model write."""
    plot_loss([config.run_folder], config.run_folder / "loss.png")
    if not config.sample_tokens:
        return
    text = generate(
        trainer.graphdef,
        trainer.state.params,
        dataset.tokenizer,
        config.prompt,
        context=config.model.context,
        new_tokens=config.sample_tokens,
        temperature=config.temperature,
        seed=config.seed,
    )
    (config.run_folder / "sample.txt").write_text(text + "\n")
    console.print(f"\nThe model, given {config.prompt!r}:\n\n{text}")
