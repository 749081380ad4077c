# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""GPT-2 and its train step in plain PyTorch, as nanoGPT has them: what ``train_step`` compares ours with.

One matrix for query, key and value, learned positions, GELU, fused causal attention, the token table as the
head, no biases; clipping at a global norm, then fused AdamW. On CUDA matrix products are in bfloat16 by autocast and
the residual stream stays float32, on CPU everything is float32. torch is no dependency of this project.
"""

from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from examples.pretrain.config import Config, ModelConfig


class Attention(nn.Module):
    """Causal self-attention, (B, T, D) to the same."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.heads = model.heads
        self.qkv = nn.Linear(model.width, 3 * model.width, bias=False)
        self.out = nn.Linear(model.width, model.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix along time."""
        batch, time, width = x.shape
        query, key, value = (
            third.view(batch, time, self.heads, -1).transpose(1, 2) for third in self.qkv(x).split(width, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.attention_norm = nn.LayerNorm(model.width, eps=model.norm_epsilon, bias=False)
        self.attention = Attention(model)
        self.mlp_norm = nn.LayerNorm(model.width, eps=model.norm_epsilon, bias=False)
        self.up = nn.Linear(model.width, model.mlp_width, bias=False)
        self.down = nn.Linear(model.mlp_width, model.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, D) to the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))


class GPT2(nn.Module):
    """Tokens (B, T + 1) to the mean cross-entropy, in nats, of the last T."""

    def __init__(self, model: ModelConfig, vocabulary: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, model.width)
        self.positions = nn.Embedding(model.context, model.width)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.final_norm = nn.LayerNorm(model.width, eps=model.norm_epsilon, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.final_norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def weights(params: dict) -> dict[str, torch.Tensor]:
    """Our parameters under the names of ``GPT2``, as it keeps them; our kernels are (inputs, outputs)."""
    found = {
        "tokens.weight": params["tokens"]["embedding"],
        "positions.weight": params["positions"]["embedding"],
        "final_norm.weight": params["final_norm"]["scale"],
    }
    for i, block in params["blocks"].items():
        found |= {
            f"blocks.{i}.attention_norm.weight": block["attention_norm"]["scale"],
            f"blocks.{i}.attention.qkv.weight": block["attention"]["qkv"]["kernel"].T,
            f"blocks.{i}.attention.out.weight": block["attention"]["out"]["kernel"].T,
            f"blocks.{i}.mlp_norm.weight": block["mlp_norm"]["scale"],
            f"blocks.{i}.up.weight": block["mlp"]["up"]["kernel"].T,
            f"blocks.{i}.down.weight": block["mlp"]["down"]["kernel"].T,
        }
    return {name: torch.tensor(np.asarray(value)) for name, value in found.items()}


class Trainer:
    """The model with its optimizer; ``step`` is a whole train step, the other methods are its parts."""

    def __init__(self, config: Config, params: dict, *, device: str, bfloat16: bool, compiled: bool):
        self.config, self.device, self.bfloat16 = config, device, bfloat16
        self.model = GPT2(config.model, len(params["tokens"]["embedding"]))
        self.model.load_state_dict(weights(params))
        self.model.to(device)
        self.loss_of = torch.compile(self.model) if compiled else self.model
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.learning_rate,
            betas=(config.adam_b1, config.adam_b2),
            weight_decay=config.weight_decay,
            fused=True,
        )

    def _autocast(self) -> AbstractContextManager:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.bfloat16)

    def forward(self, tokens: np.ndarray) -> torch.Tensor:
        """The loss; its gradient can be taken unless ``torch.no_grad`` is on."""
        with self._autocast():
            return self.loss_of(torch.from_numpy(tokens).to(self.device, non_blocking=True))

    def backward(self, tokens: np.ndarray) -> torch.Tensor:
        """The loss; the gradients are left with the parameters."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.forward(tokens)
        loss.backward()
        return loss.detach()

    def update(self, rate: float) -> None:
        """Clip the gradients, then AdamW with the learning rate ``rate``."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()

    def step(self, tokens: np.ndarray, rate: float) -> torch.Tensor:
        """Forward, backward, update; the loss before it."""
        loss = self.backward(tokens)
        self.update(rate)
        return loss

    def wait(self) -> None:
        """Until the device is done."""
        if self.device == "cuda":
            torch.cuda.synchronize()
