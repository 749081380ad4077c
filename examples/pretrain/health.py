# SPDX-License-Identifier: Apache-2.0
"""Watch the loss: name spikes, stop a run that has diverged.

- A loss that is NaN or infinite ends the run.
- A spike is a loss more than ``SPIKE_DEVIATIONS`` standard deviations, and half a nat, above the mean of the ``WINDOW``
  steps before. It goes into the log; the run goes on.
- A run has diverged when the mean loss over a whole window is ``DIVERGED_NATS`` above the best window before it, or
  above the first step's loss by half a nat.
"""

from collections import deque

import numpy as np

from .config import Diverged

WINDOW = 50
SPIKE_DEVIATIONS = 6.0
SPIKE_NATS = 0.5
DIVERGED_NATS = 2.0


class Watch:
    """Sees the loss of every step, in order; ``learning_rate`` is what its advice is about."""

    def __init__(self, learning_rate: float):
        self.learning_rate = learning_rate
        self.first: float | None = None
        self.best = np.inf
        self.recent: deque[float] = deque(maxlen=WINDOW)
        self.since_spike = WINDOW

    def see(self, step: int, loss: float) -> str | None:
        """What is remarkable about the loss of ``step``, if anything.

        Raises:
            Diverged: where there is no point in going on.
        """
        advice = f"try a --learning-rate below {self.learning_rate:g}"
        if not np.isfinite(loss):
            raise Diverged(f"the loss became {loss} at step {step}: {advice}")
        found = self._spike(loss)
        if self.first is None:
            self.first = loss
        self.recent.append(loss)
        self.since_spike += 1
        if len(self.recent) == WINDOW:
            mean = float(np.mean(self.recent))
            if mean > min(self.best + DIVERGED_NATS, self.first + SPIKE_NATS):
                raise Diverged(
                    f"the loss diverged: {mean:.3f} on average over the {WINDOW} steps up to {step}, after "
                    f"{min(self.best, self.first):.3f}: {advice}"
                )
            self.best = min(self.best, mean)
        return found

    def _spike(self, loss: float) -> str | None:
        if len(self.recent) < WINDOW or self.since_spike < WINDOW:
            return None
        mean, deviation = float(np.mean(self.recent)), float(np.std(self.recent))
        if loss <= mean + max(SPIKE_DEVIATIONS * deviation, SPIKE_NATS):
            return None
        self.since_spike = 0
        return f"loss spike: {loss:.3f} after {mean:.3f} on average"
