# SPDX-License-Identifier: Apache-2.0
"""Grammar of the public names: documented, keyword-only, with the defaults that DESIGN promises to tools outside."""

import doctest
import inspect

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
RELATIVES = {k: v for k, v in COMMON.items() if k not in ("tangent", "tangent_radius", "orientation", "rms")}
NEWTON_SCHULZ = {"nesterov": True, "ns_steps": 5, "ns_coefficients": "muon", **RELATIVES, **ON_MESHES}
OF_THE_REST = ("weight_decay", "weight_decay_mask")

# Name: (positional arguments, keyword-only arguments with their defaults).
OPTIMIZERS = {
    "normpre_g": (["learning_rate"], {"ns_steps": 5, "ns_coefficients": "muon", **COMMON, **ON_MESHES}),
    "normpre_l": (
        ["learning_rate"],
        {"rank": 32, "oversample": 8, "power_iterations": 1, "method": "sketch", "seed": 0, "warm_start": False}
        | COMMON
        | ON_MESHES
        | {"divide": False},
    ),
    "normpre": (["learning_rate", "precondition"], COMMON | {"shardings": None}),
    "scale_by_normpre": (
        ["precondition"],
        {k: v for k, v in COMMON.items() if not k.startswith("adam_") and k not in OF_THE_REST},
    ),
    "muon": (["learning_rate"], {"convention": "moonlight", **NEWTON_SCHULZ}),
    "mano": (["learning_rate"], {"version": 1, "nesterov": False, **RELATIVES}),
    "rmnp": (["learning_rate"], {"nesterov": True, **RELATIVES}),
    "muoneq": (["learning_rate"], {"mode": "R", **NEWTON_SCHULZ}),
    "muon_plus": (["learning_rate"], {"mode": "row_col", **NEWTON_SCHULZ}),
    "normuon": (["learning_rate"], {"b2": 0.95, **NEWTON_SCHULZ}),
    "adamuon": (["learning_rate"], NEWTON_SCHULZ),
    "moga": (["learning_rate"], {"mode": "rows", "nesterov": True, **RELATIVES}),
    "swan": (
        ["learning_rate"],
        {"whitening_steps": 6, "rms": None, **ON_MESHES} | {k: v for k, v in RELATIVES.items() if k != "momentum"},
    ),
    "dion": (["learning_rate"], {"rank": 768, "seed": 0, **RELATIVES}),
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
    },
    "scale_to_rms": {"rms": 0.2},
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
    "explain",
    "families",
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
    assert set(found) == OPTIMIZERS.keys() - {"normpre", "scale_by_normpre"}
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


@pytest.mark.parametrize("name", CALLABLES)
def test_no_hidden_arguments(name):
    kinds = {p.kind for p in inspect.signature(getattr(npo, name)).parameters.values()}
    assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}, name


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
        "scale_by_normpre": (optax.identity(),),
        "as_matrices": (None, optax.identity()),
        "alternate_orientation": (optax.identity(),),
        **dict.fromkeys(PARTS, ()),
    }.get(name, (1e-3,))
    assert isinstance(getattr(npo, name)(*arguments), optax.GradientTransformationExtraArgs)


def test_static_args_name_real_arguments_and_all_that_are_not_numbers():
    arguments = {a for f in OPTIMIZERS for a in inspect.signature(getattr(npo, f)).parameters}
    assert arguments >= npo.STATIC_ARGS
    numeric = {"learning_rate", "momentum", "b2", "weight_decay", "tangent_radius", "rms"}
    numeric |= {a for a in arguments if a.startswith("adam_")}
    assert arguments - npo.STATIC_ARGS == numeric
