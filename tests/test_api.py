# SPDX-License-Identifier: Apache-2.0
"""The public names: documented, keyword-only, with the promised defaults, and errors
that name what to write.
"""

import doctest
import inspect
import types
import typing
from operator import attrgetter
from typing import get_args, get_origin

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import normpre_optax as npo
from normpre_optax import stages
from normpre_optax.option_table import OPTIONS
from normpre_optax.stages import scale_by_row_moment
from tests import cases

CALLABLES = sorted(name for name in npo.__all__ if callable(getattr(npo, name)))
STAGES = [
    f"stages.{name}"
    for name in vars(stages).keys() - set(npo.__all__)
    if inspect.isfunction(getattr(stages, name))
]
REST = {
    "weight_decay": 0.1,
    "norm_control": "none",
    "adam_b1": 0.9,
    "adam_b2": 0.95,
    "adam_eps": 1e-8,
}
REST |= dict.fromkeys(
    (
        "row_norms",
        "weight_decay_mask",
        "learning_rate_multipliers",
        "adam_learning_rate",
        "adam_weight_decay",
    )
)
REST |= dict.fromkeys(("mu_dtype", "matrix_dims", "shardings"))
NORMPRE = {
    "momentum": 0.95,
    "nesterov": False,
    "tangent": "relaxed",
    "orientation": "alternating",
    "rms": 0.2,
}
# Table 4 of the paper; the defaults of other relatives are those of their
# transcriptions.
DEFAULTS = {
    "normpre": NORMPRE,
    "normpre_g": {"ns_steps": 5, "ns_coefficients": "muon", **NORMPRE},
    "normpre_l": {
        "rank": 32,
        "oversample": 8,
        "power_iterations": 1,
        "method": "sketch",
        "seed": 0,
        **NORMPRE,
    },
    "muon": {
        "convention": "moonlight",
        "momentum": 0.95,
        "nesterov": True,
        "ns_steps": 5,
        "ns_coefficients": "muon",
    },
    "mano": {"version": 1, "momentum": 0.95, "nesterov": False},
}
DEFAULTS["normpre_l"] |= {"relative_threshold": None}


def is_a_number(option):
    """Whether the table of options has a range for it, and it is no tree."""
    known = OPTIONS.get(option)
    return known is not None and known.interval is not None and not known.tree


def arguments(f, *kinds):
    return {
        k: p.default
        for k, p in inspect.signature(f).parameters.items()
        if not kinds or p.kind in kinds
    }


def test_the_public_names():
    assert len(npo.__all__) == len(set(npo.__all__))
    directions = {name for name in npo.__all__ if f"scale_by_{name}" in npo.__all__}
    assert set(npo.optimizers()) == directions - {"normpre"}
    assert next(iter(npo.optimizers())) == "normpre_h"
    for name, found in npo.optimizers().items():
        assert found.factory is getattr(npo, name)
        assert found.direction is getattr(npo, f"scale_by_{name}")
    npo.optimizers().clear()
    assert npo.optimizers()


def test_the_former_registry_works_and_names_the_new_one():
    with pytest.warns(DeprecationWarning, match=r"families\(\) is now optimizers\(\)"):
        found = npo.families()
    assert found == {
        name: optimizer.factory
        for name, optimizer in npo.optimizers().items()
        if name != "normpre_h"
    }


@pytest.mark.parametrize("name", [*cases.ONE_RATE, "normpre"])
def test_an_optimizer_has_the_options_of_its_direction_and_of_with_adamw(name):
    factory, direction = getattr(npo, name), getattr(npo, f"scale_by_{name}")
    own = arguments(direction, inspect.Parameter.KEYWORD_ONLY)
    assert own | DEFAULTS.get(name, {}) == own
    assert {
        own[option]
        for option in own.keys() & {"compute_dtype", "mu_dtype", "matrix_dims"}
    } == {None}
    assert arguments(factory, inspect.Parameter.KEYWORD_ONLY) == {**own, **REST}
    positional = ["precondition"] * (name == "normpre")
    for f, first in (
        (factory, ["learning_rate", *positional]),
        (direction, positional),
    ):
        assert [*arguments(f, inspect.Parameter.POSITIONAL_OR_KEYWORD)] == first
        assert arguments(f).keys() == {
            *first,
            *arguments(f, inspect.Parameter.KEYWORD_ONLY),
        }  # no hidden ones
        numbers = {
            option
            for option, default in arguments(f).items()
            if is_a_number(option) or type(default) is float
        }
        assert npo.static_args(f) == arguments(f).keys() - numbers
    assert (factory.__name__, factory.__qualname__, factory.__module__) == (
        name,
        name,
        direction.__module__,
    )


