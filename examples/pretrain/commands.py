# SPDX-License-Identifier: Apache-2.0
"""What one can do with a finished (or half-finished) run: score it, let it write, export it."""

import dataclasses
import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import tyro
from flax import nnx
from rich.console import Console

from . import data
from .checkpoint import Checkpoints, Damaged
from .config import MOST_SAMPLED, Config, RunError, flag, from_dict
from .generate import generate as continuation
from .models import hugging_face
from .optimizers import make_optimizer
from .train import TrainState, evaluation, initialise, schedule, vocabulary_of

Run = Annotated[Path, tyro.conf.Positional]
EXPORTED = ("model.safetensors", "config.json", "tokenizer.json")


@dataclass(frozen=True)
class Evaluate:
    """Score the model of a run on its validation set, or on that of other token files."""

    run: Run
    """Folder of the run: runs/<name>."""
    step: int | None = None
    """Step of the checkpoint; None: the newest."""
    average: int = 1
    """How many kept checkpoints, up to that one, whose mean weights are scored."""
    tokens: Path | None = None
    """Folder of token files made with the same tokenizer; None: those of the run."""
    validation_tokens: int | None = None
    """Predictions to score, spread evenly over the validation split; None: as many as the run does."""


@dataclass(frozen=True)
class Generate:
    """Let the model of a run continue a text."""

    run: Run
    """Folder of the run: runs/<name>."""
    step: int | None = None
    """Step of the checkpoint; None: the newest."""
    prompt: str | None = None
    """The text; None: the run's."""
    tokens: Path | None = None
    """Folder of the token files, where they are no longer where they were."""
    sample_tokens: int = 160
    """Length of the continuation."""
    samples: int = 1
    """How many continuations."""
    temperature: float = 0.6
    """Randomness: 0 takes the likeliest token each time."""
    seed: int = 0
    """Seed of the draws."""


@dataclass(frozen=True)
class Export:
    """Write the model of a run as safetensors and config.json, for Hugging Face transformers and others to load."""

    run: Run
    """Folder of the run: runs/<name>."""
    output: Path
    """Folder to write."""
    overwrite: bool = False
    """Replace a model that is there."""
    tokens: Path | None = None
    """Folder of the token files, where they are no longer where they were."""
    step: int | None = None
    """Step of the checkpoint; None: the newest."""


class Trained(NamedTuple):
    """A model out of a checkpoint."""

    config: Config
    dataset: data.Dataset
    graphdef: nnx.GraphDef
    params: dict
    step: int


class Stored(NamedTuple):
    """A run as its folder tells it: ``run.json``, the configuration in it, and the data it was trained on."""

    record: dict[str, Any]
    config: Config
    dataset: data.Dataset


def read_run(folder: Path, tokens: Path | None = None) -> Stored:
    """The run in ``folder`` and the data it was trained on, or ``tokens``.

    Raises:
        RunError: where there is no such run, or its token files are gone or are not those it knew.
    """
    try:
        run: dict[str, Any] = json.loads((folder / "run.json").read_text())
        config = from_dict(run["config"])
        fingerprint, where = run["fingerprint"], Path(run["data"]["folder"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{folder} is not the folder of a run: its run.json is missing or damaged") from error
    dataset = data.load(tokens or where)
    if tokens is None and dataset.manifest["fingerprint"] != fingerprint:
        raise RunError(f"{where} holds other text than {folder} was trained on: --tokens names a folder to use instead")
    if dataset.manifest["tokenizer_sha256"] != run["data"].get("tokenizer_sha256"):
        raise RunError(f"{dataset.folder} was made with another tokenizer than the text of {folder}")
    return Stored(run, config, dataset)


def load(folder: Path, step: int | None = None, tokens: Path | None = None, average: int = 1) -> Trained:
    """The model of the run in ``folder`` after ``step`` updates, and the data it was trained on, or ``tokens``.

    Its weights are the mean of those of the last ``average`` checkpoints.

    Raises:
        RunError: where there is no such run or checkpoint, or its token files are gone or are not those it knew.
    """
    _, config, dataset = read_run(folder, tokens)
    graphdef, params = initialise(config, dataset)
    state = jax.eval_shape(lambda p: TrainState(p, make_optimizer(config, schedule(config)).init(p)), params)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement()), state)
    while True:
        with closing(Checkpoints(folder / "checkpoints")) as checkpoints:
            last = chosen(folder, checkpoints.steps(), step, average)
            try:
                models = [checkpoints.restore(kept, like)[0].params for kept in last]
                break
            except Damaged as error:
                there = Checkpoints(folder / "checkpoints").steps()  # a run that goes on deletes its old ones
                if last == chosen(folder, there, step, average):
                    others = ", ".join(str(kept) for kept in there if kept not in last) or "none"
                    raise RunError(f"{error}: --step names another, there are {others}") from error
    params = models[0] if average == 1 else jax.tree.map(lambda *x: sum(x) / average, *models)
    return Trained(config, dataset, graphdef, params, last[-1])


