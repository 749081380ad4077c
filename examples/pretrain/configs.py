# SPDX-License-Identifier: Apache-2.0
"""Named configurations, and the options of ``train`` put over them.

``docs/pretraining.md`` has their sizes, ``docs/results/`` what was measured.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tyro

from .checks import check
from .config import Common, Config, ModelConfig, RunError
from .names import apply_name, is_relative

PROGRAM = "python -m examples.pretrain train"


def gpt2(
    layers: int, width: int, heads: int, context: int, vocabulary: int | None = None
) -> ModelConfig:
    """A GPT-2."""
    return ModelConfig(
        family="gpt2",
        layers=layers,
        width=width,
        heads=heads,
        mlp_width=4 * width,
        context=context,
        vocabulary=vocabulary,
        norm_epsilon=1e-5,
    )


GPT2 = gpt2(layers=12, width=768, heads=12, context=1024, vocabulary=50_304)
TINY_LLAMA = ModelConfig(
    family="llama", layers=2, width=32, heads=2, mlp_width=64, context=32
)
LLAMA = ModelConfig(
    family="llama",
    context=1024,
    vocabulary=32_000,
    tied_head=False,
    scaled_residuals=False,
    scan_layers=True,
)
QWEN3 = replace(
    LLAMA,
    family="qwen3",
    layers=28,
    heads=16,
    kv_heads=8,
    head_width=128,
    vocabulary=151_936,
    tied_head=True,
    rotary_base=1e6,
    remat=True,
)


def small(name: str, model: ModelConfig, steps: int, **more: Any) -> Config:
    """A configuration on Python source.

    Warm-up for a tenth of the steps, a validation loss at every tenth.
    """
    options: dict[str, Any] = {
        "warmup_steps": steps // 10,
        "evaluate_every": steps // 10,
        "checkpoint_every": steps // 10,
    }
    return Config(config=name, model=model, steps=steps, **(options | more))


def paper(name: str, model: ModelConfig, corpus: str, **more: Any) -> Config:
    """A configuration of the paper: 10,000 steps of 512 x 1,024 tokens.

    Clipping and decay are the defaults. It needs ``prepare CORPUS`` first.
    """
    options: dict[str, Any] = {
        "optimizer": "normpre_g",
        "tokens": Path(f"data/{corpus}"),
        "steps": 10_000,
        "batch_size": 512,
        "warmup_steps": 1_000,
        "evaluate_every": 500,
        "checkpoint_every": 500,
        "validation_tokens": 2048 * 1024,
    }
    return Config(config=name, model=model, **(options | more))


ALL = (
    # Every part of the program in seconds, for tests and for trying things out; the
    # loss falls from 6.24 to about 5.4.
    small(
        "tiny",
        TINY_LLAMA,
        steps=40,
        batch_size=8,
        learning_rate=1e-2,
        vocabulary=512,
        validation_tokens=2048,
        evaluate_every=20,
        checkpoint_every=10,
    ),
    # The smallest model that distinguishes optimizers, on bytes: about a minute on one
    # CPU core.
    small(
        "nano",
        gpt2(layers=3, width=64, heads=4, context=64),
        steps=1_500,
        batch_size=16,
        learning_rate=4e-3,
        vocabulary=257,
        warmup_steps=100,
        evaluate_every=250,
    ),
    # Two to four minutes on two CPU cores; validation loss 3.449 with normpre_h, 3.766
    # with adamw (Python 3.11.7).
    Config(config="first_run"),
    # Ten minutes on two CPU cores.
    small(
        "gpt2_2m",
        gpt2(layers=4, width=160, heads=5, context=128),
        steps=1_500,
        batch_size=16,
        learning_rate=3e-3,
        vocabulary=4096,
    ),
    # Hours on CPU cores, minutes on a GPU. The standard library alone has 2.3 million
    # tokens, which is too few.
    small(
        "gpt2_10m",
        gpt2(layers=6, width=320, heads=5, context=256),
        steps=3_000,
        batch_size=32,
        learning_rate=2e-3,
        vocabulary=8192,
        installed_packages=True,
    ),
    # GPT-2 Small on all installed Python source, without a download: half an hour on
    # one GPU. Not measured yet.
    small(
        "gpt2_small_python",
        GPT2,
        steps=1_000,
        batch_size=128,
        micro_batch=32,
        learning_rate=1e-3,
        vocabulary=50_257,
        installed_packages=True,
        validation_tokens=524_288,
    ),
    # The paper's validation losses: AdamW 3.1444, Muon 3.1064, MANO 3.1156, NormPre-G
    # 3.0667, NormPre-L 3.0826 (means of three seeds). Its Muon is
    # muon,convention=keller,learning_rate=0.02,adam_learning_rate=6e-4. It scores 200
    # random mini-batches; here they are fixed, and of nanoGPT's 12 sequences. The table
    # is padded as in nanoGPT.
    paper(
        "gpt2_small",
        GPT2,
        corpus="openwebtext",
        micro_batch=32,
        learning_rate=6e-4,
        warmup_steps=2_000,
        validation_tokens=200 * 12 * 1024,
    ),
    # AdamW 3.1363, Muon 3.1019, MANO 3.1102, NormPre-G 3.0737, NormPre-L 3.0930.
    paper(
        "llama_130m",
        replace(LLAMA, layers=12, width=768, heads=12, mlp_width=2048),
        corpus="c4",
        micro_batch=64,
        learning_rate=6e-4,
    ),
    # AdamW 3.0378, Muon 2.9999, MANO 2.9946, NormPre-G 2.9678, NormPre-L 2.9758.
    paper(
        "llama_350m",
        replace(LLAMA, layers=24, width=1024, heads=16, mlp_width=2736),
        corpus="c4",
        micro_batch=32,
        learning_rate=3e-4,
    ),
    # AdamW 2.9385, Muon 2.9037, MANO 2.8963, NormPre-G 2.8571, NormPre-L 2.8662.
    paper(
        "llama_1p3b",
        replace(LLAMA, layers=24, width=2048, heads=32, mlp_width=5461, remat=True),
        corpus="c4",
        micro_batch=16,
        learning_rate=3e-4,
    ),
    # AdamW 2.8956, Muon 2.8335, MANO 2.8382, NormPre-G 2.7967, NormPre-L 2.8066.
    paper(
        "qwen3_0p6b",
        replace(QWEN3, width=1024, mlp_width=3072),
        corpus="pile",
        micro_batch=16,
        learning_rate=3e-4,
    ),
    # AdamW 2.6758, Muon 2.6408, MANO 2.6205, NormPre-G 2.5868, NormPre-L 2.5897.
    paper(
        "qwen3_1p7b",
        replace(QWEN3, width=2048, mlp_width=6144),
        corpus="pile",
        micro_batch=8,
        learning_rate=3e-4,
    ),
)
CONFIGS = {config.config: config for config in ALL}
# Where the learning rate of the AdamW group beside Hyperball was tuned, to another
# value than AdamW's own.
TUNED_BESIDE_HYPERBALL = ("tiny", "nano", "first_run", "gpt2_2m")


def load(name: str) -> Config:
    """The configuration of this name.

    Raises:
        RunError: if there is none.
    """
    if name not in CONFIGS:
        raise RunError(f"--config must be one of {', '.join(CONFIGS)}, got {name!r}")
    return CONFIGS[name]


def parse(arguments: Sequence[str]) -> Config:
    """The configuration that ``--config`` names, with every other option put over it.

    Raises:
        RunError: if it cannot run.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", nargs="?", default="first_run")
    named, _ = first.parse_known_args(arguments)
    config = load(named.config)
    if {"-h", "--help"} & set(arguments):
        show_help(config)
    given = read(arguments, default=config)
    check(given)
    if not is_relative(given.optimizer):
        return given
    return read(arguments, default=with_rates_of_hyperball(config, given.steps))


def show_help(config: Config) -> None:
    """Print the common options with the values of ``config``, and exit."""
    names = [option.name for option in dataclasses.fields(Common)]
    shown = Common(**{name: getattr(config, name) for name in names})
    tyro.cli(Common, default=shown, args=["--help"], prog=PROGRAM)


def read(arguments: Sequence[str], default: Config) -> Config:
    """The options, and those that the name of the optimizer sets, over ``default``."""
    given = tyro.cli(Config, args=list(arguments), prog=PROGRAM, default=default)
    return apply_name(given)


def with_rates_of_hyperball(config: Config, steps: int) -> Config:
    """``config`` with the learning rates of a run under Hyperball of so many steps."""
    from .optimizers import learning_rate_by_length  # waits for jax

    # Trials of a few steps get no warning that the rule is not for them.
    rate = learning_rate_by_length(max(200, steps))
    adam = config.learning_rate
    if config.config in TUNED_BESIDE_HYPERBALL:
        adam = 1.6e-2
    return replace(config, learning_rate=rate, adam_learning_rate=adam)
