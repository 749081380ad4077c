# SPDX-License-Identifier: Apache-2.0
"""The related optimizers against literal transcriptions; Muon against others' Muon."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import normpre_optax as npo
from normpre_optax.relatives import REGISTRY
from tests import cases
from tests.reference import decoupled_step
from tests.reference_family import VARIANTS

LEARNING_RATE = 0.03
WEIGHT_DECAY = 0.1
SHAPES = {"wide": (5, 12), "stack": (3, 8, 5)}
DIMS = {name: cases.DIMS[name] for name in SHAPES}


def follow(label, steps, dtype, tolerance):
    """Compare a path of the optimizer and of its transcription, matrix by matrix."""
    variant = VARIANTS[label]
    gradients = cases.gradients(steps, shapes=SHAPES)
    tx = npo.optimizers()[variant.optimizer](
        LEARNING_RATE, weight_decay=WEIGHT_DECAY, matrix_dims=DIMS, **variant.options
    )

    def by_rule(name, index, w, *gradients):
        step = variant.start(w.shape)
        w = np.float64(w)
        for gradient in gradients:
            direction = step(np.float64(gradient), w)
            w = decoupled_step(w, direction, LEARNING_RATE, WEIGHT_DECAY)
        return w

    expected = cases.each_matrix(by_rule, cases.weights(shapes=SHAPES), *gradients)
    found = cases.path(tx, gradients, SHAPES, dtype)
    cases.assert_same_path(found, expected, tolerance)


@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_follow_the_rule(variant):
    with jax.enable_x64(True):
        follow(variant, 4, jnp.float64, VARIANTS[variant].tolerance)


@pytest.mark.parametrize(
    "variant", ["mano", "muoneq-both", "normuon", "adamuon", "swan"]
)
def test_steps_follow_the_rule_in_float32(variant):
    # A few eps32 a step, times a slope of 20 to 100 in Newton-Schulz.
    follow(variant, 4, jnp.float32, 5e-5)


# Those of NormPre are in tests/reference.py and test_recommended.py.
NORMPRE = {"normpre_h", "normpre_g", "normpre_l"}


@pytest.mark.parametrize("name", npo.optimizers())
def test_every_relative_has_a_transcription(name):
    transcribed = {variant.optimizer for variant in VARIANTS.values()}
    missing = f"tests/reference_family.py has no transcription of {name}"
    assert name in transcribed | NORMPRE, missing


# Those whose multipliers by width are known.
CLAIMED = {name: found.update for name, found in npo.optimizers().items()}
CLAIMED = {name: update for name, update in CLAIMED.items() if update is not None}
# It orthogonalizes signs: those of a large rank-one part leave it one singular value.
OF_SIGNS = {"adamuon"}


def spectral_norm(name, shape):
    """Of the first direction: its median over eight matrices (out, in)."""
    dims = {"w": npo.MatrixDims(inputs=2, outputs=1)}
    tx = npo.optimizers()[name].direction(matrix_dims=dims)
    stack = (8, *shape)
    weights = cases.gaussian(stack, 1) / np.sqrt(shape[1])
    gradient = cases.gaussian(stack, 2)
    if name not in OF_SIGNS:
        signs = np.sign(cases.gaussian(stack, 3))
        gradient = gradient + signs[:, :, :1] * signs[:, :1, :]
    updates = cases.first_update(
        tx, {"w": jnp.float32(gradient)}, {"w": jnp.float32(weights)}
    )
    return np.median(np.linalg.norm(updates["w"], 2, axis=(1, 2)))


@pytest.mark.parametrize("name", CLAIMED)
def test_directions_depend_on_the_width_as_the_registry_says(name):
    """Four times as wide, multiplier times spectral norm stays within a root of two.

    Half of the squared norm of the gradient is one singular value. Rules for single
    entries keep it: their spectral norm grows as the width. If all singular values
    become equal, it grows as the root of the width.
    """
    narrow, wide = (8, 16), (32, 64)
    grows = spectral_norm(name, wide) / spectral_norm(name, narrow)
    multipliers = npo.multipliers_by_width(
        {"w": jnp.zeros(wide)},
        {"w": jnp.zeros(narrow)},
        update=CLAIMED[name],
        matrix_dims={"w": npo.MatrixDims(inputs=1, outputs=0)},
    )
    assert 0.5**0.5 < multipliers["w"] * grows < 2**0.5, (
        f"{name} is {CLAIMED[name]!r} in REGISTRY, but with four times the width the"
        f" spectral norm of its direction is times {grows:.2f}: about 1 is"
        ' "relative", 2 "orthogonal", 4 "elementwise"; None if it is none of them'
    )


HEADINGS = {
    "spectral": "| optimizer | before the spectral stage |",
    "without products": "| optimizer without matrix products |",
}


def described(gallery):
    """Names of optimizers in a table of the gallery."""
    page = (Path(__file__).parents[1] / "docs" / "family.md").read_text()
    rows = page.partition(HEADINGS[gallery])[2].partition("\n\n")[0]
    return re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE)


@pytest.mark.parametrize("name", npo.optimizers())
def test_every_optimizer_has_a_row_in_the_gallery(name):
    gallery = npo.optimizers()[name].gallery
    missing = f"the table {HEADINGS[gallery]} of docs/family.md has no row of {name}"
    assert name in described(gallery), missing


def test_the_gallery_has_the_order_of_the_registry_and_nothing_else():
    for gallery in HEADINGS:
        registered = [x.name for x in REGISTRY if x.gallery == gallery]
        assert described(gallery) == registered
    assert {variant.optimizer for variant in VARIANTS.values()} <= set(npo.optimizers())


def test_labels_are_different():
    labels = [found.label for found in npo.optimizers().values()]
    assert len(set(labels)) == len(labels)


# Muon elsewhere.

FLAT = {"tall": (12, 5), "wide": (5, 12), "square": (7, 7)}


def follow_muon(expected, gradients, **options):
    """Compare our Muon with another's weights after the same steps.

    Two float32 programs: ten eps32 each, times a Lipschitz constant of 20 to 100,
    relative to the path; optax's additive 1e-8 is below eps32 of norms of order one.
    """
    dims = dict.fromkeys(FLAT, npo.MatrixDims(inputs=0, outputs=1))
    tx = npo.muon(LEARNING_RATE, weight_decay=WEIGHT_DECAY, matrix_dims=dims, **options)
    cases.assert_same_path(cases.path(tx, gradients, FLAT), expected, 1e-4)


@cases.rows(
    "convention consistent_rms nesterov steps",
    ("moonlight", 0.2, False, 4),
    ("keller", None, True, 1),
)
def test_muon_is_optaxs_muon(convention, consistent_rms, nesterov, steps):
    """optax averages, M = beta M + (1 - beta) G, and corrects the bias.

    Without Nesterov that is our momentum times a number, which orthogonalization
    removes: the same optimizer, at every step. With Nesterov optax weights the gradient
    by (1 - beta) / (1 - beta^t) and the average by beta / (1 - beta^(t + 1)), which is
    proportional to ours on the first step only.
    """
    dims = dict.fromkeys(
        FLAT, optax.contrib.MuonDimensionNumbers(reduction_axis=0, output_axis=1)
    )
    options = {
        "consistent_rms": consistent_rms,
        "nesterov": nesterov,
        "weight_decay": WEIGHT_DECAY,
    }
    tx = optax.contrib.muon(
        LEARNING_RATE, muon_weight_dimension_numbers=dims, **options
    )
    gradients = cases.gradients(steps, shapes=FLAT)
    follow_muon(
        cases.path(tx, gradients, FLAT),
        gradients,
        convention=convention,
        nesterov=nesterov,
    )


RMS, DECAY = npo.learning_rate_from_muon(LEARNING_RATE, WEIGHT_DECAY, convention=0.3)


@cases.rows(
    "theirs ours",
    ({}, {}),
    (
        {"ns_coeffs": "standard", "ns_steps": 3, "beta": 0.8},
        {"ns_coefficients": "muon", "ns_steps": 3, "momentum": 0.8},
    ),
    ({"ns_coeffs": "dion"}, {"ns_coefficients": "you"}),
    (
        {"preconditioning": "schatten", "ns_steps": 4},
        {"ns_norm": "schatten", "ns_steps": 4},
    ),
    (
        {"consistent_rms": 0.3},
        {"convention": "moonlight", "learning_rate": RMS, "weight_decay": DECAY},
    ),
    (
        {
            "weight_decay_mask": {
                "up": {"kernel": False, "bias": True},
                "down": True,
                "wte": True,
            }
        },
    )
    * 2,
    (
        {
            "adam_learning_rate": 0.1,
            "adam_b1": 0.8,
            "adam_b2": 0.9,
            "adam_weight_decay": 0.2,
        },
    )
    * 2,
    ({"mu_dtype": jnp.bfloat16},) * 2,
)
def test_the_arguments_of_optaxs_muon_have_these_names(theirs, ours):
    """As the tables of docs/moving.md say, on matrices and vectors, without Nesterov.
    Tolerances are those above.
    """
    shapes = {"up": {"kernel": (4, 6), "bias": (6,)}, "down": (6, 4), "wte": (5, 3)}
    grads = [cases.numbers(shapes, seed) for seed in (1, 2, 3)]
    theirs = {
        "learning_rate": LEARNING_RATE,
        "weight_decay": WEIGHT_DECAY,
        "nesterov": False,
    } | theirs
    same = {
        "learning_rate": LEARNING_RATE,
        "weight_decay": WEIGHT_DECAY,
        "convention": "keller",
        "nesterov": False,
    }
    same |= {
        "adam_learning_rate": LEARNING_RATE,
        "adam_b2": 0.999,
        "adam_weight_decay": 0.0,
    }
    same |= {
        "matrix_dims": lambda path, leaf: (
            npo.MatrixDims(inputs=0, outputs=1) if leaf.ndim == 2 else None
        )
    }
    paths = []
    for tx in (optax.contrib.muon(**theirs), npo.muon(**(same | ours))):
        params, state = cases.numbers(shapes), tx.init(cases.numbers(shapes))
        for g in grads:
            updates, state = tx.update(g, state, params)
            params = optax.apply_updates(params, updates)
        paths.append(params)
    # bfloat16 rounds an average and a sum differently: 2^-9, times a Lipschitz constant
    # of 20.
    tolerance = 0.05 if "mu_dtype" in ours else 1e-4
    cases.assert_close(*paths, rtol=0, atol=tolerance * LEARNING_RATE)


@pytest.mark.parity
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    ("convention", "adjust_lr_fn"),
    [("keller", "original"), ("moonlight", "match_rms_adamw")],
)
def test_muon_is_torchs_muon_in_float32(
    monkeypatch, convention, adjust_lr_fn, nesterov
):
    torch = pytest.importorskip("torch")
    # torch casts its Newton-Schulz to bfloat16; with the cast taken out the same code
    # runs in float32.
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
    params = {
        name: torch.nn.Parameter(torch.tensor(x))
        for name, x in cases.weights(shapes=FLAT).items()
    }
    options = {
        "lr": LEARNING_RATE,
        "weight_decay": WEIGHT_DECAY,
        "nesterov": nesterov,
        "adjust_lr_fn": adjust_lr_fn,
    }
    optimizer, gradients = (
        torch.optim.Muon(params.values(), **options),
        cases.gradients(12, shapes=FLAT),
    )
    for gradient in gradients:
        for name, p in params.items():
            p.grad = torch.tensor(gradient[name])
        optimizer.step()
    expected = {
        name: p.detach().numpy().astype(np.float64) for name, p in params.items()
    }
    follow_muon(expected, gradients, convention=convention, nesterov=nesterov)
