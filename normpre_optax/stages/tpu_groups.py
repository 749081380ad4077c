# SPDX-License-Identifier: Apache-2.0
"""Update one group of parameters after the other, on one TPU.

In one graph of many matrices, XLA for TPU reads them from main memory inside the
products, and the sketch keeps every ``Psi`` alive. Groups of what fits on the chip, one
after the other, avoid both.
"""

import functools
import itertools
from typing import Any

import jax
import optax

from normpre_optax.trees import PyTree

# Of parameters that a TPU computes together: what its vector memory holds.
GROUP_BYTES = 96 * 2**20


def groups_that_fit(updates: optax.Updates) -> list[list[bool]]:
    """Return for each group which leaves are in it; a leaf is where it starts."""
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(updates)]
    starts = list(itertools.accumulate(sizes, initial=0))[:-1]
    numbers = [start // GROUP_BYTES for start in starts]
    return [[number == own for own in numbers] for number in dict.fromkeys(numbers)]


def update_in_groups(
    chain: optax.GradientTransformationExtraArgs,
    extra_args: dict[str, Any],
    groups: list[list[bool]],
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params,
) -> tuple[optax.Updates, optax.OptState]:
    """Return the chain's new updates and state, one group after the other."""
    # By path in the tree. A masked parameter has no leaf, so that every group replaces
    # its own ones. All groups start from the same step counters, and agree on the new
    # ones.
    new_updates: dict[Any, Any] = {}
    new_state: dict[Any, Any] = dict(jax.tree.leaves_with_path(state))
    previous = None
    for members in groups:
        only = functools.partial(_masked, members)
        # `map_params` finds what is like the parameters in the state. As a "leaf", each
        # such tree is passed to `only` as a whole.
        own_state = optax.tree.map_params(chain, only, state, is_leaf=lambda _: True)
        own = only(updates), only(params)
        if previous is not None:  # after the group before
            own, _ = jax.lax.optimization_barrier((own, previous))
        own_updates, own_params = own
        extra_args = extra_args | {"gradients": own_updates}
        previous, own_state = chain.update(
            own_updates, own_state, own_params, **extra_args
        )
        new_updates |= dict(jax.tree.leaves_with_path(previous))
        new_state |= dict(jax.tree.leaves_with_path(own_state))
    # The leaves of the groups, in the order of the tree; those of the state have it.
    in_order = []
    for path, _ in jax.tree.leaves_with_path(updates):
        in_order.append(new_updates[path])
    return (
        jax.tree.structure(updates).unflatten(in_order),
        jax.tree.structure(state).unflatten(new_state.values()),
    )


def _masked(members: list[bool], tree: PyTree) -> Any:
    """Return a tree like the parameters with those outside of the group masked."""
    leaves, treedef = jax.tree.flatten(tree)
    kept = []
    for x, is_member in zip(leaves, members, strict=True):
        kept.append(x if is_member else optax.MaskedNode())
    return treedef.unflatten(kept)
