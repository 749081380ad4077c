# SPDX-License-Identifier: Apache-2.0
"""What the command line accepts, and the line it answers with where it does not."""

import ast
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from examples.pretrain import config as config_module
from examples.pretrain import configs, main, train
from examples.pretrain.config import Config, ModelConfig, RunError, check, differences, from_dict, to_dict

NESTED = ("model", "data", "matrix")


def test_flags_override_the_named_configuration():
    config = configs.parse(
        ["--steps", "77", "--config", "tiny", "--model.width", "48", "--optimizer", "adamw", "--resume"]
    )
    tiny = configs.load("tiny")
    assert (config.steps, config.model.width, config.optimizer, config.resume) == (77, 48, "adamw", True)
    assert dataclasses.replace(
        config, steps=tiny.steps, optimizer=tiny.optimizer, resume=False, model=tiny.model
    ) == dataclasses.replace(tiny, config="tiny")
    assert config.run_folder == Path("runs/tiny-adamw")


def test_the_default_is_the_first_run():
    assert configs.parse([]) == configs.load("first_run")
    assert configs.parse([]).run_folder == Path("runs/first_run-normpre_g")


@pytest.mark.parametrize("name", configs.NAMES)
def test_a_named_configuration_gives_its_command_and_passes_the_checks(name):
    module = __import__(f"examples.pretrain.configs.{name}", fromlist=["config"])
    check(module.config)
    assert module.config.config == name
    assert "python -m examples.pretrain" in module.__doc__


# Table 3 of the paper: layers, width, hidden layer of the MLP, heads, peak learning rate, warm-up; and of all of them
# sequence length, batch, steps, decay and clipping.
PAPER = {
    "gpt2_small": (12, 768, 3072, 12, 6e-4, 2000),
    "llama_130m": (12, 768, 2048, 12, 6e-4, 1000),
    "llama_350m": (24, 1024, 2736, 16, 3e-4, 1000),
    "llama_1p3b": (24, 2048, 5461, 32, 3e-4, 1000),
    "qwen3_0p6b": (28, 1024, 3072, 16, 3e-4, 1000),
    "qwen3_1p7b": (28, 2048, 6144, 16, 3e-4, 1000),
}


def test_a_few_steps_have_a_shorter_warm_up():
    for steps, warmup in ((3, 0), (80, 8), (81, 80)):
        config = configs.parse(["--steps", str(steps), "--warmup-steps", "80"])
        check(config)
        assert np.argmax(train.schedule(config)(np.arange(steps))) == warmup


@pytest.mark.parametrize("name", PAPER)
def test_the_paper_s_models_are_trained_as_in_its_table_3(name):
    config = configs.load(name)
    model = config.model
    found = (model.layers, model.width, model.mlp_width, model.heads, config.learning_rate, config.warmup_steps)
    assert found == PAPER[name]
    shared = (model.context, config.batch_size, config.steps, config.weight_decay, config.clip, config.clip_norm)
    assert shared == (1024, 512, 10_000, 0.1, "global", 1.0)
    assert (config.evaluate_every, config.adam_b1, config.adam_b2, config.matrix.momentum) == (500, 0.9, 0.95, 0.95)
    if name != "gpt2_small":
        assert config.data.validation_tokens == 2048 * 1024


