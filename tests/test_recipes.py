# SPDX-License-Identifier: Apache-2.0
"""Muon against ``torch.optim.Muon``, where torch is installed (the extra ``parity``; CI installs it)."""

import numpy as np
import pytest

import normpre_optax as npo
from tests import cases, reference

pytestmark = pytest.mark.parity
STEPS, LEARNING_RATE, WEIGHT_DECAY = 12, 0.03, 0.1
FLAT = {"tall": (12, 5), "wide": (5, 12), "square": (7, 7)}
every_scale = pytest.mark.parametrize(
    ("convention", "adjust_lr_fn"), [("keller", "original"), ("moonlight", "match_rms_adamw")]
)


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
@every_scale
def test_muon_is_torchs_muon_in_float32(monkeypatch, convention, adjust_lr_fn, nesterov):
    torch = pytest.importorskip("torch")
    # torch casts its Newton-Schulz to bfloat16; with the cast taken out the same code runs in float32.
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
    gradients = cases.gradients(STEPS, shapes=FLAT)
    expected = run_torch(torch, adjust_lr_fn, gradients, nesterov)
    # Two float32 programs: ten eps32 each, times a Lipschitz constant of 20 to 100, relative to the path.
    cases.assert_same_path(run_ours(convention, gradients, nesterov), expected, 1e-4)


def well_conditioned(x):
    """The same singular vectors, with singular values from one down to a half."""
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    return (u * np.linspace(1.0, 0.5, len(s)) @ vt).astype(np.float32)


@every_scale
def test_muon_is_torchs_muon_up_to_its_bfloat16(convention, adjust_lr_fn):
    torch = pytest.importorskip("torch")
    # Small singular values would carry torch's rounding up to 485 times, and the comparison would say nothing.
    gradient = {name: well_conditioned(x) for name, x in cases.gradients(1, shapes=FLAT)[0].items()}
    expected = run_torch(torch, adjust_lr_fn, [gradient], True)
    got, start = run_ours(convention, [gradient], True), cases.weights(shapes=FLAT)
    for name, x in expected.items():
        singular = np.linalg.svd(np.float64(gradient[name]), compute_uv=False)
        singular /= np.linalg.norm(singular)
        # torch rounds to 8 bits, 2^-9 relative. The rounding of the start goes through the whole iteration, whose
        # Lipschitz constant carries it; that of the last step adds up in a X + b A X + c A A X, whose terms are |a|,
        # |b| and |c| times the result where singular values are near one. Earlier steps are between and are damped.
        size = np.linalg.norm(reference.newton_schulz_scalar(singular))
        bound = 2**-9 * (reference.newton_schulz_lipschitz(singular) / size + np.abs(reference.MUON).sum())
        assert bound < 0.1, name
        error = np.linalg.norm(got[name] - x) / np.linalg.norm(x - start[name])
        assert 1e-5 < error <= bound, name  # it is bfloat16 that we measure
