# SPDX-License-Identifier: Apache-2.0
"""A whole run and its folder.

``main`` checks everything, trains, and writes what is left behind.
"""

import json
import shlex
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
from .paths import check_writable
from .processes import LOCK, lock, on_signals
from .train import Trainer, compute_dtype, warmup_steps

# run.json of the run to be continued; None if a new one starts.
Stored = dict[str, Any] | None
# What a run writes beside its checkpoints.
WRITTEN = ("parameters.txt", "log.jsonl", "loss.png", "result.json", "run.json")


def main(config: Config) -> None:
    """Train as ``config`` says, alone or with other processes."""
    optimizers.settings_of(config.optimizer)
    mesh.check(config)
    check_writable(config.run_folder)
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
    folder = config.run_folder
    if not folder.exists():
        if config.resume:
            raise RunError(
                f"there is no run in {folder}: remove --resume to start it, or check"
                " --name"
            )
        return None
    if not (folder / "run.json").exists():
        there = {path.name for path in folder.iterdir()}
        if there <= {LOCK, "run.json.partial"}:
            return None  # stopped before there was anything to resume
        raise RunError(
            f"{folder} is not a run (no run.json in it): choose another --name"
        )
    if config.overwrite:
        return None
    if not config.resume:
        raise RunError(
            f"{folder} exists: --resume continues it, --overwrite replaces it, --name"
            " starts another"
        )
    return read_stored(config)


def read_stored(config: Config) -> dict[str, Any]:
    """``run.json`` of the run that ``config`` continues.

    Raises:
        RunError: if it is damaged, or of a run with other settings.
    """
    folder = config.run_folder
    file = folder / "run.json"
    try:
        found = json.loads(file.read_text())
        changed = differences(found["config"], config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"cannot resume: {file} is damaged; another --name starts again"
        ) from error
    if not changed:
        return found
    way_out = ""
    if any(change.startswith("--steps ") for change in changed):
        way_out = (
            f" (learning rates depend on it; --init-from {shlex.quote(str(folder))}"
            " --name NEW starts a new run from its weights)"
        )
    raise RunError(
        f"cannot resume {folder} with other settings: {'; '.join(changed)}{way_out}"
    )


def train(config: Config, stored: Stored, console: Console) -> Score:
    """Train: text, tokens, updates, plot."""
    began = time.perf_counter()
    dataset = cluster.first_of_all(lambda: data.open_corpus(config, console))
    check_text(config, stored, dataset)
    # What cannot run is refused before anything is written.
    weights = cluster.together(lambda: other_weights(config, dataset))
    initial = weights and weights.params
    trainer = cluster.together(lambda: Trainer(config, dataset, initial))
    if weights:
        console.print(f"Weights    of {config.init_from} after step {weights.step:,}")
    with cluster.together(lambda: hold(config)) or nullcontext():
        score = train_in_folder(config, stored, dataset, trainer, console)
    seconds = time.perf_counter() - began
    console.print(
        f"\nFinal validation loss {score.loss:.4f} ({score.bits_per_byte:.3f} bits per"
        f" byte) after {config.steps:,} steps of {config.optimizer}; {seconds:.0f} s"
        f" total.\nLog, plot and checkpoint: {config.run_folder}/\nGenerate text:"
        f" python -m examples.pretrain generate {shlex.quote(str(config.run_folder))}"
        " --prompt TEXT"
    )
    return score


def check_text(config: Config, stored: Stored, dataset: data.Dataset) -> None:
    """Refuse a text that differs among the processes, or from that of the run so far.

    Raises:
        RunError: naming the folder of the text.
    """
    fingerprint = dataset.manifest["fingerprint"]
    if len(set(cluster.gathered(fingerprint))) > 1:
        raise RunError(f"the processes have different texts in {dataset.folder}")
    if stored and stored["fingerprint"] != fingerprint:
        raise RunError(
            f"cannot resume {config.run_folder}: it was trained on other text"
            f" ({stored['data']['folder']}, now {dataset.folder})"
        )