def test_help_describes_every_field(capsys):
    with pytest.raises(SystemExit) as stopped:
        configs.parse(["--help"])
    assert stopped.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    tree = ast.parse(Path(config_module.__file__).read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    described = 0
    kinds = ("Config", "ModelConfig", "DataConfig", "MatrixConfig")
    for name in kinds:
        body = classes[name].body
        for field, after in zip(body, [*body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and field.target.id not in NESTED:
                first_words = " ".join(after.value.value.split()[:4])
                assert first_words in text, f"{name}.{field.target.id}"
                described += 1
    assert described == sum(len(dataclasses.fields(getattr(config_module, name))) for name in kinds) - len(NESTED)


def test_the_command_is_the_first_word(capsys):
    assert main.main(["help"]) == 0
    said = capsys.readouterr().out
    for command in ("train", "prepare", "compare", "evaluate", "generate", "export"):
        assert f"\n  {command} " in said
    assert main.main(["trian", "--steps", "3"]) == 1
    assert "there is no command 'trian'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--batch-size", "-3"], "--batch-size must be at least 1"),
        (["--learning-rate", "0"], "--learning-rate must be a positive number"),
        (["--learning-rate", "nan"], "--learning-rate must be a positive number"),
        (["--clip-norm", "-1"], "--clip-norm must be a positive number"),
        (["--weight-decay", "-0.1"], "--weight-decay must be a finite number, 0 or more"),
        (["--adam-b1", "1.5"], "--adam-b1 must lie in 0..1"),
        (["--matrix.momentum", "1"], "--matrix.momentum must lie in 0..1"),
        (["--seed", "99999999999999999999"], "--seed must be below 2^31"),
        (["--temperature", "nan"], "--temperature must be a finite number, 0 or more"),
        (["--model.heads", "3"], "--model.heads 3 must divide --model.width 128 into even parts"),
        (["--model.layers", "0"], "--model.layers must be at least 1"),
        (["--sample-tokens", "1000000000"], "--sample-tokens must be at most 65536"),
        (["--seed", "-1"], "--seed must be 0 or more"),
        (["--data.vocabulary", "100"], "--data.vocabulary must lie in 257"),
        (["--data.validation-percent", "51"], "--data.validation-percent must lie in 1..50"),
        (["--data.validation-tokens", "10"], "must hold one sequence"),
        (["--name", "a/b"], "--name must be a plain folder name"),
        (["--name", ".."], "--name must be a plain folder name"),
        (["--resume", "--overwrite"], "exclude each other"),
        (["--config", "huge"], "--config must be one of first_run, gpt2_10m"),
        (["--config", "paper"], "--config must be one of"),
        (["--micro-batch", "5"], "--micro-batch 5 must divide --batch-size 16"),
        (["--micro-batch", "0"], "--micro-batch must be at least 1"),
        (["--matrix.rms", "0"], "--matrix.rms must be a positive number"),
        (["--matrix.rank", "0"], "--matrix.rank must be at least 1"),
        (["--model.kv-heads", "2"], "--model.kv-heads is a field of qwen3, the model is llama"),
        (["--model.family", "qwen3", "--model.kv-heads", "3"], "--model.kv-heads 3 must divide --model.heads 4"),
        (["--model.family", "qwen3", "--model.head-width", "9"], "--model.head-width must be even"),
        (["--model.family", "gpt2", "--model.heads", "3"], "must divide --model.width 128 into equal parts"),
        (["--model.bias"], "--model.bias is a field of gpt2, the model is llama"),
        (["--config", "gpt2_small", "--steps", "9999", "--warmup-steps", "9"], "prepare openwebtext"),
        (["--data.source", "nowhere"], "no Python source for train under nowhere"),
    ],
)
def test_a_bad_setting_is_one_line_before_anything_is_written(arguments, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main.main(["--steps", "100", "--warmup-steps", "80", *arguments]) == 1
    said = capsys.readouterr()
    assert line in said.err
    assert said.err.count("\n") == 1
    assert said.err.startswith("error: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", configs.NAMES)
def test_a_stored_configuration_comes_back(name):
    config = configs.load(name)
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_settings_that_an_earlier_version_did_not_store_have_their_defaults():
    flat = to_dict(Config(steps=7))
    assert from_dict({"steps": flat["steps"], "model.layers": 3}) == Config(steps=7, model=ModelConfig(layers=3))


def test_differences_name_what_changes_the_numbers_only():
    stored = to_dict(Config())
    assert differences(stored, Config()) == []
    assert (
        differences(stored, dataclasses.replace(Config(), resume=True, checkpoint_every=3, runs_folder=Path("x"))) == []
    )
    changed = differences(stored, dataclasses.replace(Config(), learning_rate=1.0, seed=5))
    assert changed == ["--seed was 0, is 5", f"--learning-rate was {Config().learning_rate}, is 1.0"]
    assert differences({**stored, "gone": 1}, Config()) == ["--gone was 1, is None"]
    del stored["model.hidden_std"]  # as of a run from before the field
    assert differences(stored, Config()) == []
    del stored["decay_gains"]  # they all did
    assert differences(stored, Config()) == ["--decay-gains was True, is False"]
    assert differences(stored, Config(decay_gains=True)) == []
    wider = Config(decay_gains=True, model=ModelConfig(hidden_std=0.1))
    assert differences(stored, wider) == ["--model.hidden-std was 0.02, is 0.1"]


def test_run_error_is_no_value_error():
    # ``main`` turns RunError into one line; a ValueError from a library must keep its traceback.
    assert not issubclass(RunError, ValueError)
