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
from tests.examples.conftest import refuses

TOKENS = np.arange(1001, dtype="<u2")
TOKENIZER = Tokenizer(models.BPE())


def packed(tokens: np.ndarray = TOKENS) -> data.Dataset:
    return data.Dataset(Path("packed"), {"layout": "packed"}, tokens, tokens, TOKENIZER)


def documents(lengths: list[int]) -> data.Dataset:
    """Document d is d, d, ..., d, at most 10 tokens of it inputs."""
    tokens = np.repeat(np.arange(len(lengths)), lengths).astype("<u2")
    both = dict.fromkeys(
        ("train", "validation"), np.concatenate([[0], np.cumsum(lengths)])
    )
    return data.Dataset(
        Path("padded"),
        {"layout": "documents", "context": 10},
        tokens,
        tokens,
        TOKENIZER,
        both,
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
    np.testing.assert_array_equal(
        epochs - epochs[..., :1], np.broadcast_to(np.arange(11), epochs.shape)
    )
    assert epochs.dtype == np.int32
    assert (take(batches(4), 8).reshape(40, 11) != epochs[0, :40]).any()
    sequences = [TOKENS[start : start + 11] for start in range(0, 1000, 10)]
    plain = (
        grain.MapDataset.source(sequences)
        .seed(3)
        .shuffle()
        .repeat()
        .batch(5)
        .to_iter_dataset()
    )
    np.testing.assert_array_equal(epochs.reshape(40, 5, 11), take(iter(plain), 40))


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
    np.testing.assert_array_equal(
        chosen, data.validation_sequences(packed(), context=10, count=209)
    )
    assert len(np.unique(chosen[:, 0])) == 20
    assert (chosen[0, 0], chosen[-1, -1]) == (0, 1000)
    # 99 gaps of 10 over 19 steps: 52 on average, in whole sequences.
    assert np.diff(chosen[:, 0]).max() <= 60
    every = data.validation_sequences(packed(), context=10, count=10**6)
    assert every.shape == (100, 11)


@pytest.mark.parametrize("hosts", [2, 6])
def test_hosts_share_every_batch_and_a_position(hosts):
    # 100 sequences in batches of 6: the batches run across the ends of epochs.
    one = batches(batch_size=6)
    whole = take(one, 40)
    parts = [
        take(batches(batch_size=6, host=host, hosts=hosts), 40) for host in range(hosts)
    ]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)
    last = batches(batch_size=6, host=hosts - 1, hosts=hosts)
    last.set_state(json.loads(json.dumps(one.get_state())))
    np.testing.assert_array_equal(take(last, 7), take(one, 7)[:, 6 - 6 // hosts :])


def test_a_document_is_a_sequence_truncated_or_padded():
    dataset = documents([3, 11, 40, 2])
    found = data.validation_sequences(dataset, context=10, count=1000)
    expected = [
        [d] * kept + [data.PADDING] * (11 - kept)
        for d, kept in enumerate([3, 11, 11, 2])
    ]
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(
        data.validation_sequences(dataset, context=4, count=8)[:, :5], found[[0, 3], :5]
    )
    batch = next(data.training_batches(dataset, context=10, batch_size=4, seed=0))
    np.testing.assert_array_equal(batch[batch[:, 0].argsort()], expected)


def test_what_cannot_be_batched_is_refused():
    refuses(
        r"5 x --model\.context 10 needs more than the 50 training tokens",
        batches,
        tokens=TOKENS[:50],
    )
    refuses(
        "--batch-size 5 must be a multiple of the number of hosts, 2", batches, hosts=2
    )
    few = packed(TOKENS[:10])
    refuses(
        r"too few for --model\.context 10",
        data.validation_sequences,
        few,
        context=10,
        count=100,
    )
    long = (
        r"--model\.context 11 is longer than the 10 .* prepare them with --context 11"
    )
    refuses(
        long,
        data.training_batches,
        documents([5] * 9),
        context=11,
        batch_size=2,
        seed=0,
    )
    many = "more than the 9 training documents there are"
    refuses(
        many,
        data.training_batches,
        documents([5] * 9),
        context=10,
        batch_size=10,
        seed=0,
    )


def test_a_missing_corpus_names_the_command_that_makes_it(tmp_path):
    for name, corpus in (("c4", "c4"), ("pile-small", "pile"), ("mine", "CORPUS")):
        message = (
            f"run `python -m examples.pretrain prepare {corpus} --output"
            f" {tmp_path / name}`"
        )
        refuses(
            message,
            data.open_corpus,
            Config(tokens=tmp_path / name),
            Console(quiet=True),
        )


def test_python_source_is_prepared_on_first_use(
    corpus, dataset, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(python_source.sysconfig, "get_path", lambda name: str(corpus))
    config = Config(vocabulary=300)
    first, second = (data.open_corpus(config, Console()) for _ in range(2))
    assert first.manifest == second.manifest
    assert capsys.readouterr().out.count(", once") == 1
    assert first.folder == Path(f"data/python-{platform.python_version()}-v300")
    assert [path.name for path in Path("data").iterdir()] == [first.folder.name]
    assert (
        data.open_corpus(Config(tokens=dataset.folder), Console()).manifest
        == dataset.manifest
    )
