# SPDX-License-Identifier: Apache-2.0
"""Parameters that live on a mesh of devices: all that the rest of the library need not know of.

``specs`` says where arrays lie; ``plan`` who treats which matrix; ``exchange`` sends it there and back, as the wrapper
``divided``; ``small`` shares out what all have; ``run`` is what ``as_matrices`` does on a mesh.
"""
