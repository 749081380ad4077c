# SPDX-License-Identifier: Apache-2.0
"""Options of the commands: frozen dataclasses; the comment above a field is its text in
``--help``.
"""

import dataclasses
import math
import sys
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro


class RunError(Exception):
    """An error that the user can fix: ``main`` prints its one line, without a
    traceback, and exits with status 1.
    """


class Diverged(RunError):
    """The loss is NaN or infinite."""


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

    These are the options that most runs need; every option not given has the value of
    --config. All others are the fields of Config and ModelConfig in
    examples/pretrain/config.py, such as --evaluate-every 50 and --model.width 256.
    """

    # Named configuration to start from; every other option overrides one of its fields.
    config: str = "first_run"
    name: str = (
        ""  # Name of the run, whose folder is runs/<name>; empty: <config>-<optimizer>.
    )
    # Continue the run from its last checkpoint, exactly; repeat the other options as
    # they were.
    resume: bool = False
    # Delete what a run of the same name wrote first; other files in its folder stay.
    overwrite: bool = False
    seed: int = 0  # Seed of initialization, data order and sampling.
    # Optimizer of the hidden matrices: normpre_h, adamw, muon, mano, rmnp, muoneq,
    # normuon, normpre_g or normpre_l, with settings of its own after commas:
    # normpre_l,rank=0.25. Embeddings, norms and biases use AdamW under all of them.
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
    installed_packages: bool = (
        False  # Without --tokens: add the installed packages to the standard library.
    )
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

    evaluate_every: int = (
        200  # Steps between validation losses; one is always computed at the end.
    )
    log_every: int = (
        10  # Steps between writes of the log; every step has its own line in it.
    )
    checkpoint_every: int = (
        200  # Steps between checkpoints; one is always written at the end.
    )
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
    tokens: Path | None = (
        # Folder of token files made with the same tokenizer; None: those of the run.
        None
    )


@dataclass(frozen=True)
class Evaluate(Stored):
    """Score the model of a run on its validation set or that of other token files."""

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
    """Write the model of a run as safetensors and config.json, for Hugging Face
    transformers and others to load.
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
    runs_folder: Path = Path(
        "runs"
    )  # Its folder is made here: every run in a subfolder, and report/.
    rest: tyro.conf.Suppress[tuple[str, ...]] = ()  # Options of train.


def read_compare(
    arguments: Sequence[str],
    kind: Any = Compare,
    program: str = "examples.pretrain compare",
) -> Any:
    """The options of ``compare``, or of a similar program, with those of ``train`` as
    ``rest``.
    """
    options, rest = tyro.cli(
        kind,
        args=list(arguments),
        return_unknown_args=True,
        prog=f"python -m {program}",
    )
    return dataclasses.replace(options, rest=("--config", options.config, *rest))


# Options of a run that a name of an optimizer may set, beside the settings of the
# optimizer itself.
IN_NAMES: dict[str, type] = {
    **dict.fromkeys(
        ("learning_rate", "adam_learning_rate", "weight_decay", "hidden_std"), float
    ),
    "base_width": int,
}


def split_name(optimizer: str) -> tuple[str, dict[str, str]]:
    """The name and the settings of "normpre_l,rank=8".

    Raises:
        RunError: if a setting has another form, or is there twice.
    """
    name, *settings = (part.strip() for part in optimizer.split(","))
    found = {
        key: value
        for key, equals, value in (part.partition("=") for part in settings)
        if key and value
    }
    if len(found) < len(settings):
        raise RunError(
            f"--optimizer: write each setting once, as in {name},learning_rate=1e-3;"
            f" got {optimizer!r}"
        )
    return name, found


def is_relative(optimizer: str) -> bool:
    """Whether steps of hidden matrices have a size relative to the weights."""
    return optimizer.startswith("normpre_h") or "hyperball" in optimizer


def join_name(name: str, settings: dict[str, str]) -> str:
    """What ``split_name`` splits."""
    return ",".join((name, *(f"{key}={value}" for key, value in settings.items())))


def apply_name(config: Config) -> Config:
    """``config`` with the options that its optimizer's name sets, which keeps the
    others.
    """
    name, settings = split_name(config.optimizer)
    try:
        options: dict[str, Any] = {
            key: IN_NAMES[key](settings.pop(key)) for key in IN_NAMES if key in settings
        }
    except ValueError as error:
        raise RunError(f"--optimizer {config.optimizer}: {error}") from error
    if "hidden_std" in options:
        options["model"] = dataclasses.replace(
            config.model, hidden_std=options.pop("hidden_std")
        )
    return dataclasses.replace(config, optimizer=join_name(name, settings), **options)


# Fields that may differ between a run and its continuation: they change no loss beyond
# rounding. Of the text the tokens themselves are compared.
FREE_ON_RESUME = {
    "config",
    "name",
    "runs_folder",
    "resume",
    "overwrite",
    "tokens",
    "installed_packages",
}
FREE_ON_RESUME |= {
    "fsdp",
    "replicas",
    "coordinator",
    "processes",
    "process",
    "micro_batch",
    "model.remat",
}
FREE_ON_RESUME |= {
    "evaluate_every",
    "log_every",
    "checkpoint_every",
    "keep_checkpoints",
}


