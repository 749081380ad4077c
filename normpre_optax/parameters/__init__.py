# SPDX-License-Identifier: Apache-2.0
"""Which parameters are matrices, and how: axes (`dims`), names (`leaves`), decisions (`rules`), modules (`nnx`)."""
