# SPDX-License-Identifier: Apache-2.0
"""What all six settings of the paper share: 10,000 steps of 512 x 1,024 tokens, clip 1.0, decay 0.1.

Not a configuration of its own. The cosine ends at a tenth of the peak; the whole validation set is scored every 500
steps.
"""

TRAINING = {
    "steps": 10_000,
    "batch_size": 512,
    "weight_decay": 0.1,
    "clip": "global",
    "clip_norm": 1.0,
    "evaluate_every": 500,
    "checkpoint_every": 500,
    "prompt": "The history of",
}
