# SPDX-License-Identifier: Apache-2.0
"""All optimizers: ``REGISTRY`` has one line each.

The names of ``normpre_optax``, the pretraining program, the API pages and the tests
read it. A new optimizer is a file of its name in this folder, and a line below.
"""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, Literal

import optax

from normpre_optax.deprecation import deprecated

Factory = Callable[..., optax.GradientTransformationExtraArgs]
Update = Literal["orthogonal", "relative", "elementwise"]
Gallery = Literal["spectral", "without products"]


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optimizer of this package. A call of it is a call of its factory.

    Pass the factory itself to functions that read its signature, such as
    ``optax.inject_hyperparams``.

    Attributes:
        name: its name in ``normpre_optax``.
        label: its name in tables and plots.
        factory: function that returns the complete optimizer.
        direction: function that returns its direction, ``scale_by_<name>``.
        update: how its steps depend on the shape of a matrix, ``update=`` of
            ``multipliers_by_width``; None if that is unknown. It is "relative" for
            every optimizer under Hyperball, and for ``muon(convention="keller")``.
        gallery: the table that describes it in the gallery of the documentation.
    """

    name: str
    label: str
    factory: Factory
    direction: Factory
    update: Update | None
    gallery: Gallery

    def __call__(
        self, *args: Any, **options: Any
    ) -> optax.GradientTransformationExtraArgs:
        """Return the complete optimizer."""
        return self.factory(*args, **options)


def _entry(
    name: str,
    label: str,
    update: Update | None,
    gallery: Gallery = "spectral",
    module: str | None = None,
) -> Optimizer:
    """Return the entry of an optimizer, by default that of ``relatives/<name>.py``."""
    path = module or f"relatives.{name}"
    found = importlib.import_module(f"normpre_optax.{path}")
    factory = getattr(found, name)
    direction = getattr(found, f"scale_by_{name}")
    return Optimizer(name, label, factory, direction, update, gallery)


# In the order of lists and of the gallery.
REGISTRY = (
    _entry("normpre_h", "NormPre-H", "relative", module="recommended"),
    _entry("normpre_g", "NormPre-G", "orthogonal", module="algorithm"),
    _entry("normpre_l", "NormPre-L", "orthogonal", module="algorithm"),
    _entry("muon", "Muon", "orthogonal"),
    _entry("mano", "MANO", None, "without products"),
    _entry("rmnp", "RMNP", None, "without products"),
    _entry("muoneq", "MuonEq", "orthogonal"),
    _entry("muon_plus", "Muon+", "relative"),
    _entry("normuon", "NorMuon", "relative"),
    _entry("adamuon", "AdaMuon", "orthogonal"),
    _entry("moga", "MOGA", None, "without products"),
    _entry("swan", "SWAN", None),
)


def optimizers() -> dict[str, Optimizer]:
    """Return all optimizers by name: NormPre first, then the related ones.

    Returns:
        A new dict of entries. Each is called like the optimizer, and has the
        ``factory`` itself, its ``direction``, its ``label`` in plots, and the kind of
        its ``update`` (see ``multipliers_by_width``).

    Example:
        >>> from normpre_optax import optimizers
        >>> list(optimizers())[:4]
        ['normpre_h', 'normpre_g', 'normpre_l', 'muon']
        >>> tx = optimizers()["normuon"](0.02, adam_learning_rate=3e-4)
        >>> optimizers()["normuon"].label
        'NorMuon'
    """
    return {optimizer.name: optimizer for optimizer in REGISTRY}


@deprecated("optimizers()", removed_in="0.5.0")
def families() -> dict[str, Factory]:
    """Return all optimizers but ``normpre_h``; the former name of ``optimizers``.

    Returns:
        A new dict of factories.

    Warns:
        DeprecationWarning: always. Version 0.5.0 removes this function.

    Example:
        >>> from normpre_optax import optimizers  # instead of families
        >>> factories = {name: found.factory for name, found in optimizers().items()}
    """
    others = [found for found in REGISTRY if found.name != "normpre_h"]
    return {found.name: found.factory for found in others}
