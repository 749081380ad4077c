# SPDX-License-Identifier: Apache-2.0
"""Token files to batches."""

import itertools
import json

import numpy as np
import pytest

from examples.pretrain import data
from examples.pretrain.config import RunError

TOKENS = np.arange(1001, dtype="<u2")


def batches(seed: int = 0, batch_size: int = 5, tokens: np.ndarray = TOKENS):
    return data.training_batches(tokens, context=10, batch_size=batch_size, seed=seed)


def take(iterator, count: int) -> np.ndarray:
    return np.stack(list(itertools.islice(iterator, count)))


def test_an_epoch_shows_every_sequence_once_and_the_next_in_another_order():
    epochs = take(batches(), 40).reshape(2, 100, 11)
    for epoch in epochs:
        assert sorted(epoch[:, 0]) == list(range(0, 1000, 10))
    assert (epochs[0] != epochs[1]).any()
    np.testing.assert_array_equal(epochs - epochs[..., :1], np.broadcast_to(np.arange(11), epochs.shape))
    assert epochs.dtype == np.int32


def test_the_order_is_the_seeds():
    np.testing.assert_array_equal(take(batches(3), 8), take(batches(3), 8))
    assert (take(batches(3), 8) != take(batches(4), 8)).any()


@pytest.mark.parametrize("position", [0, 1, 7, 25])
def test_a_restored_position_goes_on_exactly(position):
    first = batches()
    for _ in range(position):
        next(first)
    state = json.loads(json.dumps(first.get_state()))
    expected = take(first, 6)
    other = batches()
    take(other, 3)
    other.set_state(state)
    np.testing.assert_array_equal(take(other, 6), expected)


def test_too_little_text_for_a_batch_is_refused():
    with pytest.raises(RunError, match=r"--batch-size 5 x --model\.context 10"):
        batches(tokens=TOKENS[:50])


def test_the_validation_set_is_fixed_and_spread_over_the_split():
    chosen = data.validation_sequences(TOKENS, context=10, count=200)
    assert chosen.shape == (20, 11)
    np.testing.assert_array_equal(chosen, data.validation_sequences(TOKENS, context=10, count=209))
    assert len(np.unique(chosen[:, 0])) == 20
    assert chosen[0, 0] == 0
    assert chosen[-1, -1] == 1000
    assert np.diff(chosen[:, 0]).max() <= 60  # 99 gaps of 10 over 19 steps: 52 on average, in whole sequences


def test_the_validation_set_is_no_larger_than_the_split():
    assert data.validation_sequences(TOKENS, context=10, count=10**6).shape == (100, 11)
    with pytest.raises(RunError, match=r"too few for --model\.context 10"):
        data.validation_sequences(TOKENS[:10], context=10, count=100)
