# SPDX-License-Identifier: Apache-2.0
"""Related optimizers, one page each, made of the same parts as NormPre."""
