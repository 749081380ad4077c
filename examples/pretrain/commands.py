# SPDX-License-Identifier: Apache-2.0
"""What a run's model is used for, finished or not: to be scored, to continue a text, to
be exported.
"""

import dataclasses
import functools
import json
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
from .prepare.token_files import end_of_text
from .train import evaluation, initialize, vocabulary_of

EXPORTED = ("model.safetensors", "config.json", "tokenizer.json")


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
    """``run.json`` of the run in ``folder``, its configuration, and the data it was
    trained on, or ``tokens``.

    Raises:
        RunError: if there is no such run, or its token files are gone or have changed.
    """
    try:
        run: dict[str, Any] = json.loads((folder / "run.json").read_text())
        config = from_dict(run["config"])
        fingerprint, where = run["fingerprint"], Path(run["data"]["folder"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{folder} is not the folder of a run: its run.json is missing or damaged"
        ) from error
    dataset = data.load(tokens or where)
    if tokens is None and dataset.manifest["fingerprint"] != fingerprint:
        raise RunError(
            f"{where} is not the text that {folder} was trained on: pass the folder to"
            " use as --tokens"
        )
    if dataset.manifest["tokenizer_sha256"] != run["data"].get("tokenizer_sha256"):
        raise RunError(f"{dataset.folder} has another tokenizer than {folder}")
    return run, config, dataset


def load(folder: Path, step: int | None = None, tokens: Path | None = None) -> Trained:
    """The model of the run in ``folder`` after ``step`` updates, on the first device,
    and its data, or ``tokens``.

    Raises:
        RunError: as ``read_run``, and if there is no such checkpoint.
    """
    _, config, dataset = read_run(folder, tokens)
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, attention="xla")
    )  # on any device
    graphdef, params = initialize(config, dataset)
    params = make_layout().parameters(params)
    with closing(Checkpoints(folder / "checkpoints")) as checkpoints:
        there = checkpoints.steps()
        if not there or step not in (None, *there):
            which = "" if step is None else f" of step {step}"
            raise RunError(
                f"no checkpoint{which} in {folder}: there are"
                f" {', '.join(map(str, there)) or 'none'}"
            )
        chosen = there[-1] if step is None else step
        found, _ = checkpoints.restore(chosen, params=params)
    return Trained(config, dataset, graphdef, found["params"], chosen)


@functools.partial(jax.jit, static_argnums=0)
def next_logits(
    graphdef: nnx.GraphDef, params: Any, window_T: jax.Array, last: jax.Array
) -> jax.Array:
    """Logits (V,) of the token after position ``last`` of the window."""
    return nnx.merge(graphdef, params)(window_T[None])[0, last].astype(jnp.float32)


def continuation(
    model: Trained, prompt: str, *, new_tokens: int, temperature: float, seed: int
) -> str:
    """``prompt`` and its continuation by at most ``new_tokens`` tokens; stops at the
    end of a file.
    """
    tokenizer, context = model.dataset.tokenizer, model.config.model.context
    end = end_of_text(tokenizer, model.dataset.manifest.get("end_token"))
    start = tokenizer.encode(prompt, add_special_tokens=False).ids or [end]
    tokens = list(start)
    for key in jax.random.split(jax.random.key(seed), new_tokens):
        seen = np.array(tokens[-context:], np.int32)
        window = np.resize(
            seen, context
        )  # of fixed length: one compilation; what follows ``seen`` has no effect
        logits = next_logits(model.graphdef, model.params, window, len(seen) - 1)
        # Divided by less than 1e-6, logits could overflow.
        token = int(
            jax.random.categorical(key, logits / temperature)
            if temperature > 1e-6
            else jnp.argmax(logits)
        )
        if token == end:
            break
        tokens.append(token)
    # Decoded with the prompt: alone, a word's leading space would be lost under
    # SentencePiece.
    return prompt + tokenizer.decode(tokens)[len(tokenizer.decode(start)) :]


def evaluate(options: Evaluate) -> None:
    """Print the score of a run's model."""
    check_ranges(vars(options))
    trained = load(options.run, options.step, options.tokens)
    count = options.validation_tokens or trained.config.validation_tokens
    config = dataclasses.replace(trained.config, validation_tokens=count)
    score = evaluation(config, trained.dataset, trained.graphdef, make_layout())(
        trained.params
    )
    losses = (
        f"loss {score.loss:.4f} nats per token, {score.bits_per_byte:.4f} bits per byte"
    )
    print(
        f"step {trained.step:,}: {losses} (validation text of {trained.dataset.folder})"
    )


def generate(options: Generate) -> None:
    """Print a continuation of a text."""
    check_ranges(vars(options))
    trained = load(options.run, options.step, options.tokens)
    how = {"temperature": options.temperature, "seed": options.seed}
    print(
        continuation(trained, options.prompt, new_tokens=options.sample_tokens, **how)
    )


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
    hugging_face.save_hf(
        options.output, trained.config.model, vocabulary, jax.device_get(trained.params)
    )
    trained.dataset.tokenizer.save(str(options.output / "tokenizer.json"))
    print(
        f"step {trained.step:,} of {options.run}:"
        f" {options.output}/{', '.join(EXPORTED)}"
    )
