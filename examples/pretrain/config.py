# SPDX-License-Identifier: Apache-2.0
"""What a run is: frozen dataclasses whose field docstrings are the text of ``--help``."""

import dataclasses
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


class RunError(Exception):
    """Something the user can mend: ``main`` prints its one line, without a traceback, and exits with status 1."""


class Diverged(RunError):
    """The loss is beyond repair: NaN, infinite, or far above where it was."""


@dataclass(frozen=True)
class ModelConfig:
    """The network."""

    family: Literal["gpt2", "llama", "qwen3"] = "llama"
    """Architecture. gpt2: LayerNorm, learned positions, GELU, one fused query-key-value matrix. llama: RMSNorm, rotary
    positions, gated MLP. qwen3: llama with grouped-query attention and normalised queries and keys."""
    layers: int = 2
    """Number of blocks."""
    width: int = 128
    """Size of the residual stream."""
    heads: int = 4
    """Attention heads."""
    kv_heads: int | None = None
    """qwen3: heads of keys and values, each shared by heads / kv_heads queries; None: as many as heads."""
    head_width: int | None = None
    """qwen3: size of a head; None: width / heads."""
    mlp_width: int = 344
    """Size of the hidden layer of each MLP."""
    context: int = 128
    """Tokens the model sees at once; also the length of a training sequence."""
    vocabulary: int | None = None
    """Rows of the token table; None: as many as the tokenizer has. More than that is padding, less is refused."""
    tied_head: bool = True
    """Whether the token table is the output head, too."""
    bias: bool = False
    """gpt2: biases in linear layers and LayerNorm."""
    rotary_base: float = 10_000.0
    """llama, qwen3: base of the rotary frequencies."""
    norm_epsilon: float = 1e-6
    """Added to the variance (mean square) in every norm."""
    hidden_std: float = 0.02
    """Standard deviation that the entries of the hidden matrices begin with; those of tables and head have 0.02."""
    scaled_residuals: bool = True
    """Whether the last matrix of every branch starts smaller by sqrt(2 layers), as in GPT-2, or like the others."""
    scan_layers: bool = False
    """Keep the blocks as one stack and scan over it: compile time does not grow with depth."""
    remat: bool = False
    """Compute a block's inside again in the backward pass: less memory, a third more arithmetic."""
    attention: Literal["auto", "xla", "cudnn"] = "auto"
    """Implementation of attention. auto: cuDNN's where it runs (NVIDIA, bfloat16), XLA's elsewhere."""


@dataclass(frozen=True)
class DataConfig:
    """The text: a prepared corpus, or Python source, split by file into training and validation."""

    tokens: Path | None = None
    """Folder of token files that the ``prepare`` command wrote; None: Python source, made on first use."""
    source: Path | None = None
    """Folder whose .py files are the corpus; None is the standard library of the running interpreter."""
    include_site_packages: bool = False
    """Add the .py files of every installed package to the standard library."""
    folder: Path = Path("data")
    """Where token files and tokenizers are kept; made once for each corpus and vocabulary, then reused."""
    vocabulary: int = 2048
    """Tokens of the byte-pair vocabulary, trained on the training files."""
    validation_percent: int = 5
    """Share of the files, chosen by a hash of their path, that is held out."""
    validation_tokens: int = 65_536
    """Predictions in the fixed validation set, spread evenly over the held-out files."""


