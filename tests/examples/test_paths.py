# SPDX-License-Identifier: Apache-2.0
"""Folders of runs with any names: checkpoints are read from them, or refused."""

import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from examples.pretrain import checkpoint, main, paths
from examples.pretrain.checkpoint import Checkpoints
from examples.pretrain.config import RunError
from examples.pretrain.logs import read_lines
from tests import cases
from tests.examples.conftest import refuses, words
from tests.examples.corpora import TEXTS, prepare, put, put_texts, zstd

TREE = {"weight": jnp.arange(6.0).reshape(2, 3), "bias": jnp.ones(3)}
SHORT = words(
    "--steps 4 --checkpoint-every 2 --evaluate-every 2 --model.layers 1 --model.width"
    " 16 --model.mlp-width 32 --batch-size 4"
)
posix_only = pytest.mark.skipif(os.name != "posix", reason="no such names elsewhere")
pytestmark = posix_only

TAKEN = [
    "[",
    "]",
    "[]",
    "[!]",
    "!]a[!",
    "]a[",
    "{a,b}",
    "{",
    "}",
    " a b ",
    "-x",
    "--name",
    "größe 雪 😀",
    "a\nb\t",
    "a%20b#c&d;e|f<g>",
    "$HOME ~ `'\"",
    "a:b@c",
    "s3:",
    "gs",
    "..a",
]
# Name: the part of it that the error names. Only the second half cannot be read either.
REFUSED_TO_WRITE = {
    "a[1]": "'[1]'",
    "[ab]": "'[ab]'",
    "a[]]": "'[]]'",
    "[!a]": "'[!a]'",
    "[!]]": "'[!]]'",
    "][[]": "'[[]'",
    "[a\nb]": r"'[a\nb]'",
    "*": "'*'",
    "a?b": "'?'",
}
REFUSED = {
    "a\\b": r"'\\' in it as '/'",
    "\\": r"'\\' in it as '/'",
    "a**b": "'**' in it as a pattern",
    "gs:": "'gs:' in it as a bucket",
    "logs:": "'gs:' in it as a bucket",
    "a\udcffb": r"'\udcff' in it as no text",
}


def save(folder: Path) -> None:
    """Two checkpoints, of which one is kept."""
    checkpoints = Checkpoints(folder, keep=1)
    for step in (1, 2):
        checkpoints.save(step, {"position": step}, params=TREE)
    checkpoints.close()


def check_saved(folder: Path) -> None:
    """Assert that the second checkpoint can be read."""
    checkpoints = Checkpoints(folder)
    assert checkpoints.steps() == [2]
    found, position = checkpoints.restore(2, params=TREE)
    assert position == {"position": 2}
    jax.tree.map(np.testing.assert_array_equal, found["params"], TREE)
    checkpoints.close()


@pytest.mark.parametrize("name", TAKEN)
def test_checkpoints_are_read_from_any_other_path(tmp_path, name):
    folder = tmp_path / name / "checkpoints"
    folder.parent.mkdir()
    save(folder)
    check_saved(folder)
    assert list(tmp_path.iterdir()) == [folder.parent]


@pytest.mark.parametrize("name", REFUSED_TO_WRITE | REFUSED)
@pytest.mark.parametrize("below", ["", "run"])
def test_a_path_that_orbax_misreads_is_refused_with_its_characters(
    tmp_path, name, below
):
    folder = tmp_path / name / below
    part = (REFUSED_TO_WRITE | REFUSED)[name]
    with pytest.raises(RunError) as error:
        Checkpoints(folder, keep=1)
    assert f"stored in {folder}: Orbax reads {part}" in str(error.value)
    assert not folder.exists()


@pytest.mark.parametrize("name", REFUSED_TO_WRITE | REFUSED)
def test_checkpoints_that_were_moved_are_read_where_that_can_be(tmp_path, name):
    save(tmp_path / "plain")
    folder = tmp_path / name
    shutil.move(tmp_path / "plain", folder)
    if name not in REFUSED:
        check_saved(folder)
        return
    with pytest.raises(RunError) as error:
        Checkpoints(folder)
    assert f"read from {folder}: Orbax reads {REFUSED[name]}" in str(error.value)


