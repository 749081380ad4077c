# SPDX-License-Identifier: Apache-2.0
"""The public names: documented, keyword-only, with the promised defaults, and errors that name what to write."""

import doctest
import inspect

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import normpre_optax as npo
from normpre_optax.stages import scale_by_row_moment, standardize_rows, whiten

REST = {
    "weight_decay": 0.1,
    "weight_decay_mask": None,
    "learning_rate_multipliers": None,
    "norm_control": "none",
    "adam_learning_rate": None,
    "adam_b1": 0.9,
    "adam_b2": 0.95,
    "adam_eps": 1e-8,
    "adam_weight_decay": None,
    "mu_dtype": None,
    "matrix_dims": None,
    "shardings": None,
}
MOMENTUM = {"momentum": 0.95, "mu_dtype": None, "matrix_dims": None}
NEWTON_SCHULZ = {"ns_steps": 5, "ns_coefficients": "muon", "compute_dtype": None}
OF_NORMPRE = {"nesterov": False, "tangent": "relaxed", "orientation": "alternating", "rms": 0.2, **MOMENTUM}
OF_MUON = {"nesterov": True, **MOMENTUM, **NEWTON_SCHULZ}
SKETCH = {"rank": 32, "oversample": 8, "power_iterations": 1, "method": "sketch", "seed": 0, "compute_dtype": None}
SKETCH |= {"threshold": 1.0}
# Name: keyword-only arguments of the direction with their defaults; an optimizer also has REST.
DIRECTIONS = {
    "normpre_g": {**NEWTON_SCHULZ, **OF_NORMPRE},
    "normpre_l": {**SKETCH, **OF_NORMPRE},
    "normpre": OF_NORMPRE,
    "muon": {"convention": "moonlight", **OF_MUON},
    "mano": {"version": 1, "nesterov": False, **MOMENTUM},
    "rmnp": {"nesterov": True, **MOMENTUM},
    "muoneq": {"mode": "rows", **OF_MUON},
    "muon_plus": {"mode": "both", **OF_MUON},
    "normuon": {"b2": 0.95, **OF_MUON},
    "adamuon": OF_MUON,
    "moga": {"mode": "rows", "nesterov": True, **MOMENTUM},
    "swan": {"whitening_steps": 6, "rms": None, "compute_dtype": None, "matrix_dims": None},
}
# Stages, with all their arguments.
DIMS = {"matrix_dims": None}
STAGES = {
    npo.project_to_tangent: {"mode": "relaxed", **DIMS},
    npo.normalize_rows: {"side": "rows", "eps": 0.0, **DIMS},
    npo.precondition_globally: {**NEWTON_SCHULZ, "rms": None, **DIMS},
    npo.precondition_locally: {**SKETCH, "rms": None, **DIMS},
    npo.scale_to_rms: {"rms": 0.2, **DIMS},
    whiten: {"steps": 6, "compute_dtype": None, "rms": None, **DIMS},
    scale_by_row_moment: {"b2": 0.95, "eps": 1e-10, **DIMS},
    standardize_rows: DIMS,
}
CALLABLES = sorted(name for name in npo.__all__ if callable(getattr(npo, name)))
EVERY_DIRECTION = [name for name in DIRECTIONS if name != "normpre"]
NUMBERS = {"learning_rate", "momentum", "b2", "weight_decay", "rms", "threshold"}  # and what begins with adam_


def arguments(f, *kinds):
    return {k: p.default for k, p in inspect.signature(f).parameters.items() if not kinds or p.kind in kinds}


def test_the_public_names():
    assert len(npo.__all__) == len(set(npo.__all__)) <= 46
    assert all(hasattr(npo, name) for name in npo.__all__)
    assert set(npo.families()) == {*EVERY_DIRECTION}
    assert all(factory is getattr(npo, name) for name, factory in npo.families().items())
    npo.families().clear()
    assert npo.families()


@pytest.mark.parametrize("name", DIRECTIONS)
def test_optimizers_and_directions_have_the_promised_arguments(name):
    positional = ["precondition"] * (name == "normpre")
    for f, first, expected in (
        (getattr(npo, name), ["learning_rate"], {**DIRECTIONS[name], **REST}),
        (getattr(npo, f"scale_by_{name}"), [], DIRECTIONS[name]),
    ):
        assert [*arguments(f, inspect.Parameter.POSITIONAL_OR_KEYWORD)] == first + positional
        assert arguments(f, inspect.Parameter.KEYWORD_ONLY) == expected
        numbers = {a for a in arguments(f) if a in NUMBERS or a.startswith("adam_")}
        assert npo.static_args(f) == arguments(f).keys() - numbers


