# SPDX-License-Identifier: Apache-2.0
"""Grammar of the public names: documented, keyword-only, with the defaults that DESIGN promises to tools outside."""

import doctest
import inspect
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import normpre_optax as npo

COMMON = {
    "momentum": 0.95,
    "weight_decay": 0.1,
    "weight_decay_mask": None,
    "tangent": "relaxed",
    "tangent_radius": 1.0,
    "orientation": "alternating",
    "rms": 0.2,
    "mu_dtype": None,
    "compute_dtype": None,
    "matrix_dims": None,
    "adam_learning_rate": None,
    "adam_b1": 0.9,
    "adam_b2": 0.95,
    "adam_eps": 1e-8,
    "adam_weight_decay": None,
}
ON_MESHES = {"divide": True, "shardings": None}
REST = {k: v for k, v in COMMON.items() if k.startswith("adam_") or k in ("weight_decay", "weight_decay_mask")}
REST |= {"mu_dtype": None, "matrix_dims": None, "shardings": None, "cautious": False, "norm_control": "none"}
REST |= {"rate_multipliers": None}
MOMENTUM = {"momentum": 0.95, "mu_dtype": None, "compute_dtype": None, "matrix_dims": None}
NEWTON_SCHULZ = {"ns_steps": 5, "ns_coefficients": "muon", "compute_dtype": None, "divide": True}
OF_NORMPRE = {k: v for k, v in COMMON.items() if k not in REST} | {"nesterov": False, **MOMENTUM}
OF_MUON = {"nesterov": True, **MOMENTUM, **NEWTON_SCHULZ}
SKETCH = {"rank": 32, "oversample": 8, "power_iterations": 1, "method": "sketch", "seed": 0, "warm_start": False}
SKETCH |= {"threshold": 1.0}

NUMERIC = {
    "learning_rate",
    "momentum",
    "b2",
    "weight_decay",
    "tangent_radius",
    "rms",
    "threshold",
}  # and what begins with adam_

# Name: keyword-only arguments with their defaults, of the direction alone and of the optimizer beside REST.
DIRECTIONS = {
    "muon": {"convention": "moonlight", **OF_MUON},
    "mano": {"version": 1, "nesterov": False, **MOMENTUM},
    "rmnp": {"nesterov": True, **MOMENTUM},
    "muoneq": {"mode": "rows", **OF_MUON},
    "muon_plus": {"mode": "both", **OF_MUON},
    "normuon": {"b2": 0.95, **OF_MUON},
    "adamuon": OF_MUON,
    "moga": {"mode": "rows", "nesterov": True, **MOMENTUM},
    "swan": {"whitening_steps": 6, "rms": None, "divide": True}
    | {k: v for k, v in MOMENTUM.items() if k != "momentum"},
    "dion": {"rank": 768, "seed": 0, **MOMENTUM},
}
# Name: (positional arguments, keyword-only arguments with their defaults).
OPTIMIZERS = {
    "normpre_g": (["learning_rate"], {**NEWTON_SCHULZ, **OF_NORMPRE, **REST}),
    "normpre_l": (["learning_rate"], {**SKETCH, "divide": False, **OF_NORMPRE, **REST}),
    "normpre": (["learning_rate", "precondition"], {**OF_NORMPRE, **REST}),
    "scale_by_normpre": (["precondition"], OF_NORMPRE),
    "scale_by_normpre_g": ([], {**NEWTON_SCHULZ, **OF_NORMPRE}),
    "scale_by_normpre_l": ([], {**SKETCH, "divide": False, **OF_NORMPRE}),
    **{name: (["learning_rate"], {**own, **REST}) for name, own in DIRECTIONS.items()},
    **{f"scale_by_{name}": ([], own) for name, own in DIRECTIONS.items()},
    "hybrid": (["direction", "learning_rate"], REST),
    "orthogonalize": ([], NEWTON_SCHULZ),
    "orthogonalized_momentum": ([], {"before": (), "after": (), **OF_MUON}),
    "matrix_momentum": (["stage"], {"nesterov": True, **MOMENTUM}),
}
PARTS = {
    "project_to_tangent": {"mode": "relaxed", "radius": 1.0},
    "normalize_rows": {"eps": 0.0},
    "standardize_rows": {},
    "equalize_rows_and_columns": {},
    "whiten": {"steps": 6, "compute_dtype": None},
    "scale_by_row_moment": {"decay": 0.95, "eps": 1e-10},
    "precondition_globally": {"ns_steps": 5, "ns_coefficients": "muon", "compute_dtype": None},
    "precondition_locally": {
        "rank": 32,
        "oversample": 8,
        "power_iterations": 1,
        "method": "sketch",
        "seed": 0,
        "compute_dtype": None,
        "warm_start": False,
        "threshold": 1.0,
    },
    "scale_to_rms": {"rms": 0.2},
    "brake_radially": {"outward": 0.5, "inward": 1.0, "per": "rows", "matrix_dims": None},
    "hold_norm": {"norm": None, "per": "matrix", "matrix_dims": None},
}
# What DESIGN lists; `diagnostics` belongs to the analysis.
CONTRACT = {
    *OPTIMIZERS,
    *PARTS,
    "as_matrices",
    "alternate_orientation",
    "MatrixDims",
    "default_matrix_dims",
    "dims_from_nnx",
    "STATIC_ARGS",
    "static_args",
    "chain",
    "explain",
    "families",
    "hyperball",
    "row_gains",
    "add_cautious_decay",
    "no_gains_or_biases",
    "rates_by_width",
    "learning_rate_from_muon",
}
CALLABLES = sorted(name for name in npo.__all__ if callable(getattr(npo, name)))