def other_weights(config: Config, dataset: data.Dataset) -> Trained | None:
    """The model of ``--init-from``, unless this run has a checkpoint of its own.

    Raises:
        RunError: if there is none, or its text had another tokenizer.
    """
    if config.init_from is None:
        return None
    if config.resume and checkpoints_in(config.run_folder):
        return None
    if not cluster.alone():
        raise RunError(
            "--init-from works in one process only; --resume the new run with several"
        )
    return load(config.init_from, tokens=dataset.folder)


def checkpoints_in(folder: Path) -> list[Path]:
    """The complete checkpoints of a run; Orbax has other names for unfinished ones."""
    found = (folder / "checkpoints").glob("*")
    return [path for path in found if path.name.isdecimal()]


def hold(config: Config) -> IO[bytes] | None:
    """Make the run's folder, empty with ``--overwrite``, and lock it.

    Of several processes the first one does; the others do nothing.

    Raises:
        RunError: if another process has locked it.
    """
    if not cluster.first():
        return None
    folder = config.run_folder
    folder.mkdir(parents=True, exist_ok=True)
    held = lock(folder)
    if config.overwrite:
        for path in sorted(folder.glob("checkpoints/*")):
            number, _, _ = path.name.partition(".")
            if number.isdecimal():
                delete(path)
        for name in WRITTEN:
            delete(folder / name)
    return held


def delete(path: Path) -> None:
    """Delete a file or a folder, if there is one."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def train_in_folder(
    config: Config,
    stored: Stored,
    dataset: data.Dataset,
    trainer: Trainer,
    console: Console,
) -> Score:
    """Train, and write everything to the run's folder, which exists and is locked."""
    folder = config.run_folder

    def begin() -> None:
        if cluster.first():
            introduce(config, stored, dataset, trainer, console)
        elif not (folder / "run.json").exists():
            raise RunError(
                f"the first process writes {folder}, which all processes must see"
            )

    cluster.first_of_all(begin)
    checkpoints = Checkpoints(folder / "checkpoints", config.keep_checkpoints)
    if steps := checkpoints.steps():
        cluster.together(lambda: trainer.resume(checkpoints, steps[-1]))
    if stored:
        console.print(where_it_resumes(trainer.start))
    writes = cluster.first()
    log = cluster.first_of_all(lambda: logs.Log(folder, trainer.start, writes=writes))
    try:
        with (
            closing(log),
            closing(checkpoints),
            on_signals(trainer.stop),
            cluster.leaving_at_once(),
        ):
            score = trainer.run(log, checkpoints, console)
        if writes:
            result = {
                "validation_loss": score.loss,
                "bits_per_byte": score.bits_per_byte,
            }
            store_result(config, result)
            plot_losses(folder)
    except Diverged as error:
        if writes:
            store_result(config, {"diverged": str(error)})
        raise
    return score


def where_it_resumes(step: int) -> str:
    """Where a run continues, as a line for the user."""
    if step:
        return f"Resuming from step {step:,}"
    return "No checkpoint: from the start"


def introduce(
    config: Config,
    stored: Stored,
    dataset: data.Dataset,
    trainer: Trainer,
    console: Console,
) -> None:
    """Print and store what is about to be trained, and on what."""
    params = trainer.state.params
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    table, totals = optimizers.parameter_table(params, config)
    environment = logs.environment()
    sessions = []
    if stored:
        sessions = stored["sessions"]
    run = {
        "config": to_dict(config),
        "fingerprint": dataset.manifest["fingerprint"],
        "parameters": parameters,
        "data": {
            "folder": str(dataset.folder),
            "passes": passes_over(config, dataset),
            **dataset.manifest,
        },
        "dtype": str(compute_dtype(config)),
        "sessions": [*sessions, environment],
    }
    # First: a folder without it is no run.
    logs.write_json(config.run_folder / "run.json", run)
    (config.run_folder / "parameters.txt").write_text(table + "\n")
    lines = [
        text_line(dataset.manifest),
        model_line(config, parameters),
        optimizer_line(config, totals),
        run_line(config, run, environment["device"]["kind"]),
    ]
    console.print("\n".join(lines) + "\n")


