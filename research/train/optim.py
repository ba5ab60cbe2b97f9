"""AdamW, the biases that balance experts, and the learning rate of each step as closed formulas."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from research import comm
from research.built import Built
from research.config import TrainConfig
from research.models.moe import MoE


def adamw(config: TrainConfig, parameters: Sequence[tuple[Tensor, bool]]) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2), fused, over (tensor, whether it decays)."""
    groups = [
        {"params": [t for t, decays in parameters if decays], "weight_decay": config.weight_decay},
        {"params": [t for t, decays in parameters if not decays], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW([g for g in groups if g["params"]], config.lr, betas, config.adam_eps, fused=True)


def make_moments(optimizer: torch.optim.Optimizer) -> None:
    """What the first step of fused AdamW makes, where it is not there yet: a checkpoint is loaded into it."""
    for p in (p for group in optimizer.param_groups for p in group["params"] if not optimizer.state[p]):
        step = torch.zeros((), dtype=torch.float32, device=p.device)
        optimizer.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}


@torch.no_grad()
def move_biases(built: Built, good: Tensor) -> dict[str, Tensor]:
    """An expert that was chosen less than the mean in this step becomes easier to choose, and the other way round, by
    `bias_rate` (Wang et al. 2024, algorithm 1), where the step is `good`. Counts are global, once those of a stage's
    copies, which see some microbatches each, are added up: all ranks do the same.

    Returns how often each expert was chosen in the step and how many of these choices it dropped (2, E), by MoE layer,
    with and without biases."""
    loads = {}
    for name, layer in built.model.named_modules():
        holders = built.copies.get(f"{name}.router")
        if isinstance(layer, MoE) and (layer.counted or holders):
            none = torch.zeros(2, layer.c.experts, dtype=torch.int64, device=good.device)
            loads[name.removesuffix(".ffn")] = load = sum(layer.counted, none)
            layer.counted.clear()
            if holders:
                comm.all_reduce_(load, holders, "expert counts")
            counts = load[0]
            if layer.c.bias_rate:
                missing = counts.sum() - counts * len(counts)  # E times (mean - count): an integer, so that 0 is 0
                layer.bias.add_(missing.sign() * good, alpha=layer.c.bias_rate)
    return loads


def max_violation(choices: Sequence[int]) -> float:
    """How far the busiest expert is above the mean, as a share of it (MaxVio of Wang et al. 2024, eq. 4)."""
    return max(choices) * len(choices) / sum(choices) - 1


def learning_rate(config: TrainConfig, step: int) -> float:
    """Of the optimizer step with this 0-based index: linear warm-up to `lr` at step `warmup_steps - 1`, then `cosine`
    (Loshchilov and Hutter 2017, eq. 5) or stable and linear (`wsd`, Hu et al. 2024, eq. 1) down to `min_lr_ratio` at
    the last step."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    first = config.warmup_steps
    if config.schedule == "wsd":
        first = max(first, config.steps - round(config.decay_share * config.steps))
    done = (step + 1 - first) / max(config.steps - first, 1)
    if done <= 0:
        return config.lr
    left = 0.5 * (1 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1 - done
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)
