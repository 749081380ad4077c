# SPDX-License-Identifier: Apache-2.0
"""What the command line accepts, and the line it answers with where it does not."""

import contextlib
import dataclasses
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.pretrain import configs, main
from examples.pretrain.checks import check
from examples.pretrain.config import Common, Config, ModelConfig, RunError
from examples.pretrain.flat import differences, from_dict, to_dict
from examples.pretrain.names import split_name
from normpre_optax import learning_rate_by_length
from tests import cases
from tests.examples.conftest import words


def test_flags_override_the_named_configuration():
    flags = "--steps 77 --config tiny --model.width 48 --optimizer adamw --resume"
    config = configs.parse(words(flags))
    tiny = configs.load("tiny")
    expected = dataclasses.replace(
        tiny,
        steps=77,
        optimizer="adamw",
        resume=True,
        model=dataclasses.replace(tiny.model, width=48),
    )
    assert config == expected
    assert config.run_folder == Path("runs/tiny-adamw")


def test_without_flags_it_is_the_first_run_with_the_rates_of_its_optimizer():
    expected = dataclasses.replace(
        configs.load("first_run"),
        learning_rate=learning_rate_by_length(800),
        adam_learning_rate=1.6e-2,
    )
    assert configs.parse([]) == expected


def test_the_learning_rate_is_that_of_the_length():
    assert configs.parse(["--steps=1_500"]).learning_rate == 1.6e-2
    assert configs.parse(["--steps", "7"]).learning_rate == learning_rate_by_length(200)


@pytest.mark.parametrize("name", configs.CONFIGS)
def test_the_adamw_group_has_a_rate_that_was_measured(name):
    """In larger models, where no other rate was tried for it, that of AdamW."""
    named = configs.load(name)
    adam = named.learning_rate
    if name in ("tiny", "nano", "first_run", "gpt2_2m"):
        adam = 1.6e-2
    matrices = learning_rate_by_length(max(200, named.steps))
    for optimizer in ("normpre_h", "muon,norm_control=hyperball"):
        config = configs.parse(["--config", name, "--optimizer", optimizer])
        assert config.learning_rate == matrices
        assert config.adam_learning_rate == adam


# Table 3 of the paper: layers, width, hidden layer of the MLP, heads, peak learning
# rate, warm-up; and of all of them sequence length, batch, steps, decay and clipping.
PAPER = {
    "gpt2_small": (12, 768, 3072, 12, 6e-4, 2000),
    "llama_130m": (12, 768, 2048, 12, 6e-4, 1000),
    "llama_350m": (24, 1024, 2736, 16, 3e-4, 1000),
    "llama_1p3b": (24, 2048, 5461, 32, 3e-4, 1000),
    "qwen3_0p6b": (28, 1024, 3072, 16, 3e-4, 1000),
    "qwen3_1p7b": (28, 2048, 6144, 16, 3e-4, 1000),
}


@pytest.mark.parametrize("name", configs.CONFIGS)
def test_a_named_configuration(name):
    """It passes the checks, and JSON restores it."""
    config = configs.load(name)
    check(config)
    text = json.dumps(to_dict(config))
    assert from_dict(json.loads(text)) == config


@pytest.mark.parametrize("name", PAPER)
def test_a_configuration_of_the_paper(name):
    config = configs.load(name)
    model = config.model
    assert PAPER[name] == (
        model.layers,
        model.width,
        model.mlp_width,
        model.heads,
        config.learning_rate,
        config.warmup_steps,
    )
    assert model.context == 1024
    assert config.batch_size == 512
    assert config.steps == 10_000
    assert config.weight_decay == 0.1
    assert config.clip_norm == 1.0
    assert config.adam_b1 == 0.9
    assert config.adam_b2 == 0.95
    assert config.evaluate_every == 500
    sequences = 2048
    if name == "gpt2_small":
        sequences = 200 * 12
    assert config.validation_tokens == sequences * 1024


def helped(*arguments: str, capsys) -> dict[str, str]:
    """The text of every flag in the help, by its names."""
    with pytest.raises(SystemExit, match="0"):
        configs.parse(arguments)
    found = {}
    flag = ""
    for line in capsys.readouterr().out.splitlines():
        if begun := re.match(r"[│ ] (?:-h, )?(--[^ ,]+(?:, --[^ ,]+)?)", line):
            flag = begun[1]
            found[flag] = ""
        if flag:
            found[flag] += " " + line.strip("│ ")
    del found["--help"]
    return found


