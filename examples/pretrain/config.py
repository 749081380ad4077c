# SPDX-License-Identifier: Apache-2.0
"""Options of the commands: frozen dataclasses.

The comment above a field, or behind it, is its text in ``--help``.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro


class RunError(Exception):
    """An error that the user can fix.

    ``main`` prints its one line, without a traceback, and exits with status 1.
    """


class Diverged(RunError):
    """The loss is NaN or infinite."""


def one_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@dataclass(frozen=True)
class ModelConfig:
    """The network."""

    # Architecture. gpt2: LayerNorm, learned positions, GELU, one fused query-key-value
    # matrix. llama: RMSNorm, rotary positions, gated MLP. qwen3: llama with
    # grouped-query attention and normalized queries and keys.
    family: Literal["gpt2", "llama", "qwen3"] = "llama"
    layers: int = 2  # Number of blocks.
    width: int = 128  # Size of the residual stream.
    heads: int = 4  # Attention heads.
    # qwen3: heads of keys and values, each shared by heads / kv_heads queries; None: as
    # many as heads.
    kv_heads: int | None = None
    head_width: int | None = None  # qwen3: size of a head; None: width / heads.
    mlp_width: int = 344  # Size of the hidden layer of each MLP.
    context: int = 128  # Context length, and length of a training sequence, in tokens.
    # Rows of the token table; None: the tokenizer's vocabulary size. More rows are
    # padding, fewer are an error.
    vocabulary: int | None = None
    # Use the token table as output head; without, the head is a matrix of its own.
    tied_head: bool = True
    bias: bool = False  # gpt2: use biases in linear layers and LayerNorm.
    rotary_base: float = 10_000.0  # llama, qwen3: base of the rotary frequencies.
    norm_epsilon: float = 1e-6  # Added to the variance (mean square) in every norm.
    # Initial standard deviation of hidden matrices; that of tables and head is 0.02.
    hidden_std: float = 0.02
    # Divide the initial standard deviation of the last matrix of every branch by sqrt(2
    # layers), as in GPT-2.
    scaled_residuals: bool = True
    # Stack the blocks' parameters and scan over them: compile time does not grow with
    # depth.
    scan_layers: bool = False
    # Recompute the inside of a block in the backward pass: less memory, a third more
    # arithmetic.
    remat: bool = False
    # Implementation of attention. auto: cuDNN where it runs (NVIDIA, bfloat16), XLA
    # elsewhere.
    attention: Literal["auto", "xla"] = "auto"


@dataclass(frozen=True)
class Common:
    """Train a language model.

    These are the options that most runs need; every option not given has the value
    of --config. All others are the fields of Config and ModelConfig in
    examples/pretrain/config.py, such as --evaluate-every 50 and --model.width 256.
    """

    # Named configuration to start from; every other option overrides one of its fields.
    config: str = "first_run"
    # Name of the run, whose folder is runs/<name>; empty: <config>-<optimizer>.
    name: str = ""
    # Continue the run from its last checkpoint, exactly; repeat the other options as
    # they were.
    resume: bool = False
    # Delete what a run of the same name wrote first; other files in its folder stay.
    overwrite: bool = False
    seed: int = 0  # Seed of initialization, data order and sampling.
    # Optimizer of the hidden matrices: adamw, or one of normpre_optax.optimizers(), as
    # normpre_h or muon, with settings of its own after commas: normpre_l,rank=0.25.
    # Embeddings, norms and biases use AdamW under all of them.
    optimizer: str = "normpre_h"
    # Peak learning rate. Under Hyperball (normpre_h), where it is relative to the
    # weights, another default follows from the number of steps:
    # learning_rate_by_length.
    learning_rate: float = 4e-3
    steps: int = 800  # Number of updates.
    batch_size: int = 16  # Sequences per update.
    # Devices that the batch, the parameters and the optimizer state are split over.
    fsdp: int = 1


@dataclass(frozen=True)
class Config(Common):
    """Train a language model: all options.

    The command writes to two folders only: data/, and runs/<name>/ with run.json,
    parameters.txt, log.jsonl, checkpoints/ and loss.png.
    """

    runs_folder: Path = Path("runs")  # Where the folder of the run is made.
    # Folder of another run, runs/<name>, whose newest weights initialize this one;
    # optimizer, schedule and data start anew.
    init_from: Path | None = None

    # Folder of token files that the prepare command wrote; None: Python source,
    # prepared on first use.
    tokens: Path | None = None
    # Without --tokens: add the installed packages to the standard library.
    installed_packages: bool = False
    # Without --tokens: size of the byte-pair vocabulary, trained on the training files.
    vocabulary: int = 2048
    # Predictions in the fixed validation set, spread evenly over the held-out files.
    validation_tokens: int = 65_536

    # Sequences per forward and backward pass; gradients are accumulated before the
    # update. None: all at once.
    micro_batch: int | None = None
    # Peak learning rate of the AdamW group; None: --learning-rate. Beside normpre_h:
    # 1.6e-2, in larger models AdamW's.
    adam_learning_rate: float | None = None
    # Width of the model that learning rates and --model.hidden-std were tuned on: the
    # initial standard deviation of hidden matrices is divided by the root of the ratio,
    # and learning rates are multiplied by normpre_optax.multipliers_by_width.
    base_width: int | None = None
    # Steps of linear warm-up; a cosine to 10 % of the peak follows. If not below
    # --steps: a tenth of those.
    warmup_steps: int = 80
    # Decoupled weight decay of matrices and tables, multiplied by the learning rate.
    weight_decay: float = 0.1
    # AdamW's decay of the first moment, for every parameter of the AdamW group.
    adam_b1: float = 0.9
    adam_b2: float = 0.95  # AdamW's decay of the second moment.
    # Largest global norm of the gradients; larger ones are clipped before the
    # optimizer.
    clip_norm: float = 1.0
    # Type of the forward and backward pass; parameters stay float32. auto: bfloat16, on
    # CPU float32.
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"

    # Groups of --fsdp devices, each with a copy of the parameters; the batch is split
    # over all devices.
    replicas: int = 1
    # host:port of process 0 where several processes train together; detected under
    # SLURM, Open MPI and on GKE.
    coordinator: str = ""
    processes: int | None = None  # With --coordinator: how many processes there are.
    process: int | None = None  # With --coordinator: which of them this is, from 0.

    # Steps between validation losses; one is always computed at the end.
    evaluate_every: int = 200
    # Steps between writes of the log; every step has its own line in it.
    log_every: int = 10
    # Steps between checkpoints; one is always written at the end.
    checkpoint_every: int = 200
    keep_checkpoints: int = 2  # Checkpoints kept on disk.

    model: ModelConfig = field(default_factory=ModelConfig)

    @property
    def devices(self) -> int:
        """Devices to train on."""
        return self.replicas * self.fsdp

    @property
    def run_name(self) -> str:
        """Name of the run's folder."""
        return self.name or f"{self.config}-{self.optimizer}".replace("/", ".")

    @property
    def run_folder(self) -> Path:
        """Where everything about the run is written, except the data."""
        return self.runs_folder / self.run_name


