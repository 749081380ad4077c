# SPDX-License-Identifier: Apache-2.0
"""The inequalities hold for the paper's kernels, and not for kernels that are wrong.

So none of them is always true.
"""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.research import inequalities, theorem
from examples.research.inequalities import (
    COROLLARY,
    LEMMAS,
    THEOREM,
    Step,
    slacks,
    tolerance,
)
from tests import reference

M, N, RANK = 5, 9, 2
EVERY = {f.__name__: f for f in (*LEMMAS, *THEOREM, *COROLLARY)}


def given():
    """A gradient, and weights whose rows have norms below one.

    The normalized rows of the gradient have several modes above one.
    """
    random = np.random.default_rng(0)
    gradient = random.standard_normal((M, N)) + random.standard_normal((1, N))
    return gradient, 0.1 * random.standard_normal((M, N)) / 3


def psi(tangent="relaxed"):
    return reference.unit_rows(reference.tangent_rows(*given(), tangent))


def step(update, rank):
    """A step on numbers like those of ``||W||^2 / 2``.

    The loss falls as much as a 1-smooth function's may at most.
    """
    gradient, weight = given()
    rate = 0.1
    drop = rate * np.sum(gradient * update) - 0.5 * rate**2 * np.sum(update**2)
    return Step(gradient, weight, update, rank, rate, 10.0, 10.0 - drop, 1.0)


def right(rank):
    """The step of NormPre-L with this rank; None is NormPre-G."""
    if rank is None:
        return step(reference.msign(psi()), rank)
    return step(reference.precondition_exact(psi(), rank), rank)


def sketched():
    omega = np.random.default_rng(1).standard_normal((N, 3))
    return step(reference.precondition_sketch(psi(), omega, RANK, 0), RANK)


def violated(step, which=(*LEMMAS, *THEOREM)):
    """The names of the inequalities that a step breaks."""
    found = slacks(step, which)
    return {name for name, value in found.items() if value < -tolerance(step)}


@pytest.mark.parametrize("rank", [None, RANK])
def test_the_papers_kernels_keep_all_of_them(rank):
    assert violated(right(rank)) == set()
    assert violated(sketched(), COROLLARY) == set()
    assert right(rank).epsilon > 0, "else half of the inequalities were not asked"
    assert sketched().delta > 1e-3


def but(step, **properties):
    """The step with other values for what it derives."""
    step = dataclasses.replace(step)
    step.__dict__.update(properties)
    return step


def spoiled():
    """For every inequality a step that breaks it.

    ``corollary_duality`` holds for any three matrices.
    """
    g = right(None)
    l = right(RANK)
    hat = sketched()
    reversed_ = dataclasses.replace(hat, update=-hat.update)
    return {
        "lemma_1_rows": but(l, x=0.1 * l.x),
        "lemma_1": but(l, x=0.1 * l.x),
        "lemma_2_basis": but(l, preconditioner=l.preconditioner + np.eye(M)[::-1]),
        "lemma_2_a": but(l, factors=np.full(M, 2.0)),
        "lemma_2_b": dataclasses.replace(l, update=2 * l.update),
        "lemma_2_b_spectrum": dataclasses.replace(l, update=0.99 * l.update),
        "lemma_2_c": but(l, factors=0.9 * l.factors),
        "lemma_2_c_equality": but(g, factors=1.1 * g.factors),
        "lemma_3_factors": but(l, factors=0.9 * l.factors),
        "lemma_3_operator": but(l, nu=1e-6),
        "lemma_3": but(l, nu=1e-6),
        "smoothness": dataclasses.replace(l, smoothness=0.9),
        "signal": dataclasses.replace(l, update=-l.update),
        "one_step": dataclasses.replace(l, next_loss=11.0),
        "corollary_perturbation": but(hat, delta=0.0),
        "corollary_nuclear": but(hat, sines=np.full(M, 10.0)),
        "corollary_norm": dataclasses.replace(hat, update=2 * hat.update),
        "corollary_signal": but(reversed_, delta=0.0),
    }


def test_every_inequality_can_fail():
    found = spoiled()
    assert found.keys() == EVERY.keys() - {"corollary_duality"}
    for name, step in found.items():
        assert name in violated(step, (EVERY[name],))
    with pytest.raises(AssertionError, match="fails at step 1"):
        theorem.check([right(RANK), found["signal"]], is_sketch=False)


