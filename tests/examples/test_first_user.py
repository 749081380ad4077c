# SPDX-License-Identifier: Apache-2.0
"""The README's lines in a first user's program of 200 steps.

``python -m tests.examples.test_first_user`` compares.
"""

import re
from pathlib import Path
from sysconfig import get_path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import normpre_optax as npo

README = Path(__file__).parents[2] / "README.md"
WIDTH = 96
HEADS = 4
LAYERS = 3
CONTEXT = 64
STEPS = 200
WARMUP = 20


class Model(nnx.Module):
    """A transformer with Flax's default initialization.

    It maps bytes (B, T) to logits (B, T, 256).
    """

    def __init__(self, rngs):
        hidden = 4 * WIDTH
        layers = range(LAYERS)
        self.embed = nnx.Embed(256, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(CONTEXT, WIDTH, rngs=rngs)
        attention = [
            nnx.MultiHeadAttention(HEADS, WIDTH, rngs=rngs, decode=False)
            for _ in layers
        ]
        self.attention = nnx.List(attention)
        self.up = nnx.List([nnx.Linear(WIDTH, hidden, rngs=rngs) for _ in layers])
        self.down = nnx.List([nnx.Linear(hidden, WIDTH, rngs=rngs) for _ in layers])
        norms = range(2 * LAYERS + 1)
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in norms])
        self.head = nnx.Linear(WIDTH, 256, rngs=rngs)

    def __call__(self, tokens):
        norms = iter(self.norms)
        mask = nnx.make_causal_mask(tokens)
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[-1]))
        for attention, up, down in zip(self.attention, self.up, self.down, strict=True):
            x = x + attention(next(norms)(x), mask=mask)
            hidden = jax.nn.gelu(up(next(norms)(x)))
            x = x + down(hidden)
        return self.head(next(norms)(x))


def loss_of(model, tokens):
    logits = model(tokens[:, :-1])
    targets = tokens[:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return losses.mean()


def texts():
    """Bytes to train on, and of every tenth file, to validate on."""
    files = sorted(Path(get_path("stdlib")).glob("*.py"))
    held_out = files[::10]
    training = [file for file in files if file not in held_out]
    return text_of(training), text_of(held_out)


def text_of(files):
    return np.concatenate([np.fromfile(file, np.uint8) for file in files])


def windows(text, draw, count):
    starts = draw.integers(len(text) - CONTEXT - 1, size=(count, 1))
    return jnp.asarray(text[starts + np.arange(CONTEXT + 1)], jnp.int32)


def validation_loss(model, optimizer):
    """After 200 steps."""

    @nnx.jit
    def step(model, optimizer, tokens):
        optimizer.update(model, nnx.grad(loss_of)(model, tokens))

    training, held_out = texts()
    draw = np.random.default_rng(0)
    for _ in range(STEPS):
        step(model, optimizer, windows(training, draw, 16))
    draw = np.random.default_rng(99)
    evaluate = nnx.jit(loss_of)
    losses = [evaluate(model, windows(held_out, draw, 64)) for _ in range(16)]
    return float(np.mean(losses))


def peaking_at(rate):
    return optax.warmup_cosine_decay_schedule(0.0, rate, WARMUP, STEPS)


def by(tx):
    model = Model(nnx.Rngs(0))
    return validation_loss(model, nnx.Optimizer(model, tx, wrt=nnx.Param))


def by_readme(adamw_peak=3e-3):
    """With the README's first block, but for the numbers of the user's own script."""
    block = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1]
    numbers = {"100, 1_500": f"{WARMUP}, {STEPS}", "6e-4": str(adamw_peak)}
    for old, new in numbers.items():
        assert block.count(old) == 1
        block = block.replace(old, new)
    scope = {"model": Model(nnx.Rngs(0))}
    exec(block, scope)
    return validation_loss(scope["model"], scope["optimizer"])


@pytest.mark.slow
def test_the_readmes_lines_are_ahead_of_muon_in_200_steps():
    """By 0.1, of 0.19 found."""
    muon = by(npo.muon(peaking_at(1.6e-2)))
    assert by_readme() < muon - 0.1


if __name__ == "__main__":
    tx = optax.adamw(peaking_at(3e-3))
    print(f"{by(tx):.3f}  optax.adamw, 3e-3", flush=True)
    for adam in (1.6e-2, 3e-3):
        tx = npo.muon(peaking_at(1.6e-2), adam_learning_rate=peaking_at(adam))
        print(f"{by(tx):.3f}  muon, 1.6e-2, AdamW {adam:g}", flush=True)
    for rate in (1.6e-2, 3.2e-2, npo.learning_rate_by_length(STEPS), 8e-2):
        tx = npo.normpre_h(peaking_at(rate), peaking_at(3e-3))
        print(f"{by(tx):.3f}  normpre_h, {rate:.2g}, AdamW 3e-3", flush=True)
    print(f"{by_readme(1.6e-2):.3f}  the README's lines, AdamW 1.6e-2", flush=True)
