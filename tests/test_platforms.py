# SPDX-License-Identifier: Apache-2.0
"""What accelerators are given computes what a CPU computes, as far as float32 (or, in a GPU's sketch, bfloat16) can.

Their branches are traced and run on the CPU, whose usual product is float32: what parts them here is the order of sums,
the scale at which a row is measured, and how small factorisations are done. How an accelerator itself rounds is not
seen. `tests/linalg` has the same for each function, where a bound can be tighter.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normpre_optax as npo
from normpre_optax.platforms import by_platform, on
from normpre_optax.transforms.draws import draws_of_stacks, sketch_draws
from tests import cases
from tests.cases import EPS32

pytestmark = pytest.mark.every_platform
STEPS = 3
# The slope of five steps of Newton-Schulz at zero: 485 and 970. They start from norm one, a few eps off.
MUON, POLAR_EXPRESS = 4 * 3.4445**5 * EPS32, 4 * 970 * EPS32
# Sums of twelve, a division and a root. The tangent's cancel where momentum lies along the weights: eps / q^2 for a
# share q across them, which is above 1/4 for nearly every row here.
ROWS = 32 * EPS32
# The sketch's basis and eigenpairs: cond(Y) of below 100, as in tests/linalg/test_eigenspace.py.
SKETCH = 2e-5
# Psi and the thin factors rounded to bfloat16, 2^-9 each. A truncated sketch's modes lie close together, so they turn
# by a few times that; eight of them, 2^-6, is more than three steps do here and less than a wrong mode would.
HALF = 2**-6

# Optimizer, and by how much it may differ on a TPU and on a GPU, relative to the norm of a matrix's update.
OPTIMIZERS = {
    "normpre_g": (npo.normpre_g, {}, MUON, MUON),
    "normpre_g-steep": (npo.normpre_g, {"ns_coefficients": "polar_express"}, POLAR_EXPRESS, POLAR_EXPRESS),
    "normpre_g-columns": (npo.normpre_g, {"orientation": "columns", "tangent": "strict"}, MUON, MUON),
    "normpre_l": (npo.normpre_l, {"rank": 2, "oversample": 1}, SKETCH, HALF),
    "normpre_l-float32": (npo.normpre_l, {"rank": 2, "oversample": 1, "compute_dtype": jnp.float32}, SKETCH, SKETCH),
    "normpre_l-warm": (
        npo.normpre_l,
        {"rank": 2, "oversample": 1, "power_iterations": 0, "warm_start": True},
        SKETCH,
        HALF,
    ),
    "normpre_l-exact": (npo.normpre_l, {"rank": 2, "method": "exact"}, SKETCH, SKETCH),
    "muon": (npo.muon, {}, MUON, MUON),
    "mano": (npo.mano, {}, ROWS, ROWS),
    "rmnp": (npo.rmnp, {}, ROWS, ROWS),
    "muoneq": (npo.muoneq, {}, MUON, MUON),
    "muoneq-both": (npo.muoneq, {"mode": "both"}, MUON, MUON),
}
# What takes longer than three seconds to compile: CI runs what is like no other.
SLOW = {"normpre_g-steep", "normpre_l-exact", "normpre_l-warm"}
THOROUGH = {"normpre_g-columns", "normpre_l-float32", "muoneq-both"}


def often(name):
    chosen = [pytest.mark.slow] * (name in SLOW) + [pytest.mark.thorough] * (name in THOROUGH)
    return pytest.param(name, marks=chosen)


def updates(name, platform):
    """Updates of a few steps as (out, in), in float64: with a zero row, a zero matrix and one in a stack."""
    factory, options, *_ = OPTIMIZERS[name]
    tx = factory(1.0, weight_decay=0.0, matrix_dims=cases.DIMS, **options)
    params = cases.as_jax(cases.to_layout(cases.weights()))
    state, seen = tx.init(params), []
    update = on(platform, cases.one_by_one_jit(tx.update))
    for gradient in cases.gradients(STEPS):
        gradient["wide"][2] = gradient["twin"][:] = gradient["stack"][1] = 0
        new, state = update(cases.as_jax(cases.to_layout(gradient)), state, params)
        seen.append(cases.from_layout(new))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
    return seen


@pytest.mark.parametrize("name", [often(name) for name in OPTIMIZERS])
def test_every_platform_takes_the_same_steps(name):
    found = {platform: updates(name, platform) for platform in ("cpu", "tpu", "gpu")}
    *_, tpu, gpu = OPTIMIZERS[name]
    for platform, tolerance in (("tpu", tpu), ("gpu", gpu)):
        differences = []
        for step, (expected, got) in enumerate(zip(found["cpu"], found[platform], strict=True)):
            for leaf, x in expected.items():
                assert np.isfinite(got[leaf]).all()
                norm = np.linalg.norm(x, axis=(-2, -1))
                difference = np.linalg.norm(got[leaf] - x, axis=(-2, -1))
                assert (difference <= tolerance * norm).all(), (platform, step, leaf, difference / norm)
                differences.extend(np.ravel(difference))
            assert not got["twin"].any()
            assert not got["stack"][1].any()
            assert got["square"].any()
        # bfloat16 shows: half a unit in its last place is 2^-9, and a tenth of that is more than float32 would do.
        assert (max(differences) > 1e-3) == (tolerance == HALF)


@pytest.mark.parametrize(
    ("dtype", "compute_dtype", "rounded"),
    [
        (jnp.float32, None, True),
        (jnp.float32, jnp.float32, False),
        (jnp.float32, jnp.bfloat16, True),
        (jnp.float64, None, False),
    ],
)
def test_a_gpu_sketches_in_bfloat16_where_nothing_else_is_said(x64, dtype, compute_dtype, rounded):
    psi = jnp.asarray(np.random.default_rng(0).standard_normal((5, 12)), dtype)
    found = {}
    tx = npo.precondition_locally(rank=2, oversample=1, compute_dtype=compute_dtype)
    for platform in ("cpu", "tpu", "gpu"):
        program = on(platform, jax.make_jaxpr(tx.update))(psi, tx.init(psi))
        found[platform] = "bf16" in str(program)
        assert program.out_avals[0].dtype == dtype
    asked_for = compute_dtype == jnp.bfloat16
    assert found == {"cpu": asked_for, "tpu": asked_for, "gpu": rounded}


def test_draws_that_are_made_together_are_those_of_each_matrix():
    ids = [
        jnp.array([[7, 0], [7, 1], [7, 2]], jnp.uint32),
        jnp.array([9, 0], jnp.uint32),
        jnp.array([[[8, 0]]], jnp.uint32),
    ]
    shapes = [(2, 6), (2, 6), (3, 6)]
    found = cases.quick_jit(lambda ids: draws_of_stacks(3, 5, ids, shapes))(ids)
    for drawn, identities, shape in zip(found, ids, shapes, strict=True):
        assert drawn.shape == (*identities.shape[:-1], *shape)
        for place in np.ndindex(identities.shape[:-1]):
            # One stream of bits for each matrix, but two programs may round its logarithm by a unit apart.
            np.testing.assert_allclose(drawn[place], sketch_draws(3, 5, *identities[place], shape), rtol=4 * EPS32)


def choice(x):
    """Three branches, and two of them inside each."""
    deeper = lambda name: lambda y: by_platform(y, cpu=lambda z: z + name, default=lambda z: z - name)  # noqa: E731
    return by_platform(x, cpu=deeper(1), tpu=deeper(2), default=deeper(3))


def test_what_is_traced_for_a_platform_takes_its_branches_all_the_way_down():
    x = jnp.zeros(())
    expected = {"cpu": 1, "tpu": -2, "gpu": -3}
    assert {kind: int(on(kind, choice)(x)) for kind in expected} == expected
    # One jitted function: what was compiled for one platform is not taken for another, nor for none.
    program = jax.jit(choice)
    for _ in range(2):
        assert {kind: int(on(kind, program)(x)) for kind in expected} == expected
        assert int(program(x)) == 1
    # Without a kind all are in the program, and each is decided once: no combinations.
    text = str(jax.make_jaxpr(choice)(x))
    assert sorted(name for name in ("1.0", "2.0", "3.0") if name in text) == ["1.0", "2.0", "3.0"]
    assert text.count("add") == 1
    assert text.count("sub") == 2
    with pytest.raises(ValueError, match="kind='cuda' is not one of"):
        on("cuda", choice)


def test_without_a_tpu_of_its_own_a_tpu_takes_the_default():
    two = lambda: by_platform(cpu=lambda: "cpu", default=lambda: "default")  # noqa: E731
    assert [on(kind, two)() for kind in ("cpu", "tpu", "gpu")] == ["cpu", "default", "default"]


def test_it_holds_only_for_the_call():
    with pytest.raises(ZeroDivisionError):
        on("tpu", lambda: 1 / 0)()
    assert int(choice(jnp.zeros(()))) == 1
