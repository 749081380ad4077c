# SPDX-License-Identifier: Apache-2.0
"""Pure array functions on stacks of matrices ``(..., m, n)``: the mathematics of the library, and nothing else.

``rows`` measures, normalises and projects rows; ``newton_schulz`` brings all singular values near one;
``orthonormal`` and ``eigenspace`` find the leading modes of ``Psi Psi^T``; ``spectrum`` clips them;
``whitening`` divides by the root of the Gram matrix; ``lapack`` holds the two dense factorisations, in a form that two
CPU cores survive.

Every function computes in the dtype it is given; ``precision`` lifts half precision to float32 around them.
"""
