# SPDX-License-Identifier: Apache-2.0
"""Meshes: how parameters are sharded, and which device computes which matrix."""
