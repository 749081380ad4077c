# SPDX-License-Identifier: Apache-2.0
"""The command from beginning to end, stopped, continued, refused."""

import errno
import gc
import io
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

from examples.pretrain import checkpoint, configs, logs, main, processes, train
from examples.pretrain import run as run_module
from examples.pretrain.compare import arms
from examples.pretrain.evaluate import Score
from examples.pretrain.prepare import command
from tests import cases
from tests.examples.conftest import ENVIRONMENT, losses, wait_for

STEPS = [
    "--steps",
    "12",
    "--warmup-steps",
    "2",
    "--checkpoint-every",
    "4",
    "--evaluate-every",
    "6",
    "--log-every",
    "3",
]
SMALLEST = [
    "--model.layers",
    "1",
    "--model.width",
    "16",
    "--model.mlp-width",
    "32",
    "--batch-size",
    "4",
]


def refused(arguments: list[str], capture, *, midway: bool = False) -> str:
    """The line with which the program refuses, before the first step or ``midway``."""
    capture.readouterr()
    assert main.main(arguments) == 1
    gc.collect()  # what is given up has no more to say
    said = capture.readouterr()
    assert said.err.count("\n") == 1
    assert midway or "step " not in said.out
    return said.err


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def finished(tmp_path_factory, dataset) -> tuple[Path, list[str], str]:
    """A run without interruption: its folder, its arguments, what it said."""
    folder = tmp_path_factory.mktemp("finished")
    arguments = ["--config", "tiny", "--tokens", str(dataset.folder), *STEPS, *SMALLEST]
    with pytest.MonkeyPatch.context() as patch, (folder / "said.txt").open("w") as said:
        patch.chdir(folder)
        patch.setattr(sys, "stdout", said)
        assert main.main(arguments) == 0
    return (
        folder / "runs" / "tiny-normpre_h",
        arguments,
        (folder / "said.txt").read_text(),
    )


@pytest.fixture
def other_tokens(corpus, tmp_path) -> str:
    """Token files of another text and tokenizer."""
    folder = str(tmp_path / "other")
    options = ["--vocabulary", "400", "--validation-percent", "20", "--output", folder]
    command.main(["python", str(corpus / "email"), *options])
    return folder


@pytest.fixture
def copy(finished, tmp_path, monkeypatch) -> tuple[Path, list[str]]:
    """A copy of the finished run, and the arguments that made it.

    It is in a working folder of its own.
    """
    run, arguments, _ = finished
    shutil.copytree(run.parent, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / run.name, arguments


def test_a_run_leaves_its_folder_and_nothing_else(finished, dataset):
    run, arguments, said = finished
    assert files(run.parent.parent) == ["runs", "said.txt"]
    assert files(run) == [
        *(
            "checkpoints",
            "lock",
            "log.jsonl",
            "loss.png",
            "parameters.txt",
            "result.json",
            "run.json",
        )
    ]
    assert files(run / "checkpoints") == ["12", "8"]
    lines = losses(run)
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 13))
    assert [line["step"] for line in lines if "validation_loss" in line] == [0, 6, 12]
    rate = train.schedule(configs.parse(arguments))
    assert [line["learning_rate"] for line in lines if "loss" in line] == pytest.approx(
        [float(rate(t)) for t in range(12)]
    )
    assert lines[-1]["validation_loss"] < lines[0]["validation_loss"] < 6.4
    assert f"generate {Path('runs') / run.name} --prompt" in said
    assert f"Final validation loss {lines[-1]['validation_loss']:.4f}" in said
    assert "7 matrices" in said
    assert "12 steps (2 of warm-up)" in said
    stored = json.loads((run / "run.json").read_text())
    assert (stored["config"]["model.width"], stored["config"]["steps"]) == (16, 12)
    tokens = 12 * stored["config"]["batch_size"] * stored["config"]["model.context"]
    assert stored["data"]["passes"] == pytest.approx(
        tokens / len(dataset.train), rel=0.02
    )
    assert f"{stored['data']['passes']:.2g} passes over the text" in said
    assert stored["fingerprint"] == dataset.manifest["fingerprint"]
    (session,) = stored["sessions"]
    assert {"python", "jax", "orbax-checkpoint", "numpy"} <= session["versions"].keys()
    assert session["device"]["platform"]
    assert "attention/query/kernel" in (run / "parameters.txt").read_text()


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
        calls = iter(range(5))

        def counted(state, tokens):
            if next(calls, None) == 4:
                if not number:
                    raise KeyboardInterrupt
                os.kill(os.getpid(), number)
            return step(state, tokens)

        return counted

    patch.setattr(train, "make_train_step", make)


