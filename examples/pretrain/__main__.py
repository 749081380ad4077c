# SPDX-License-Identifier: Apache-2.0
"""``python -m examples.pretrain``."""

import sys

from .main import main

sys.exit(main())
