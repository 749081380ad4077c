# SPDX-License-Identifier: Apache-2.0
"""Named configurations. ``docs/pretraining.md`` has their sizes, ``docs/results/`` what
was measured.
"""

import argparse
import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tyro

from .config import (
    Common,
    Config,
    ModelConfig,
    RunError,
    apply_name,
    check,
    is_relative,
)


def gpt2(
    layers: int, width: int, heads: int, context: int, vocabulary: int | None = None
) -> ModelConfig:
    """A GPT-2."""
    sizes = {"mlp_width": 4 * width, "context": context, "vocabulary": vocabulary}
    return ModelConfig("gpt2", layers, width, heads, norm_epsilon=1e-5, **sizes)


GPT2 = gpt2(12, 768, 12, context=1024, vocabulary=50_304)
TINY_LLAMA = ModelConfig("llama", layers=2, width=32, heads=2, mlp_width=64, context=32)
LLAMA = ModelConfig(
    "llama",
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
    rotary_base=1e6,
)


def small(
    name: str,
    model: ModelConfig,
    steps: int,
    batch_size: int,
    learning_rate: float,
    vocabulary: int,
    **more: Any,
) -> Config:
    """A configuration on Python source: warm-up for a tenth of the steps, a validation
    loss at every tenth.
    """
    tenths = dict.fromkeys(
        ("warmup_steps", "evaluate_every", "checkpoint_every"), steps // 10
    )
    shared = {
        "config": name,
        "model": model,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
    }
    return Config(steps=steps, vocabulary=vocabulary, **{**shared, **tenths, **more})


def paper(
    name: str,
    model: ModelConfig,
    micro_batch: int,
    learning_rate: float,
    corpus: str,
    **more: Any,
) -> Config:
    """A configuration of the paper: 10,000 steps of 512 x 1,024 tokens; clipping and
    decay are the defaults.

    It needs ``prepare CORPUS`` first.
    """
    shared = {
        "steps": 10_000,
        "batch_size": 512,
        "warmup_steps": 1_000,
        "evaluate_every": 500,
        "checkpoint_every": 500,
    }
    shared |= {
        "config": name,
        "model": model,
        "micro_batch": micro_batch,
        "learning_rate": learning_rate,
    }
    shared |= {
        "tokens": Path(f"data/{corpus}"),
        "validation_tokens": 2048 * 1024,
        "optimizer": "normpre_g",
    }
    return Config(**{**shared, **more})


ALL = (
    # Every part of the program in seconds, for tests and for trying things out; the
    # loss falls from 6.24 to about 5.4.
    small(
        "tiny",
        TINY_LLAMA,
        40,
        8,
        1e-2,
        512,
        validation_tokens=2048,
        evaluate_every=20,
        checkpoint_every=10,
    ),
    # The smallest model that distinguishes optimizers, on bytes: about a minute on one
    # CPU core.
    small(
        "nano",
        gpt2(3, 64, 4, context=64),
        1_500,
        16,
        4e-3,
        257,
        warmup_steps=100,
        evaluate_every=250,
    ),
    # Two to four minutes on two CPU cores; validation loss 3.449 with normpre_h, 3.766
    # with adamw (Python 3.11.7).
    Config(config="first_run"),
    # Ten minutes on two CPU cores.
    small("gpt2_2m", gpt2(4, 160, 5, context=128), 1_500, 16, 3e-3, vocabulary=4096),
    # Hours on CPU cores, minutes on a GPU. The standard library alone has 2.3 million
    # tokens, which is too few.
    small(
        "gpt2_10m",
        gpt2(6, 320, 5, context=256),
        3_000,
        32,
        2e-3,
        vocabulary=8192,
        installed_packages=True,
    ),
    # GPT-2 Small on all installed Python source, without a download: half an hour on
    # one GPU. Not measured yet.
    replace(
        small(
            "gpt2_small_python",
            GPT2,
            1_000,
            128,
            1e-3,
            50_257,
            installed_packages=True,
            micro_batch=32,
        ),
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
        32,
        6e-4,
        "openwebtext",
        warmup_steps=2_000,
        validation_tokens=200 * 12 * 1024,
    ),
    # AdamW 3.1363, Muon 3.1019, MANO 3.1102, NormPre-G 3.0737, NormPre-L 3.0930.
    paper(
        "llama_130m",
        replace(LLAMA, layers=12, width=768, heads=12, mlp_width=2048),
        64,
        6e-4,
        "c4",
    ),
    # AdamW 3.0378, Muon 2.9999, MANO 2.9946, NormPre-G 2.9678, NormPre-L 2.9758.
    paper(
        "llama_350m",
        replace(LLAMA, layers=24, width=1024, heads=16, mlp_width=2736),
        32,
        3e-4,
        "c4",
    ),
    # AdamW 2.9385, Muon 2.9037, MANO 2.8963, NormPre-G 2.8571, NormPre-L 2.8662.
    paper(
        "llama_1p3b",
        replace(LLAMA, layers=24, width=2048, heads=32, mlp_width=5461, remat=True),
        16,
        3e-4,
        "c4",
    ),
    # AdamW 2.8956, Muon 2.8335, MANO 2.8382, NormPre-G 2.7967, NormPre-L 2.8066.
    paper(
        "qwen3_0p6b",
        replace(QWEN3, width=1024, mlp_width=3072, tied_head=True, remat=True),
        16,
        3e-4,
        "pile",
    ),
    # AdamW 2.6758, Muon 2.6408, MANO 2.6205, NormPre-G 2.5868, NormPre-L 2.5897.
    paper(
        "qwen3_1p7b",
        replace(QWEN3, width=2048, mlp_width=6144, tied_head=True, remat=True),
        8,
        3e-4,
        "pile",
    ),
)
CONFIGS = {config.config: config for config in ALL}


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
    config = load(first.parse_known_args(arguments)[0].config)
    shown = Common(
        **{
            option.name: getattr(config, option.name)
            for option in dataclasses.fields(Common)
        }
    )
    program = "python -m examples.pretrain train"
    if {"-h", "--help"} & set(arguments):
        tyro.cli(Common, default=shown, args=["--help"], prog=program)
    read = functools.partial(tyro.cli, Config, args=list(arguments), prog=program)
    given = apply_name(read(default=config))
    check(given)
    if not is_relative(given.optimizer):
        return given
    from .optimizers import learning_rate_by_length  # waits for jax

    rate = learning_rate_by_length(
        max(200, given.steps)
    )  # no warning for trials of a few steps
    # That of AdamW, except where another one was measured.
    adam = (
        1.6e-2
        if config.config in ("tiny", "nano", "first_run", "gpt2_2m")
        else config.learning_rate
    )
    return apply_name(
        read(default=replace(config, learning_rate=rate, adam_learning_rate=adam))
    )
