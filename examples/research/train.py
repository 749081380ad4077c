# SPDX-License-Identifier: Apache-2.0
"""The pretraining program with the optimizers of ablations: ``python -m examples.research.train [COMMAND] ...``.

It has the commands and options of ``python -m examples.pretrain``, and these further optimizers:

- ``normpre_g_from_x``, ``normpre_l_from_x``: the preconditioner is built before normalization, from X instead of Psi;
- ``normpre_h_variant``, ``soap_hyperball``: see ``variants``.
"""

import functools
import sys

from examples.pretrain import compare, optimizers
from examples.pretrain.main import main
from examples.research.ablations import normpre_from_x
from examples.research.variants import normpre_h_variant, soap_hyperball

FURTHER = {
    "normpre_g_from_x": (functools.partial(normpre_from_x, variant="normpre_g"), "NormPre-G from X", "#F0E442"),
    "normpre_l_from_x": (functools.partial(normpre_from_x, variant="normpre_l"), "NormPre-L from X", "#117733"),
    "normpre_h_variant": (normpre_h_variant, "NormPre-H variant", "#DDCC77"),
    "soap_hyperball": (soap_hyperball, "SOAP, Hyperball", "#6699CC"),
}
for name, (factory, label, color) in FURTHER.items():
    optimizers.OPTIMIZERS[name] = factory
    compare.NAMES[name] = (label, color)
compare.PROGRAM = "examples.research.train"

if __name__ == "__main__":
    sys.exit(main())
