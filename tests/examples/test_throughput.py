# SPDX-License-Identifier: Apache-2.0
"""Model FLOPs utilisation."""

import jax
import jax.numpy as jnp
import pytest

from examples.pretrain import configs, models
from examples.pretrain.throughput import flops_per_token, peak_flops


@pytest.mark.parametrize(
    ("kind", "flops"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("TPU v5p", 459e12),
        ("TPU v5 lite", 197e12),
        ("NVIDIA L40S", 362e12),
        ("cpu", None),
    ],
)
def test_known_devices(kind, flops):
    assert peak_flops(kind) == flops


def test_gpt2_small_takes_six_operations_per_weight_and_attention():
    config = configs.load("gpt2_small").model

    def params():
        from flax import nnx

        model = models.build(config, 50_304, dtype=jnp.dtype("float32"), seed=0)
        return nnx.to_pure_dict(nnx.state(model, nnx.Param))

    hidden, table, norms = 12 * 12 * 768**2, 50_304 * 768, 25 * 768
    expected = 6 * (hidden + table + norms) + 12 * 12 * 1024 * 768
    assert flops_per_token(config, jax.eval_shape(params)) == expected
