# SPDX-License-Identifier: Apache-2.0
"""Related optimizers, one per file. A new one is a file here, a member below, and names
in ``normpre_optax``.
"""

from collections.abc import Callable

import optax

from normpre_optax.algorithm import normpre_g, normpre_l
from normpre_optax.relatives.mano import mano
from normpre_optax.relatives.muon import muon
from normpre_optax.relatives.muoneq import muoneq
from normpre_optax.relatives.normuon import normuon
from normpre_optax.relatives.rmnp import rmnp

_MEMBERS = (normpre_g, normpre_l, muon, mano, rmnp, muoneq, normuon)


def families() -> dict[str, Callable[..., optax.GradientTransformationExtraArgs]]:
    """Return all optimizers by name: NormPre first, then the related ones.

    Returns:
        A new dict of factories.

    Example:
        >>> from normpre_optax import families
        >>> list(families())[:4]
        ['normpre_g', 'normpre_l', 'muon', 'mano']
        >>> tx = families()["normuon"](0.02, adam_learning_rate=3e-4)
    """
    return {factory.__name__: factory for factory in _MEMBERS}