def test_with_adamw_and_stages_have_the_promised_arguments():
    assert arguments(npo.with_adamw, inspect.Parameter.KEYWORD_ONLY) == REST
    for stage, expected in STAGES.items():
        assert arguments(stage) == expected, stage
        assert isinstance(stage(), optax.GradientTransformationExtraArgs)
    kinds = {p.kind for name in CALLABLES for p in inspect.signature(getattr(npo, name)).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds  # no hidden arguments


@pytest.mark.parametrize("name", CALLABLES)
def test_docstrings_have_their_parts_and_an_example(name):
    thing = getattr(npo, name)
    doc = inspect.getdoc(thing)
    assert doc.splitlines()[0].endswith((".", ":")), "the first line is a sentence of its own"
    sections = [line.rstrip(":") for line in doc.splitlines() if line in ("Args:", "Returns:", "Raises:", "Example:")]
    assert sections == [s for s in ("Args", "Returns", "Raises", "Example") if s in sections]
    described = {line.strip().split(":")[0] for line in doc.split("Args:")[-1].splitlines()}
    named = {k for k, p in inspect.signature(thing).parameters.items()}
    assert named <= described or "Args" not in sections, named - described
    assert not named or "Args" in sections
    assert inspect.isclass(thing) or "Returns" in sections
    shown = npo.families().get(name.removeprefix("scale_by_"), thing)  # of a direction, the complete optimizer has it
    assert doctest.DocTestParser().get_examples(shown.__doc__), "an example that pytest runs"


@pytest.mark.parametrize("name", EVERY_DIRECTION)
def test_help_shows_the_optimizer(name):
    factory = getattr(npo, name)
    assert (factory.__name__, factory.__qualname__) == (name, name)
    assert factory.__module__ == getattr(npo, f"scale_by_{name}").__module__
    assert "The complete optimizer" in factory.__doc__


INT, TRACED = "must be an int", "static_args"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: npo.muon(1e-3, wieght_decay=0.1),
            r"muon\(\) has no option 'wieght_decay': did you mean 'weight_decay'",
        ),
        (lambda: npo.muon(1e-3, adam_lr=3e-4), r"did you mean 'adam_learning_rate'"),
        (lambda: npo.muon(1e-3, b1=0.9), r"did you mean 'adam_b1'"),
        (lambda: npo.muon(1e-3, consistent_rms=0.2), r"did you mean 'convention'"),
        (lambda: npo.muon(1e-3, muon_weight_dimension_numbers=None), r"did you mean 'matrix_dims'"),
        (lambda: npo.normpre_g(1e-3, consistent_rms=0.2), r"no option 'consistent_rms': its options are learning_rate"),
        (lambda: npo.mano(lr=1e-3), r"no option 'lr': did you mean 'learning_rate'"),
        (lambda: npo.mano(1e-3, compute_dtype=None), r"mano\(\) has no option 'compute_dtype'"),
        (lambda: npo.scale_by_swan(radius=1), r"no option 'radius': its options are whitening_steps, rms"),
        (lambda: npo.muon(1e-3, momentum=1.5), r"momentum must be in \[0, 1\), got 1.5"),
        (lambda: npo.normuon(1e-3, b2=1.0), r"b2 must be in \[0, 1\), got 1.0"),
        (lambda: npo.mano(1e-3, weight_decay=-0.1), r"weight_decay must be in \[0, inf\), got -0.1"),
        (lambda: npo.muon(1e-3, adam_b2=float("nan")), r"adam_b2 must be in \[0, 1\), got nan"),
        (lambda: npo.muon(1e-3, adam_b1=np.array(2.0)), r"adam_b1 must be in \[0, 1\), got 2.0"),
        (lambda: npo.muon(1e-3, adam_weight_decay=np.array(np.inf)), "adam_weight_decay must be in"),
        (lambda: npo.muon(float("nan")), r"learning_rate must be in \[0, inf\), got nan"),
        (lambda: npo.muon(-1e-3), r"learning_rate must be in \[0, inf\), got -0.001"),
        (lambda: npo.hyperball(-0.1), r"learning_rate must be in \[0, inf\)"),
        (lambda: npo.muon(True), "learning_rate must be a number, got True"),
        (lambda: npo.muon([1e-3]), r"learning_rate must be a number, got \[0.001\]"),
        (lambda: npo.normpre_g(1e-3, rms=-0.1), "rms must be in"),
        (lambda: npo.swan(1e-3, rms=np.float32(0)), "rms must be in"),
        (lambda: npo.normpre_g(1e-3, rms=float("inf")), "rms must be in"),
        (lambda: npo.scale_to_rms(0.0), "rms must be in"),
        (lambda: npo.normpre_l(1e-3, threshold=float("inf")), "threshold must be in"),
        (lambda: npo.normpre_g(1e-3, tangent="loose"), "tangent='loose' is not one of .*'relaxed'"),
        (lambda: npo.normpre_g(1e-3, tangent="bounded"), "tangent='bounded' is not one of"),
        (lambda: npo.project_to_tangent("tangential"), "tangent='tangential' is not one of"),
        (lambda: npo.normpre_g(1e-3, orientation="row"), "orientation='row' is not one of"),
        (lambda: npo.normalize_tangent(orientation="row"), "orientation='row' is not one of"),
        (lambda: npo.normalize_rows("row"), "side='row' is not one of"),
        (lambda: npo.muoneq(1e-3, mode="rc"), "mode='rc' is not one of .*'rows'"),
        (lambda: npo.muon(1e-3, convention="keler"), "convention='keler' is not one of"),
        (lambda: npo.mano(1e-3, version=3), "version=3 is not one of"),
        (lambda: npo.muon(1e-3, norm_control="brake"), "norm_control='brake' is not one of"),
        (lambda: npo.muon(1e-3, norm_control=optax.scale(2.0)), "norm_control=.* is not one of"),
        (lambda: npo.normpre_l(1e-3, method="exactly"), "method='exactly' is not one of"),
        (lambda: npo.precondition_locally(threshold="median"), "threshold='median' is neither a number nor 'mean'"),
        (lambda: npo.normpre_l(1e-3, threshold="median"), "threshold='median' is neither"),
        (lambda: npo.normpre_l(1e-3, rank=2.0), f"rank {INT}.*got 2.0"),
        (lambda: npo.normpre_l(1e-3, rank="2"), f"rank {INT}.*got '2'"),
        (lambda: npo.normpre_l(1e-3, rank=True), f"rank {INT}"),
        (lambda: npo.normpre_l(1e-3, rank=float("nan")), f"rank {INT}"),
        (lambda: npo.normpre_l(1e-3, rank=0), "rank must be at least 1"),
        (lambda: npo.normpre_l(1e-3, rank=jnp.int32(2)), f"rank .*cannot be traced.*{TRACED}"),
        (lambda: npo.normpre_l(1e-3, oversample=-1), "oversample must be at least 0"),
        (lambda: npo.normpre_l(1e-3, power_iterations=-1), "power_iterations must be at least 0"),
        (lambda: npo.normpre_l(1e-3, seed=2**40), "seed must be at least 0 and below 4294967296"),
        (lambda: npo.normpre_g(1e-3, ns_steps=0), "ns_steps must be at least 1"),
        (lambda: npo.normpre_g(1e-3, ns_steps=2.5), f"ns_steps {INT}"),
        (lambda: npo.swan(1e-3, whitening_steps=0), "whitening_steps must be at least 1"),
        (lambda: npo.muon(1e-3, ns_coefficients="muno"), "ns_coefficients='muno' is not one of"),
        (lambda: npo.muon(1e-3, ns_coefficients=3), "ns_coefficients=3 is not one of"),
        (lambda: npo.muon(1e-3, nesterov=1), "nesterov must be True or False, got 1"),
        (lambda: npo.rmnp(1e-3, mu_dtype=int), "mu_dtype must be a floating-point dtype of 16 bits or more"),
        (lambda: npo.rmnp(1e-3, mu_dtype="bf16"), "mu_dtype must be a floating-point dtype"),
        (lambda: npo.muon(1e-3, mu_dtype=jnp.float8_e4m3fn), "mu_dtype must be .*of 16 bits"),
        (lambda: npo.muon(1e-3, compute_dtype=jnp.float8_e5m2), "compute_dtype must be .*of 16 bits"),
        (lambda: npo.normpre(1e-3, lambda x: x), "precondition must be an optax.GradientTransformation"),
        (lambda: npo.scale_by_normpre(None), "precondition must be an optax.GradientTransformation"),
        (lambda: npo.muon(), "missing a required argument: 'learning_rate'|missing 1 required .*'learning_rate'"),
        (lambda: npo.with_adamw(npo.scale_by_muon(), 1e-3), "direction must be a function .*such as scale_by_muon or"),
        (lambda: npo.with_adamw(lambda matrix_dims: None, 1e-3), "direction must be a function that returns an optax"),
    ],
)
def test_an_invalid_argument_is_named_at_construction(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_numbers_of_numpy_are_numbers():
    assert npo.normpre_l(np.float32(1e-3), rank=np.int64(4), seed=np.uint32(7), rms=np.float64(0.2))