def to_dict(config: Config) -> dict[str, Any]:
    """The configuration flattened to ``{"steps": 800, "model.layers": 4, ...}``, ready
    for JSON.
    """
    flat = dataclasses.asdict(config)
    flat |= {f"model.{key}": value for key, value in flat.pop("model").items()}
    return {
        key: str(value) if isinstance(value, Path) else value
        for key, value in flat.items()
    }


def from_dict(flat: dict[str, Any]) -> Config:
    """The configuration that ``to_dict`` flattened; fields it does not mention have
    their defaults.
    """

    def build(kind: Any, prefix: str, **more: Any) -> Any:
        hints = typing.get_type_hints(kind)
        given = {name: flat[prefix + name] for name in hints if prefix + name in flat}
        paths = {
            name: Path(given[name])
            for name in given
            if "Path" in str(hints[name]) and given[name] is not None
        }
        return kind(**given | paths | more)

    return build(Config, "", model=build(ModelConfig, "model."))


def differences(stored: dict[str, Any], config: Config) -> list[str]:
    """What keeps ``config`` from continuing the run whose flat configuration is
    ``stored``, one phrase per field.

    A field that is newer than the run had its default's effect.
    """
    was, now = to_dict(Config()) | stored, to_dict(config)
    return [
        f"{flag(key)} was {was[key]!r}, is {now.get(key)!r}"
        for key in was
        if key not in FREE_ON_RESUME and was[key] != now.get(key)
    ]


def flag(key: str) -> str:
    """The command-line flag of a flat key."""
    return "--" + key.replace("_", "-")


HUGE, TINY, MOST = sys.float_info.max, sys.float_info.min, 2**31 - 1
# Least and greatest value; other integers are in 1..MOST.
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("weight_decay", "temperature"), (0, HUGE)),
    **dict.fromkeys(("learning_rate", "adam_learning_rate", "clip_norm"), (TINY, HUGE)),
    **dict.fromkeys(
        ("model.rotary_base", "model.norm_epsilon", "model.hidden_std"), (TINY, HUGE)
    ),
    **dict.fromkeys(("adam_b1", "adam_b2"), (0, math.nextafter(1, 0))),
    **dict.fromkeys(("process", "warmup_steps", "seed"), (0, MOST)),
    **dict.fromkeys(("model.layers", "seeds", "jobs"), (1, 10_000)),
    **{"steps": (1, 10**8), "sample_tokens": (0, 65_536)},
    "vocabulary": (257, 65_536),  # 257: the bytes and a separator
    "validation_percent": (1e-3, 50),
}


def check_ranges(flat: dict[str, Any]) -> None:
    """Refuse numbers outside ``RANGES``.

    Raises:
        RunError: naming the flag and what it may be.
    """
    for key, value in flat.items():
        low, high = RANGES.get(
            key, (1, MOST) if isinstance(value, int) else (-math.inf, math.inf)
        )
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and not low <= value <= high
        ):
            least = f"at least {low:g}" + " and below 1" * (high < 1)
            allowed = (
                least
                if high == HUGE or high < 1 or value < low == 1
                else f"in {low:g}..{high:.10g}"
            )
            raise RunError(
                f"{flag(key)} must be"
                f" {'a positive number' if low == TINY else allowed}, got {value}"
            )


def check(config: Config) -> None:
    """Refuse what cannot run.

    Raises:
        RunError: naming the flag and what it may be.
    """
    check_ranges(to_dict(config))
    check_model(config.model)
    context, predicted = config.model.context, config.validation_tokens
    if config.micro_batch and config.batch_size % config.micro_batch:
        raise RunError(
            f"--micro-batch {config.micro_batch} must divide --batch-size"
            f" {config.batch_size}"
        )
    if predicted < context:
        raise RunError(
            f"--validation-tokens {predicted} must hold one sequence: --model.context"
            f" is {context}"
        )
    if Path(config.run_name).name != config.run_name or config.run_name in {".", ".."}:
        raise RunError(f"--name must be a plain folder name, got {config.run_name!r}")
    if config.resume and config.overwrite:
        raise RunError(
            "--resume and --overwrite exclude each other: continue the run, or"
            " replace it"
        )


def check_model(model: ModelConfig) -> None:
    """Refuse fields that the family does not have, and heads that do not fit.

    Raises:
        RunError: naming the flag and what it may be.
    """
    for name, family in {
        "kv_heads": "qwen3",
        "head_width": "qwen3",
        "bias": "gpt2",
    }.items():
        if getattr(model, name) and model.family != family:
            raise RunError(
                f"{flag('model.' + name)} is an option of {family}, but the model is"
                f" {model.family}"
            )
    parts = (
        1 if model.family == "gpt2" else 2
    )  # rotary positions rotate pairs of dimensions
    if model.head_width is None and model.width % (model.heads * parts):
        even = "even" if parts == 2 else "equal"
        raise RunError(
            f"--model.heads {model.heads} must divide --model.width {model.width} into"
            f" {even} parts"
        )
    if model.head_width and model.head_width % 2:
        raise RunError(f"--model.head-width must be even, got {model.head_width}")
    if model.kv_heads and model.heads % model.kv_heads:
        raise RunError(
            f"--model.kv-heads {model.kv_heads} must divide --model.heads {model.heads}"
        )