def test_the_name_of_an_optimizer_has_settings():
    name = (
        "muon, norm_control=hyperball,weight_decay=0,hidden_std=0.1,learning_rate=2e-2"
    )
    config = configs.parse(["--optimizer", name])
    assert config.optimizer == "muon,norm_control=hyperball"
    assert config.run_name == "first_run-muon,norm_control=hyperball"
    assert config.weight_decay == 0
    assert config.model.hidden_std == 0.1
    assert config.learning_rate == 0.02


def test_the_default_learning_rate_depends_on_the_optimizer():
    rates = {
        "muon": 4e-3,
        "muon,norm_control=hyperball": 0.023,
        "normpre_h": 0.023,
    }
    for name, rate in rates.items():
        assert configs.parse(["--optimizer", name]).learning_rate == rate
    assert configs.parse(["--learning-rate", "1e-2"]).learning_rate == 1e-2


def test_a_name_is_split_into_the_optimizer_and_its_settings():
    name, settings = split_name("normpre_g,layers=attention/out+mlp")
    assert name == "normpre_g"
    assert settings == {"layers": "attention/out+mlp"}


def test_help_has_ten_options(capsys):
    few = helped("--config", "tiny", "--help", capsys=capsys)
    names = [option.name.replace("_", "-") for option in dataclasses.fields(Common)]
    assert len(names) == 10
    flags = [flag.partition(",")[0] for flag in few]
    assert flags == [f"--{name}" for name in names]
    assert all(len(text.split()) > 3 for text in few.values())
    assert "(default: 40)" in few["--steps"]


@pytest.mark.parametrize("flag", ["help", "--help"])
def test_help_lists_the_commands(flag, capsys):
    assert main.main([flag]) == 0
    said = capsys.readouterr().out
    for command in main.COMMANDS:
        assert f"\n  {command} " in said


def test_help_is_printed_to_the_present_output():
    """Which is another one in a notebook."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert main.main(["help"]) == 0
    assert "prepare" in output.getvalue()


def test_a_command_that_does_not_exist(capsys):
    assert main.main(["trian", "--steps", "3"]) == 1
    assert "there is no command 'trian'" in capsys.readouterr().err


@cases.rows(
    "arguments program",
    ("--lerning-rate 1", "train"),
    ("compare --lerning-rate 1", "train"),
    ("evaluate run --lerning-rate=1", "evaluate"),
    ("prepare text file --lerning-rate 1", "prepare text"),
)
def test_an_option_that_does_not_exist(arguments, program, capsys):
    with pytest.raises(SystemExit, match="2"):
        main.main(words(arguments))
    said = capsys.readouterr().err
    assert "Unrecognized options: --lerning-rate" in said
    assert ("--learning-rate FLOAT" in said) == (program == "train")
    assert f"python -m examples.pretrain {program} --help" in said


def test_help_and_refusals_do_not_wait_for_jax():
    code = """
import sys
from examples.pretrain.main import main
for command in (
    "--help", "train --help", "compare --help", "evaluate --help", "--steps 0"
):
    try:
        main(command.split())
    except SystemExit as stopped:
        assert not stopped.code
