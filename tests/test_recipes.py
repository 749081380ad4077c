# SPDX-License-Identifier: Apache-2.0
"""Muon against ``torch.optim.Muon``, where torch is installed (the extra ``parity``; CI installs it)."""

import numpy as np
import pytest

import normpre_optax as npo
from tests import cases

pytestmark = pytest.mark.parity
STEPS, LEARNING_RATE, WEIGHT_DECAY = 12, 0.03, 0.1
FLAT = {"tall": (12, 5), "wide": (5, 12), "square": (7, 7)}


def run_torch(torch, adjust_lr_fn, gradients, nesterov):
    params = {name: torch.nn.Parameter(torch.tensor(x)) for name, x in cases.weights(shapes=FLAT).items()}
    optimizer = torch.optim.Muon(
        params.values(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, nesterov=nesterov, adjust_lr_fn=adjust_lr_fn
    )
    for gradient in gradients:
        for name, p in params.items():
            p.grad = torch.tensor(gradient[name])
        optimizer.step()
    return {name: p.detach().numpy().astype(np.float64) for name, p in params.items()}


def run_ours(convention, gradients, nesterov):
    dims = dict.fromkeys(FLAT, npo.MatrixDims(inputs=0, outputs=1))
    tx = npo.muon(LEARNING_RATE, convention=convention, nesterov=nesterov, weight_decay=WEIGHT_DECAY, matrix_dims=dims)
    return cases.path(tx, gradients, FLAT)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("convention", "adjust_lr_fn"), [("keller", "original"), ("moonlight", "match_rms_adamw")])
def test_muon_is_torchs_muon_in_float32(monkeypatch, convention, adjust_lr_fn, nesterov):
    torch = pytest.importorskip("torch")
    # torch casts its Newton-Schulz to bfloat16; with the cast taken out the same code runs in float32.
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
    gradients = cases.gradients(STEPS, shapes=FLAT)
    expected = run_torch(torch, adjust_lr_fn, gradients, nesterov)
    # Two float32 programs: ten eps32 each, times a Lipschitz constant of 20 to 100, relative to the path.
    cases.assert_same_path(run_ours(convention, gradients, nesterov), expected, 1e-4)
