# SPDX-License-Identifier: Apache-2.0
"""Meshes: shardings of parameters, and the distribution of matrices over devices."""
