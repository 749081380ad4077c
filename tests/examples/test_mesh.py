# SPDX-License-Identifier: Apache-2.0
"""Training on a mesh and in several processes.

The numbers are those of one device, whatever the work is spread over.
"""

import dataclasses
import json
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from examples.pretrain import cluster, main, mesh, models, train
from examples.pretrain.config import ModelConfig
from examples.pretrain.data import PADDING
from tests import cases
from tests.examples.conftest import ENVIRONMENT, losses, wait_for, words

VOCABULARY = 32
MODEL = ModelConfig(layers=2, width=16, heads=4, mlp_width=32, context=8)
FLOAT32 = jnp.dtype("float32")
STEPS = words(
    "--steps 12 --warmup-steps 2 --checkpoint-every 8 --evaluate-every 6 --log-every 3"
)
SMALLEST = words("--model.layers 1 --model.width 16 --model.mlp-width 32")

# Relative. float32 sums of some hundred terms that a mesh adds up in another order: a
# few units in the last place, 6e-8 each, in every loss and norm; 3e-7 was seen over a
# dozen steps, in which rounding has no time to grow.
ROUNDING = 2e-6


@cases.rows(
    "arguments line",
    ("--replicas 0", "--replicas must be at least 1, got 0"),
    (
        "--replicas 3",
        "--batch-size 8 must be a multiple of --replicas x --fsdp, 3",
    ),
    (
        "--fsdp 8 --replicas 2",
        "--batch-size 8 must be a multiple of --replicas x --fsdp, 16",
    ),
    (
        "--fsdp 4 --micro-batch 2",
        "--micro-batch 2 must be a multiple of --replicas x --fsdp, 4",
    ),
    (
        "--fsdp 8 --model.width 36",
        "--model.width 36 must be a multiple of --fsdp, 8",
    ),
    (
        "--fsdp 2",
        "--replicas 1 x --fsdp 2 must equal the number of devices, 8",
    ),
    ("--processes 2", "add --fsdp N, their number of devices"),
    (
        "--coordinator a:1 --processes 2 --process 0",
        "add --fsdp N, their number of devices",
    ),
    (
        "--replicas 2 --coordinator a --processes 2 --process 0",
        "must be host:port",
    ),
)
def test_a_mesh_that_cannot_be_is_one_line_before_anything_is_written(
    arguments, line, flags, refused_at_once
):
    refused_at_once([*flags, *words(arguments)], line)


