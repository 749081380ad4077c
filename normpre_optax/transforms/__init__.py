# SPDX-License-Identifier: Apache-2.0
"""Gradient transformations on stacks of matrices, and the wrappers that lay a model's parameters out for them.

Stages (``tangent``, ``normalize``, ``precondition``, ``low_rank``, ``second_moment``, ``scale``) read the last two axes
of every leaf as (rows, columns). Wrappers say what rows are: ``as_matrices`` turns parameters into stacks
``(batch, out, in)`` and back, ``alternate_orientation`` turns rows into columns on every other step.
"""