@pytest.mark.parametrize("scheme", ["gs", "s3", "az", "hf"])
def test_a_path_that_etils_takes_for_a_bucket_is_refused(scheme):
    for folder in (Path(f"/{scheme}/runs/a"), Path(f"/{scheme}")):
        message = rf"Orbax reads '/{scheme}' in it as a bucket"
        refuses(message, paths.check_writable, folder)
        refuses(message, paths.check_readable, folder)
    for folder in (Path(f"/{scheme}a/runs"), Path(f"/a/{scheme}/runs")):
        paths.check_writable(folder)


def test_the_parent_of_a_link_is_that_of_its_target(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("far/deep").mkdir(parents=True)
    Path("link").symlink_to("far/deep")
    folder = Path("link/../run")
    save(folder)
    check_saved(folder)
    assert sorted(os.listdir()) == ["far", "link"]
    assert Path("far/run/2").exists()


def test_a_link_to_a_path_that_orbax_misreads_is_taken(tmp_path):
    (tmp_path / "a[1]").mkdir()
    link = tmp_path / "link"
    link.symlink_to("a[1]")
    save(link / "run")
    check_saved(link / "run")
    check_saved(tmp_path / "a[1]" / "run")


# The program


@cases.rows(
    "options path",
    (["--name=run[1]"], "runs/run[1]: Orbax reads '[1]'"),
    (["--name=[1]", "--resume"], "runs/[1]: Orbax reads '[1]'"),
    (["--runs-folder", "a*"], "a*/tiny-normpre_h: Orbax reads '*'"),
    (["--runs-folder", "a?/b"], "a?/b/tiny-normpre_h: Orbax reads '?'"),
    (["--name", "a\\b"], r"a\b: Orbax reads '\\'"),
    (["--name", "a\n[b]"], r"a\n[b]: Orbax reads '[b]'"),
    (["--optimizer", "muon,layers=[a]"], "tiny-muon,layers=[a]: Orbax reads '[a]'"),
)
def test_a_run_in_such_a_path_is_refused_before_anything_is_written(
    refused_at_once, options, path
):
    refused_at_once(["--config", "tiny", *options], path)


@cases.rows(
    "options path",
    (["--name", "a[1]"], "runs/a[1]/adamw-lr0.01-seed0: Orbax reads '[1]'"),
    (["--runs-folder", "a*"], "a*/compare-tiny/adamw-lr0.01-seed0: Orbax reads '*'"),
)
def test_a_comparison_in_such_a_path_is_refused_before_anything_is_written(
    refused_at_once, options, path
):
    command = ["compare", "--config", "tiny", "--optimizers", "adamw", *options]
    refused_at_once(command, path)


def test_a_working_folder_with_such_a_path_counts(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "a[1]"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert main.main(["--config", "tiny"]) == 1
    path = folder / "runs" / "tiny-normpre_h"
    assert f"stored in {path}: Orbax reads '[1]'" in capsys.readouterr().err
    assert list(folder.iterdir()) == []


def test_a_run_is_used_from_folders_with_any_other_names(
    dataset, tmp_path, monkeypatch
):
    folder = tmp_path / "{a,b} [ größe\n'$(x)'"
    tokens = folder / "tokens [1]*\\"
    shutil.copytree(dataset.folder, tokens)
    monkeypatch.chdir(folder)
    train = ["--config", "tiny", *SHORT, "--tokens", str(tokens)]
    assert main.main([*train, "--name=--name"]) == 0
    run = folder / "runs" / "--name"
    for command in (
        ["evaluate", str(run)],
        ["generate", str(run), "--sample-tokens", "2"],
        ["export", str(run), "--output", "a[1]*\\"],
        [*train, "--init-from", str(run), "--name", "next", "--steps", "1"],
    ):
        assert main.main(command) == 0
    assert Path("a[1]*\\/model.safetensors").exists()
    # Runs are read from where they could not be written.
    shutil.move(run, folder / "moved[1]*")
    assert main.main(["evaluate", "moved[1]*"]) == 0


def test_text_is_prepared_and_models_are_exported_in_any_folder(
    byte_level, flags, tmp_path
):
    folder = tmp_path / "a\udcff[1]*\\\n"
    put_texts(folder, TEXTS)
    put(folder / "a.txt.zst", zstd(b"compressed"))
    tokenizer = Path(shutil.copy(byte_level, folder / "tokenizer.json"))
    tokens = folder / "tokens"
    prepare("text", folder, tokenizer=tokenizer, output=tokens)
    assert main.main([*flags, *SHORT, "--tokens", str(tokens), "--name", "run"]) == 0
    run = tmp_path / "runs" / "run"
    assert main.main(["export", str(run), "--output", str(folder / "exported")]) == 0
    exported = folder / "exported" / "tokenizer.json"
    assert exported.read_bytes() == (tokens / "tokenizer.json").read_bytes()


def test_a_command_that_is_printed_is_quoted(flags, tmp_path, capsys):
    assert main.main([*flags, *SHORT, "--steps", "1", "--name", "my run"]) == 0
    run = tmp_path / "runs" / "my run"
    assert f"generate '{run}' --prompt TEXT" in capsys.readouterr().out
    assert main.main([*flags, *SHORT, "--name", "my run", "--resume"]) == 1
    assert f"--init-from '{run}' --name NEW" in capsys.readouterr().err
    assert main.main(["--config", "tiny", "--tokens", "my text"]) == 1
    assert "prepare CORPUS --output 'my text'`" in capsys.readouterr().err


# Reading back


def losing(what: str, patch) -> None:
    """Let every checkpoint lose something when it is complete."""
    whole = ocp.CheckpointManager.wait_until_finished

    def wait(manager):
        whole(manager)
        for path in Path(manager.directory).rglob(what):
            path.unlink()

    patch.setattr(ocp.CheckpointManager, "wait_until_finished", wait)


@cases.rows(
    "lost reason",
    ("params/manifest.ocdbt", "NOT_FOUND"),
    ("opt_state/manifest.ocdbt", "NOT_FOUND"),
    ("opt_state/_METADATA", "no arrays in opt_state"),
    ("facts/metadata", "not found"),
)
def test_a_first_checkpoint_that_cannot_be_read_stops_the_run(
    flags, tmp_path, monkeypatch, capsys, lost, reason
):
    losing(lost, monkeypatch)
    assert main.main([*flags, *SHORT, "--name", "lost"]) == 1
    said = capsys.readouterr().err
    run = tmp_path / "runs" / "lost"
    checkpoint = run / "checkpoints" / "2"
    message = f"error: stopped: {checkpoint} was written, but cannot be read back"
    assert said.startswith(message)
    assert reason in said
    assert said.count("\n") == 1
    assert read_lines(run / "log.jsonl")[-1]["step"] == 2
    assert checkpoint.exists()


def test_a_checkpoint_that_is_not_merged_stops_the_run(
    flags, tmp_path, monkeypatch, capsys
):
    """As in a path that a later version of Orbax misreads."""
    monkeypatch.setattr(paths, "PATTERNS", {})
    assert main.main([*flags, *SHORT, "--name", "a[1]"]) == 1
    said = capsys.readouterr().err
    assert "a[1]/checkpoints/2 was written, but cannot be read back (NOT_FOUND" in said
    assert "delete" not in said
    assert main.main([*flags, *SHORT, "--name", "a[1]", "--resume"]) == 1
    said = capsys.readouterr().err
    assert "checkpoints/2 is damaged, or cannot be read here" in said
    assert "delete" not in said


def test_only_the_first_checkpoint_is_waited_for(tmp_path, monkeypatch):
    waited = []
    monkeypatch.setattr(
        checkpoint.Checkpoints,
        "_check_written",
        lambda checkpoints, step, names: waited.append((step, sorted(names))),
    )
    save(tmp_path / "run")
    assert waited == [(1, ["params"])]