def test_an_incomplete_address_is_one_line(tmp_path):
    """JAX checks it; in a process of its own, as JAX has to be new."""
    code = """
from examples.pretrain.main import main
for address in ("--processes 2", "--coordinator a:1 --processes 2 --process 2"):
    assert main(["--config", "tiny", "--replicas", "2", *address.split()]) == 1
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=ENVIRONMENT,
        check=True,
        capture_output=True,
        text=True,
    )
    # Libraries below may log warnings, as grain does with an old jaxlib.
    lines = [x for x in done.stderr.splitlines() if not x.startswith("WARNING:")]
    first, second = lines
    assert "coordinator_address should be defined" in first
    assert "process_id < num_processes" in second
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("family", "scan"), [("gpt2", True), ("qwen3", False)])
def test_every_matrix_has_its_shares(family, scan):
    bias = family == "gpt2"
    model = dataclasses.replace(
        MODEL, family=family, scan_layers=scan, tied_head=False, bias=bias
    )
    for name, leaf in mesh.by_name(models.shapes(model, VOCABULARY)).items():
        axes = mesh.parameter_axes(name, leaf.ndim)
        assert len(axes) == leaf.ndim
        split = {axis: leaf.shape[axes.index(axis)] for axis in axes if axis}
        *_, layer, kind = name.split("/")
        if kind not in {"kernel", "embedding"}:
            assert split == {}, name
            continue
        assert split == {"fsdp": MODEL.width}, name
        if layer in {"tokens", "positions", "head"}:
            continue
        # Split along the residual stream, which is the output of the last layers.
        expected = ("fsdp", None)
        if layer in {"out", "down"}:
            expected = (None, "fsdp")
        assert axes[-2:] == expected, name


def step_of(config: ModelConfig, parts: int, layout: mesh.Layout):
    """Parameters, loss and gradient norm of a step of SGD on a batch with padding."""
    model = models.build(config, VOCABULARY, dtype=FLOAT32, seed=0)
    graphdef, variables = nnx.split(model)
    optimizer = optax.with_extra_args_support(optax.sgd(1.0))
    draw = np.random.default_rng(0)
    size = (8, config.context + 1)
    tokens = draw.integers(VOCABULARY, size=size, dtype=np.int32)
    tokens[1, 3:] = PADDING  # every prediction counts the same
    params = layout.parameters(nnx.to_pure_dict(variables))
    shardings = shardings_of(params)
    step = layout.bound(train.make_train_step(graphdef, optimizer, parts))
    state = train.TrainState(params, optimizer.init(params))
    state, metrics = step(state, layout.batch(tokens, 8))
    assert shardings_of(state.params) == shardings
    return jax.device_get((state.params, metrics))


def shardings_of(tree):
    return jax.tree.map(lambda x: x.sharding, tree)


GPT2 = {"family": "gpt2", "bias": True, "scan_layers": True, "tied_head": False}
QWEN3 = {"family": "qwen3", "kv_heads": 2, "head_width": 8, "remat": True}


@cases.rows(
    "form parts shape",
    pytest.param(GPT2, 1, (1, 4), marks=pytest.mark.slow),
    pytest.param(QWEN3, 1, (1, 4), marks=pytest.mark.slow),
    pytest.param({}, 2, (2, 2), marks=pytest.mark.slow),
    # A part has one sequence per device.
    pytest.param(GPT2, 2, (4, 1), marks=pytest.mark.slow),
    pytest.param(QWEN3, 2, (4, 1), marks=pytest.mark.thorough),
)
def test_a_step_on_a_mesh_is_that_of_one_device(form, parts, shape):
    config = dataclasses.replace(MODEL, **form)
    expected = step_of(config, parts, mesh.make_layout())
    found = step_of(config, parts, mesh.Layout(jax.make_mesh(shape, mesh.BATCH)))
    # Parameters of at most 1 minus gradients below 1: two roundings of 6e-8, and the
    # gradients' own 1e-6.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6, rtol=2e-6),
        found,
        expected,
    )


def test_gathered_weights_are_not_kept_for_the_backward_pass():
    layout = mesh.Layout(jax.make_mesh((1, 4), mesh.BATCH))
    # No other array has the shape of its MLP.
    config = dataclasses.replace(MODEL, layers=1, mlp_width=40)
    model = models.build(config, VOCABULARY, dtype=FLOAT32, seed=0)
    graphdef, variables = nnx.split(model)
    params = layout.parameters(nnx.to_pure_dict(variables))
    tokens = layout.batch(np.zeros((8, 9), np.int32), 8)

    def loss_of(params):
        return train.token_losses(graphdef, params, tokens).mean()

    def backward(params):
        _, pullback = jax.vjp(loss_of, params)
        return pullback

    def residuals(params):
        return jax.eval_shape(backward, params)

    shapes = jax.tree.leaves(layout.bound(residuals)(params))
    weight = (config.width, config.mlp_width)
    kept = [leaf.sharding.spec for leaf in shapes if leaf.shape == weight]
    assert kept
    assert all("fsdp" in axes for axes in kept)


def test_a_batch_is_read_in_parts():
    layout = mesh.Layout(jax.make_mesh((2, 2), mesh.BATCH))
    assert layout.batch_part(8) == (0, 1)
    tokens = np.arange(40, dtype=np.int32).reshape(8, 5)
    batch = layout.batch(tokens, 8)
    np.testing.assert_array_equal(batch, tokens)
    assert {shard.data.shape for shard in batch.addressable_shards} == {(2, 5)}
    parts = layout.bound(jax.jit(lambda x: mesh.in_parts(x, 2)))(batch)
    np.testing.assert_array_equal(parts, tokens.reshape(2, 4, 5))
    # Each part is on all devices.
    assert {shard.data.shape for shard in parts.addressable_shards} == {(2, 1, 5)}


def test_other_commands_run_in_one_process(refused_at_once):
    command = words("compare --config tiny --replicas 2 --process 0")
    refused_at_once(command, "compare runs in one process")
    command = words("compare --config tiny --replicas 3")
    refused_at_once(command, "must be a multiple of --replicas x --fsdp")


@cases.rows(
    "environment expected",
    ({}, False),
    # A batch script outside srun.
    ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, False),
    ({"SLURM_STEP_NODELIST": "n1", "SLURM_NTASKS": "1"}, False),
    ({"TPU_WORKER_HOSTNAMES": "a"}, False),
    ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False),
    ({"SLURM_STEP_NODELIST": "n[1-4]", "SLURM_NTASKS": "4"}, True),
    ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
    ({"TPU_WORKER_HOSTNAMES": "a,b"}, True),
    ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}, True),
)
def test_launchers_are_recognized(environment, expected):
    assert cluster.several(environment) is expected


def close(run: Path, other: Path) -> None:
    """Assert that two logs are one but for rounding."""
    found = losses(run)
    expected = losses(other)
    assert [line.keys() for line in found] == [line.keys() for line in expected]
    for line, wanted in zip(found, expected, strict=True):
        assert line == pytest.approx(wanted, rel=ROUNDING, abs=1e-7)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


class Runs:
    """Starts the program in processes of its own, in one folder."""

    def __init__(self, flags: list[str], folder: Path):
        small = words("--batch-size 8 --model.heads 2")
        self.flags = [*flags, *STEPS, *SMALLEST, *small]
        self.folder = folder

    def start(
        self, name: str, options: str = "", *, devices: int = 1, processes: int = 1
    ) -> list[subprocess.Popen]:
        """The processes of a run, each with so many devices."""
        program = [sys.executable, "-m", "examples.pretrain", *self.flags]
        command = [*program, "--name", name, *words(options)]
        if processes > 1:
            address = f"localhost:{free_port()}"
            command += ["--coordinator", address, "--processes", str(processes)]
        xla = f"--xla_force_host_platform_device_count={devices}"
        environment = {**ENVIRONMENT, "XLA_FLAGS": xla}
        started = []
        for number in range(processes):
            own = []
            if processes > 1:
                own = ["--process", str(number)]
            with (self.folder / f"{name}.{number}.txt").open("a") as said:
                process = subprocess.Popen(
                    [*command, *own],
                    cwd=self.folder,
                    env=environment,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                )
            started.append(process)
        return started

    def finish(
        self, name: str, options: str = "", *, devices: int = 1, processes: int = 1
    ) -> Path:
        """The folder of a run that has ended well."""
        started = self.start(name, options, devices=devices, processes=processes)
        statuses = [process.wait(400) for process in started]
        assert statuses == [0] * processes, self.said(name)
        return self.folder / "runs" / name

    def said(self, name: str) -> str:
        """What all processes of a run have said."""
        paths = sorted(self.folder.glob(f"{name}.*.txt"))
        return "\n".join(path.read_text() for path in paths)

    def wait_for(self, name: str, step: int, started: list[subprocess.Popen]) -> None:
        wait_for(self.folder / "runs" / name, step, *started)


@pytest.fixture
def runs(flags, tmp_path) -> Runs:
    return Runs([*flags, "--optimizer", "adamw"], tmp_path)


def test_a_run_on_a_mesh(flags, tmp_path, capsys):
    options = words("--optimizer adamw --steps 3 --checkpoint-every 3")
    arguments = [*flags, *STEPS, *SMALLEST, *options]
    on_mesh = words("--name mesh --replicas 2 --fsdp 4")
    assert main.main([*arguments, "--name", "one"]) == 0
    assert main.main([*arguments, *on_mesh]) == 0
    assert "8 x cpu (2 x 4 FSDP)" in capsys.readouterr().out
    close(tmp_path / "runs" / "mesh", tmp_path / "runs" / "one")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_devices_and_fewer(runs):
    runs.flags += ["--optimizer", "normpre_l"]
    one = runs.finish("one", "--micro-batch 4")
    four = runs.finish("four", "--replicas 2 --fsdp 2 --micro-batch 4", devices=4)
    close(four, one)
    fewer = shutil.copytree(four, four.with_name("fewer"))
    shutil.rmtree(fewer / "checkpoints" / "12")
    runs.finish("fewer", "--micro-batch 4 --resume --fsdp 2", devices=2)
    close(fewer, one)
    assert "Resuming from step 8" in runs.said("fewer")


@pytest.mark.timeout(900)
@cases.rows(
    "processes optimizer options",
    pytest.param(2, "normpre_l", "--replicas 2 --fsdp 2", marks=pytest.mark.slow),
    pytest.param(4, "normpre_g", "--replicas 1 --fsdp 4", marks=pytest.mark.thorough),
)
def test_processes_that_train_together(runs, processes, optimizer, options):
    runs.flags += ["--optimizer", optimizer]
    one = runs.finish("one")
    devices = 4 // processes
    many = runs.finish("many", options, devices=devices, processes=processes)
    close(many, one)
    (session,) = json.loads((many / "run.json").read_text())["sessions"]
    assert session["processes"] == processes
    names = {path.name for path in one.iterdir()}
    assert {path.name for path in many.iterdir()} == names
    assert runs.said("many").count("Final validation loss") == 1


@pytest.mark.timeout(900)
@cases.rows(
    "lost",
    pytest.param(0, marks=pytest.mark.slow),
    pytest.param(1, marks=pytest.mark.thorough),
)
def test_a_run_that_lost_a_process_goes_on_exactly(runs, lost):
    options = "--replicas 2 --steps 120 --checkpoint-every 20"
    whole = runs.finish("whole", options, processes=2)
    started = runs.start("part", options, processes=2)
    runs.wait_for("part", 50, started)
    started[lost].send_signal(signal.SIGKILL)
    left = started[1 - lost]
    assert left.wait(150) != 0
    # Without process 0, which everything is agreed through, JAX may end the others
    # before they can speak.
    if lost == 1:
        assert "the same commands with --resume continue" in runs.said("part")
    assert losses(whole.with_name("part"))[-1]["step"] < 120
    part = runs.finish("part", f"{options} --resume", processes=2)
    assert "Resuming from step" in runs.said("part")
    assert losses(part) == losses(whole)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_signal_to_one_process_stops_all_after_the_same_step(runs):
    # Longer than the test: it never comes to its end, a checkpoint or a score.
    options = "--replicas 2 --steps 2000 --checkpoint-every 2000 --evaluate-every 2000"
    started = runs.start("part", options, processes=2)
    runs.wait_for("part", 30, started)
    started[1].send_signal(signal.SIGTERM)
    statuses = [process.wait(150) for process in started]
    assert statuses == [143, 143], runs.said("part")
    folder = runs.folder / "runs" / "part"
    (checkpoint,) = (folder / "checkpoints").iterdir()
    saved = int(checkpoint.name)
    assert losses(folder)[-1]["step"] == saved
    assert runs.said("part").count(f"stopped after step {saved}, saved") == 2
    assert not (folder / "result.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_one_process_lacks_stops_all_with_one_line_each(runs, tmp_path):
    def errors(options: str) -> list[str]:
        """What the processes have said until now, after one more run of them."""
        started = runs.start("bad", options, processes=2)
        statuses = [process.wait(150) for process in started]
        assert statuses == [1, 1], runs.said("bad")
        lines = runs.said("bad").splitlines()
        return [line for line in lines if line.startswith("error: ")]

    shutil.copytree(runs.finish("one", "--steps 3"), tmp_path / "runs" / "bad")
    first, second = errors("--replicas 2")
    assert "--resume continues it" in first
    assert "process 0: " in second
    assert len(errors("--replicas 2 --overwrite --replicas 4")) == 4
    assert (tmp_path / "runs" / "bad" / "result.json").exists()
