# SPDX-License-Identifier: Apache-2.0
"""Former names of functions and options: they work, and warn at the call."""

import dataclasses
import inspect
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import normpre_optax as npo
from normpre_optax import deprecation, option_table
from normpre_optax.options import checked
from tests import cases


@pytest.fixture
def renamed(monkeypatch):
    """The option ``momentum`` was called ``inertia``."""
    momentum = option_table.OPTIONS["momentum"]
    former = (option_table.Former("inertia", "9.0"),)
    entry = dataclasses.replace(momentum, formerly=former)
    monkeypatch.setitem(option_table.OPTIONS, "momentum", entry)
    monkeypatch.setattr(deprecation, "_RENAMED", deprecation._renamed_options())


def test_a_former_option_works_and_warns_at_every_call(renamed):
    for factory in (npo.scale_by_rmnp, npo.rmnp):
        more = {"learning_rate": 0.1} if factory is npo.rmnp else {}
        for _ in range(2):
            with pytest.warns(DeprecationWarning, match="inertia=") as seen:
                factory(inertia=0.5, **more)
            assert [warning.filename for warning in seen] == [__file__]
            assert str(seen[0].message) == (
                "inertia= is now momentum=: the former name will be removed in version"
                " 9.0"
            )


def test_the_value_of_a_former_option_is_used_and_checked(renamed):
    @checked
    def factory(*, momentum: float = 0.9):
        """Return the momentum."""
        return momentum

    with pytest.warns(DeprecationWarning, match="inertia="):
        assert factory(inertia=0.5) == 0.5
    with (
        pytest.warns(DeprecationWarning, match="inertia="),
        pytest.raises(ValueError, match=r"momentum must be in \[0, 1\), got 2"),
    ):
        factory(inertia=2.0)
    with pytest.raises(TypeError, match="'momentum' and its former name 'inertia'"):
        factory(inertia=0.5, momentum=0.5)
    assert "inertia" not in inspect.signature(factory).parameters


def test_a_former_name_of_an_option_that_a_function_lacks_is_an_error(renamed):
    with pytest.raises(TypeError, match="has no option 'inertia'"):
        npo.with_adamw(npo.scale_by_rmnp, 0.1, inertia=0.5)


def test_a_stage_takes_former_names(renamed):
    @deprecation.accepts_former_names
    def stage(momentum=0.9):
        return momentum

    with pytest.warns(DeprecationWarning, match="inertia=") as seen:
        assert stage(inertia=0.5) == 0.5
    assert seen[0].filename == __file__
    with warnings.catch_warnings(action="error"):
        assert stage(0.3) == stage(momentum=0.3) == 0.3
    with pytest.raises(TypeError, match="unexpected keyword argument 'weight'"):
        stage(weight=1)


@pytest.mark.parametrize("make", [npo.scale_by_muon, npo.precondition_globally])
def test_ns_scale_is_ns_norm(make):
    with pytest.warns(DeprecationWarning, match=r"ns_scale= is now ns_norm=.* 0\.5\.0"):
        former = make(ns_scale="schatten")
    grads = {"kernel": jnp.arange(12.0).reshape(3, 4)}
    got = cases.first_update(former, grads, grads)
    expected = cases.first_update(make(ns_norm="schatten"), grads, grads)
    np.testing.assert_array_equal(got["kernel"], expected["kernel"])
    other = cases.first_update(make(), grads, grads)
    assert (got["kernel"] != other["kernel"]).any()


def test_a_deprecated_function_names_its_successor():
    @deprecation.deprecated("area()", removed_in="2.0")
    def size(a, b=2):
        """Return the area."""
        return a * b

    with pytest.warns(DeprecationWarning, match="size") as seen:
        assert size(3) == 6
    assert seen[0].filename == __file__
    assert str(seen[0].message) == (
        "size() is now area(): the former name will be removed in version 2.0"
    )
    assert (size.__name__, size.__doc__) == ("size", "Return the area.")


def test_former_names_of_the_table_are_not_options_of_today():
    present = set()
    for name in npo.__all__:
        if callable(getattr(npo, name)):
            present |= inspect.signature(getattr(npo, name)).parameters.keys()
    for name, option in option_table.OPTIONS.items():
        for former in option.formerly:
            assert former.name not in present, name
            assert former.name not in option_table.OPTIONS, name
