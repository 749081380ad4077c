# SPDX-License-Identifier: Apache-2.0
"""The hidden matrices of the paper's models, and of a mixture of experts.

As Flax stores them: (in, out), one leaf each.
"""

import jax
import jax.numpy as jnp

Tree = dict[str, dict[str, dict[str, jax.Array]]]


def gpt2(width: int, layers: int) -> tuple[int, dict[str, tuple[int, ...]]]:
    """GPT-2: fused qkv, four matrices a layer."""
    shapes = {
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    return layers, shapes


def gated(
    width: int, hidden: int, layers: int, heads: int, kv_heads: int, head: int
) -> tuple[int, dict[str, tuple[int, ...]]]:
    """LLaMA and Qwen3: separate projections and a gated MLP, seven matrices a layer."""
    shapes = {
        "q": (width, heads * head),
        "k": (width, kv_heads * head),
        "v": (width, kv_heads * head),
        "o": (heads * head, width),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }
    return layers, shapes


def mixture(
    width: int, hidden: int, layers: int, experts: int
) -> tuple[int, dict[str, tuple[int, ...]]]:
    """A mixture of experts with all layers in one stack.

    Its matrices are (layer, in, out), and (layer, expert, in, out).
    """
    attention = dict.fromkeys(("q", "k", "v", "o"), (layers, width, width))
    shapes = {
        **attention,
        "gate": (layers, experts, width, hidden),
        "up": (layers, experts, width, hidden),
        "down": (layers, experts, hidden, width),
    }
    return 1, shapes


MODELS: dict[str, tuple[int, dict[str, tuple[int, ...]]]] = {
    "tiny": gpt2(64, 2),
    "gpt2_small": gpt2(768, 12),
    "llama_130m": gated(768, 2048, 12, 12, 12, 64),
    "llama_350m": gated(1024, 2736, 24, 16, 16, 64),
    "llama_1p3b": gated(2048, 5461, 24, 32, 32, 64),
    "llama_1p3b_layer": gated(2048, 5461, 1, 32, 32, 64),
    "qwen3_0p6b": gated(1024, 3072, 28, 16, 8, 128),
    "qwen3_1p7b": gated(2048, 6144, 28, 16, 8, 128),
    "olmoe_1b_7b": mixture(2048, 1024, 16, 64),
}


def matrices(model: str, seed: int = 0, layers: int | None = None) -> Tree:
    """Random weights of standard deviation 0.02 in the shapes of ``model``.

    ``layers`` of them; None: all.
    """
    depth, shapes = MODELS[model]
    if layers is None:
        layers = depth
    keys = iter(jax.random.split(jax.random.key(seed), layers * len(shapes)))
    tree: Tree = {}
    for i in range(layers):
        tree[f"block_{i}"] = {}
        for name, shape in shapes.items():
            draws = jax.random.normal(next(keys), shape, jnp.float32)
            tree[f"block_{i}"][name] = {"kernel": 0.02 * draws}
    return tree
