# SPDX-License-Identifier: Apache-2.0
"""Muon and MANO against the reference; they and MuonEq against torch's and optax's Muon where they coincide."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import normpre_optax as npo
from tests import cases, reference

STEPS, LEARNING_RATE, WEIGHT_DECAY = 12, 0.03, 0.1


def run(tx, steps=STEPS, dtype=jnp.float32, shapes=cases.SHAPES, gradients=None):
    """Weights (…, out, in) after free steps."""
    update, params = cases.updater(tx), cases.as_jax(cases.to_layout(cases.weights(shapes=shapes)), dtype)
    state = tx.init(params)
    for gradient in gradients or cases.gradients(steps, shapes=shapes):
        updates, state = update(cases.as_jax(cases.to_layout(gradient), dtype), state, params)
        params = optax.apply_updates(params, updates)
    return cases.from_layout(params)


def run_reference(oracle, steps=STEPS):
    w = {name: np.float64(x) for name, x in cases.weights().items()}
    trace = {name: np.zeros_like(x) for name, x in w.items()}
    for step, gradient in enumerate(cases.gradients(steps)):
        trace = cases.each_matrix(lambda n, i, m, g: oracle.accumulate(m, np.float64(g)), trace, gradient)

        def advance(name, index, m, g, x, t=step):
            where = (x, t) if isinstance(oracle, reference.Mano) else ()
            direction = oracle.direction(m, np.float64(g), *where)
            return reference.decoupled_step(x, direction, LEARNING_RATE, WEIGHT_DECAY)

        w = cases.each_matrix(advance, trace, gradient, w)
    return w


def moved(w):
    """Where the weights went, so that errors are relative to what the optimizer did."""
    start = cases.weights()
    return {name: x - start[name] for name, x in w.items()}


def assert_same_path(got, expected, rtol):
    for name, x in moved(expected).items():
        assert np.linalg.norm(moved(got)[name] - x) <= rtol * np.linalg.norm(x), name


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("convention", ["moonlight", "keller"])
def test_muon_agrees_with_the_reference(convention, nesterov):
    expected = run_reference(reference.Muon(convention, nesterov))
    tx = npo.muon(
        LEARNING_RATE, convention=convention, nesterov=nesterov, weight_decay=WEIGHT_DECAY, matrix_dims=cases.DIMS
    )
    with jax.enable_x64(True):
        # eps64 times 485, a step.
        assert_same_path(run(tx, dtype=jnp.float64), expected, 1e-10)
    if nesterov:
        # Ten eps32 times the Lipschitz constant of Newton-Schulz, 20 to 100 for these momenta.
        assert_same_path(run(tx), expected, 1e-4)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("version", [1, 2])
def test_mano_agrees_with_the_reference(version, nesterov):
    expected = run_reference(reference.Mano(version, nesterov))
    tx = npo.mano(LEARNING_RATE, version=version, nesterov=nesterov, weight_decay=WEIGHT_DECAY, matrix_dims=cases.DIMS)
    with jax.enable_x64(True):
        # The official eps of 1e-8 is 1e-8 relative to lengths of order one, and we do without it.
        assert_same_path(run(tx, dtype=jnp.float64), expected, 1e-7)
    if not nesterov:
        assert_same_path(run(tx), expected, 2e-5)


def test_mano_starts_with_columns():
    w, (gradient,) = cases.weights(), cases.gradients(1)
    params, grads = (cases.as_jax(cases.to_layout(x)) for x in (w, gradient))
    tx = npo.mano(1.0, weight_decay=0.0, matrix_dims=cases.DIMS)
    x = cases.from_layout(cases.first_update(tx, grads, params))["stack"][0]
    np.testing.assert_allclose(np.linalg.norm(x, axis=0), 0.2 * np.sqrt(8), rtol=1e-5)  # every column
    assert np.ptp(np.linalg.norm(x, axis=1)) > 0.1  # but not every row


@pytest.mark.parametrize("convention", ["moonlight", "keller"])
def test_muon_measures_nothing_and_scales_by_the_shape(convention):
    w, (gradient,) = cases.weights(), cases.gradients(1)
    params, grads = (cases.as_jax(cases.to_layout(x)) for x in (w, gradient))
    tx = npo.muon(1.0, convention=convention, ns_steps=None, weight_decay=0.0, matrix_dims=cases.DIMS)
    for name, x in cases.from_layout(cases.first_update(tx, grads, params)).items():
        m, n = x.shape[-2:]
        scale = 0.2 * max(m, n) ** 0.5 if convention == "moonlight" else max(1, m / n) ** 0.5
        # With the exact msign all singular values are the scale itself.
        np.testing.assert_allclose(np.linalg.svd(x, compute_uv=False), scale, rtol=1e-5, err_msg=name)


def test_unknown_conventions_and_versions_are_refused():
    with pytest.raises(ValueError, match="convention"):
        npo.muon(1e-3, convention="keler")
    with pytest.raises(ValueError, match="version"):
        npo.mano(1e-3, version=3)


# torch.optim.Muon. CI installs torch (the extra `parity`); without it there is nothing to compare with.

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
    return run(tx, shapes=FLAT, gradients=gradients)


def well_conditioned(matrices):
    """The same singular vectors, with singular values from one down to a half."""

    def one(x):
        u, s, vt = np.linalg.svd(x, full_matrices=False)
        return (u * np.linspace(1.0, 0.5, len(s)) @ vt).astype(np.float32)

    return {name: one(x) for name, x in matrices.items()}


@pytest.mark.parity
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


@pytest.mark.parity
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


@pytest.mark.parity
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


# optax.contrib.muon.


def test_muon_is_optaxs_muon_without_nesterov():
    """optax averages, M = beta M + (1 - beta) G, and corrects the bias.

    Without Nesterov that is our momentum times a number, which the orthogonalisation forgets: the same optimizer, at
    every step. With Nesterov optax weighs the gradient by (1 - beta) / (1 - beta^t) and the average by
    beta / (1 - beta^(t + 1)), which is proportional to ours on the first step only.
    """
    dims = dict.fromkeys(FLAT, npo.MatrixDims(inputs=0, outputs=1))
    theirs = jax.tree.map(
        lambda d: optax.contrib.MuonDimensionNumbers(reduction_axis=d.inputs, output_axis=d.outputs), dims
    )
    for convention, consistent_rms in (("moonlight", 0.2), ("keller", None)):
        for nesterov, steps in ((False, STEPS), (True, 1)):
            ours = npo.muon(
                LEARNING_RATE, convention=convention, nesterov=nesterov, weight_decay=WEIGHT_DECAY, matrix_dims=dims
            )
            peer = optax.contrib.muon(
                LEARNING_RATE,
                nesterov=nesterov,
                weight_decay=WEIGHT_DECAY,
                consistent_rms=consistent_rms,
                muon_weight_dimension_numbers=theirs,
            )
            got, expected = (run(tx, steps, shapes=FLAT) for tx in (ours, peer))
            start = cases.weights(shapes=FLAT)
            for name, x in expected.items():
                # Two float32 programs again; optax's additive 1e-8 is below eps32 of norms of order one.
                error = np.linalg.norm(got[name] - x) / np.linalg.norm(x - start[name])
                assert error <= 1e-4, (name, convention, nesterov)