def test_with_adamw_and_stages_have_the_same_defaults():
    assert arguments(npo.with_adamw, inspect.Parameter.KEYWORD_ONLY) == REST
    both = {**arguments(npo.scale_by_normpre_g), **arguments(npo.scale_by_normpre_l)}
    both |= {
        "rms": None,
        "mode": "relaxed",
        **arguments(npo.scale_by_normuon, inspect.Parameter.KEYWORD_ONLY),
    }
    with_these_defaults = (
        npo.project_to_tangent,
        npo.precondition_globally,
        npo.precondition_locally,
        scale_by_row_moment,
    )
    for stage in with_these_defaults:
        own = {
            option: default
            for option, default in arguments(stage).items()
            if option != "eps"
        }
        assert own == {option: both[option] for option in own}
        assert isinstance(stage(), optax.GradientTransformationExtraArgs)


@pytest.mark.parametrize("name", CALLABLES)
def test_docstrings_have_their_parts_and_an_example(name):
    thing = getattr(npo, name)
    doc, parameters = inspect.getdoc(thing), inspect.signature(thing).parameters
    assert doc.splitlines()[0].endswith((".", ":")), (
        "the first line is a sentence of its own"
    )
    sections = [
        line.rstrip(":")
        for line in doc.splitlines()
        if line in ("Args:", "Returns:", "Raises:", "Example:")
    ]
    assert sections == [
        s for s in ("Args", "Returns", "Raises", "Example") if s in sections
    ]
    described = {
        line.strip().split(":")[0] for line in doc.split("Args:")[-1].splitlines()
    }
    missing = sorted(parameters.keys() - described)
    assert not missing, (
        f"the docstring of {name} describes no {', '.join(missing)}: write a line"
        f' "{missing[0]}: what it does" under "Args:" of its function, or, if several'
        " functions share the option, the description of its entry of OPTIONS in"
        " normpre_optax/option_table.py"
    )
    assert ("Args" in sections) == bool(parameters)
    assert inspect.Parameter.VAR_KEYWORD not in {p.kind for p in parameters.values()}
    assert inspect.isclass(thing) or "Returns" in sections
    shown = getattr(
        npo, name.removeprefix("scale_by_"), thing
    )  # of a direction, the complete optimizer has it
    assert doctest.DocTestParser().get_examples(shown.__doc__), (
        "an example that pytest runs"
    )


def is_annotated_as_number(parameter):
    """Whether it is ``Number`` or ``float``, perhaps with None or a schedule.

    What may also be an int or a name, as ``rank``, has a check of its own.
    """
    kind = parameter.annotation
    kinds = {kind}
    if get_origin(kind) in (types.UnionType, typing.Union):
        kinds = set(get_args(kind)) - {type(None)}
    return jax.Array in kinds or kinds == {float}


@pytest.mark.parametrize("name", [*CALLABLES, *sorted(STAGES)])
def test_every_option_that_is_a_number_has_a_range(name):
    """Without one, -1, NaN and True are accepted silently."""
    parameters = inspect.signature(attrgetter(name)(npo)).parameters
    for option, parameter in parameters.items():
        known = OPTIONS.get(option)
        is_float = type(parameter.default) is float
        if is_float or is_annotated_as_number(parameter):
            has_range = known is not None and known.interval is not None
            assert has_range, (
                f"{option} of {name} is a number without a range: add"
                f' "{option}": Option(interval=SHARE) to OPTIONS in'
                " normpre_optax/option_table.py. SHARE is [0, 1), ANY [0, inf),"
                " POSITIVE excludes 0; (least, below) is another range"
            )


def test_every_description_of_an_option_is_used():
    used = {
        option
        for name in CALLABLES
        for option in inspect.signature(getattr(npo, name)).parameters
    }
    described = {name for name, option in OPTIONS.items() if option.description}
    assert described <= used