def defaults(f, kind):
    return {k: p.default for k, p in inspect.signature(f).parameters.items() if p.kind is kind}


def test_all_is_exactly_what_the_face_shows():
    assert set(npo.__all__) >= CONTRACT
    assert len(npo.__all__) == len(set(npo.__all__))
    for name in npo.__all__:
        assert hasattr(npo, name), name


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_have_the_promised_signature(name):
    factory, (positional, keywords) = getattr(npo, name), OPTIMIZERS[name]
    assert list(defaults(factory, inspect.Parameter.POSITIONAL_OR_KEYWORD)) == positional
    assert defaults(factory, inspect.Parameter.KEYWORD_ONLY) == keywords


def test_families_are_all_the_optimizers_but_the_one_that_wants_a_part():
    found = npo.families()
    assert set(found) == {"normpre_g", "normpre_l", *DIRECTIONS}
    assert all(factory is getattr(npo, name) for name, factory in found.items())
    found.clear()
    assert npo.families()


@pytest.mark.parametrize("name", PARTS)
def test_parts_have_the_promised_defaults(name):
    found = {k: p.default for k, p in inspect.signature(getattr(npo, name)).parameters.items()}
    assert found == PARTS[name]


def test_the_wrappers_have_the_promised_arguments():
    assert list(inspect.signature(npo.as_matrices).parameters) == ["dims", "inner"]
    first = inspect.signature(npo.alternate_orientation).parameters["first"]
    assert (first.kind, first.default) == (inspect.Parameter.KEYWORD_ONLY, "rows")
    assert list(inspect.signature(npo.MatrixDims).parameters)[:2] == ["inputs", "outputs"]