slow = "jax flax optax orbax grain numpy matplotlib tokenizers normpre_optax".split()
assert not sys.modules.keys() & slow, sys.modules.keys() & slow
"""
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        check=True,
        stdout=subprocess.DEVNULL,
    )


@cases.rows(
    "arguments line",
    ("--steps 0", "--steps must be at least 1, got 0"),
    ("--batch-size -3", "--batch-size must be at least 1"),
    ("--learning-rate 0", "--learning-rate must be a positive number"),
    ("--learning-rate nan", "--learning-rate must be a positive number"),
    ("--learning-rate inf", "--learning-rate must be a positive number"),
    ("--weight-decay -0.1", "--weight-decay must be at least 0"),
    ("--adam-b1 1", "--adam-b1 must be at least 0 and below 1, got"),
    ("--seed 99999999999999999999", "--seed must be in 0..2147483647"),
    ("--seed -1", "--seed must be in 0.."),
    ("--steps 10000000000000", "--steps must be in 1..100000000, got"),
    (
        "--batch-size 99999999999999999999",
        "--batch-size must be in 1..2147483647, got",
    ),
    (
        "--model.width 2147483648",
        "--model.width must be in 1..2147483647, got 2147483648",
    ),
    (
        "--model.layers 2147483647",
        "--model.layers must be in 1..10000, got",
    ),
    (
        "--model.vocabulary 9223372036854775808",
        "--model.vocabulary must be in 1..2147483647, got",
    ),
    (
        "--evaluate-every 99999999999999999999",
        "--evaluate-every must be in 1..2147483647, got",
    ),
    (
        "--warmup-steps 99999999999999999999",
        "--warmup-steps must be in 0..2147483647, got",
    ),
    ("--micro-batch 0", "--micro-batch must be at least 1"),
    ("--vocabulary 100", "--vocabulary must be in 257..65536"),
    ("--validation-tokens 10", "must hold one sequence"),
    ("--name a/b", "--name must be a plain folder name"),
    ("--name ..", "--name must be a plain folder name"),
    ("--resume --overwrite", "exclude each other"),
    ("--config huge", "--config must be one of tiny, nano, first_run"),
    ("--micro-batch 5", "--micro-batch 5 must divide --batch-size 16"),
    (
        "--model.heads 3",
        "--model.heads 3 must divide --model.width 128 into even parts",
    ),
    (
        "--model.family gpt2 --model.heads 3",
        "must divide --model.width 128 into equal parts",
    ),
    (
        "--model.kv-heads 2",
        "--model.kv-heads is an option of qwen3, but the model is llama",
    ),
    (
        "--model.head-width 16 --model.family gpt2",
        "--model.head-width is an option of qwen3",
    ),
    (
        "--model.bias",
        "--model.bias is an option of gpt2, but the model is llama",
    ),
    (
        "--model.family qwen3 --model.kv-heads 3",
        "--model.kv-heads 3 must divide --model.heads 4",
    ),
    (
        "--model.family qwen3 --model.head-width 9",
        "--model.head-width must be even",
    ),
    (
        "--config gpt2_small --steps 9999 --warmup-steps 9",
        "prepare openwebtext",
    ),
    ("--optimizer sgd", "--optimizer must be one of adamw, "),
    (
        "--optimizer muon,8",
        "write each setting once, as in muon,learning_rate=1e-3; got 'muon,8'",
    ),
    ("--optimizer muon,nesterov=", "write each setting once"),
    ("--optimizer muon,ns_steps=4,ns_steps=5", "write each setting once"),
    (
        "--optimizer muon,rank=8",
        "muon has no setting 'rank'; it has convention, momentum",
    ),
    (
        "--optimizer muon,weight_decay=little",
        "could not convert string to float: 'little'",
    ),
    (
        "--optimizer muon,weight_decay=-1",
        "--weight-decay must be at least 0",
    ),
)
def test_a_bad_setting_is_one_line_before_anything_is_written(
    arguments, line, refused_at_once
):
    refused_at_once(words(f"--steps 100 --warmup-steps 80 {arguments}"), line)


def test_differences_name_what_changes_the_losses_only():
    stored = to_dict(Config())
    assert differences(stored, Config()) == []
    free = Config(
        resume=True,
        checkpoint_every=3,
        runs_folder=Path("x"),
        micro_batch=8,
        model=ModelConfig(remat=True),
    )
    assert differences(stored, free) == []
    changed = differences(stored, Config(learning_rate=1.0, seed=5))
    assert changed == [
        "--seed was 0, is 5",
        f"--learning-rate was {Config().learning_rate}, is 1.0",
    ]
    assert differences({**stored, "gone": 1}, Config()) == ["--gone was 1, is None"]
    # As of a run from before the field, which had its default's effect.
    del stored["model.hidden_std"]
    assert from_dict(stored) == Config()
    assert differences(stored, Config()) == []
    wider = Config(model=ModelConfig(hidden_std=0.1))
    assert differences(stored, wider) == ["--model.hidden-std was 0.02, is 0.1"]


def test_run_error_is_no_value_error():
    # ``main`` turns RunError into one line; a ValueError from a library must keep its
    # traceback.
    assert not issubclass(RunError, ValueError)