def signal_while_logging(patch, number: int) -> None:
    whole = train.Log.write
    calls = iter(range(4))

    def write(log, records):
        if next(calls, None) == 3:
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
    line = "--resume"
    if number:
        line = f"stopped after step {after}, saved; the same command with --resume"
        line += " continues"
    assert line in capsys.readouterr().err
    part = tmp_path / "runs" / run.name
    assert files(part / "checkpoints")[-1] == str(after)
    assert not (part / "result.json").exists()
    assert main.main([*arguments, "--resume"]) == 0
    assert losses(part) == losses(run)
    assert len(json.loads((part / "run.json").read_text())["sessions"]) == 2


def test_a_finished_run_is_left_as_it_is(copy, capsys):
    run, arguments = copy
    before = losses(run)
    kept = files(run)
    assert "--resume continues it" in refused(arguments, capsys)
    assert "no run in" in refused(
        [*arguments, "--resume", "--name", "misspelled"], capsys
    )
    for bad in (
        ["--optimizer", "normpre_g,ns_coefficients=none"],
        ["--model.vocabulary", "3"],
        ["--batch-size", "9999999"],
    ):
        refused([*arguments, "--overwrite", *bad], capsys)
    assert files(run) == kept
    with processes.lock(run):
        assert "another process is writing" in refused([*arguments, "--resume"], capsys)
    assert main.main([*arguments, "--resume", "--log-every", "4"]) == 0
    assert losses(run) == before
    assert (
        f"Final validation loss {before[-1]['validation_loss']:.4f}"
        in capsys.readouterr().out
    )
    (run / "run.json").unlink()
    assert "run.json" in refused([*arguments, "--overwrite"], capsys)
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


def test_another_runs_weights_replace_the_initial_ones_and_overwrite_starts_anew(
    copy, capsys
):
    run, arguments = copy
    assert (
        f"--init-from {Path('runs') / run.name} --name NEW starts a new run"
        in refused([*arguments, "--steps", "15", "--resume"], capsys)
    )
    short = [
        *arguments,
        "--steps",
        "3",
        "--optimizer",
        "adamw",
        "--init-from",
        str(run),
    ]
    other = refused([*short, "--model.mlp-width", "48"], capsys)
    assert (
        "--init-from is of another model: blocks/0/mlp/down/kernel is float32[32, 16]"
        " there" in other
    )
    other_run = run.parent / "tiny-adamw"
    other_run.mkdir()
    for stray in (
        "run.json",
        "stray.txt",
        "result.json",
        "checkpoints/7/params",
        "checkpoints/7 good/params",
        "notes/a",
    ):
        (other_run / stray).parent.mkdir(parents=True, exist_ok=True)
        (other_run / stray).write_text("")
    assert main.main([*short, "--overwrite"]) == 0
    # What the run before it wrote is gone, and nothing else.
    assert json.loads((other_run / "result.json").read_text())["best_validation_loss"]
    assert {"3", "7", "7 good"} & set(files(other_run / "checkpoints")) == {
        "3",
        "7 good",
    }
    assert (other_run / "stray.txt").exists()
    assert (other_run / "notes" / "a").exists()
    assert f"{run} after step 12" in capsys.readouterr().out
    begun = losses(other_run)
    assert begun[0]["validation_loss"] == losses(run)[-1]["validation_loss"]
    assert [line["step"] for line in begun if "loss" in line] == [1, 2, 3]
    shutil.rmtree(run)
    assert main.main([*short, "--resume"]) == 0


def test_another_runs_checkpoint_is_refused(copy, other_tokens, capsys):
    run, arguments = copy
    other = refused(
        [*arguments, "--resume", "--model.width", "32", "--learning-rate", "0.5"],
        capsys,
    )
    assert "--model.width was 16, is 32" in other
    assert "--learning-rate was 0.054, is 0.5" in other
    assert "other text" in refused(
        [*arguments, "--resume", "--tokens", other_tokens], capsys
    )
    stored = json.loads((run / "run.json").read_text())
    stored["config"]["model.mlp_width"] = 48
    (run / "run.json").write_text(json.dumps(stored))
    other = refused([*arguments, "--resume", "--model.mlp-width", "48"], capsys)
    assert "which belongs to another model or optimizer: " in other
    assert "is float32[32, 16] there, float32[48, 16] here" in other
    (run / "run.json").write_text("{")
    assert "run.json is damaged" in refused([*arguments, "--resume"], capsys)


def damage(checkpoint: Path) -> None:
    """Cut all files of a checkpoint's part in half."""
    for path in checkpoint.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


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
    said = refused([*arguments, "--resume"], capfd)
    assert "12 is damaged" in said
    assert "delete it to use the checkpoint before" in said
    shutil.rmtree(newest)
    assert main.main([*arguments, "--resume"]) == 0
    assert "Resuming from step 8" in capfd.readouterr().out
    assert losses(run) == losses(finished[0])