# A call of the package: what its error says.
INVALID = {
    "muon(1e-3, wieght_decay=0.1)": (
        r"muon\(\) has no option 'wieght_decay': did you mean 'weight_decay'"
    ),
    "muon(1e-3, adam_lr=3e-4)": "did you mean 'adam_learning_rate'",
    "muon(1e-3, b1=0.9)": "did you mean 'adam_b1'",
    "muon(1e-3, consistent_rms=0.2)": "did you mean 'convention'",
    "muon(1e-3, muon_weight_dimension_numbers=None)": "did you mean 'matrix_dims'",
    "normpre_g(1e-3, consistent_rms=0.2)": (
        "no option 'consistent_rms': its options are learning_rate"
    ),
    "mano(lr=1e-3)": "no option 'lr': did you mean 'learning_rate'",
    "scale_by_rmnp(radius=1)": "no option 'radius': its options are momentum, nesterov",
    "muon()": (
        "missing a required argument: 'learning_rate'|missing 1 required"
        " .*'learning_rate'"
    ),
    "muon(1e-3, momentum=1.5)": r"momentum must be in \[0, 1\), got 1.5",
    "muon(1e-3, momentum=0.99999999)": r"momentum must be in \[0, 1\)",  # 1 in float32
    "normpre_h(1e-2, 1e-3, metric_strength=100.0)": (
        r"metric_strength must be in \[0, 10\)"
    ),
    "normuon(1e-3, b2=1.0)": r"b2 must be in \[0, 1\), got 1.0",
    "mano(1e-3, weight_decay=-0.1)": r"weight_decay must be in \[0, inf\), got -0.1",
    "muon(1e-3, adam_b2=np.nan)": r"adam_b2 must be in \[0, 1\), got nan",
    "muon(1e-3, adam_b1=np.array(2.0))": r"adam_b1 must be in \[0, 1\), got 2.0",
    "muon(1e-3, adam_weight_decay=np.array(np.inf))": "adam_weight_decay must be in",
    "muon(-1e-3)": r"learning_rate must be in \[0, inf\), got -0.001",
    "hyperball(-0.1)": r"learning_rate must be in \[0, inf\)",
    "muon(True)": "learning_rate must be a number, got True",
    "muon(jnp.bool_(True))": "learning_rate must be a number, got Array",
    "muon([1e-3])": r"learning_rate must be a number, got \[0.001\]",
    "muon(None)": "learning_rate must be a number, got None",
    "muon(lambda: 0.1)": (
        "learning_rate must be a number, or a function of the step: .* takes 0"
        " positional"
    ),
    "normpre_h(0.01, 1e-3, slow_weight=lambda: 0.5)": (
        "slow_weight must be a number, or a function of the step"
    ),
    "muon(lambda step: None)": r"learning_rate\(0\) must be a number, got None",
    "muon(lambda step: -0.1 if step < 10 else 0.1)": (
        r"learning_rate\(0\) must be in \[0, inf\), got -0.1"
    ),
    "normpre_h(1e-2, lambda step: -0.1)": (
        r"adam_learning_rate\(0\) must be in \[0, inf\), got -0.1"
    ),
    "muon(1e-3, weight_decay=lambda step: jnp.ones(2))": (
        r"weight_decay\(0\) must be a number"
    ),
    "muon(1e-3, weight_decay=None)": "weight_decay must be a number, got None",
    "muon(jnp.array([1e-3]))": "learning_rate must be a number, got Array",
    "muon(jnp.float32(-1.0))": r"learning_rate must be in \[0, inf\), got -1.0",
    "normpre_l(1e-3, relative_threshold=lambda step: 1.0)": (
        "relative_threshold must be a number .*inject_hyperparams"
    ),
    "normpre_g(1e-3, 0.1)": r"normpre_g\(\): too many positional arguments",
    "normpre_g(1e-3, rms=np.float32(0))": "rms must be in",
    "scale_to_rms(0.0)": "rms must be in",
    "normpre_l(1e-3, relative_threshold=np.inf)": "relative_threshold must be in",
    "normpre_g(1e-3, tangent='bounded')": "tangent='bounded' is not one of .*'relaxed'",
    "project_to_tangent('tangential')": "mode='tangential' is not one of",
    "normpre_g(1e-3, orientation='row')": "orientation='row' is not one of",
    "normalize_tangent(orientation='row')": "orientation='row' is not one of",
    "normalize_rows('row')": "side='row' is not one of",
    "muoneq(1e-3, mode='rc')": "mode='rc' is not one of .*'rows'",
    "muon(1e-3, convention='keler')": "convention='keler' is not one of",
    "mano(1e-3, version=3)": "version=3 is not one of",
    "muon(1e-3, norm_control=optax.scale(2.0))": "norm_control=.* is not one of",
    "normpre_l(1e-3, method='exactly')": "method='exactly' is not one of",
    "precondition_locally(relative_threshold='median')": (
        "relative_threshold must be a number, got 'median'"
    ),
    "normpre_l(1e-3, relative_threshold='median')": (
        "relative_threshold must be a number"
    ),
    "normpre_l(1e-3, rank=1.0)": (
        "rank must be an int of at least 1, or a share between 0 and 1, got 1.0"
    ),
    "normpre_l(1e-3, rank='2')": "rank must be an int.*got '2'",
    "normpre_l(1e-3, rank=True)": "rank must be an int",
    "normpre_l(1e-3, rank=np.nan)": "rank must be an int",
    "normpre_l(1e-3, rank=0)": "rank must be at least 1",
    "normpre_l(1e-3, rank=jnp.int32(2))": "rank must be a Python int.*static_args",
    "normpre_l(1e-3, oversample=-1)": "oversample must be at least 0",
    "normpre_l(1e-3, power_iterations=-1)": "power_iterations must be at least 0",
    "normpre_l(1e-3, seed=2**40)": "seed must be at least 0 and below 4294967296",
    "normpre_g(1e-3, ns_steps=0)": "ns_steps must be at least 1",
    "normpre_g(1e-3, ns_steps=2.5)": "ns_steps must be an int",
    "muon(1e-3, ns_coefficients='muno')": "ns_coefficients='muno' is not one of",
    "muon(1e-3, nesterov=1)": "nesterov must be True or False, got 1",
    "muon(1e-3, convention=np.ones(2))": "convention=.* is not one of",
    "rmnp(1e-3, mu_dtype=jnp.float32(0.5))": (
        "mu_dtype must be bfloat16, float32, float64 or None"
    ),
    "rmnp(1e-3, mu_dtype=int)": "mu_dtype must be bfloat16, float32, float64 or None",
    "rmnp(1e-3, mu_dtype='bf16')": (
        "mu_dtype must be bfloat16, float32, float64 or None"
    ),
    "precondition_globally(compute_dtype='int8')": (
        "compute_dtype must be bfloat16, float32, float64, narrow or None"
    ),
    "normpre_h(1e-2)": "missing a required argument: 'adam_learning_rate'",
    "normpre_h(1e-2, 1e-3, weight_decay=0.1)": "did you mean 'adam_weight_decay'",
    "normpre_h(1e-2, 1e-3, tangent='none')": (
        "no option 'tangent': its options are learning_rate"
    ),
    "muon(1e-2, norm_control='hyperball')": (
        'norm_control="hyperball" needs adam_learning_rate'
    ),
    "muon(1e-2, **HYPERBALL, convention='keller')": "convention has no effect",
    "normpre_g(1e-2, **HYPERBALL, rms=0.1)": ("rms has no effect"),
    "muon(1e-3, row_norms=1.0)": "row_norms has no effect without norm_control",
    "muon(lambda step: 1e-3 * (1 - step / 2**31))": (
        r"learning_rate is a schedule of int32 steps.* 2\*\*31 .*floats"
    ),
    "hyperball(optax.linear_schedule(0.02, 0.0, 2**40))": (
        "learning_rate is a schedule of int32 steps"
    ),
    "rmnp(1e-3, weight_decay=optax.join_schedules([lambda step: 0.1] * 2, [2**31]))": (
        "weight_decay is a schedule of"
    ),
    "two_momenta(slow_weight=lambda step: jnp.where(step < 2**40, 0.0, 0.5))": (
        "slow_weight is a schedule of int32"
    ),
    "muon(1e-3, ns_steps=2**40)": (
        "ns_steps must be at least 1 and below 1000, got 1099511627776"
    ),
    "normpre_l(1e-3, power_iterations=2**40)": (
        "power_iterations must be at least 0 and below 1000"
    ),
    "normpre_l(1e-3, rank=2**70)": "rank must be at least 1 and below 2147483648",
    "normpre_l(1e-3, oversample=2**31)": (
        "oversample must be at least 0 and below 2147483648"
    ),
    "muon(1e-3, ns_steps=None, ns_coefficients='muno')": (
        "ns_coefficients='muno' is not one of"
    ),
    "muon(1e-3, compute_dtype=jnp.float16)": (
        "compute_dtype must be bfloat16, float32, float64, narrow or None"
    ),
    "normpre(1e-3, lambda x: x)": (
        "precondition must be an optax.GradientTransformation"
    ),
    "with_metric(precondition_globally)": (
        "spectral must be an optax.GradientTransformation, got <function"
    ),
    "with_metric(optax.identity(), clip=0.5)": r"clip must be in \[1, inf\), got 0.5",
    "with_metric(None)": "spectral must be an optax.GradientTransformation, got None",
    "two_momenta(accumulator_dtype='bf16')": (
        "accumulator_dtype must be bfloat16, float32, float64 or None"
    ),
    "two_momenta(accumulator_dtype=int)": (
        "accumulator_dtype must be bfloat16, float32, float64 or None"
    ),
    "swan(1e-3, rms=np.float32(0))": "rms must be in",
    "swan(1e-3, whitening_steps=0)": "whitening_steps must be at least 1",
    "stages.normalize_successively(('row',))": "sides='row' is not one of",
    "stages.normalize_successively(eps=np.nan)": r"eps must be in \[0, inf\), got nan",
    "stages.scale_by_row_moment(b2=1.0)": r"b2 must be in \[0, 1\)",
    "stages.scale_by_row_moment(eps=-1.0)": r"eps must be in \[0, inf\), got -1.0",
    "stages.scale_by_row_moment(eps=None)": "eps must be a number, got None",
    "scale_by_shape('keller')": (
        r"factor must be a function \(outputs, inputs\) -> number, got 'keller'"
    ),
    "scale_by_shape(None)": (
        r"factor must be a function \(outputs, inputs\) -> number, got None"
    ),
    "normalize_tangent(norm=1.0)": (
        r"norm must be a function \(entries\) -> number, got 1.0"
    ),
    "normalize_tangent(first='both')": (
        r"first='both' is not one of \('rows', 'columns'\)"
    ),
    "per_parameter(normalize_rows())": (
        r"f must be a function \(update, weight, dims\) -> update, got Gradient"
    ),
    "direction(optax.identity(), optax.trace)": (
        "stages must be an optax.GradientTransformation, got <function"
    ),
    "direction([optax.identity()])": (
        r"stages must be an optax.GradientTransformation, got \["
    ),
    "direction(matrix_dims=None)": (
        "stages must be an optax.GradientTransformation, got None"
    ),
    "with_adamw(scale_by_muon(), 1e-3)": (
        "direction must be a function .*such as scale_by_muon or"
    ),
    "with_adamw(muon, 1e-3)": r"muon\(\): missing a required argument: 'learning_rate'",
    "with_adamw(lambda matrix_dims: None, 1e-3)": (
        "direction must be a function that returns an optax"
    ),
}


