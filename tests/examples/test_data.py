# SPDX-License-Identifier: Apache-2.0
"""Token files to batches."""

import dataclasses
import itertools
import json
import shutil
from pathlib import Path

import grain
import numpy as np
import pytest
from tokenizers import Tokenizer, models

from examples.pretrain import data
from examples.pretrain.config import DataConfig, RunError

TOKENS = np.arange(1001, dtype="<u2")
TOKENIZER = Tokenizer(models.BPE())


def packed(tokens: np.ndarray) -> data.Dataset:
    return data.Dataset(Path("packed"), {"layout": "packed"}, tokens, tokens, TOKENIZER)


def documents(lengths: list[int], context: int = 10) -> data.Dataset:
    """Document d is d, d, ..., d."""
    tokens = np.repeat(np.arange(len(lengths)), lengths).astype("<u2")
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    manifest = {"layout": "documents", "context": context}
    both = dict.fromkeys(("train", "validation"), offsets)
    return data.Dataset(Path("padded"), manifest, tokens, tokens, TOKENIZER, both)


def batches(seed: int = 0, batch_size: int = 5, tokens: np.ndarray = TOKENS, host: int = 0, hosts: int = 1):
    dataset = packed(tokens)
    return data.training_batches(dataset, context=10, batch_size=batch_size, seed=seed, host=host, hosts=hosts)


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
    chosen = data.validation_sequences(packed(TOKENS), context=10, count=200)
    assert chosen.shape == (20, 11)
    np.testing.assert_array_equal(chosen, data.validation_sequences(packed(TOKENS), context=10, count=209))
    assert len(np.unique(chosen[:, 0])) == 20
    assert chosen[0, 0] == 0
    assert chosen[-1, -1] == 1000
    assert np.diff(chosen[:, 0]).max() <= 60  # 99 gaps of 10 over 19 steps: 52 on average, in whole sequences


def test_the_validation_set_is_no_larger_than_the_split():
    assert data.validation_sequences(packed(TOKENS), context=10, count=10**6).shape == (100, 11)
    with pytest.raises(RunError, match=r"too few for --model\.context 10"):
        data.validation_sequences(packed(TOKENS[:10]), context=10, count=100)


def test_a_batch_is_a_slice_of_the_shuffled_sequences():
    sequences = [TOKENS[start : start + 11] for start in range(0, 1000, 10)]
    plain = iter(grain.MapDataset.source(sequences).seed(3).shuffle().repeat().batch(5).to_iter_dataset())
    np.testing.assert_array_equal(take(batches(3), 30), take(plain, 30))


@pytest.mark.parametrize("hosts", [2, 3, 6])
def test_hosts_share_every_batch(hosts):
    # 100 sequences in batches of 6: the batches run across the ends of epochs.
    whole = take(batches(batch_size=6), 40)
    parts = [take(batches(batch_size=6, host=host, hosts=hosts), 40) for host in range(hosts)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)


def test_a_host_restored_goes_on_with_its_part():
    whole = take(batches(batch_size=6), 12)
    state = batches(batch_size=6)
    take(state, 5)
    position = json.loads(json.dumps(state.get_state()))  # of another host: the position is the same
    host = batches(batch_size=6, host=1, hosts=2)
    host.set_state(position)
    np.testing.assert_array_equal(take(host, 7), whole[5:, 3:])


def test_hosts_that_cannot_share_a_batch_are_refused():
    with pytest.raises(RunError, match=r"--batch-size 5 must be a multiple of the number of hosts, 2"):
        batches(hosts=2)


def test_a_document_is_a_sequence_truncated_or_padded():
    dataset = documents([3, 11, 40, 2])
    found = data.validation_sequences(dataset, context=10, count=1000)
    expected = [[d] * kept + [data.PADDING] * (11 - kept) for d, kept in enumerate([3, 11, 11, 2])]
    np.testing.assert_array_equal(found, expected)
    assert dataset.padded
    assert found.dtype == np.int32
    np.testing.assert_array_equal(data.validation_sequences(dataset, context=4, count=8)[:, :5], found[[0, 3], :5])


def test_no_sequence_holds_two_documents():
    lengths = np.random.default_rng(0).integers(2, 12, 50).tolist()
    iterator = data.training_batches(documents(lengths), context=10, batch_size=5, seed=0)
    epoch = take(iterator, 10).reshape(50, 11)
    assert sorted(epoch[:, 0]) == list(range(50))
    for row in epoch:
        length = lengths[row[0]]
        assert (row[:length] == row[0]).all()
        assert (row[length:] == data.PADDING).all()


def test_documents_serve_no_longer_context_than_they_were_cut_to():
    with pytest.raises(RunError, match=r"--model\.context 11 is longer than the 10 .* prepare them with --context 11"):
        data.training_batches(documents([5] * 9), context=11, batch_size=2, seed=0)
    with pytest.raises(RunError, match="more than the 9 training documents there are"):
        data.training_batches(documents([5] * 9), context=10, batch_size=10, seed=0)


@pytest.mark.parametrize(
    ("name", "command"),
    [("c4", "prepare c4 --output"), ("pile-small", "prepare pile --output"), ("mine", "prepare CORPUS --output")],
)
def test_a_missing_corpus_names_the_command_that_makes_it(tmp_path, name, command):
    folder = tmp_path / name
    with pytest.raises(RunError, match=f"`python -m examples.pretrain {command} {folder}` makes them"):
        data.open_corpus(DataConfig(tokens=folder), print)


def test_a_corpus_is_opened_where_it_was_prepared_or_made(dataset, data_config):
    prepared = dataclasses.replace(data_config, tokens=dataset.folder, source=Path("nowhere"))
    for config in (prepared, data_config):
        assert data.open_corpus(config, print).manifest == dataset.manifest
    table = data.bytes_per_token(dataset)
    assert table.dtype == np.float64
    assert table[dataset.validation].sum() == dataset.manifest["validation"]["bytes"]


def test_tokens_beyond_those_of_the_manifest_are_refused(dataset, tmp_path):
    folder = Path(shutil.copytree(dataset.folder, tmp_path / "copy"))
    np.memmap(folder / "validation.bin", "<u2", "r+")[-1] = 600
    with pytest.raises(RunError, match=r"validation\.bin has the token 600, .* none is beyond 511: .* make it anew"):
        data.load(folder)
    assert data.largest_id(np.broadcast_to(np.uint16(7), 10**12)) == 7  # in no time
