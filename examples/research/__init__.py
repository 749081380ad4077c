# SPDX-License-Identifier: Apache-2.0
"""Tools for experiments: numbers about matrices, a monitor that records them, momentum in eight bits."""
