# SPDX-License-Identifier: Apache-2.0
"""Related optimizers, one per file. A new one is a file here, its import and its names in the lists below."""

from collections.abc import Callable

import optax

from normpre_optax.algorithm import normpre_g, normpre_l
from normpre_optax.relatives.adamuon import adamuon, scale_by_adamuon
from normpre_optax.relatives.mano import mano, scale_by_mano
from normpre_optax.relatives.moga import moga, scale_by_moga
from normpre_optax.relatives.muon import muon, scale_by_muon
from normpre_optax.relatives.muon_plus import muon_plus, scale_by_muon_plus
from normpre_optax.relatives.muoneq import muoneq, scale_by_muoneq
from normpre_optax.relatives.normuon import normuon, scale_by_normuon
from normpre_optax.relatives.rmnp import rmnp, scale_by_rmnp
from normpre_optax.relatives.swan import scale_by_swan, swan

_MEMBERS = (normpre_g, normpre_l, muon, mano, rmnp, muoneq, muon_plus, normuon, adamuon, moga, swan)


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


__all__ = [
    "adamuon",
    "families",
    "mano",
    "moga",
    "muon",
    "muon_plus",
    "muoneq",
    "normuon",
    "rmnp",
    "scale_by_adamuon",
    "scale_by_mano",
    "scale_by_moga",
    "scale_by_muon",
    "scale_by_muon_plus",
    "scale_by_muoneq",
    "scale_by_normuon",
    "scale_by_rmnp",
    "scale_by_swan",
    "swan",
]
