"""The decoder against a second implementation that shares no code with it: loops, explicit softmax, plain means."""

import dataclasses
import math
from itertools import pairwise

import pytest
import torch

from research.build import build
from research.config import RunConfig, replace
from research.mesh import Mesh
from research.models.batch import Batch
from research.train.loop import Trainer

SMALL = RunConfig(
    model=dataclasses.replace(RunConfig().model, vocab=50, layers=3, balance=0.3, z_loss=0.1),
    train=dataclasses.replace(RunConfig().train, dtype="float64", clip=0.0),
)


def batch_of(config: RunConfig) -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.model.vocab, (4, 17), generator=generator)
    targets = ids[:, 1:].clone()
    targets[0, 3:9] = -100
    return Batch(ids[:, :-1], targets, torch.arange(16).expand(4, 16), torch.zeros(4, 16, dtype=torch.int64))


def biased(config: RunConfig) -> Trainer:
    """Selection biases start as zeros, norms as ones, which would hide their part; here biases change most choices."""
    trainer = Trainer(config, Mesh({}), torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in trainer.built.model.named_parameters():
        if name.endswith("ffn.bias"):
            parameter.data.normal_(std=0.02, generator=generator)
        elif "norm" in name:
            parameter.data.normal_(1.0, 0.3, generator=generator)
    return trainer


def rms(x, w, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * w


def turn(x, base):
    """x (S, h): pairs (i, i + h/2) turned by position * base**(-2i/h), as complex numbers."""
    length, width = x.shape
    angle = torch.arange(length)[:, None] * base ** (-torch.arange(0, width, 2, dtype=x.dtype) / width)
    z = torch.complex(x[:, : width // 2], x[:, width // 2 :]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], -1)


def swiglu(x, gate, up, down):
    a = x @ gate.T
    return (a / (1 + torch.exp(-a)) * (x @ up.T)) @ down.T


def first_norm(x, w, part, c):
    return rms(x, w[f"{part}_norm.weight"], c.norm_eps) if c.norm in ("pre", "sandwich") else x


def added(x, y, w, part, c):
    weight = w.get(f"{part}_out_norm.weight")
    if c.norm == "post":
        return rms(x + y, weight, c.norm_eps)
    return x + (y if c.norm == "pre" else rms(y, weight, c.norm_eps))


def best_experts(scores, c):
    """The chosen experts, the best first: those of the best groups."""
    size = c.experts // c.expert_groups
    worth = [sum(sorted(scores[g * size : g * size + size])[-c.group_best :]) for g in range(c.expert_groups)]
    open_groups = sorted(range(c.expert_groups), key=lambda g: -worth[g])[: c.top_groups]
    inside = [e for e in range(c.experts) if e // size in open_groups]
    return sorted(inside, key=lambda e: -scores[e])[: c.top_k]


def served(wishes, tokens, c):
    """The (expert, weight) of each token that no full expert turned away."""
    room = math.ceil(c.capacity * tokens * c.top_k / c.experts) if c.capacity else tokens
    left, taken = [room] * c.experts, [[] for _ in range(tokens)]
    for i, e, weight in sorted(wishes, key=lambda w: -w[2].item()) if c.drop_by == "score" else wishes:
        if left[e]:
            left[e] -= 1
            taken[i].append((e, weight))
    return taken


def layers_by_hand(p, c, xs):
    """What the layers make of each sequence, and auxiliary losses: one head, one expert, one token at a time."""
    aux = 0.0
    for i in range(c.layers):
        w = {k.removeprefix(f"layers.{i}."): v for k, v in p.items() if k.startswith(f"layers.{i}.")}
        after = []
        for x in xs:
            h = first_norm(x, w, "attention", c)
            heads = []
            for n in range(c.heads):
                g, d = n * c.kv_heads // c.heads, c.head_dim
                q = turn(h @ w["attention.wq"][n * d : n * d + d].T, c.rope_base)
                k = turn(h @ w["attention.wk"][g * d : g * d + d].T, c.rope_base)
                v = h @ w["attention.wv"][g * d : g * d + d].T
                score = (q @ k.T / math.sqrt(d)).masked_fill(torch.ones(len(h), len(h)).triu(1).bool(), -math.inf)
                heads.append(score.softmax(-1) @ v)
            after.append(added(x, torch.cat(heads, -1) @ w["attention.wo"].T, w, "attention", c))
        hs = [first_norm(x, w, "ffn", c) for x in after]
        if "ffn.router" not in w:
            dense = [w[f"ffn.{n}"] for n in ("w_gate", "w_up", "w_down")]
            xs = [added(x, swiglu(h, *dense), w, "ffn", c) for x, h in zip(after, hs, strict=True)]
            continue
        tokens = torch.cat(hs)
        logits = tokens @ w["ffn.router"].T
        score = 1 / (1 + torch.exp(-logits)) if c.router_score == "sigmoid" else logits.softmax(-1)
        bias = w.get("ffn.bias", torch.zeros(c.experts))
        chosen = torch.zeros(len(xs), c.experts, dtype=torch.float64)
        rows, wishes = [], []
        for i, (s, logit) in enumerate(zip(score, logits, strict=True)):
            best = best_experts((s + bias).tolist(), c)
            weight = s[best]
            if c.normalize_weights:  # of softmax scores: top-k before softmax
                weight = logit[best].softmax(-1) if c.router_score == "softmax" else weight / weight.sum()
            wishes += [(i, e, part) for e, part in zip(best, weight * c.weight_scale, strict=True)]
            for e in best:
                chosen[i // len(xs[0]), e] += 1
        taken = served(wishes, len(tokens), c)
        for i, t in enumerate(tokens):
            y = torch.zeros_like(t)
            for e, part in taken[i]:
                y = y + part * swiglu(t[None], w["ffn.w_gate"][e], w["ffn.w_up"][e], w["ffn.w_down"][e])[0]
            if c.shared_experts:
                y = y + swiglu(t[None], *(w[f"ffn.shared.{n}"] for n in ("w_gate", "w_up", "w_down")))[0]
            rows.append(y)
        if c.router_score == "sigmoid":
            score = score / score.sum(-1, keepdim=True)
        if c.balance_scope == "batch":
            chosen, score = chosen.sum(0, keepdim=True), [score]
        else:
            score = score.chunk(len(xs))
        balance = [c.experts * (n / n.sum() * p.mean(0)).sum() for n, p in zip(chosen, score, strict=True)]
        aux = aux + c.balance * sum(balance) / len(balance)
        aux = aux + c.z_loss * (torch.log(torch.exp(logits).sum(-1)) ** 2).mean()
        ys = torch.stack(rows).split([len(x) for x in after])
        xs = [added(x, y, w, "ffn", c) for x, y in zip(after, ys, strict=True)]
    return xs, aux


def loss_by_hand(p, c, batch):
    """Sum of cross-entropy and auxiliary loss."""
    xs, aux = layers_by_hand(p, c, [p["embedding.weight"][row] for row in batch.tokens])
    hs = [rms(x, p["head.norm.weight"], c.norm_eps) for x in xs]
    return cross_entropy_by_hand(hs, p["embedding.weight" if c.tied else "head.weight"], batch.targets), aux


def cross_entropy_by_hand(hs, head, targets):
    total = 0.0
    for h, of_row in zip(hs, targets, strict=True):
        log = torch.log_softmax(h @ head.T, -1)
        for row, target in zip(log, of_row, strict=True):
            if target >= 0:
                total = total - row[target]
    return total


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model.tied": True, "model.kv_heads": 8},
        {"model.kv_heads": 1, "model.shared_experts": 0, "model.top_k": 1, "model.normalize_weights": False},
        {"model.shared_experts": 2, "model.top_k": 3, "model.normalize_weights": False, "model.dense_layers": 0},
        {"model.experts": 0},
        {"model.norm": "post"},
        {"model.norm": "output"},
        {"model.norm": "sandwich", "train.recompute": "full"},
        {"model.router_score": "sigmoid", "model.weight_scale": 2.5, "model.bias_rate": 0.1},
        {"model.router_score": "sigmoid", "model.normalize_weights": False, "model.balance_scope": "sequence"},
        {"model.balance_scope": "sequence", "model.bias_rate": 0.1, "model.moe_every": 3},
        {"model.expert_groups": 4, "model.top_groups": 2, "model.group_best": 2, "model.top_k": 3},
        {"model.capacity": 1.0, "model.bias_rate": 0.1},
        {"model.capacity": 0.7, "model.drop_by": "score", "model.shared_experts": 0, "train.recompute": "full"},
        {"model.capacity": 0.01, "model.dense_layers": 0},  # one choice an expert
        {
            "model.router_score": "sigmoid",
            "model.expert_groups": 2,
            "model.group_best": 3,
            "model.bias_rate": 0.1,
            "train.recompute": "full",
        },
    ],
)
@pytest.mark.parametrize("cuts", [(0, 4), (0, 2, 3, 4)], ids=["whole", "unequal microbatches"])
def test_loss_and_every_gradient(changes, cuts):
    config = replace(SMALL, changes)
    parameters = {n: p.detach().clone().requires_grad_() for n, p in biased(config).built.model.named_parameters()}
    batch = batch_of(config)
    parts = [batch.map(lambda t, a=a, b=b: t[a:b]).numbered() for a, b in pairwise(cuts)]
    losses, auxes = zip(*(loss_by_hand(parameters, config.model, part) for part in parts), strict=True)
    loss = sum(losses) / int((batch.targets >= 0).sum())
    aux = sum(a * part.tokens.numel() / batch.tokens.numel() for a, part in zip(auxes, parts, strict=True))
    (loss + aux).backward()
    config = replace(config, {"train.microbatches": len(parts)})
    trainer = biased(config)
    got = trainer.backward(parts)
    torch.testing.assert_close(got.totals[0], loss.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(got.totals[1], torch.as_tensor(aux, dtype=torch.float64).detach(), rtol=1e-12, atol=0)
    for name, _, grad in trainer.storage.gradients():
        want = parameters[name].grad
        assert (grad - want).norm() <= 1e-11 * max(want.norm(), 1e-8), name


def test_rotary_depends_on_the_distance_only():
    """Positions shifted alike leave the loss alone: a rank may hold any part of a sequence."""
    trainer = Trainer(SMALL, Mesh({}), torch.device("cpu"))
    batch = batch_of(SMALL)
    losses = [
        trainer.built.model(dataclasses.replace(batch, positions=batch.positions + shift)).loss for shift in (0, 1000)
    ]
    torch.testing.assert_close(*losses, rtol=1e-11, atol=0)


def test_parameters_are_declared_and_counted():
    built = build(SMALL, Mesh({}), torch.device("cpu"))
    named = dict(built.model.named_parameters())
    assert set(named) == set(built.specs)
    assert all(tuple(named[n].shape) == s.shape for n, s in built.specs.items())


@pytest.mark.parametrize(
    "what, fault, changes",
    [
        ("decoder.Layer._added", lambda self, x, y, norm: x + norm(y), {"model.norm": "post"}),
        ("moe.choose", lambda scores, c: scores.topk(c.top_k, -1).indices, {"model.expert_groups": 4}),
        ("moe.capacity", lambda c, tokens: int(c.capacity * tokens * c.top_k / c.experts), {"model.capacity": 0.7}),
        ("moe.MoE.share", lambda self, ids, n: (n / n.sum()).double()[None], {"model.balance_scope": "sequence"}),
    ],
)
def test_planted_faults(monkeypatch, what, fault, changes):
    monkeypatch.setattr(f"research.models.{what}", fault)
    with pytest.raises(AssertionError):
        test_loss_and_every_gradient(changes, (0, 4))
