# SPDX-License-Identifier: Apache-2.0
"""Programs that use the library: ``quickstart.py``, the pretraining program, plots made
from its logs.
"""
