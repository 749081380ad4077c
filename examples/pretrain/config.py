# SPDX-License-Identifier: Apache-2.0
"""What a run is: frozen dataclasses whose field docstrings are the text of ``--help``."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


class RunError(Exception):
    """Something the user can mend: ``main`` prints its one line, without a traceback, and exits with status 1."""


@dataclass(frozen=True)
class ModelConfig:
    """The network."""

    family: Literal["llama"] = "llama"
    """Architecture. llama: RMSNorm, rotary positions, gated MLP, no biases, head tied to the token embedding."""
    layers: int = 2
    """Number of blocks."""
    width: int = 128
    """Size of the residual stream."""
    heads: int = 4
    """Attention heads; each is width / heads wide, an even number."""
    mlp_width: int = 344
    """Size of the hidden layer of each MLP."""
    context: int = 128
    """Tokens the model sees at once; also the length of a training sequence."""


@dataclass(frozen=True)
class DataConfig:
    """The text: Python source, split by file into training and validation."""

    source: Path | None = None
    """Folder whose .py files are the corpus; None is the standard library of the running interpreter."""
    folder: Path = Path("data")
    """Where token files and tokenizers are kept; made once for each corpus and vocabulary, then reused."""
    vocabulary: int = 2048
    """Tokens of the byte-pair vocabulary, trained on the training files."""
    validation_percent: int = 5
    """Share of the files, chosen by a hash of their path, that is held out."""
    validation_tokens: int = 65_536
    """Predictions in the fixed validation set, spread evenly over the held-out files."""


@dataclass(frozen=True)
class Config:
    """Train a small language model, and see what the optimizer makes of it.

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
    seed: int = 0
    """Seed of initialisation, data order and sampling."""

    optimizer: Literal["adamw", "muon", "mano", "normpre_g", "normpre_l"] = "normpre_g"
    """Optimizer of the hidden matrices; embeddings, norms and biases go to AdamW under all of them."""
    steps: int = 800
    """Number of updates."""
    batch_size: int = 16
    """Sequences per update."""
    learning_rate: float = 4e-3
    """Peak learning rate, the same for hidden matrices and the rest (updates are matched to AdamW's size)."""
    warmup_steps: int = 80
    """Steps of linear warm-up; a cosine to 10 % of the peak follows."""
    weight_decay: float = 0.1
    """Decoupled weight decay, multiplied by the learning rate."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this global norm before the optimizer sees them."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of the forward and backward pass; parameters stay float32. auto: bfloat16, on CPU float32."""

    evaluate_every: int = 200
    """Steps between validation losses; one is always taken at the end."""
    log_every: int = 10
    """Steps between writes of the log; every step has its own line in it."""
    checkpoint_every: int = 200
    """Steps between checkpoints; one is always written at the end."""
    keep_checkpoints: int = 2
    """Checkpoints kept on disk."""
    prompt: str = "def read_lines(path, encoding=None):"
    """Text the trained model continues at the end."""
    sample_tokens: int = 160
    """Length of that continuation."""
    temperature: float = 0.6
    """Randomness of that continuation: 0 takes the likeliest token each time."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)

    @property
    def run_name(self) -> str:
        """Name of the run's folder."""
        return self.name or f"{self.config}-{self.optimizer}"

    @property
    def run_folder(self) -> Path:
        """Where everything about the run is written, data apart."""
        return self.runs_folder / self.run_name


# Fields that may differ between a run and its continuation: they do not touch the numbers.
FREE_ON_RESUME = frozenset(
    {
        "config",
        "name",
        "runs_folder",
        "resume",
        "overwrite",
        "evaluate_every",
        "log_every",
        "checkpoint_every",
        "keep_checkpoints",
        "prompt",
        "sample_tokens",
        "temperature",
        "data.folder",
        "data.source",  # the tokens themselves are compared instead
    }
)


def to_dict(config: Config) -> dict[str, Any]:
    """The configuration flattened to ``{"steps": 800, "model.layers": 4, ...}``, ready for JSON."""
    flat: dict[str, Any] = {}
    for key, value in dataclasses.asdict(config).items():
        items = {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
        flat |= {k: str(v) if isinstance(v, Path) else v for k, v in items.items()}
    return flat


def differences(stored: dict[str, Any], config: Config) -> list[str]:
    """What keeps ``config`` from continuing the run whose flat configuration is ``stored``, one phrase per field."""
    now = to_dict(config)
    return [
        f"{flag(key)} was {stored.get(key)!r}, is {now.get(key)!r}"
        for key in dict.fromkeys([*stored, *now])
        if key not in FREE_ON_RESUME and stored.get(key) != now.get(key)
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
    may_be_zero = {"seed", "warmup_steps", "sample_tokens"}
    for key, value in flat.items():
        if isinstance(value, int) and not isinstance(value, bool) and value < (0 if key in may_be_zero else 1):
            raise RunError(f"{flag(key)} must be {'0 or more' if key in may_be_zero else 'at least 1'}, got {value}")
    for key in ("learning_rate", "clip_norm"):
        if not 0 < flat[key] < float("inf"):
            raise RunError(f"{flag(key)} must be a positive number, got {flat[key]}")
    for key in ("weight_decay", "temperature"):
        if not 0 <= flat[key] < float("inf"):
            raise RunError(f"{flag(key)} must be 0 or more, got {flat[key]}")
    if config.warmup_steps >= config.steps:
        raise RunError(f"--warmup-steps {config.warmup_steps} must be smaller than --steps {config.steps}")
    if config.model.width % (2 * config.model.heads):
        raise RunError(
            f"--model.heads {config.model.heads} must divide --model.width {config.model.width} into even parts"
        )
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
