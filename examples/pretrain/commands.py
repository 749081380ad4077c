# SPDX-License-Identifier: Apache-2.0
"""What the model of a run is used for, finished or not.

It is scored, continues a text, or is exported.
"""

import dataclasses
import functools
import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from . import data
from .checkpoint import Checkpoints
from .checks import check_ranges
from .config import Config, Evaluate, Export, Generate, RunError
from .flat import from_dict
from .mesh import make_layout
from .prepare.tokenizer import end_of_text
from .train import evaluation, initialize, vocabulary_of

EXPORTED = (
    "model.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


class Trained(NamedTuple):
    """A model out of a checkpoint."""

    config: Config
    dataset: data.Dataset
    graphdef: nnx.GraphDef
    params: dict
    step: int


def read_run(
    folder: Path, tokens: Path | None = None
) -> tuple[dict[str, Any], Config, data.Dataset]:
    """``run.json`` of the run in ``folder``, its configuration and its data.

    The data are what it was trained on, or ``tokens``.

    Raises:
        RunError: if there is no such run, or its token files are gone or have changed.
    """
    try:
        run: dict[str, Any] = json.loads((folder / "run.json").read_text())
        config = from_dict(run["config"])
        fingerprint = run["fingerprint"]
        trained_on = Path(run["data"]["folder"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{folder} is not the folder of a run: its run.json is missing or damaged"
        ) from error
    dataset = data.load(tokens or trained_on)
    if tokens is None and dataset.manifest["fingerprint"] != fingerprint:
        raise RunError(
            f"{trained_on} is not the text that {folder} was trained on: pass the"
            " folder to use as --tokens"
        )
    if dataset.manifest["tokenizer_sha256"] != run["data"].get("tokenizer_sha256"):
        raise RunError(f"{dataset.folder} has another tokenizer than {folder}")
    return run, config, dataset


def load(folder: Path, step: int | None = None, tokens: Path | None = None) -> Trained:
    """The model of the run in ``folder`` after ``step`` updates, on the first device.

    With its data, or ``tokens``.

    Raises:
        RunError: as ``read_run``, and if there is no such checkpoint.
    """
    _, config, dataset = read_run(folder, tokens)
    # XLA's attention runs on any device.
    network = dataclasses.replace(config.model, attention="xla")
    config = dataclasses.replace(config, model=network)
    graphdef, params = initialize(config, dataset)
    params = make_layout().parameters(params)
    with closing(Checkpoints(folder / "checkpoints")) as checkpoints:
        chosen = chosen_step(folder, checkpoints.steps(), step)
        found, _ = checkpoints.restore(chosen, params=params)
    return Trained(config, dataset, graphdef, found["params"], chosen)


def chosen_step(folder: Path, there: Sequence[int], step: int | None) -> int:
    """``step``, or the newest of those that have a checkpoint.

    Raises:
        RunError: if there is no such checkpoint.
    """
    if step is None and there:
        return there[-1]
    if step is not None and step in there:
        return step
    which = ""
    if step is not None:
        which = f" of step {step}"
    steps = ", ".join(map(str, there)) or "none"
    raise RunError(f"no checkpoint{which} in {folder}: there are {steps}")


@functools.partial(jax.jit, static_argnums=0)
def next_logits(
    graphdef: nnx.GraphDef, params: Any, window_T: jax.Array, last: jax.Array
) -> jax.Array:
    """Logits (V,) of the token after position ``last`` of the window."""
    return nnx.merge(graphdef, params)(window_T[None])[0, last].astype(jnp.float32)


def continuation(
    model: Trained, prompt: str, *, new_tokens: int, temperature: float, seed: int
) -> str:
    """``prompt`` and its continuation by at most ``new_tokens`` tokens.

    It stops at the end of a document.
    """
    tokenizer = model.dataset.tokenizer
    context = model.config.model.context
    end = end_of(model.dataset)
    start = tokenizer.encode(prompt, add_special_tokens=False).ids or [end]
    tokens = list(start)
    for key in jax.random.split(jax.random.key(seed), new_tokens):
        seen = np.array(tokens[-context:], np.int32)
        # Of fixed length: one compilation. What follows ``seen`` has no effect.
        window = np.resize(seen, context)
        logits = next_logits(model.graphdef, model.params, window, len(seen) - 1)
        token = int(draw(key, logits, temperature))
        if token == end:
            break
        tokens.append(token)
    # Decoded with the prompt: alone, a word's leading space would be lost under
    # SentencePiece.
    return prompt + tokenizer.decode(tokens)[len(tokenizer.decode(start)) :]


def end_of(dataset: data.Dataset) -> int:
    """The token that ends a document."""
    return end_of_text(dataset.tokenizer, dataset.manifest.get("end_token"))


def draw(key: jax.Array, logits: jax.Array, temperature: float) -> jax.Array:
    """A token; the likeliest one without a temperature."""
    if temperature > 1e-6:
        return jax.random.categorical(key, logits / temperature)
    return jnp.argmax(logits)  # divided by less, logits could overflow


def check_tokens(tokens: Path | None, flag: str) -> None:
    """Refuse a number as the folder of token files.

    Args:
        tokens: the value of --tokens.
        flag: the option of a number of tokens.

    Raises:
        RunError: naming it.
    """
    if tokens is None or tokens.exists():
        return
    if str(tokens).replace("_", "").isdecimal():
        raise RunError(
            f"--tokens is a folder of token files, and there is no folder {tokens}: for"
            f" a number of tokens, write {flag} {tokens}"
        )


def evaluate(options: Evaluate) -> None:
    """Print the score of a run's model."""
    check_ranges(vars(options))
    check_tokens(options.tokens, "--validation-tokens")
    trained = load(options.run, options.step, options.tokens)
    count = options.validation_tokens or trained.config.validation_tokens
    config = dataclasses.replace(trained.config, validation_tokens=count)
    score_of = evaluation(config, trained.dataset, trained.graphdef, make_layout())
    score = score_of(trained.params)
    print(
        f"step {trained.step:,}: loss {score.loss:.4f} nats per token,"
        f" {score.bits_per_byte:.4f} bits per byte (validation text of"
        f" {trained.dataset.folder})"
    )


def generate(options: Generate) -> None:
    """Print a continuation of a text."""
    check_ranges(vars(options))
    check_tokens(options.tokens, "--sample-tokens")
    trained = load(options.run, options.step, options.tokens)
    text = continuation(
        trained,
        options.prompt,
        new_tokens=options.sample_tokens,
        temperature=options.temperature,
        seed=options.seed,
    )
    print(text)


def export(options: Export) -> None:
    """Write a run's model for Hugging Face transformers."""
    from .models import hugging_face  # needs safetensors

    there = [name for name in EXPORTED if (options.output / name).exists()]
    if there and not options.overwrite:
        raise RunError(
            f"{options.output} has a {there[0]}: pass --overwrite to replace it, or"
            " another --output"
        )
    trained = load(options.run, options.step, options.tokens)
    vocabulary = vocabulary_of(trained.config, trained.dataset)
    params = jax.device_get(trained.params)
    tokenizer = trained.dataset.tokenizer
    end = end_of(trained.dataset)
    model = trained.config.model
    hugging_face.save_hf(options.output, model, vocabulary, params, end)
    hugging_face.save_tokenizer(options.output, tokenizer, end)
    print(
        f"step {trained.step:,} of {options.run}:"
        f" {options.output}/{', '.join(EXPORTED)}"
    )
