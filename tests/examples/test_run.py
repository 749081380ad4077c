# SPDX-License-Identifier: Apache-2.0
"""The command from beginning to end, stopped, continued, refused."""

import errno
import gc
import io
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from tokenizers import Tokenizer

from examples.pretrain import checkpoint, configs, logs, main, processes, train
from examples.pretrain import run as run_module
from examples.pretrain.compare import arms
from examples.pretrain.evaluate import Score
from examples.pretrain.prepare.tokenizer import END_OF_TEXT
from tests import cases
from tests.examples.conftest import ENVIRONMENT, losses, wait_for, words
from tests.examples.corpora import TEXTS, prepare, put, put_texts, whole_words

STEPS = words(
    "--steps 12 --warmup-steps 2 --checkpoint-every 4 --evaluate-every 6 --log-every 3"
)
SMALLEST = words(
    "--model.layers 1 --model.width 16 --model.mlp-width 32 --batch-size 4"
)


def refused(
    arguments: list[str], capture, options: str = "", *, midway: bool = False
) -> str:
    """The line with which the program refuses, before the first step or ``midway``."""
    capture.readouterr()
    assert main.main([*arguments, *words(options)]) == 1
    gc.collect()  # what is given up has no more to say
    said = capture.readouterr()
    assert said.err.count("\n") == 1
    if not midway:
        assert "step " not in said.out
    return said.err


def succeeds(arguments: list[str], options: str = "") -> None:
    """Assert that a command comes to its end."""
    assert main.main([*arguments, *words(options)]) == 0


def final_loss(run: Path) -> float:
    return losses(run)[-1]["validation_loss"]


def facts(run: Path) -> dict:
    return json.loads((run / "run.json").read_text())


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def finished(tmp_path_factory, dataset) -> tuple[Path, list[str], str]:
    """A run without interruption: its folder, its arguments, what it said."""
    folder = tmp_path_factory.mktemp("finished")
    arguments = ["--config", "tiny", "--tokens", str(dataset.folder), *STEPS, *SMALLEST]
    said = folder / "said.txt"
    with pytest.MonkeyPatch.context() as patch, said.open("w") as file:
        patch.chdir(folder)
        patch.setattr(sys, "stdout", file)
        succeeds(arguments)
    return folder / "runs" / "tiny-normpre_h", arguments, said.read_text()


@pytest.fixture
def other_tokens(corpus, tmp_path) -> str:
    """Token files of another text and tokenizer."""
    folder = tmp_path / "other"
    prepare(
        "python",
        corpus / "email",
        vocabulary=400,
        validation_percent=20,
        output=folder,
    )
    return str(folder)


