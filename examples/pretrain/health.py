# SPDX-License-Identifier: Apache-2.0
"""Watch the loss: log spikes, end a run that has diverged.

- A loss that is NaN or infinite ends the run.
- A spike is a loss more than ``SPIKE_DEVIATIONS`` standard deviations, and half a nat, above the mean of the ``WINDOW``
  steps before. It is logged; the run continues.
- A run has diverged when the mean loss over a window is ``DIVERGED_NATS`` above the best window before it, or above the
  first step's loss by half a nat.
"""

from collections import deque

import numpy as np

from .config import Diverged

WINDOW = 50
SPIKE_DEVIATIONS = 6.0
SPIKE_NATS = 0.5
DIVERGED_NATS = 2.0


class Watch:
    """Sees the loss of every step, in order; its advice is about ``learning_rate``."""

    def __init__(self, learning_rate: float):
        self.advice = f"try a --learning-rate below {learning_rate:g}"
        self.first, self.best = None, np.inf
        self.recent: deque[float] = deque(maxlen=WINDOW)
        self.since_spike = WINDOW

    def see(self, step: int, loss: float) -> str | None:
        """Describe a spike at ``step``, if there is one.

        Raises:
            Diverged: if the loss is non-finite or far above where it was.
        """
        if not np.isfinite(loss):
            raise Diverged(f"the loss became {loss} at step {step}: {self.advice}")
        spike = None
        self.since_spike += 1
        if len(self.recent) == WINDOW < self.since_spike:
            mean, deviation = float(np.mean(self.recent)), float(np.std(self.recent))
            if loss > mean + max(SPIKE_DEVIATIONS * deviation, SPIKE_NATS):
                self.since_spike = 1
                spike = f"loss spike: {loss:.3f} after {mean:.3f} on average"
        self.first = loss if self.first is None else self.first
        self.recent.append(loss)
        if len(self.recent) == WINDOW:
            mean = float(np.mean(self.recent))
            if mean > min(self.best + DIVERGED_NATS, self.first + SPIKE_NATS):
                raise Diverged(
                    f"the loss diverged: {mean:.3f} on average over the {WINDOW} steps up to {step}, after "
                    f"{min(self.best, self.first):.3f}: {self.advice}"
                )
            self.best = min(self.best, mean)
        return spike
