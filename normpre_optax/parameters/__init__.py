# SPDX-License-Identifier: Apache-2.0
"""Which parameters are matrices, and along which axes."""