NAMES = {
    **vars(npo),
    "jnp": jnp,
    "np": np,
    "optax": optax,
    "HYPERBALL": {"norm_control": "hyperball", "adam_learning_rate": 1e-3},
}


@pytest.mark.parametrize("call", INVALID)
def test_an_invalid_argument_is_named_at_construction(call):
    with pytest.raises((TypeError, ValueError), match=INVALID[call]):
        eval(call, NAMES)


STAGES = {
    name: stage
    for name, stage in vars(npo.stages).items()
    if inspect.isfunction(stage) and not name.endswith("_scale")
}
VALID = {"factor": max, "f": max, "spectral": optax.identity()}  # those without default


def stage_arguments():
    for name, stage in STAGES.items():
        for argument in inspect.signature(stage).parameters:
            if argument not in ("stages", "matrix_dims"):
                yield name, argument


@pytest.mark.parametrize(("name", "argument"), list(stage_arguments()))
def test_a_stage_names_its_own_argument(name, argument):
    stage = STAGES[name]
    required = {a: VALID[a] for a in inspect.signature(stage).parameters if a in VALID}
    with pytest.raises((TypeError, ValueError), match=rf"^{argument}\b"):
        stage(**required | {argument: object()})


def test_numbers_of_numpy_are_numbers():
    assert npo.normpre_l(
        np.float32(1e-3), rank=np.int64(4), seed=np.uint32(7), rms=np.float64(0.2)
    )


def test_arrays_of_jax_are_numbers_also_inside_of_jit():
    options = {
        "row_norms": jnp.array(1.0),
        "learning_rate_multipliers": lambda params: jnp.array(2.0),
    }
    params, rate = {"up": {"kernel": jnp.ones((4, 8))}}, jnp.array(0.02)

    def updated(params):
        tx = npo.normpre_h(rate, rate, **options)
        return tx.update(params, tx.init(params), params)[0]["up"]["kernel"]

    np.testing.assert_allclose(jax.jit(updated)(params), updated(params), rtol=1e-6)


def test_long_schedules_are_schedules():
    """Up to the last int32, beyond it as floats; and those that work outside of jit
    only.
    """
    for schedule in (
        optax.linear_schedule(0.02, 0.0, 2**31 - 1),
        optax.linear_schedule(0.02, 0.0, 1e12),
        lambda step: 0.02 / (1 + step / 1e12),
        lambda step: 0.02 if step < 10 else 0.01,
    ):
        assert npo.normpre_h(schedule, schedule)
