# SPDX-License-Identifier: Apache-2.0
"""Muon and MuonEq against ``torch.optim.Muon``, where torch is installed (the extra ``parity``; CI installs it)."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import normpre_optax as npo
from tests import cases, reference
from tests.test_relatives import path

pytestmark = pytest.mark.parity
STEPS, LEARNING_RATE, WEIGHT_DECAY = 12, 0.03, 0.1
FLAT = {"tall": (12, 5), "wide": (5, 12), "square": (7, 7)}
TORCH_SCALES = [("keller", "original"), ("moonlight", "match_rms_adamw")]


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
    return path(tx, gradients, FLAT)


def well_conditioned(matrices):
    """The same singular vectors, with singular values from one down to a half."""

    def one(x):
        u, s, vt = np.linalg.svd(x, full_matrices=False)
        return (u * np.linspace(1.0, 0.5, len(s)) @ vt).astype(np.float32)

    return {name: one(x) for name, x in matrices.items()}


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("convention", "adjust_lr_fn"), TORCH_SCALES)
def test_muon_is_torchs_muon_in_float32(monkeypatch, convention, adjust_lr_fn, nesterov):
    torch = pytest.importorskip("torch")
    # torch casts its Newton-Schulz to bfloat16; with the cast taken out the same code runs in float32.
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
    gradients = cases.gradients(STEPS, shapes=FLAT)
    expected = run_torch(torch, adjust_lr_fn, gradients, nesterov)
    got, start = run_ours(convention, gradients, nesterov), cases.weights(shapes=FLAT)
    for name, x in expected.items():
        # Two float32 programs: ten eps32 each, times a Lipschitz constant of 20 to 100, relative to the path.
        assert np.linalg.norm(got[name] - x) <= 1e-4 * np.linalg.norm(x - start[name]), name


@pytest.mark.parametrize(("convention", "adjust_lr_fn"), TORCH_SCALES)
def test_muon_is_torchs_muon_up_to_its_bfloat16(convention, adjust_lr_fn):
    torch = pytest.importorskip("torch")
    # Small singular values would carry torch's rounding up to 485 times, and the comparison would say nothing.
    gradient = well_conditioned(cases.gradients(1, shapes=FLAT)[0])
    expected = run_torch(torch, adjust_lr_fn, [gradient], True)
    got, start = run_ours(convention, [gradient], True), cases.weights(shapes=FLAT)
    for name, x in expected.items():
        singular = np.linalg.svd(np.float64(gradient[name]), compute_uv=False)
        singular /= np.linalg.norm(singular)
        # torch rounds to 8 bits, 2^-9 relative. The rounding of the start goes through the whole iteration, whose
        # Lipschitz constant carries it; that of the last step adds up in a X + b A X + c A A X, whose terms are |a|,
        # |b| and |c| times the result where singular values are near one. Earlier steps lie between and are damped.
        size = np.linalg.norm(reference.newton_schulz_scalar(singular))
        bound = 2**-9 * (reference.newton_schulz_lipschitz(singular) / size + np.abs(reference.MUON).sum())
        assert bound < 0.1, name
        error = np.linalg.norm(got[name] - x) / np.linalg.norm(x - start[name])
        assert error <= bound, name
        assert error > 1e-5, name  # it is bfloat16 that we measure


def test_muoneq_of_equal_rows_is_torchs_muon(monkeypatch):
    """Where rows have one length already, as those of U keep under a constant gradient, the two rules are one."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())  # its Newton-Schulz in float32
    gradient = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    gradient /= np.linalg.norm(gradient, axis=1, keepdims=True)
    weight = torch.nn.Parameter(torch.zeros(4, 6))
    optimizer = torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    tx = npo.muoneq(1.0, weight_decay=0.0)
    params, grads = {"kernel": jnp.zeros((6, 4))}, {"kernel": jnp.asarray(gradient.T)}
    state, update = tx.init(params), cases.updater(tx)
    for _ in range(3):
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    # Two float32 programs of three steps of size 0.2: ten eps32 each, times a slope of 20 to 100.
    np.testing.assert_allclose(params["kernel"].T, weight.detach().numpy(), atol=1e-4)