@dataclass(frozen=True)
class MatrixConfig:
    """The optimizer of the hidden matrices; a field that the chosen optimizer lacks is not used."""

    momentum: float = 0.95
    """Momentum coefficient mu (all but adamw and swan)."""
    nesterov: bool | None = None
    """Whether the update looks one gradient ahead (all but adamw, swan, rmnp and moga); None: the optimizer's own
    default."""
    norm_control: Literal["none", "hyperball"] = "none"
    """hyperball keeps every matrix at its initial Frobenius norm."""
    version: Literal[1, 2] = 1
    """Of its authors' code (mano)."""
    mode: str = ""
    """Variant: rows, columns or both (muoneq); the same or columns_rows (muon_plus); rows or columns (moga). Empty: the
    first, and both for muon_plus."""
    ns_steps: int = 5
    """Newton-Schulz iterations (muon, muoneq, muon_plus, normuon, adamuon, normpre_g)."""
    ns_coefficients: str = "muon"
    """Table of Newton-Schulz coefficients (the same)."""
    rank: int | float = 32
    """Singular values that are clipped; below 1 the share of the smaller dimension (normpre_l)."""
    oversample: int = 8
    """Further directions of the sketch (normpre_l)."""
    power_iterations: int = 1
    """Power iterations of the sketch (normpre_l)."""
    method: Literal["sketch", "products", "exact"] = "sketch"
    """How the modes are found (normpre_l)."""
    threshold: float | Literal["mean"] = 1.0
    """To what leading singular values are clipped: a number, or mean, the root mean square of all (normpre_l)."""
    tangent: Literal["relaxed", "strict", "none"] = "relaxed"
    """What becomes of the radial part of the momentum (normpre_g, normpre_l)."""
    orientation: Literal["alternating", "rows", "columns", "both"] = "alternating"
    """What is normalised, step by step (normpre_g, normpre_l)."""
    layers: str = ""
    """Hidden matrices with one of these in their path, such as attention or mlp/up+mlp/down; the others go to AdamW.
    Empty: all (all but adamw)."""
    rms: float = 0.2
    """Root mean square of every matrix's direction (normpre_g, normpre_l, swan)."""
    muon_convention: Literal["moonlight", "keller"] = "moonlight"
    """Scale of Muon's update: 0.2 sqrt(max(in, out)), or sqrt(max(1, out / in))."""
    muon_ratio: float = 1.0
    """Learning rate for matrices over --learning-rate, which stays that of AdamW's part (muon, rmnp, muon_plus,
    normuon, moga; updates of the others have the size of AdamW's)."""
    momentum_in: Literal["float32", "bfloat16"] = "float32"
    """What momentum is kept in, that of AdamW's part too (all but adamw)."""
    bfloat16: bool = False
    """bfloat16 products with float32 sums in the spectral stage (all but adamw, mano, rmnp and moga)."""


@dataclass(frozen=True)
class Config:
    """Train a language model, and see what the optimizer makes of it (other commands: ``help``).

    Writes to two folders only: data/, and runs/<name>/ with run.json, parameters.txt, log.jsonl, checkpoints/, loss.png
    and sample.txt.
    """

    config: str = "first_run"
    """Named configuration to start from; every other flag overrides one of its fields."""
    name: str = ""
    """Name of the run; <config>-<optimizer> where none is given."""
    runs_folder: Path = Path("runs")
    """Where the folder of the run is made."""
    resume: bool = False
    """Go on from the run's last checkpoint, exactly; repeat the other flags as they were."""
    overwrite: bool = False
    """Delete a run of the same name first."""
    init_from: Path | None = None
    """Folder of another run, runs/<name>, whose newest weights this one begins with; optimizer, schedule and data begin
    anew."""
    seed: int = 0
    """Seed of initialisation, data order and sampling."""

    optimizer: str = "normpre_g"
    """Optimizer of the hidden matrices: adamw, muon, mano, rmnp, muoneq, muon_plus, normuon, adamuon, moga, swan,
    normpre_g or normpre_l; embeddings, norms and biases go to AdamW under all of them."""
    steps: int = 800
    """Number of updates."""
    batch_size: int = 16
    """Sequences per update."""
    micro_batch: int | None = None
    """Sequences per forward and backward pass; their gradients are added up before the update. None: all at once."""
    learning_rate: float = 4e-3
    """Peak learning rate. Updates of hidden matrices have about AdamW's size; under --matrix.norm-control hyperball the
    rate is the size of a step relative to the weights, 1e-2 to 2e-2."""
    adam_learning_rate: float | None = None
    """Peak learning rate of what is no hidden matrix, by AdamW under all optimizers; None: --learning-rate."""
    base_width: int | None = None
    """Width of the model that learning rates and --model.hidden-std were tuned on: the initial standard deviation of
    hidden matrices is smaller by the root of the ratio, and learning rates are multiplied by
    normpre_optax.multipliers_by_width."""
    warmup_steps: int = 80
    """Steps of linear warm-up; a cosine to 10 % of the peak follows. As many as --steps or more: a tenth of those."""
    weight_decay: float = 0.1
    """Decoupled weight decay, multiplied by the learning rate."""
    decay_gains: bool = False
    """Whether gains of norms and biases decay, too; nanoGPT and most others leave them out."""
    adam_b1: float = 0.9
    """AdamW's decay of the first moment, for every parameter it has."""
    adam_b2: float = 0.95
    """AdamW's decay of the second moment."""
    clip: Literal["global", "matrix", "none"] = "global"
    """What is scaled down to --clip-norm before the optimizer sees it: all gradients together, each by itself, none."""
    clip_norm: float = 1.0
    """Largest norm of what is clipped."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of the forward and backward pass; parameters stay float32. auto: bfloat16, on CPU float32."""

    mesh: str = ""
    """Devices to train on, such as data=2,fsdp=4: axes data (copies of the model), fsdp (its parameters in shares) and
    tensor (each layer's work in shares), whose product is the number of devices. Empty: one device."""
    coordinator: str = ""
    """host:port of process 0 where several processes train together; found by itself under SLURM, Open MPI, on GKE."""
    processes: int | None = None
    """With --coordinator: how many processes there are."""
    process: int | None = None
    """With --coordinator: which of them this is, from 0."""

    evaluate_every: int = 200
    """Steps between validation losses; one is always taken at the end."""
    log_every: int = 10
    """Steps between writes of the log; every step has its own line in it."""
    checkpoint_every: int = 200
    """Steps between checkpoints; one is always written at the end."""
    keep_checkpoints: int = 2
    """Checkpoints kept on disk."""
    tensorboard: bool = False
    """Write TensorBoard events beside the log (needs tensorboardX)."""
    wandb: str = ""
    """Weights & Biases project to report to (needs wandb); none where empty."""
    prompt: str = "def read_lines(path, encoding=None):"
    """Text the trained model continues at the end."""
    sample_tokens: int = 160
    """Length of that continuation."""
    temperature: float = 0.6
    """Randomness of that continuation: 0 takes the likeliest token each time."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    matrix: MatrixConfig = field(default_factory=MatrixConfig)

    @property
    def run_name(self) -> str:
        """Name of the run's folder."""
        return self.name or f"{self.config}-{self.optimizer}"

    @property
    def run_folder(self) -> Path:
        """Where everything about the run is written, data apart."""
        return self.runs_folder / self.run_name