def chosen(folder: Path, there: Sequence[int], step: int | None, average: int) -> list[int]:
    """The last ``average`` of the checkpoints that are ``there`` up to ``step``, or to the newest.

    Raises:
        RunError: where there is no such checkpoint, or there are not as many.
    """
    if not there or step not in (None, *there):
        listed = ", ".join(map(str, there)) or "none"
        raise RunError(f"no checkpoint{'' if step is None else f' of step {step}'} in {folder}: there are {listed}")
    last = [kept for kept in there if step is None or kept <= step][-average:]
    if len(last) < average:
        raise RunError(f"--average {average}: {folder} has kept {len(last)} checkpoints up to step {last[-1]}")
    return last


def placement() -> jax.sharding.Sharding:
    """Everything on the first device."""
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def evaluate(arguments: Sequence[str]) -> None:
    """``python -m examples.pretrain evaluate runs/name``."""
    options = tyro.cli(Evaluate, args=list(arguments), prog="python -m examples.pretrain evaluate")
    for name in ("validation_tokens", "average"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise RunError(f"{flag(name)} must be at least 1, got {value}")
    trained = load(options.run, options.step, options.tokens, options.average)
    config = trained.config
    if options.validation_tokens is not None:
        text = dataclasses.replace(config.data, validation_tokens=options.validation_tokens)
        config = dataclasses.replace(config, data=text)
    score = evaluation(config, trained.dataset, trained.graphdef)(trained.params)
    before = f" and {options.average - 1} before it" if options.average > 1 else ""
    Console(highlight=False).print(
        f"step {trained.step:,}{before}: loss {score.loss:.4f} nats per token, {score.bits_per_byte:.4f} bits per byte "
        f"(validation text of {trained.dataset.folder})",
        soft_wrap=True,
    )


def generate(arguments: Sequence[str]) -> None:
    """``python -m examples.pretrain generate runs/name --prompt "def "``."""
    options = tyro.cli(Generate, args=list(arguments), prog="python -m examples.pretrain generate")
    if options.sample_tokens > MOST_SAMPLED:
        raise RunError(f"--sample-tokens must be at most {MOST_SAMPLED}, got {options.sample_tokens}")
    if options.sample_tokens < 1 or options.samples < 1 or not 0 <= options.temperature < float("inf"):
        raise RunError("--sample-tokens and --samples must be at least 1, --temperature a finite number, 0 or more")
    if not 0 <= options.seed < 2**31:
        raise RunError(f"--seed must lie in 0..2^31, got {options.seed}")
    trained = load(options.run, options.step, options.tokens)
    for number in range(options.samples):
        text = continuation(
            trained.graphdef,
            trained.params,
            trained.dataset.tokenizer,
            trained.config.prompt if options.prompt is None else options.prompt,
            context=trained.config.model.context,
            new_tokens=options.sample_tokens,
            temperature=options.temperature,
            seed=options.seed + number,
        )
        print(text if options.samples == 1 else f"--- {number + 1}\n{text}")


def export(arguments: Sequence[str]) -> None:
    """``python -m examples.pretrain export runs/name --output folder``."""
    options = tyro.cli(Export, args=list(arguments), prog="python -m examples.pretrain export")
    there = [name for name in EXPORTED if (options.output / name).exists()]
    if there and not options.overwrite:
        raise RunError(f"{options.output} has a {there[0]}: --overwrite replaces it, --output names another folder")
    trained = load(options.run, options.step, options.tokens)
    vocabulary = vocabulary_of(trained.config, trained.dataset)
    hugging_face.save_hf(options.output, trained.config.model, vocabulary, jax.device_get(trained.params))
    trained.dataset.tokenizer.save(str(options.output / "tokenizer.json"))
    print(f"step {trained.step:,} of {options.run}: {options.output}/{', '.join(EXPORTED)}")