@dataclass(frozen=True)
class Stored:
    """Options of the commands that read a run."""

    run: tyro.conf.Positional[Path]  # Folder of the run: runs/<name>.
    step: int | None = None  # Step of the checkpoint; None: the newest.
    # Folder of token files made with the same tokenizer; None: those of the run.
    tokens: Path | None = None


@dataclass(frozen=True)
class Evaluate(Stored):
    """Score the model of a run on its validation set, or on that of other token
    files.
    """

    # Predictions to score, spread evenly over the validation split; None: as many as
    # the run does.
    validation_tokens: int | None = None


@dataclass(frozen=True)
class Generate(Stored):
    """Continue a text with the model of a run."""

    prompt: str = ""  # The text; empty: begin a document.
    sample_tokens: int = 160  # Length of the continuation.
    temperature: float = 0.6  # 0 takes the likeliest token each time.
    seed: int = 0  # Seed of the draws; another seed gives another text.


@dataclass(frozen=True, kw_only=True)
class Export(Stored):
    """Write the model of a run as safetensors, with its tokenizer and the token that
    ends a text, for Hugging Face transformers and others to load.
    """

    output: Path  # Folder to write.
    overwrite: bool = False  # Replace a model that is there.


@dataclass(frozen=True)
class Compare:
    """Compare optimizers at the same model, data order and budget.

    Every optimizer runs at every learning rate with the first seed, then at its best
    one with the other seeds. Options of train may follow; they hold for every run. The
    same command resumes a stopped comparison.
    """

    config: str = "first_run"  # Named configuration.
    # Optimizers, separated by commas; settings of one follow it:
    # muon,normpre_l,rank=8,muon,learning_rate=8e-3.
    optimizers: str = "adamw,muon,normpre_h,normpre_g,normpre_l"
    # Peak learning rates, separated by commas, of the optimizers that set none. Empty:
    # the default of each.
    learning_rates: str = ""
    # Seeds (of initialization and data order) of each optimizer's best run, counted
    # from --seed.
    seeds: int = 1
    # Runs side by side, each with an equal share of the cores. With one accelerator, 1
    # is fastest.
    jobs: int = 1
    name: str = ""  # Name of the comparison; empty: compare-<config>.
    # Its folder is made here: every run in a subfolder, and report/.
    runs_folder: Path = Path("runs")
    rest: tyro.conf.Suppress[tuple[str, ...]] = ()  # Options of train.


def read_compare(
    arguments: Sequence[str],
    kind: type = Compare,
    program: str = "examples.pretrain compare",
) -> Any:
    """The options of ``compare``, with those of ``train`` as ``rest``.

    Or those of a similar ``program``, whose options are the dataclass ``kind``.
    """
    options, rest = tyro.cli(
        kind,
        args=list(arguments),
        return_unknown_args=True,
        prog=f"python -m {program}",
    )
    return dataclasses.replace(options, rest=("--config", options.config, *rest))
