# SPDX-License-Identifier: Apache-2.0
"""Plots and tables made from the logs of runs."""
