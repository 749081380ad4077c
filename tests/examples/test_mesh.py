# SPDX-License-Identifier: Apache-2.0
"""Training on a mesh and in several processes: the numbers of one device, whatever the
work is spread over.
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
from tests import cases
from tests.examples.conftest import ENVIRONMENT, losses, wait_for

VOCABULARY = 32
MODEL = ModelConfig(layers=2, width=16, heads=4, mlp_width=32, context=8)
STEPS = [
    "--steps",
    "12",
    "--warmup-steps",
    "2",
    "--checkpoint-every",
    "8",
    "--evaluate-every",
    "6",
    "--log-every",
    "3",
]
SMALLEST = ["--model.layers", "1", "--model.width", "16", "--model.mlp-width", "32"]

# Relative. float32 sums of some hundred terms that a mesh adds up in another order: a
# few units in the last place, 6e-8 each, in every loss and norm; 3e-7 was seen over a
# dozen steps, in which rounding has no time to grow.
ROUNDING = 2e-6


ADDRESS = ["--processes", "2", "--process", "0"]


@cases.rows(
    "arguments line",
    (["--replicas", "0"], "--replicas must be at least 1, got 0"),
    (
        ["--replicas", "3"],
        "--batch-size 8 must be a multiple of --replicas x --fsdp, 3",
    ),
    (
        ["--fsdp", "8", "--replicas", "2"],
        "--batch-size 8 must be a multiple of --replicas x --fsdp, 16",
    ),
    (
        ["--fsdp", "4", "--micro-batch", "2"],
        "--micro-batch 2 must be a multiple of --replicas x --fsdp, 4",
    ),
    (
        ["--fsdp", "8", "--model.width", "36"],
        "--model.width 36 must be a multiple of --fsdp, 8",
    ),
    (["--fsdp", "2"], "--replicas 1 x --fsdp 2 must equal the number of devices, 8"),
    (["--processes", "2"], "add --fsdp N, their number of devices"),
    (["--coordinator", "a:1", *ADDRESS], "add --fsdp N, their number of devices"),
    (["--replicas", "2", "--coordinator", "a", *ADDRESS], "must be host:port"),
)
def test_a_mesh_that_cannot_be_is_one_line_before_anything_is_written(
    arguments, line, flags, refused_at_once
):
    refused_at_once([*flags, *arguments], line)


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
    first, second = done.stderr.splitlines()
    assert "coordinator_address should be defined" in first
    assert "process_id < num_processes" in second
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("family", "scan"), [("gpt2", True), ("qwen3", False)])
def test_every_matrix_has_its_shares(family, scan):
    model = dataclasses.replace(
        MODEL, family=family, scan_layers=scan, tied_head=False, bias=family == "gpt2"
    )
    for name, leaf in mesh.by_name(models.shapes(model, VOCABULARY)).items():
        axes = mesh.parameter_axes(name, leaf.ndim)
        assert len(axes) == leaf.ndim
        split = {axis: leaf.shape[axes.index(axis)] for axis in axes if axis}
        layer, kind = name.split("/")[-2:]
        if kind not in {"kernel", "embedding"}:
            assert split == {}, name
        elif layer in {"tokens", "positions", "head"}:
            assert split == {"fsdp": MODEL.width}, name
        else:  # along the residual stream
            assert split == {"fsdp": MODEL.width}, name
            assert axes[-2:] == (
                (None, "fsdp") if layer in {"out", "down"} else ("fsdp", None)
            ), name


def step_of(config: ModelConfig, parts: int, layout: mesh.Layout):
    """Parameters, loss and gradient norm of a step of SGD on a batch with padding."""
    graphdef, variables = nnx.split(
        models.build(config, VOCABULARY, dtype=jnp.dtype("float32"), seed=0)
    )
    optimizer = optax.with_extra_args_support(optax.sgd(1.0))
    tokens = np.random.default_rng(0).integers(
        VOCABULARY, size=(8, config.context + 1), dtype=np.int32
    )
    tokens[1, 3:] = -1  # padding: every prediction counts the same
    params = layout.parameters(nnx.to_pure_dict(variables))
    shardings = jax.tree.map(lambda x: x.sharding, params)
    step = layout.bound(train.make_train_step(graphdef, optimizer, parts))
    state, metrics = step(
        train.TrainState(params, optimizer.init(params)), layout.batch(tokens, 8)
    )
    assert jax.tree.map(lambda x: x.sharding, state.params) == shardings
    return jax.device_get((state.params, metrics))


GPT2 = {"family": "gpt2", "bias": True, "scan_layers": True, "tied_head": False}
QWEN3 = {"family": "qwen3", "kv_heads": 2, "head_width": 8, "remat": True}


@cases.rows(
    "form parts shape",
    pytest.param(GPT2, 1, (1, 4), marks=pytest.mark.slow),
    pytest.param(QWEN3, 1, (1, 4), marks=pytest.mark.slow),
    pytest.param({}, 2, (2, 2), marks=pytest.mark.slow),
    pytest.param(
        GPT2, 2, (4, 1), marks=pytest.mark.slow
    ),  # a part has one sequence per device
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
    model = dataclasses.replace(MODEL, layers=1, mlp_width=40)  # a shape of its own
    graphdef, variables = nnx.split(
        models.build(model, VOCABULARY, dtype=jnp.dtype("float32"), seed=0)
    )
    params = layout.parameters(nnx.to_pure_dict(variables))
    tokens = layout.batch(np.zeros((8, 9), np.int32), 8)

    def backward(params):
        return jax.vjp(
            lambda p: train.token_losses(graphdef, p, tokens).mean(), params
        )[1]

    shapes = jax.tree.leaves(
        layout.bound(lambda params: jax.eval_shape(backward, params))(params)
    )
    kept = [
        leaf.sharding.spec
        for leaf in shapes
        if leaf.shape == (model.width, model.mlp_width)
    ]
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
    assert {shard.data.shape for shard in parts.addressable_shards} == {
        (2, 1, 5)
    }  # each part on all devices


def test_other_commands_run_in_one_process(refused_at_once):
    command = ["compare", "--config", "tiny"]
    refused_at_once(
        [*command, "--replicas", "2", "--process", "0"], "compare runs in one process"
    )
    refused_at_once(
        [*command, "--replicas", "3"], "must be a multiple of --replicas x --fsdp"
    )


def test_launchers_are_recognized():
    for expected, environments in {
        False: [
            {},
            {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},  # a batch script outside srun
            {"SLURM_STEP_NODELIST": "n1", "SLURM_NTASKS": "1"},
            {"TPU_WORKER_HOSTNAMES": "a"},
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
        ],
        True: [
            {"SLURM_STEP_NODELIST": "n[1-4]", "SLURM_NTASKS": "4"},
            {"OMPI_COMM_WORLD_SIZE": "2"},
            {"TPU_WORKER_HOSTNAMES": "a,b"},
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"},
        ],
    }.items():
        for environment in environments:
            assert cluster.several(environment) is expected, environment


def close(run: Path, other: Path) -> None:
    """Assert that two logs are one but for rounding."""
    found, expected = losses(run), losses(other)
    assert [line.keys() for line in found] == [line.keys() for line in expected]
    for line, wanted in zip(found, expected, strict=True):
        assert line == pytest.approx(wanted, rel=ROUNDING, abs=1e-7)


class Runs:
    """Starts the program in processes of its own, in one folder."""

    def __init__(self, flags: list[str], folder: Path):
        self.flags = [
            *flags,
            *STEPS,
            *SMALLEST,
            "--batch-size",
            "8",
            "--model.heads",
            "2",
        ]
        self.folder = folder

    def start(
        self, name: str, *more: str, devices: int = 1, processes: int = 1
    ) -> list[subprocess.Popen]:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        started = []
        for i in range(processes):
            together = [
                "--coordinator",
                f"localhost:{port}",
                "--processes",
                str(processes),
                "--process",
                str(i),
            ]
            command = [
                sys.executable,
                "-m",
                "examples.pretrain",
                *self.flags,
                "--name",
                name,
                *more,
            ]
            xla = f"--xla_force_host_platform_device_count={devices}"
            environment = {**ENVIRONMENT, "XLA_FLAGS": xla}
            with (self.folder / f"{name}.{i}.txt").open("a") as said:
                command += together if processes > 1 else []
                started.append(
                    subprocess.Popen(
                        command,
                        cwd=self.folder,
                        env=environment,
                        stdout=said,
                        stderr=subprocess.STDOUT,
                    )
                )
        return started

    def finish(
        self, name: str, *more: str, devices: int = 1, processes: int = 1
    ) -> Path:
        started = self.start(name, *more, devices=devices, processes=processes)
        assert [process.wait(400) for process in started] == [0] * processes, self.said(
            name
        )
        return self.folder / "runs" / name

    def said(self, name: str) -> str:
        return "\n".join(
            path.read_text() for path in sorted(self.folder.glob(f"{name}.*.txt"))
        )

    def wait_for(self, name: str, step: int, started: list[subprocess.Popen]) -> None:
        wait_for(self.folder / "runs" / name, step, *started)


@pytest.fixture
def runs(flags, tmp_path) -> Runs:
    return Runs([*flags, "--optimizer", "adamw"], tmp_path)


def test_a_run_on_a_mesh(flags, tmp_path, capsys):
    arguments = [
        *flags,
        *STEPS,
        *SMALLEST,
        "--optimizer",
        "adamw",
        "--steps",
        "3",
        "--checkpoint-every",
        "3",
    ]
    assert main.main([*arguments, "--name", "one"]) == 0
    assert (
        main.main([*arguments, "--name", "mesh", "--replicas", "2", "--fsdp", "4"]) == 0
    )
    assert "8 x cpu (2 x 4 FSDP)" in capsys.readouterr().out
    close(tmp_path / "runs" / "mesh", tmp_path / "runs" / "one")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_devices_and_fewer(runs):
    runs.flags += ["--optimizer", "normpre_l"]
    on_mesh = ["--replicas", "2", "--fsdp", "2", "--micro-batch", "4"]
    one = runs.finish("one", "--micro-batch", "4")
    four = runs.finish("four", *on_mesh, devices=4)
    close(four, one)
    fewer = shutil.copytree(four, four.with_name("fewer"))
    shutil.rmtree(fewer / "checkpoints" / "12")
    close(
        runs.finish(
            "fewer", "--micro-batch", "4", "--resume", "--fsdp", "2", devices=2
        ),
        one,
    )
    assert "Resuming from step 8" in runs.said("fewer")


@pytest.mark.timeout(900)
@cases.rows(
    "processes axes",
    pytest.param(2, (2, 2), marks=pytest.mark.slow),
    pytest.param(4, (1, 4), marks=pytest.mark.thorough),
)
def test_processes_that_train_together(runs, processes, axes):
    runs.flags += ["--optimizer", "normpre_l" if processes == 2 else "normpre_g"]
    one = runs.finish("one")
    flags = ["--replicas", str(axes[0]), "--fsdp", str(axes[1])]
    many = runs.finish("many", *flags, devices=4 // processes, processes=processes)
    close(many, one)
    assert (
        json.loads((many / "run.json").read_text())["sessions"][0]["processes"]
        == processes
    )
    assert sorted(path.name for path in many.iterdir()) == sorted(
        path.name for path in one.iterdir()
    )
    assert runs.said("many").count("Final validation loss") == 1


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "lost",
    [
        pytest.param(0, marks=pytest.mark.slow),
        pytest.param(1, marks=pytest.mark.thorough),
    ],
)
def test_a_run_that_lost_a_process_goes_on_exactly(runs, lost):
    flags = ["--replicas", "2", "--steps", "120", "--checkpoint-every", "20"]
    whole = runs.finish("whole", *flags, processes=2)
    started = runs.start("part", *flags, processes=2)
    runs.wait_for("part", 50, started)
    started[lost].send_signal(signal.SIGKILL)
    left = started[1 - lost]
    assert left.wait(150) != 0
    if (
        lost == 1
        # without process 0, which everything is agreed through, JAX may end the others
        # before they can speak
    ):
        assert "the same commands with --resume continue" in runs.said("part")
    assert losses(whole.with_name("part"))[-1]["step"] < 120
    part = runs.finish("part", *flags, "--resume", processes=2)
    assert "Resuming from step" in runs.said("part")
    assert losses(part) == losses(whole)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_signal_to_one_process_stops_all_after_the_same_step(runs):
    flags = [
        "--replicas",
        "2",
        "--steps",
        "2000",
        "--checkpoint-every",
        "2000",
        "--evaluate-every",
        "2000",
    ]
    started = runs.start("part", *flags, processes=2)
    runs.wait_for("part", 30, started)
    started[1].send_signal(signal.SIGTERM)
    assert [process.wait(150) for process in started] == [143, 143], runs.said("part")
    folder = runs.folder / "runs" / "part"
    (saved,) = (int(path.name) for path in (folder / "checkpoints").iterdir())
    assert losses(folder)[-1]["step"] == saved
    assert runs.said("part").count(f"stopped after step {saved}, saved") == 2
    assert not (folder / "result.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_one_process_lacks_stops_all_with_one_line_each(runs, tmp_path):
    def refused(*more: str) -> list[str]:
        started = runs.start("bad", "--replicas", "2", *more, processes=2)
        assert [process.wait(150) for process in started] == [1, 1], runs.said("bad")
        texts = [(tmp_path / f"bad.{i}.txt").read_text() for i in range(2)]
        return [
            line
            for text in texts
            for line in text.splitlines()
            if line.startswith("error: ")
        ]

    shutil.copytree(runs.finish("one", "--steps", "3"), tmp_path / "runs" / "bad")
    first, second = refused()
    assert "--resume continues it" in first
    assert "process 0: " in second
    assert len(refused("--overwrite", "--replicas", "4")) == 4
    assert (tmp_path / "runs" / "bad" / "result.json").exists()
