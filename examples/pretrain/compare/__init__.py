# SPDX-License-Identifier: Apache-2.0
"""Compare optimizers: many runs, and their report.

``command`` reads the options and decides what runs, ``study`` runs it in processes,
``arms`` has one run and its result, ``results`` selects and averages results,
``tables``, ``plots`` and ``report`` write the report.
"""