@pytest.mark.parametrize("name", [name for name in CALLABLES if name != "chain"])
def test_no_hidden_arguments(name):
    kinds = {p.kind for p in inspect.signature(getattr(npo, name)).parameters.values()}
    assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}, name


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: npo.muon(1e-3, wieght_decay=0.1), r"has no option 'wieght_decay': did you mean 'weight_decay'"),
        (lambda: npo.muon(1e-3, adam_lr=3e-4), r"did you mean 'adam_learning_rate'"),
        (lambda: npo.muon(1e-3, b1=0.9), r"did you mean 'adam_b1'"),
        (lambda: npo.muon(1e-3, consistent_rms=0.2), r"did you mean 'convention'"),
        (lambda: npo.normpre_g(1e-3, consistent_rms=0.2), r"no option 'consistent_rms': it takes learning_rate"),
        (lambda: npo.mano(lr=1e-3), r"no option 'lr': did you mean 'learning_rate'"),
        (lambda: npo.scale_by_dion(radius=1), r"no option 'radius': it takes .*rank, seed"),
        (lambda: npo.muon(1e-3, momentum=1.5), r"momentum must lie in \[0, 1\), got 1.5"),
        (lambda: npo.normuon(1e-3, b2=1.0), r"b2 must lie in \[0, 1\), got 1.0"),
        (lambda: npo.mano(1e-3, weight_decay=-0.1), "weight_decay must be at least 0, got -0.1"),
        (lambda: npo.muon(1e-3, adam_b1="x"), "adam_b1 must be a number, got 'x'"),
        (lambda: npo.muon(1e-3, adam_b2=float("nan")), r"adam_b2 must lie in \[0, 1\), got nan"),
        (lambda: npo.normpre_g(1e-3, tangent="loose"), "tangent='loose' is not one of .*'relaxed'"),
        (lambda: npo.muoneq(1e-3, mode="rc"), "mode='rc' is not one of .*'rows'"),
        (lambda: npo.normpre_l(1e-3, rank=2.0), "rank must be an int, or a share between 0 and 1, got 2.0"),
        (lambda: npo.normpre_l(1e-3, rank="2"), "rank must be an int, got '2'"),
        (lambda: npo.normpre_l(1e-3, method="sketch", warm_start=1), "warm_start must be True or False, got 1"),
        (lambda: npo.rmnp("1e-3"), "learning_rate must be a number, got '1e-3'"),
        (lambda: npo.rmnp(1e-3, mu_dtype=int), "mu_dtype must be a floating-point dtype"),
        (lambda: npo.swan(1e-3, rms=np.float32(-0.2)), "rms must be positive"),
        (lambda: npo.normpre_g(1e-3, rms=float("inf")), "rms must be finite, got inf"),
        (lambda: npo.scale_to_rms("x"), "rms must be a number, got 'x'"),
        (lambda: npo.normpre_g(1e-3, tangent_radius=float("inf")), "tangent_radius must be finite"),
        (lambda: npo.project_to_tangent(radius="1"), "tangent_radius must be a number, got '1'"),
        (lambda: npo.muon(float("nan")), "learning_rate must be finite, got nan"),
        (lambda: npo.muon(-1e-3), "learning_rate must be at least 0, got -0.001"),
        (lambda: npo.muon(True), "learning_rate must be a number, got True"),
        (lambda: npo.muon([1e-3]), r"learning_rate must be a number, got \[0.001\]"),
        (lambda: npo.muon(1e-3, weight_decay=Fraction(1, 2)), r"weight_decay must be a number, got Fraction\(1, 2\)"),
        (lambda: npo.muon(1e-3, adam_weight_decay=np.array(np.inf)), "adam_weight_decay must be finite"),
        (lambda: npo.muon(1e-3, adam_b1=np.array(2.0)), r"adam_b1 must lie in \[0, 1\), got 2.0"),
        (lambda: npo.normpre_l(1e-3, seed=2**40), r"seed must lie in \[0, 4294967296\)"),
        (lambda: npo.precondition_locally(seed=2**40), r"seed must lie in \[0, 4294967296\)"),
        (lambda: npo.scale_by_dion(seed=2**40), r"seed must lie in \[0, 4294967296\)"),
        (lambda: npo.muon(1e-3, mu_dtype=jnp.float8_e4m3fn), "mu_dtype must be a floating-point dtype .*of 16 bits"),
        (lambda: npo.muon(1e-3, compute_dtype=jnp.float8_e5m2), "compute_dtype must be .*of 16 bits"),
        (lambda: npo.muon(1e-3, ns_coefficients=3), "ns_coefficients=3 is not one of"),
        (lambda: npo.muon(), r"muon\(\): missing a required argument: 'learning_rate'"),
        (lambda: npo.hybrid(npo.scale_by_muon(), 1e-3), "direction must be a function .*such as scale_by_muon or"),
        (lambda: npo.hybrid(lambda matrix_dims: None, 1e-3), "what direction makes must be an optax"),
        (lambda: npo.orthogonalized_momentum(before=npo.normalize_rows()), "every stage of before must be an optax"),
        (lambda: npo.options.with_options(lambda **options: None), r"must end in \*\*options: Unpack\[G\]"),
    ],
)
def test_every_option_is_held_against_its_declaration(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_an_int_of_numpy_is_an_int():
    assert npo.normpre_l(1e-3, rank=np.int64(4), seed=np.uint32(7))


@pytest.mark.parametrize("name", CALLABLES)
def test_docstrings_have_their_parts(name):
    thing = getattr(npo, name)
    doc = inspect.getdoc(thing)
    assert doc, name
    assert not doc.splitlines()[0].endswith(","), "the first line is a sentence of its own"
    arguments = inspect.signature(thing).parameters
    sections = [line.rstrip(":") for line in doc.splitlines() if line in ("Args:", "Returns:", "Raises:", "Example:")]
    wanted = ["Example"] if inspect.isclass(thing) else ["Returns", "Example"]
    assert set(wanted + (["Args"] if arguments else [])) <= set(sections), sections
    order = [s for s in ("Args", "Returns", "Raises", "Example") if s in sections]
    assert sections == order
    described = {line.strip().split(":")[0] for line in doc.split("Args:")[-1].splitlines()}
    assert set(arguments) <= described, set(arguments) - described


@pytest.mark.parametrize("name", CALLABLES)
def test_docstrings_hold_an_example_that_pytest_runs(name):
    assert doctest.DocTestParser().get_examples(getattr(npo, name).__doc__), name


@pytest.mark.parametrize("name", [*OPTIMIZERS, *PARTS, "as_matrices", "alternate_orientation"])
def test_factories_return_transformations_with_extra_args(name):
    arguments = {
        "normpre": (1e-3, optax.identity()),
        "hybrid": (npo.scale_by_muon, 1e-3),
        "matrix_momentum": (optax.identity(),),
        "orthogonalize": (),
        "orthogonalized_momentum": (),
        "scale_by_normpre": (optax.identity(),),
        "scale_by_normpre_g": (),
        "scale_by_normpre_l": (),
        **{f"scale_by_{name}": () for name in DIRECTIONS},
        "as_matrices": (None, optax.identity()),
        "alternate_orientation": (optax.identity(),),
        **dict.fromkeys(PARTS, ()),
    }.get(name, (1e-3,))
    assert isinstance(getattr(npo, name)(*arguments), optax.GradientTransformationExtraArgs)


def test_static_args_are_all_that_are_no_numbers():
    for name in ("normpre", "scale_by_normpre", *npo.families()):
        arguments = set(inspect.signature(getattr(npo, name)).parameters)
        numbers = {a for a in arguments if a in NUMERIC or a.startswith("adam_")}
        assert npo.static_args(getattr(npo, name)) == arguments - numbers
        assert npo.STATIC_ARGS & arguments == arguments - numbers
