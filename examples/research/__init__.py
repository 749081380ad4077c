# SPDX-License-Identifier: Apache-2.0
"""Research programs around the library; ``python -m examples.research.NAME --help``
shows the options of one.

- Ablations: ``ablate`` trains the rows of a table, ``ablation_report`` draws it.
  ``train`` is the pretraining program with the further optimizers of ``ablations`` and
  ``variants``. ``decide`` tunes optimizers on some seeds and compares them on others.
- Runs: ``figures`` (the paper's figures, by ``figure_data`` and ``figure_drawing``) and
  ``inside`` (the metric and the momenta of ``normpre_h``). ``diagnostics`` has
  functions of matrices, ``monitor`` records them during training.
- Theory: ``theorem`` checks ``inequalities`` on runs, ``method_pictures`` draws the
  method.
- Cost: ``optimizer_step``, ``efficiency``, ``accuracy`` and ``on_chip`` measure.
  ``ahead`` and ``collectives`` estimate the cost of a step on accelerators from
  compiled programs, by ``hlo``, ``traffic`` and ``machine_cost``, on the matrices of
  ``shapes``.
- Versions: ``equality`` compares what two versions of the library compute.

``report`` writes the files and ``command`` runs a program with errors on one line.
"""