@pytest.mark.skipif(os.name != "posix", reason="needs limits of the system")
@pytest.mark.parametrize("part", ["checkpoint", "log"])
def test_a_full_disk_is_one_line(finished, tmp_path, monkeypatch, capfd, part):
    import resource

    def write(log, records):
        if records[-1]["step"] > 6:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def save(checkpoints, *data, **trees):
        # Less than the token table.
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        whole(checkpoints, *data, **trees)

    monkeypatch.chdir(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    whole = checkpoint.Checkpoints.save
    if part == "checkpoint":
        monkeypatch.setattr(checkpoint.Checkpoints, "save", save)
    else:
        monkeypatch.setattr(train.Log, "write", write)
    try:
        said = refused(finished[1], capfd, midway=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {"checkpoint": "cannot write", "log": "No space left on device"}[
        part
    ] in said


def test_what_ends_a_run_is_one_line(finished, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = finished[1]
    said = refused(
        [*arguments, "--optimizer", "adamw", "--learning-rate", "1e30"],
        capsys,
        midway=True,
    )
    assert "try a --learning-rate below 1e+30" in said
    assert (
        "became"
        in json.loads((tmp_path / "runs" / "tiny-adamw" / "result.json").read_text())[
            "diverged"
        ]
    )
    last = [*arguments, "--steps", "4", "--weight-decay", "1e10", "--name", "last"]
    assert "the gradient norm became nan at step 4: try a --learning-rate" in refused(
        last, capsys, midway=True
    )
    initial = [*arguments, "--model.hidden-std", "1e30", "--name", "initial"]
    assert "validation loss became nan at step 0: check the initial weights" in refused(
        initial, capsys, midway=True
    )
    shutil.copytree(finished[0], tmp_path / "runs" / "damaged")
    monkeypatch.setattr(
        train, "evaluation", lambda *_: lambda params: Score(math.nan, math.nan)
    )
    damaged = refused(
        [*arguments, "--name", "damaged", "--resume"], capsys, midway=True
    )
    assert "validation loss became nan at step" in damaged
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert "--model.vocabulary 300 is too small" in refused(
        [*arguments, "--model.vocabulary", "300"], capsys
    )
    (tmp_path / "file").touch()
    assert "file" in refused([*arguments, "--runs-folder", "file"], capsys)


@pytest.mark.parametrize(
    "damage", ["{", "17", '{"loss": 1.0}', '{"step": "4"}', "\xff", "[" * 100_000]
)
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
    assert (len(found["train"]), len(found["validation"])) == (11, 3)
    with pytest.warns(UserWarning, match="1 damaged line"):
        assert main.main([*arguments, "--resume"]) == 0
    assert losses(run) == expected
    assert log.read_bytes().count(b"\n") == len(expected)
    log.write_bytes(damage.encode("latin-1"))
    assert main.main([*arguments, "--resume"]) == 0
    found = arms.finished(run)
    assert found is not None
    assert found["norms"] == {}
    assert found["best_validation_loss"] == before[-1]["validation_loss"]


@pytest.mark.skipif(os.name != "posix", reason="needs pipes of the system")
def test_a_closed_pipe_ends_the_program_quietly(copy, capfd):
    run, arguments = copy
    root = [sys.executable, "-m", "examples.pretrain"]
    for words in (["--help"], ["train", "--help"], ["prepare"], ["prepare", "--help"]):
        process = subprocess.Popen(
            [*root, *words],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait() == 1
        assert process.stderr is not None
        assert process.stderr.read().count(b"\n") == (words == ["prepare"])  # its error
        process.stderr.close()
    for words in (["evaluate", str(run)], [*arguments, "--name", "closed"]):
        reader, writer = os.pipe()
        os.close(reader)
        with pytest.MonkeyPatch.context() as patch, open(writer, "w") as closed:
            patch.setattr(sys, "stdout", closed)
            with pytest.raises(
                SystemExit, match="1"
            ):  # Rich's answer, or Python's after ours
                sys.exit(main.main(words))
        assert capfd.readouterr().err == ""


def test_a_model_that_no_memory_holds_is_one_line(copy, capsys, monkeypatch):
    _, arguments = copy
    for flags, size in (
        (["--model.width", "2147483644"], "GB"),
        (["--model.vocabulary", "2147483647", "--model.width", "1024"], "8,796 GB"),
        (
            [
                "--model.layers",
                "10000",
                "--model.width",
                "32768",
                "--model.scan-layers",
            ],
            "GB",
        ),
    ):
        said = refused([*arguments, "--name", "large", *flags], capsys)
        assert f"{size}) do not fit into the memory of " in said
    assert not Path("runs/large").exists()
    for error in (
        ValueError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nmore"),
        MemoryError(),
    ):
        monkeypatch.setattr(
            train, "initialize", lambda *_, error=error: (_ for _ in ()).throw(error)
        )
        said = refused([*arguments, "--name", "large"], capsys)
        assert said.startswith("error: out of memory")
        assert "--micro-batch" in said


def test_a_model_is_scored_continued_and_exported(copy, capsys):
    run, _ = copy
    final = losses(run)[-1]
    assert main.main(["evaluate", str(run)]) == 0
    assert (
        f"step 12: loss {final['validation_loss']:.4f} nats per token"
        in capsys.readouterr().out
    )
    assert (
        main.main(["evaluate", str(run), "--step", "8", "--validation-tokens", "512"])
        == 0
    )
    assert "step 8: loss" in capsys.readouterr().out
    generate = ["generate", str(run), "--sample-tokens", "20", "--temperature", "0"]
    said = []
    for seed in ("0", "1"):
        assert (
            main.main([*generate, "--prompt", "def read_lines(path):", "--seed", seed])
            == 0
        )
        said.append(capsys.readouterr().out)
    assert said[0].startswith("def read_lines(path):")
    assert said[0] == said[1]  # nothing is drawn
    export = ["export", str(run), "--output", "exported"]
    assert main.main(export) == 0
    assert files(Path("exported")) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert json.loads(Path("exported/config.json").read_text())["vocab_size"] == 512
    assert len({path.stat().st_mode for path in Path("exported").iterdir()}) == 1
    assert "exported has a model.safetensors: pass --overwrite" in refused(
        export, capsys
    )
    assert main.main([*export, "--overwrite"]) == 0


def test_a_model_is_read_without_its_optimizer(copy, capsys):
    run, _ = copy
    stored = json.loads((run / "run.json").read_text())
    stored["config"]["optimizer"] = "another,x=1"
    (run / "run.json").write_text(json.dumps(stored))
    assert main.main(["evaluate", str(run)]) == 0
    assert f"loss {losses(run)[-1]['validation_loss']:.4f}" in capsys.readouterr().out


def test_a_model_that_is_not_there_is_one_line(copy, tmp_path, other_tokens, capsys):
    run, _ = copy
    for words, line in (
        (["evaluate", "nowhere"], "is not the folder of a run"),
        (["generate", str(run), "--step", "5"], "no checkpoint of step 5"),
        (["generate", str(run), "--step", "5"], "there are 8, 12"),
        (["generate", str(run), "--seed", "-1"], "--seed must be in 0.."),
        (
            ["generate", str(run), "--sample-tokens", "100000"],
            "--sample-tokens must be in 0..65536",
        ),
        (
            ["generate", str(run), "--temperature", "nan"],
            "--temperature must be at least 0",
        ),
        (
            ["evaluate", str(run), "--tokens", str(tmp_path / "no")],
            "there are no token files in",
        ),
        (
            ["evaluate", str(run), "--validation-tokens", "0"],
            "--validation-tokens must be at least 1",
        ),
        (["evaluate", str(run), "--tokens", other_tokens], "has another tokenizer"),
    ):
        assert line in refused(words, capsys)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children")
def test_what_a_process_has_begun_ends_with_it():
    child = (
        "from examples.pretrain.processes import begin_as_child as f; import"
        " subprocess, sys, time; "
    )
    child += (
        "print(subprocess.Popen(['sleep', '60'], preexec_fn=lambda: f(set())).pid,"
        " flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", child], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    begun = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    for _ in range(100):
        try:
            state = (
                Path(f"/proc/{begun}/stat").read_text().rpartition(")")[2].split()[0]
            )
        except OSError:
            return
        if state == "Z":  # ended, and nobody has asked
            return
        time.sleep(0.1)
    os.kill(begun, signal.SIGKILL)
    pytest.fail("it lives on")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_run_goes_on_exactly(flags, tmp_path):
    command = [
        sys.executable,
        "-m",
        "examples.pretrain",
        *flags,
        "--steps",
        "400",
        "--checkpoint-every",
        "7",
    ]
    command += ["--evaluate-every", "100", "--optimizer", "normpre_l"]
    killed = tmp_path / "runs" / "killed"

    def start(*more: str) -> subprocess.Popen:
        return subprocess.Popen(
            [*command, *more], cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.DEVNULL
        )

    def kill_after(step: int, *more: str) -> None:
        process = start("--name", "killed", *more)
        wait_for(killed, step, process)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL

    assert start("--name", "whole").wait(200) == 0
    kill_after(60)
    kill_after(200, "--resume")
    assert losses(killed)[-1]["step"] < 400
    assert start("--name", "killed", "--resume").wait(200) == 0
    assert losses(killed) == losses(killed.with_name("whole"))
    assert len(json.loads((killed / "run.json").read_text())["sessions"]) == 3
