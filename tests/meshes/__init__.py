# SPDX-License-Identifier: Apache-2.0
"""Tests on meshes of eight virtual devices."""
