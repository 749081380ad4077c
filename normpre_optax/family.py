# SPDX-License-Identifier: Apache-2.0
"""All optimizers of this library by name."""

from collections.abc import Callable

import optax

from normpre_optax.algorithm import normpre, normpre_g, normpre_l, scale_by_normpre
from normpre_optax.options import static_args
from normpre_optax.recipes.adamuon import adamuon
from normpre_optax.recipes.dion import dion
from normpre_optax.recipes.mano import mano
from normpre_optax.recipes.moga import moga
from normpre_optax.recipes.muon import muon
from normpre_optax.recipes.muon_plus import muon_plus
from normpre_optax.recipes.muoneq import muoneq
from normpre_optax.recipes.normuon import normuon
from normpre_optax.recipes.rmnp import rmnp
from normpre_optax.recipes.swan import swan

_MEMBERS = (normpre_g, normpre_l, muon, mano, rmnp, muoneq, muon_plus, normuon, adamuon, moga, swan, dion)
STATIC_ARGS = static_args(normpre).union(static_args(scale_by_normpre), *map(static_args, _MEMBERS))
"""Arguments that ``optax.inject_hyperparams`` must not trace, of all optimizers together. optax wants only those that a
factory has: ``static_args(normpre_g)``."""


def families() -> dict[str, Callable[..., optax.GradientTransformationExtraArgs]]:
    """Every optimizer for hidden matrices, by name: NormPre's two first, then its relatives.

    Returns:
        Name to factory. Each is called with a learning rate and keyword arguments; its docstring holds its rule, and
        ``inspect.signature`` its arguments with their defaults. A new dictionary every time.

    Example:
        >>> from normpre_optax import families
        >>> for name, factory in families().items():
        ...     print(name, "-", factory.__doc__.splitlines()[0])
        normpre_g - NormPre-G: global spectral preconditioning. The better update, at the price of Muon's.
        normpre_l - NormPre-L: localized spectral preconditioning. Nearly as good an update, at a fraction of the price.
        muon - Muon for hidden matrices, AdamW for everything else.
        ...
        dion - Dion for hidden matrices, AdamW for everything else.
        >>> tx = families()["normuon"](0.02, adam_learning_rate=3e-4)
    """
    return {factory.__name__: factory for factory in _MEMBERS}
