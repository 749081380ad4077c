# SPDX-License-Identifier: Apache-2.0
"""The state trees that versions have saved.

At a release: ``python -m tests.states > tests/states_<version>.json``.
"""

import json

import jax
import jax.numpy as jnp

import normpre_optax as npo

PARAMS = {
    "mlp": {
        "up": {
            "kernel": jax.ShapeDtypeStruct((24, 32), jnp.float32),
            "bias": jnp.zeros(32),
        }
    },
    "layers": {"proj": {"kernel": jax.ShapeDtypeStruct((2, 24, 16), jnp.bfloat16)}},
    "norm": {"scale": jnp.zeros(24)},
}
OPTIONS = {
    **{name: (found.factory, {}) for name, found in npo.optimizers().items()},
    "normpre_h": (npo.normpre_h, {"adam_learning_rate": 0.1}),
    "muon schedule": (npo.muon, {"learning_rate": lambda step: 0.1}),
    "muon masked": (npo.muon, {"weight_decay_mask": npo.decay_matrices_only}),
    "normpre_g both bfloat16": (
        npo.normpre_g,
        {"orientation": "both", "mu_dtype": jnp.bfloat16},
    ),
}


def leaves(name):
    """Every array of an optimizer's first state: path, shape and dtype."""
    factory, options = OPTIONS[name]
    state = jax.eval_shape(factory(**{"learning_rate": 0.1} | options).init, PARAMS)
    found = jax.tree_util.tree_leaves_with_path(state)
    return [
        [jax.tree_util.keystr(path), list(x.shape), str(x.dtype)] for path, x in found
    ]


if __name__ == "__main__":
    lines = [f" {json.dumps(name)}: {json.dumps(leaves(name))}" for name in OPTIONS]
    print("{\n" + ",\n".join(lines) + "\n}")