@pytest.mark.parametrize("make", [theorem.least_squares, theorem.two_layers])
def test_the_problems_are_as_smooth_as_they_say(make, x64):
    """The largest eigenvalue of the Hessian at several places, and the infimum."""
    problem = make(0.5, 3, 4, 0)

    @jax.jit
    def largest_eigenvalue(w):
        hessian = jax.hessian(problem.loss)(w).reshape(12, 12)
        return jnp.linalg.eigvalsh(hessian)[-1]

    start = jnp.asarray(problem.start)
    random = np.random.default_rng(0)
    others = [jnp.asarray(random.standard_normal((3, 4))) for _ in range(5)]
    places = [0 * start, start, *others]
    found = [float(largest_eigenvalue(w)) for w in places]
    assert max(found) <= problem.smoothness * (1 + 1e-12)
    for w in (0 * start, start):
        assert problem.infimum <= float(problem.loss(w))
    if make is theorem.least_squares:
        assert min(found) == pytest.approx(problem.smoothness)


def test_the_bound_is_that_of_the_theorem():
    """Written once more from the paper, with the constants of two steps."""
    problem = theorem.Problem(lambda w: jnp.sum(w), np.zeros((M, N)), 1.0, 2.0)
    steps = [right(RANK), dataclasses.replace(right(RANK), weight=0.5 * given()[1])]
    found = theorem.summary(problem, steps, is_sketch=False)
    gamma = min(s.gamma for s in steps)
    epsilon = 1 - max(s.nu * s.chi for s in steps) * max(s.gamma_prime for s in steps)
    gap = 10.0 - 2.0
    c = 0.1 * math.sqrt(2)
    descent = gap * N**0.5 / (epsilon * gamma * c)
    curvature = c * N**1.5 / (2 * epsilon * gamma)
    bound = (descent + curvature) / math.sqrt(2)
    assert found["bound"] == pytest.approx(bound)
    long = [dataclasses.replace(right(RANK), weight=60 * given()[1])]
    assert theorem.summary(problem, long, is_sketch=False)["bound"] is None


@pytest.mark.slow
def test_a_small_report_holds_the_library_to_the_theorem(tmp_path, monkeypatch):
    titles = ("two layers, rows 0.05", "least squares, rows 1.2")
    some = {title: theorem.PROBLEMS[title] for title in titles}
    monkeypatch.setattr(theorem, "PROBLEMS", some)
    options = "--horizons 3 6 --rows 4 --columns 6 --rank 2"
    theorem.main([*options.split(), "--out", str(tmp_path)])
    result = json.loads((tmp_path / "theorem.json").read_text())
    assert {row["variant"] for row in result["rows"]} == {"G", "L exact", "L sketch"}
    assert {row["holds"] for row in result["rows"]} == {True, False}
    assert result["slacks"].keys() == EVERY.keys()
    assert all(found["steps"] > 0 for found in result["slacks"].values())
    assert "condition" in (tmp_path / "theorem.md").read_text()
    assert (tmp_path / "theorem.png").stat().st_size > 1000
    with pytest.raises(SystemExit, match="rows <= columns"):
        theorem.main(["--rows", "5", "--columns", "4"])


def test_the_librarys_own_steps_keep_them(x64):
    """The same three variants on one short run each of NormPre-G and of the sketch."""
    problem = theorem.least_squares(0.3, 3, 5, 0)
    options = theorem.Options(rank=1, oversample=1, power_iterations=0)
    variants = theorem.variants(options)
    for name in ("G", "L sketch"):
        steps = theorem.runner(problem, variants[name])(3)
        assert theorem.check(steps, variants[name].is_sketch)["lemma_3"].steps == 3
        assert steps[-1].loss < steps[0].loss
    assert max(s.delta for s in steps) > 1e-6, "the sketch is one"


def test_inequalities_compare_the_sides():
    numbers = inequalities.Sides(2.0, 1.0)
    arrays = inequalities.Sides(np.array([2.0, 1.0]), np.array([1.0, 2.0]))
    assert inequalities.slack(numbers) == 0.5
    assert inequalities.slack(arrays) == -0.5