def passes_over(config: Config, dataset: data.Dataset) -> float:
    """How often the training text is read."""
    sequences = len(data.Sequences(dataset, "train", config.model.context))
    return config.steps * config.batch_size / sequences


def text_line(manifest: dict[str, Any]) -> str:
    """The text, as a line for the user."""
    train = manifest["train"]
    validation = manifest["validation"]
    return (
        f"Text       {manifest['source']}: {train['documents']:,} training documents"
        f" ({train['tokens']:,} tokens), {validation['documents']:,} validation"
        f" documents; vocabulary {manifest['vocabulary']:,}"
    )


def model_line(config: Config, parameters: int) -> str:
    """The model, as a line for the user."""
    model = config.model
    return (
        f"Model      {model.family}, {model.layers} layers, width {model.width},"
        f" context {model.context}: {parameters:,} parameters"
    )


def optimizer_line(config: Config, totals: str) -> str:
    """The optimizer and the parameters it has, as a line for the user."""
    adam = ""
    if config.adam_learning_rate:
        adam = f", AdamW learning rate {config.adam_learning_rate:g}"
    return (
        f"Optimizer  {config.optimizer}, learning rate {config.learning_rate:g}{adam};"
        f" {totals}"
    )


def run_line(config: Config, run: dict[str, Any], device: str) -> str:
    """Steps, tokens and devices, as a line for the user."""
    context = config.model.context
    tokens = config.steps * config.batch_size * context
    parts = ""
    if config.micro_batch:
        parts = f", {config.micro_batch} at a time,"
    return (
        f"Run        {config.steps:,} steps ({warmup_steps(config):,} of warm-up) of"
        f" {config.batch_size} x {context} tokens{parts} ({tokens / 1e6:,.2f} M,"
        f" {run['data']['passes']:.2g} passes over the text) on"
        f" {devices_of(config, device)} in {run['dtype']}"
    )


def devices_of(config: Config, kind: str) -> str:
    """The devices that a run uses, of those of this ``kind`` that there are."""
    devices = kind
    if jax.device_count() > 1:
        devices = f"{config.devices} of {jax.device_count()} x {kind}"
    if config.devices > 1:
        devices += f" ({config.replicas} x {config.fsdp} FSDP)"
    return devices


def store_result(config: Config, result: dict[str, Any]) -> None:
    """Write how the run ended, for ``compare`` to read.

    Its seconds are those of all steps, in all sessions.
    """
    lines = logs.read_lines(config.run_folder / "log.jsonl")
    tokens = config.batch_size * config.model.context
    losses = []
    seconds = 0.0
    for line in lines:
        if "validation_loss" in line:
            losses.append(line["validation_loss"])
        if "tokens_per_second" in line:
            seconds += tokens / line["tokens_per_second"]
    stored = {
        **result,
        "best_validation_loss": min(losses, default=result.get("validation_loss")),
        "train_seconds": round(seconds, 1),
    }
    logs.write_json(config.run_folder / "result.json", stored)


def plot_losses(folder: Path) -> None:
    """Draw the losses of the run in ``folder`` as ``loss.png``."""
    from matplotlib.figure import Figure  # which a refusal should not wait for

    lines = logs.read_lines(folder / "log.jsonl")
    figure = Figure(layout="constrained")
    axes = figure.add_subplot()
    for name, look, opacity in (("loss", "-", 0.4), ("validation_loss", "-o", 1)):
        found = [line for line in lines if name in line]
        steps = [line["step"] for line in found]
        losses = [line[name] for line in found]
        label = name.replace("_", " ")
        axes.plot(steps, losses, look, color="C0", alpha=opacity, label=label)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.legend(frameon=False)
    figure.savefig(folder / "loss.png", dpi=150)