# Fields that may differ between a run and its continuation: they do not touch the numbers (the mesh: but for rounding).
FREE_ON_RESUME = frozenset(
    {
        "config",
        "name",
        "runs_folder",
        "resume",
        "overwrite",
        "mesh",
        "coordinator",
        "processes",
        "process",
        "evaluate_every",
        "log_every",
        "checkpoint_every",
        "keep_checkpoints",
        "prompt",
        "sample_tokens",
        "temperature",
        "tensorboard",
        "wandb",
        "data.folder",
        "data.source",  # the tokens themselves are compared instead, as for the next
        "data.tokens",
        "data.include_site_packages",
    }
)


def to_dict(config: Config) -> dict[str, Any]:
    """The configuration flattened to ``{"steps": 800, "model.layers": 4, ...}``, ready for JSON."""
    flat: dict[str, Any] = {}
    for key, value in dataclasses.asdict(config).items():
        items = {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
        flat |= {k: str(v) if isinstance(v, Path) else v for k, v in items.items()}
    return flat


def from_dict(flat: dict[str, Any]) -> Config:
    """The configuration that ``to_dict`` flattened; fields it does not mention have their defaults."""

    def build(kind: type, prefix: str) -> Any:
        values = {}
        for name, hint in typing.get_type_hints(kind).items():
            if dataclasses.is_dataclass(hint):
                values[name] = build(typing.cast(type, hint), f"{name}.")
            elif prefix + name in flat:
                value = flat[prefix + name]
                is_path = hint is Path or Path in typing.get_args(hint)
                values[name] = Path(value) if is_path and value is not None else value
        return kind(**values)

    return build(Config, "")


BEFORE = {"decay_gains": True}
"""What runs did that are older than the field."""


def differences(stored: dict[str, Any], config: Config) -> list[str]:
    """What keeps ``config`` from continuing the run whose flat configuration is ``stored``, one phrase per field.

    A field that is newer than the run had its default's effect, or that in ``BEFORE``.
    """
    was, now = to_dict(Config()) | BEFORE | stored, to_dict(config)
    return [
        f"{flag(key)} was {was[key]!r}, is {now.get(key)!r}"
        for key in dict.fromkeys([*stored, *now])
        if key not in FREE_ON_RESUME and was[key] != now.get(key)
    ]


def flag(key: str) -> str:
    """The command-line flag of a flat key."""
    return "--" + key.replace("_", "-")


def check(config: Config) -> None:
    """Refuse what cannot run.

    Raises:
        RunError: naming the flag and what it may be.
    """
    flat = to_dict(config)
    for key, value in flat.items():
        if isinstance(value, int) and not isinstance(value, bool) and value < (0 if key in MAY_BE_ZERO else 1):
            raise RunError(f"{flag(key)} must be {'0 or more' if key in MAY_BE_ZERO else 'at least 1'}, got {value}")
    for key in POSITIVE:
        if flat[key] is not None and not 0 < flat[key] < float("inf"):
            raise RunError(f"{flag(key)} must be a positive number, got {flat[key]}")
    for key in ("weight_decay", "temperature"):
        if not 0 <= flat[key] < float("inf"):
            raise RunError(f"{flag(key)} must be a finite number, 0 or more, got {flat[key]}")
    for key in ("matrix.momentum", "adam_b1", "adam_b2"):
        if not 0 <= flat[key] < 1:
            raise RunError(f"{flag(key)} must lie in 0..1, 1 excluded, got {flat[key]}")
    if config.sample_tokens > MOST_SAMPLED:
        raise RunError(f"--sample-tokens must be at most {MOST_SAMPLED}, got {config.sample_tokens}")
    if config.seed >= 2**31:
        raise RunError(f"--seed must be below 2^31, got {config.seed}")
    if config.micro_batch and config.batch_size % config.micro_batch:
        raise RunError(f"--micro-batch {config.micro_batch} must divide --batch-size {config.batch_size}")
    check_model(config.model)
    if not 1 <= config.data.validation_percent <= 50:
        raise RunError(f"--data.validation-percent must lie in 1..50, got {config.data.validation_percent}")
    if not 257 <= config.data.vocabulary <= 65_536:
        raise RunError(
            f"--data.vocabulary must lie in 257 (the bytes and a separator)..65536, got {config.data.vocabulary}"
        )
    if config.data.validation_tokens < config.model.context:
        raise RunError(
            f"--data.validation-tokens {config.data.validation_tokens} must hold one sequence: "
            f"--model.context is {config.model.context}"
        )
    if not config.run_name or Path(config.run_name).name != config.run_name or config.run_name in {".", ".."}:
        raise RunError(f"--name must be a plain folder name, got {config.run_name!r}")
    if config.resume and config.overwrite:
        raise RunError("--resume and --overwrite exclude each other: keep the run, or begin it anew")


MOST_SAMPLED = 65_536
MAY_BE_ZERO = frozenset(
    {"seed", "process", "warmup_steps", "sample_tokens", "matrix.oversample", "matrix.power_iterations"}
)
POSITIVE = (
    *("learning_rate", "adam_learning_rate", "clip_norm"),
    *("model.rotary_base", "model.norm_epsilon", "model.hidden_std"),
    *("matrix.rms", "matrix.muon_ratio"),
)


OWN_FIELDS = {"kv_heads": "qwen3", "head_width": "qwen3", "bias": "gpt2"}


def check_model(model: ModelConfig) -> None:
    """Refuse fields that the family does not have, and heads that do not fit.

    Raises:
        RunError: naming the flag and what it may be.
    """
    for name, family in OWN_FIELDS.items():
        if getattr(model, name) and model.family != family:
            raise RunError(f"{flag('model.' + name)} is a field of {family}, the model is {model.family}")
    rotary = model.family != "gpt2"
    if model.head_width is None and model.width % (model.heads * (2 if rotary else 1)):
        parts = "even" if rotary else "equal"
        raise RunError(f"--model.heads {model.heads} must divide --model.width {model.width} into {parts} parts")
    if model.head_width and model.head_width % 2:
        raise RunError(f"--model.head-width must be even, got {model.head_width}")
    if model.kv_heads and model.heads % model.kv_heads:
        raise RunError(f"--model.kv-heads {model.kv_heads} must divide --model.heads {model.heads}")
