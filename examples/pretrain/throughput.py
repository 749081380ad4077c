# SPDX-License-Identifier: Apache-2.0
"""The share of an accelerator's arithmetic that a run uses: model FLOPs utilization (MFU)."""

from typing import Any

import jax

from .config import ModelConfig

# Dense bfloat16 FLOP/s that the manufacturers state, by JAX's name of the device (the first that it contains).
PEAK_FLOPS = {
    **{"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12},
    **{"L40S": 362e12, "L40": 181e12, "L4": 121e12},
    "V100": 125e12,  # float16
    **{"TPU v6": 918e12, "TPU v5 lite": 197e12, "TPU v5e": 197e12, "TPU v5": 459e12, "TPU v4": 275e12},
}


def peak_flops(device_kind: str) -> float | None:
    """FLOP/s of one device, None where unknown (CPUs among others)."""
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device_kind), None)


def flops_per_token(model: ModelConfig, params: Any) -> float:
    """FLOPs of a forward and backward pass: 6 per weight of a product, and attention's 12 L T (H K), both triangles.

    Look-ups (positions, a table that is not the head, too) have no product. Recomputation (remat) is not counted.
    """
    weights = sum(leaf.size for leaf in jax.tree.leaves(params))
    looked_up = params["positions"]["embedding"].size if "positions" in params else 0
    looked_up += 0 if model.tied_head else params["tokens"]["embedding"].size
    attention_width = model.heads * (model.head_width or model.width // model.heads)
    return 6.0 * (weights - looked_up) + 12.0 * model.layers * model.context * attention_width
