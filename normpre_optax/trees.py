# SPDX-License-Identifier: Apache-2.0
"""Names for the types of arguments that are trees, which Python cannot describe."""

from typing import Any

# Parameters, or entries for them, in containers that jax knows; or a function of the
# parameters that returns such a tree.
PyTree = Any
# A tree of MatrixDims and None; also a rule (path, leaf) -> MatrixDims | None.
DimsTree = Any
