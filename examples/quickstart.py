# SPDX-License-Identifier: Apache-2.0
"""Train a small transformer with one line changed from AdamW.

``python -m examples.quickstart`` takes half a minute.
"""

from pathlib import Path
from sysconfig import get_path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from normpre_optax import explain, learning_rate_by_length, normpre_h

WIDTH = 64
HEADS = 4
LAYERS = 2
CONTEXT = 64
BATCH = 32
STEPS = 300
FILES = sorted(Path(get_path("stdlib")).glob("*.py"))
TEXT = np.concatenate([np.fromfile(path, np.uint8) for path in FILES])


class Model(nnx.Module):
    """A small transformer: bytes (B, T) to logits (B, T, 256)."""

    def __init__(self, rngs: nnx.Rngs):
        hidden = 3 * WIDTH
        layers = range(LAYERS)
        self.embed = nnx.Embed(256, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(CONTEXT, WIDTH, rngs=rngs)
        self.attention = nnx.List(
            [nnx.MultiHeadAttention(HEADS, WIDTH, rngs=rngs) for _ in layers]
        )
        self.up = nnx.List([nnx.Linear(WIDTH, hidden, rngs=rngs) for _ in layers])
        self.down = nnx.List([nnx.Linear(hidden, WIDTH, rngs=rngs) for _ in layers])
        norms = range(2 * LAYERS + 1)
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in norms])
        self.head = nnx.Linear(WIDTH, 256, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits of every next byte."""
        norms = iter(self.norms)
        mask = nnx.make_causal_mask(tokens)
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[-1]))
        for attention, up, down in zip(self.attention, self.up, self.down, strict=True):
            x = x + attention(next(norms)(x), mask=mask, decode=False)
            x = x + down(jax.nn.gelu(up(next(norms)(x))))
        return self.head(next(norms)(x))


@nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    """Update model and optimizer in place; return the loss before the update."""

    def loss_of(model: Model) -> jax.Array:
        logits = model(tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


model = Model(nnx.Rngs(0))
draw = np.random.default_rng(0)
adamw_schedule = optax.warmup_cosine_decay_schedule(
    0.0, 1.6e-2, warmup_steps=30, decay_steps=STEPS
)
schedule = optax.warmup_cosine_decay_schedule(
    0.0, learning_rate_by_length(STEPS), warmup_steps=30, decay_steps=STEPS
)
# The line that was tx = optax.adamw(adamw_schedule):
tx = normpre_h(schedule, adam_learning_rate=adamw_schedule)
optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
print(explain(nnx.state(model, nnx.Param)), "\n")
for step in range(1, STEPS + 1):
    starts = draw.integers(len(TEXT) - CONTEXT - 1, size=(BATCH, 1))
    batch = TEXT[starts + np.arange(CONTEXT + 1)]
    loss = train_step(model, optimizer, jnp.asarray(batch, jnp.int32))
    if step % 50 == 0 or step == 1:
        print(f"step {step:3}  loss {loss:.3f} nats per byte")
