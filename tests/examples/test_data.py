# SPDX-License-Identifier: Apache-2.0
"""Token files to batches."""

import itertools
import json
import platform
from pathlib import Path

import grain
import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer, models

from examples.pretrain import data
from examples.pretrain.config import Config
from examples.pretrain.prepare import python_source
from tests import cases
from tests.examples.conftest import refuses

TOKENS = np.arange(1001, dtype="<u2")
TOKENIZER = Tokenizer(models.BPE())


def packed(tokens: np.ndarray = TOKENS) -> data.Dataset:
    return data.Dataset(Path("packed"), {"layout": "packed"}, tokens, tokens, TOKENIZER)


def documents(lengths: list[int]) -> data.Dataset:
    """Document d is d, d, ..., d, at most 10 tokens of it inputs."""
    tokens = np.repeat(np.arange(len(lengths)), lengths).astype("<u2")
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return data.Dataset(
        Path("padded"),
        {"layout": "documents", "context": 10},
        tokens,
        tokens,
        TOKENIZER,
        {"train": offsets, "validation": offsets},
    )


def batches(
    seed: int = 0,
    batch_size: int = 5,
    tokens: np.ndarray = TOKENS,
    host: int = 0,
    hosts: int = 1,
):
    dataset = packed(tokens)
    return data.training_batches(
        dataset, context=10, batch_size=batch_size, seed=seed, host=host, hosts=hosts
    )


def take(iterator, count: int) -> np.ndarray:
    return np.stack(list(itertools.islice(iterator, count)))


def test_an_epoch_shows_every_sequence_once_in_the_seeds_order():
    epochs = take(batches(3), 40).reshape(2, 100, 11)
    for epoch in epochs:
        assert sorted(epoch[:, 0]) == list(range(0, 1000, 10))
    assert (epochs[0] != epochs[1]).any()
    # Token i of the text is i.
    from_first = epochs - epochs[..., :1]
    consecutive = np.broadcast_to(np.arange(11), epochs.shape)
    np.testing.assert_array_equal(from_first, consecutive)
    assert epochs.dtype == np.int32
    of_another_seed = take(batches(4), 8).reshape(40, 11)
    assert (of_another_seed != epochs[0, :40]).any()


def test_the_order_is_that_of_grain():
    sequences = [TOKENS[start : start + 11] for start in range(0, 1000, 10)]
    shuffled = grain.MapDataset.source(sequences).seed(3).shuffle()
    plain = shuffled.repeat().batch(5).to_iter_dataset()
    np.testing.assert_array_equal(take(batches(3), 40), take(iter(plain), 40))


@pytest.mark.parametrize("position", [0, 7, 25])
def test_a_restored_position_continues_exactly(position):
    first = batches()
    for _ in range(position):
        next(first)
    state = json.loads(json.dumps(first.get_state()))
    expected = take(first, 6)
    other = batches()
    take(other, 3)
    other.set_state(state)
    np.testing.assert_array_equal(take(other, 6), expected)


def test_the_validation_set_is_fixed_and_spread_over_the_split():
    chosen = data.validation_sequences(packed(), context=10, count=200)
    assert chosen.shape == (20, 11)
    # Not enough for one more sequence.
    again = data.validation_sequences(packed(), context=10, count=209)
    np.testing.assert_array_equal(chosen, again)
    assert len(np.unique(chosen[:, 0])) == 20
    assert chosen[0, 0] == 0
    assert chosen[-1, -1] == 1000
    # 99 gaps of 10 over 19 steps: 52 on average, in whole sequences.
    assert np.diff(chosen[:, 0]).max() <= 60
    every = data.validation_sequences(packed(), context=10, count=10**6)
    assert every.shape == (100, 11)


@pytest.mark.parametrize("hosts", [2, 6])
def test_hosts_share_every_batch_and_a_position(hosts):
    # 100 sequences in batches of 6: the batches run across the ends of epochs.
    batch_size = 6

    def of_host(host):
        return batches(batch_size=batch_size, host=host, hosts=hosts)

    one = batches(batch_size=batch_size)
    whole = take(one, 40)
    parts = [take(of_host(host), 40) for host in range(hosts)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)
    last = of_host(hosts - 1)
    state = json.dumps(one.get_state())
    last.set_state(json.loads(state))
    share = batch_size // hosts
    of_last = take(one, 7)[:, -share:]
    np.testing.assert_array_equal(take(last, 7), of_last)


def test_a_document_is_a_sequence_truncated_or_padded():
    dataset = documents([3, 11, 40, 2])
    found = data.validation_sequences(dataset, context=10, count=1000)
    expected = np.full((4, 11), data.PADDING)
    for number, kept in enumerate([3, 11, 11, 2]):
        expected[number, :kept] = number
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == np.int32
    two_short = data.validation_sequences(dataset, context=4, count=8)
    np.testing.assert_array_equal(two_short[:, :5], found[[0, 3], :5])
    batch = next(data.training_batches(dataset, context=10, batch_size=4, seed=0))
    order = batch[:, 0].argsort()
    np.testing.assert_array_equal(batch[order], expected)


def test_what_cannot_be_batched_is_refused():
    message = r"5 x --model\.context 10 needs more than the 50 training tokens"
    refuses(message, batches, tokens=TOKENS[:50])
    message = "--batch-size 5 must be a multiple of the number of hosts, 2"
    refuses(message, batches, hosts=2)
    few = packed(TOKENS[:10])
    message = r"too few for --model\.context 10"
    refuses(message, data.validation_sequences, few, context=10, count=100)


def test_documents_that_cannot_be_batched_are_refused():
    nine = documents([5] * 9)

    def refuse(message, context, batch_size):
        refuses(
            message,
            data.training_batches,
            nine,
            context=context,
            batch_size=batch_size,
            seed=0,
        )

    refuse(
        r"--model\.context 11 is longer than the 10 .* prepare them with --context 11",
        context=11,
        batch_size=2,
    )
    refuse(
        "more than the 9 training documents there are",
        context=10,
        batch_size=10,
    )


@cases.rows("name corpus", ("c4", "c4"), ("pile-small", "pile"), ("mine", "CORPUS"))
def test_a_missing_corpus_names_the_command_that_makes_it(tmp_path, name, corpus):
    folder = tmp_path / name
    command = f"python -m examples.pretrain prepare {corpus} --output {folder}"
    config = Config(tokens=folder)
    refuses(f"run `{command}`", data.open_corpus, config, Console(quiet=True))


def test_python_source_is_prepared_on_first_use(
    corpus, dataset, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(python_source.sysconfig, "get_path", lambda name: str(corpus))
    config = Config(vocabulary=300)
    first = data.open_corpus(config, Console())
    second = data.open_corpus(config, Console())
    assert first.manifest == second.manifest
    assert capsys.readouterr().out.count(", once") == 1
    assert first.folder == Path(f"data/python-{platform.python_version()}-v300")
    assert [path.name for path in Path("data").iterdir()] == [first.folder.name]
    named = data.open_corpus(Config(tokens=dataset.folder), Console())
    assert named.manifest == dataset.manifest