@pytest.fixture
def copy(finished, tmp_path, monkeypatch) -> tuple[Path, list[str]]:
    """A copy of the finished run, and the arguments that made it.

    It is in a working folder of its own.
    """
    run, arguments, _ = finished
    shutil.copytree(run.parent, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / run.name, arguments


def test_a_run_leaves_its_folder_and_nothing_else(finished):
    run, _, _ = finished
    assert files(run.parent.parent) == ["runs", "said.txt"]
    assert files(run) == [
        "checkpoints",
        "lock",
        "log.jsonl",
        "loss.png",
        "parameters.txt",
        "result.json",
        "run.json",
    ]
    assert files(run / "checkpoints") == ["12", "8"]
    assert "attention/query/kernel" in (run / "parameters.txt").read_text()


def test_the_log_of_a_run(finished):
    run, arguments, _ = finished
    lines = losses(run)
    steps = [line for line in lines if "loss" in line]
    scores = [line for line in lines if "validation_loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert [line["step"] for line in scores] == [0, 6, 12]
    assert scores[-1] == lines[-1]
    rate = train.schedule(configs.parse(arguments))
    expected = [float(rate(t)) for t in range(12)]
    assert [line["learning_rate"] for line in steps] == pytest.approx(expected)
    assert final_loss(run) < lines[0]["validation_loss"] < 6.4


def test_what_a_run_says(finished):
    run, _, said = finished
    assert f"generate {Path('runs') / run.name} --prompt" in said
    assert f"Final validation loss {final_loss(run):.4f}" in said
    assert "7 matrices" in said
    assert "12 steps (2 of warm-up)" in said
    assert f"{facts(run)['data']['passes']:.2g} passes over the text" in said


def test_the_facts_of_a_run(finished, dataset):
    run, _, _ = finished
    stored = facts(run)
    config = stored["config"]
    assert config["model.width"] == 16
    assert config["steps"] == 12
    tokens = 12 * config["batch_size"] * config["model.context"]
    passes = tokens / len(dataset.train)
    assert stored["data"]["passes"] == pytest.approx(passes, rel=0.02)
    assert stored["fingerprint"] == dataset.manifest["fingerprint"]
    (session,) = stored["sessions"]
    assert {"python", "jax", "orbax-checkpoint", "numpy"} <= session["versions"].keys()
    assert session["device"]["platform"]


def test_a_run_that_is_killed_while_it_resumes_keeps_its_log(tmp_path, monkeypatch):
    """Killed when the file that is to be written is still empty."""

    def killed(path, text):
        path.open("w").close()
        raise KeyboardInterrupt

    file = tmp_path / "log.jsonl"
    lines = logs.to_lines([{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}])
    file.write_text(lines)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", killed)
        with pytest.raises(KeyboardInterrupt):
            logs.Log(tmp_path, start=1)
    assert file.read_text() == lines
    logs.Log(tmp_path, start=1).close()
    assert logs.read_lines(file) == [{"step": 1, "loss": 3.0}]
    assert files(tmp_path) == ["log.jsonl"]


def test_progress_is_a_line_every_30_seconds_without_a_terminal(monkeypatch):
    clock = [0.0]
    file = io.StringIO()
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    progress = logs.Progress(Console(file=file, width=200), 800)
    for step in range(1, 801):
        clock[0] += 0.25
        progress.update(step, 3.0, 0.25, 512)
    lines = file.getvalue().splitlines()
    assert len(lines) == 6  # in 200 seconds
    assert lines[0] == "step    120 of 800  loss 3.0000  2,048 tokens/s  0:02:50 left"


def signal_in_a_step(patch, number: int) -> None:
    """Send a signal in the fifth step.

    Number 0: end there at once, as by a second Ctrl-C.
    """
    whole = train.make_train_step

    def make(*args):
        step = whole(*args)
        calls = itertools.count(1)

        def counted(state, tokens):
            fifth = next(calls) == 5
            if fifth and not number:
                raise KeyboardInterrupt
            if fifth:
                os.kill(os.getpid(), number)
            return step(state, tokens)

        return counted

    patch.setattr(train, "make_train_step", make)


def signal_while_logging(patch, number: int) -> None:
    """Send a signal in the fourth write of the log."""
    whole = train.Log.write
    calls = itertools.count(1)

    def write(log, records):
        if next(calls) == 4:
            os.kill(os.getpid(), number)
        whole(log, records)

    patch.setattr(train.Log, "write", write)


@cases.rows(
    "number status send after",
    (signal.SIGTERM, 143, signal_in_a_step, 5),
    pytest.param(signal.SIGINT, 130, signal_in_a_step, 5, marks=pytest.mark.slow),
    pytest.param(0, 130, signal_in_a_step, 4, marks=pytest.mark.slow),
    # The writes are those of the first score, step 3, step 6 and its score: step 7 is
    # the first to know.
    pytest.param(signal.SIGTERM, 143, signal_while_logging, 7, marks=pytest.mark.slow),
)
def test_a_stopped_run_goes_on_exactly(
    finished, tmp_path, monkeypatch, capsys, number, status, send, after
):
    run, arguments, _ = finished
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        send(patch, number)
        assert main.main(arguments) == status
    assert signal.getsignal(signal.SIGTERM) == before
    said = capsys.readouterr().err
    assert "--resume" in said
    if number:
        saved = f"stopped after step {after}, saved"
        assert f"{saved}; the same command with --resume continues" in said
    part = tmp_path / "runs" / run.name
    assert files(part / "checkpoints")[-1] == str(after)
    assert not (part / "result.json").exists()
    succeeds(arguments, "--resume")
    assert losses(part) == losses(run)
    assert len(facts(part)["sessions"]) == 2


def test_a_finished_run_is_left_as_it_is(copy, capsys):
    run, arguments = copy
    before = losses(run)
    kept = files(run)
    assert "--resume continues it" in refused(arguments, capsys)
    assert "no run in" in refused(arguments, capsys, "--resume --name misspelled")
    for bad in (
        "--optimizer normpre_g,ns_coefficients=none",
        "--model.vocabulary 3",
        "--batch-size 9999999",
    ):
        refused(arguments, capsys, f"--overwrite {bad}")
    assert files(run) == kept
    with processes.lock(run):
        said = refused(arguments, capsys, "--resume")
    assert "another process is writing" in said
    succeeds(arguments, "--resume --log-every 4")
    assert losses(run) == before
    assert f"Final validation loss {final_loss(run):.4f}" in capsys.readouterr().out


def test_a_folder_without_the_facts_of_a_run_is_not_overwritten(copy, capsys):
    run, arguments = copy
    (run / "run.json").unlink()
    assert "run.json" in refused(arguments, capsys, "--overwrite")
    assert (run / "log.jsonl").exists()


@pytest.mark.parametrize("flags", [[], ["--resume"], ["--overwrite"]])
def test_what_was_stopped_before_it_began_is_in_nobodys_way(
    finished, tmp_path, monkeypatch, flags
):
    run, arguments, _ = finished
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / run.name
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    assert run_module.stored(configs.parse([*arguments, *flags])) is None


def shortly(run: Path) -> str:
    """Options of a short run of AdamW from the weights of another run."""
    return f"--steps 3 --optimizer adamw --init-from {run}"


def test_another_runs_weights_replace_the_initial_ones(copy, capsys):
    run, arguments = copy
    path = Path("runs") / run.name
    said = refused(arguments, capsys, "--steps 15 --resume")
    assert f"--init-from {path} --name NEW starts a new run" in said
    succeeds(arguments, shortly(run))
    assert f"{run} after step 12" in capsys.readouterr().out
    begun = losses(run.parent / "tiny-adamw")
    assert begun[0]["validation_loss"] == final_loss(run)
    assert [line["step"] for line in begun if "loss" in line] == [1, 2, 3]
    # It has been read, and is no longer needed.
    shutil.rmtree(run)
    succeeds(arguments, f"{shortly(run)} --resume")


def test_weights_of_another_model_are_refused(copy, capsys):
    run, arguments = copy
    said = refused(arguments, capsys, f"{shortly(run)} --model.mlp-width 48")
    message = "--init-from is of another model: blocks/0/mlp/down/kernel is"
    assert f"{message} float32[32, 16] there" in said


def test_overwrite_deletes_what_the_run_before_it_wrote_and_nothing_else(copy):
    run, arguments = copy
    other = run.parent / "tiny-adamw"
    for stray in (
        "run.json",
        "stray.txt",
        "result.json",
        "checkpoints/7/params",
        "checkpoints/7 good/params",
        "notes/a",
    ):
        put(other / stray)
    succeeds(arguments, f"{shortly(run)} --overwrite")
    result = json.loads((other / "result.json").read_text())
    assert result["best_validation_loss"]
    checkpoints = set(files(other / "checkpoints"))
    assert {"3", "7 good"} <= checkpoints
    assert "7" not in checkpoints
    assert (other / "stray.txt").exists()
    assert (other / "notes" / "a").exists()


def test_a_run_with_other_settings_is_not_continued(copy, other_tokens, capsys):
    _, arguments = copy
    options = "--resume --model.width 32 --learning-rate 0.5"
    said = refused(arguments, capsys, options)
    assert "--model.width was 16, is 32" in said
    assert "--learning-rate was 0.054, is 0.5" in said
    said = refused(arguments, capsys, f"--resume --tokens {other_tokens}")
    assert "other text" in said


def test_another_runs_checkpoint_is_refused(copy, capsys):
    run, arguments = copy
    stored = facts(run)
    stored["config"]["model.mlp_width"] = 48
    (run / "run.json").write_text(json.dumps(stored))
    said = refused(arguments, capsys, "--resume --model.mlp-width 48")
    assert "which belongs to another model or optimizer: " in said
    assert "is float32[32, 16] there, float32[48, 16] here" in said
    (run / "run.json").write_text("{")
    assert "run.json is damaged" in refused(arguments, capsys, "--resume")


def damage(checkpoint: Path) -> None:
    """Cut all files of a checkpoint's part in half."""
    for path in checkpoint.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            path.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("part", ["facts", "params", "opt_state", "manifest"])
def test_a_damaged_checkpoint_is_one_line_and_the_one_before_can_be_used(
    copy, finished, capfd, part
):
    run, arguments = copy
    newest = run / "checkpoints" / "12"
    if part == "manifest":
        # Tensorstore's reads are given up midway.
        (newest / "opt_state" / "manifest.ocdbt").unlink()
    else:
        damage(newest / part)
    if part == "params":
        assert "12 is damaged" in refused(["evaluate", str(run)], capfd)
    said = refused(arguments, capfd, "--resume")
    assert "12 is damaged" in said
    assert "to use the checkpoint before it, move it out of runs/" in said
    assert "delete" not in said
    shutil.rmtree(newest)
    succeeds(arguments, "--resume")
    assert "Resuming from step 8" in capfd.readouterr().out
    assert losses(run) == losses(finished[0])


@pytest.mark.skipif(os.name != "posix", reason="needs limits of the system")
def test_a_full_disk_is_one_line(finished, tmp_path, monkeypatch, capfd):
    """While a checkpoint is written: no file may be as large as the token table."""
    import resource

    def save(checkpoints, *data, **trees):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, largest))
        whole(checkpoints, *data, **trees)

    _, arguments, _ = finished
    monkeypatch.chdir(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    _, largest = limits
    whole = checkpoint.Checkpoints.save
    monkeypatch.setattr(checkpoint.Checkpoints, "save", save)
    try:
        said = refused(arguments, capfd, midway=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot write" in said


def test_a_log_that_cannot_be_written_is_one_line(
    finished, tmp_path, monkeypatch, capsys
):
    def write(log, records):
        if records[-1]["step"] > 6:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    _, arguments, _ = finished
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train.Log, "write", write)
    assert "No space left on device" in refused(arguments, capsys, midway=True)


@cases.rows(
    "options message",
    (
        "--optimizer adamw --learning-rate 1e30",
        "try a --learning-rate below 1e+30",
    ),
    (
        "--steps 4 --weight-decay 1e10",
        "the gradient norm became nan at step 4: try a --learning-rate",
    ),
    (
        "--model.hidden-std 1e30",
        "validation loss became nan at step 0: check the initial weights",
    ),
)
def test_a_run_that_diverges_is_one_line(
    finished, tmp_path, monkeypatch, capsys, options, message
):
    _, arguments, _ = finished
    monkeypatch.chdir(tmp_path)
    said = refused(arguments, capsys, f"{options} --name diverged", midway=True)
    assert message in said
    result = tmp_path / "runs" / "diverged" / "result.json"
    assert "became" in json.loads(result.read_text())["diverged"]


def test_a_finished_run_without_a_loss_is_one_line(copy, monkeypatch, capsys):
    def evaluation(*_):
        return lambda params: Score(math.nan, math.nan)

    _, arguments = copy
    monkeypatch.setattr(train, "evaluation", evaluation)
    said = refused(arguments, capsys, "--resume", midway=True)
    assert "validation loss became nan at step" in said


def test_what_is_found_before_the_first_step_is_one_line(
    finished, tmp_path, monkeypatch, capsys
):
    _, arguments, _ = finished
    monkeypatch.chdir(tmp_path)
    said = refused(arguments, capsys, "--model.vocabulary 300")
    assert "--model.vocabulary 300 is too small" in said
    put(tmp_path / "file")
    assert "file" in refused(arguments, capsys, "--runs-folder file")


every_damage = pytest.mark.parametrize(
    "damage", ["{", "17", '{"loss": 1.0}', '{"step": "4"}', "\xff", "[" * 100_000]
)


@every_damage
def test_a_damaged_line_of_the_log_is_left_out(copy, damage):
    run, arguments = copy
    log = run / "log.jsonl"
    before = losses(run)
    lines = log.read_bytes().splitlines(keepends=True)
    lines[4] = damage.encode("latin-1") + b"\n"
    log.write_bytes(b"".join(lines))
    expected = [*before[:4], *before[5:]]
    with pytest.warns(UserWarning, match=r"log\.jsonl: 1 damaged line\(s\) left out"):
        found = arms.finished(run)
    assert found is not None
    assert len(found["train"]) == 11
    assert len(found["validation"]) == 3
    with pytest.warns(UserWarning, match="1 damaged line"):
        succeeds(arguments, "--resume")
    assert losses(run) == expected
    assert log.read_bytes().count(b"\n") == len(expected)


@every_damage
def test_a_log_without_a_line_does_not_hide_the_result(copy, damage):
    run, arguments = copy
    expected = final_loss(run)
    (run / "log.jsonl").write_bytes(damage.encode("latin-1"))
    succeeds(arguments, "--resume")
    found = arms.finished(run)
    assert found is not None
    assert found["norms"] == {}
    assert found["best_validation_loss"] == expected


PROGRAM = [sys.executable, "-m", "examples.pretrain"]
posix_only = pytest.mark.skipif(os.name != "posix", reason="needs pipes of the system")


@posix_only
@cases.rows(
    "command lines",
    ("--help", 0),
    ("train --help", 0),
    ("prepare", 1),  # its error
    ("prepare --help", 0),
)
def test_a_closed_pipe_ends_a_process_quietly(tmp_path, command, lines):
    process = subprocess.Popen(
        [*PROGRAM, *words(command)],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait() == 1
    assert process.stderr is not None
    assert process.stderr.read().count(b"\n") == lines
    process.stderr.close()


@posix_only
def test_a_closed_pipe_ends_the_program_quietly(copy, capfd):
    run, arguments = copy
    for command in (["evaluate", str(run)], [*arguments, "--name", "closed"]):
        reader, writer = os.pipe()
        os.close(reader)
        with pytest.MonkeyPatch.context() as patch, open(writer, "w") as closed:
            patch.setattr(sys, "stdout", closed)
            # Rich's answer, or Python's after ours.
            with pytest.raises(SystemExit, match="1"):
                sys.exit(main.main(command))
        assert capfd.readouterr().err == ""


@cases.rows(
    "options size",
    ("--model.width 2147483644", "GB"),
    ("--model.vocabulary 2147483647 --model.width 1024", "8,796 GB"),
    ("--model.layers 10000 --model.width 32768 --model.scan-layers", "GB"),
)
def test_a_model_that_no_memory_holds_is_one_line(copy, capsys, options, size):
    _, arguments = copy
    said = refused(arguments, capsys, f"--name large {options}")
    assert f"{size}) do not fit into the memory of " in said
    assert not Path("runs/large").exists()


EXHAUSTED = ValueError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nmore")


@pytest.mark.parametrize("error", [EXHAUSTED, MemoryError()], ids=["JAX", "Python"])
def test_memory_that_is_used_up_is_one_line(copy, capsys, monkeypatch, error):
    def initialize(*_):
        raise error

    _, arguments = copy
    monkeypatch.setattr(train, "initialize", initialize)
    said = refused(arguments, capsys, "--name large")
    assert said.startswith("error: out of memory")
    assert "--micro-batch" in said


def test_a_model_is_scored(copy, capsys):
    run, _ = copy
    evaluate = ["evaluate", str(run)]
    succeeds(evaluate)
    expected = f"step 12: loss {final_loss(run):.4f} nats per token"
    assert expected in capsys.readouterr().out
    succeeds(evaluate, "--step 8 --validation-tokens 512")
    assert "step 8: loss" in capsys.readouterr().out


def test_a_prompt_is_continued_the_same_at_temperature_zero(copy, capsys):
    run, _ = copy
    prompt = "def read_lines(path):"
    options = "--sample-tokens 20 --temperature 0"
    said = []
    for seed in (0, 1):
        generate = ["generate", str(run), "--prompt", prompt]
        succeeds(generate, f"{options} --seed {seed}")
        said.append(capsys.readouterr().out)
    assert said[0].startswith(prompt)
    assert said[0] == said[1]


def test_a_model_is_exported(copy, capsys):
    run, _ = copy
    folder = Path("exported")
    export = ["export", str(run), "--output", "exported"]
    succeeds(export)
    assert files(folder) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    settings = json.loads((folder / "config.json").read_text())
    assert settings["vocab_size"] == 512
    end = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(END_OF_TEXT)
    check_end(folder, END_OF_TEXT, end)
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
    message = "exported has a model.safetensors: pass --overwrite"
    assert message in refused(export, capsys)
    succeeds(export, "--overwrite")


def check_end(folder: Path, token: str, number: int) -> None:
    """Assert that exported files have this token as the end of a text."""
    for name in ("config.json", "generation_config.json"):
        assert json.loads((folder / name).read_text())["eos_token_id"] == number
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == token


def test_the_end_of_a_text_is_exported_as_the_tokenizer_has_it(flags, tmp_path):
    put_texts(tmp_path / "texts", TEXTS)
    words_of_texts = sorted({word for text in TEXTS for word in text.split()})
    tokenizer = tmp_path / "tokenizer.json"
    whole_words([*words_of_texts, "[EOS]", "."]).save(str(tokenizer))
    tokens = tmp_path / "tokens"
    options = {"tokenizer": tokenizer, "end_token": "[EOS]", "output": tokens}
    dataset = prepare("text", tmp_path / "texts", **options)
    flags = [*flags, *SMALLEST, *words("--steps 1 --name words"), "--tokens"]
    succeeds([*flags, str(tokens)])
    exported = tmp_path / "exported"
    run = tmp_path / "runs" / "words"
    succeeds(["export", str(run), "--output", str(exported)])
    number = dataset.tokenizer.token_to_id("[EOS]")
    assert number > 10
    check_end(exported, "[EOS]", number)


def test_a_model_is_read_without_its_optimizer(copy, capsys):
    run, _ = copy
    stored = facts(run)
    stored["config"]["optimizer"] = "another,x=1"
    (run / "run.json").write_text(json.dumps(stored))
    succeeds(["evaluate", str(run)])
    assert f"loss {final_loss(run):.4f}" in capsys.readouterr().out


@cases.rows(
    "command options line",
    ("generate", "--step 5", "no checkpoint of step 5"),
    ("generate", "--step 5", "there are 8, 12"),
    ("generate", "--seed -1", "--seed must be in 0.."),
    ("generate", "--sample-tokens 100000", "--sample-tokens must be in 0..65536"),
    ("generate", "--temperature nan", "--temperature must be at least 0"),
    ("evaluate", "--tokens no", "there are no token files in"),
    ("evaluate", "--validation-tokens 0", "--validation-tokens must be at least 1"),
    ("generate", "--tokens 30", "for a number of tokens, write --sample-tokens 30"),
    ("generate", "--tokens=30", "for a number of tokens, write --sample-tokens 30"),
    ("generate", "--tokens 1_000", "write --sample-tokens 1_000"),
    ("generate", "--tokens 30b", "there are no token files in 30b"),
    ("evaluate", "--tokens 512", "for a number of tokens, write --validation-tokens"),
    ("export", "--output a --tokens 30", "there are no token files in 30 "),
)
def test_what_a_model_cannot_do_is_one_line(copy, capsys, command, options, line):
    run, _ = copy
    assert line in refused([command, str(run)], capsys, options)


def test_a_folder_of_token_files_may_have_a_number_as_its_name(copy, dataset):
    run, _ = copy
    Path("30").symlink_to(dataset.folder)
    succeeds(["generate", str(run)], "--tokens 30 --sample-tokens 1")


def test_a_model_that_is_not_there_is_one_line(capsys):
    assert "is not the folder of a run" in refused(["evaluate", "nowhere"], capsys)


def test_text_of_another_tokenizer_is_one_line(copy, other_tokens, capsys):
    run, _ = copy
    said = refused(["evaluate", str(run)], capsys, f"--tokens {other_tokens}")
    assert "has another tokenizer" in said


# A process that begins another one, and says which.
PARENT = """
import functools, subprocess, time
from examples.pretrain.processes import begin_as_child

begin = functools.partial(begin_as_child, set())
child = subprocess.Popen(["sleep", "60"], preexec_fn=begin)
print(child.pid, flush=True)
time.sleep(60)
"""


def ended(process: int) -> bool:
    """Whether a process has ended. Its state is Z until its parent has asked."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return True
    _, _, after_name = stat.rpartition(")")
    state, *_ = after_name.split()
    return state == "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children")
def test_what_a_process_has_begun_ends_with_it():
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    begun = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    for _ in range(100):
        if ended(begun):
            return
        time.sleep(0.1)
    os.kill(begun, signal.SIGKILL)
    pytest.fail("it lives on")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_run_goes_on_exactly(flags, tmp_path):
    options = "--steps 400 --checkpoint-every 7 --evaluate-every 100"
    command = [*PROGRAM, *flags, *words(options), "--optimizer", "normpre_l"]
    killed = tmp_path / "runs" / "killed"

    def start(name: str, *more: str) -> subprocess.Popen:
        return subprocess.Popen(
            [*command, "--name", name, *more],
            cwd=tmp_path,
            env=ENVIRONMENT,
            stdout=subprocess.DEVNULL,
        )

    def kill_after(step: int, *more: str) -> None:
        process = start("killed", *more)
        wait_for(killed, step, process)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL

    assert start("whole").wait(200) == 0
    kill_after(60)
    kill_after(200, "--resume")
    assert losses(killed)[-1]["step"] < 400
    assert start("killed", "--resume").wait(200) == 0
    assert losses(killed) == losses(killed.with_name("whole"))
    assert len(facts(killed)["sessions"]) == 3
