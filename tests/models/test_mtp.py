"""Multi-token prediction against a second implementation: from the text itself, with its own shifts and means."""

import dataclasses

import numpy as np
import pytest
import torch

from research.config import replace
from research.data import batches as data
from research.data.packing import Packed
from research.data.tokens import Tokens
from research.models.decoder import Decoder
from research.models.mtp import Prediction
from research.problems import ConfigError
from research.settings import from_mapping, to_mapping
from research.train import loop
from research.train.executor import Denominators
from tests.models.test_oracle import SMALL, biased, cross_entropy_by_hand, layers_by_hand, rms

LENGTH, SAMPLES = 12, 6
DOCUMENTS = (5, 1, 2, 30, 3, 9, 14, 2, 20)  # tokens of each; a sample meets up to four, and some are cut
BASE = {"model.mtp_depth": 2, "model.mtp_weight": 0.7, "model.layers": 2, "data.sequence": LENGTH}
CASES = [
    {},
    {"model.mtp_depth": 1, "model.tied": True},
    {"model.mtp_depth": 3, "model.dense_layers": 0, "model.moe_every": 3, "train.recompute": "full"},  # dense layers
    {"model.bias_rate": 0.1, "model.router_score": "sigmoid", "train.recompute": "full"},
    {"model.norm": "sandwich", "model.balance_scope": "sequence"},
    {"model.norm": "post", "model.experts": 0},
    {"model.capacity": 0.75, "train.recompute": "full"},
]


def source() -> Packed:
    ids = torch.randint(50, (sum(DOCUMENTS),), generator=torch.Generator().manual_seed(2)).numpy()
    offsets = np.cumsum([0, *DOCUMENTS])
    return Packed(Tokens(ids, offsets, None, np.bincount(ids), 50, "text"))


def given(config, microbatches):
    depth = config.model.mtp_depth
    return data.GlobalBatches([source()], LENGTH, SAMPLES, microbatches, 0, (), depth).microbatches_of(0)


def by_hand(p, c, parts):
    """Loss of the step, and its parts: main cross-entropy, auxiliary loss, cross-entropy of each depth."""
    text = source()
    ids = text._ids.tolist()
    document = [n for n, length in enumerate(DOCUMENTS) for _ in range(length)]
    head = p["embedding.weight" if c.tied else "head.weight"]
    sums, counts, aux = [0.0] * (c.mtp_depth + 1), [0] * (c.mtp_depth + 1), 0.0
    for part in parts:
        begins = [next(b for b in range(0, len(ids), LENGTH) if ids[b : b + LENGTH] == row) for row in part]
        xs, of_part = layers_by_hand(p, c, [p["embedding.weight"][row] for row in part])
        hs = [rms(x, p["head.norm.weight"], c.norm_eps) for x in xs]
        for k in range(c.mtp_depth + 1):
            w = {n.removeprefix(f"mtp.{k}."): v for n, v in p.items() if n.startswith(f"mtp.{k}.")}
            if k:
                xs = []
                for h, b in zip(hs, begins, strict=True):
                    seen = [ids[b + i + k] if i + k <= LENGTH else 0 for i in range(LENGTH)]
                    embedded = rms(p["embedding.weight"][seen], w["embedding_norm.weight"], c.norm_eps)
                    left, right = w["projection"].split(c.dim, 1)
                    xs.append(embedded @ left.T + rms(h, w["hidden_norm.weight"], c.norm_eps) @ right.T)
                one = {n.replace("layer.", "layers.0.", 1): v for n, v in w.items()}
                xs, more = layers_by_hand(one, dataclasses.replace(c, layers=1), xs)
                hs, of_part = [rms(x, w["norm.weight"], c.norm_eps) for x in xs], of_part + more
            targets = []
            for b in begins:
                places = [b + i + k + 1 for i in range(LENGTH)]
                inside = [q <= b + LENGTH and document[q] == document[b + i] for i, q in enumerate(places)]
                targets.append([ids[q] if good else -1 for q, good in zip(places, inside, strict=True)])
            sums[k] = sums[k] + cross_entropy_by_hand(hs, head, targets)
            counts[k] += sum(t >= 0 for row in targets for t in row)
        aux = aux + of_part * len(part) / SAMPLES
    means = [s / n for s, n in zip(sums, counts, strict=True)]
    assert len(set(counts)) == len(counts), "a shared denominator would not show"
    return means[0] + aux + c.mtp_weight * sum(means[1:]) / c.mtp_depth, [means[0], aux, *means[1:]]


@pytest.mark.parametrize("changes", CASES)
@pytest.mark.parametrize("microbatches", [1, 4])
def test_losses_and_every_gradient(changes, microbatches):
    config = replace(SMALL, {**BASE, **changes, "train.microbatches": microbatches})
    parameters = {n: p.detach().clone().requires_grad_() for n, p in biased(config).built.model.named_parameters()}
    parts = given(config, microbatches)
    loss, terms = by_hand(parameters, config.model, [part.tokens.tolist() for part in parts])
    loss.backward()
    trainer = biased(config)
    got = trainer.backward(parts)
    want = torch.stack([torch.as_tensor(t, dtype=torch.float64).detach() for t in terms])
    torch.testing.assert_close(got.totals, want, rtol=1e-12, atol=0)
    for name, _, grad in trainer.storage.gradients():
        of_hand = parameters[name].grad
        assert (grad - of_hand).norm() <= 1e-11 * max(of_hand.norm(), 1e-8), name


def test_depths_leave_the_main_model_alone():
    """Bitwise: initial values and the main loss are those of the model without."""
    trainers = [biased(replace(SMALL, {**BASE, "model.mtp_depth": depth})) for depth in (0, 2)]
    (none, _), (some, more) = ((t.backward(given(t.config, 1)).totals[0], t.built.specs) for t in trainers)
    assert torch.equal(none, some)
    here, there = (dict(t.built.model.named_parameters()) for t in trainers)
    assert set(there) == set(more) and set(here) == {n for n in there if not n.startswith("mtp.")}
    assert all(torch.equal(there[n], here[n]) for n in here)


def test_an_evaluation_asks_for_the_main_loss_alone(monkeypatch):
    config = replace(SMALL, BASE)
    trainer = biased(config)
    held_out = data.HeldOut([source()], LENGTH, 4)
    monkeypatch.setattr(Prediction, "forward", None)
    without = biased(replace(SMALL, {**BASE, "model.mtp_depth": 0}))
    assert trainer.evaluate(held_out) == without.evaluate(held_out)


def test_a_depth_without_any_target_has_loss_0():
    config = replace(SMALL, {**BASE, "model.z_loss": 0.0, "model.balance": 0.0})
    trainer = biased(config)
    (part,) = given(config, 1)
    first, second = part.ahead
    none = dataclasses.replace(second, targets=torch.full_like(second.targets, -100))
    got = trainer.backward([dataclasses.replace(part, ahead=(first, none))])
    assert got.totals[3] == 0 and got.totals[2] > 0
    assert all(g.isfinite().all() for _, _, g in trainer.storage.gradients())


@pytest.mark.parametrize("depth, sequence, legal", [(64, 64, "0 to 63"), (2, 1, "0 to 0")])
def test_no_target_is_refused(depth, sequence, legal):
    tree = to_mapping(SMALL)
    words = [f"model.mtp_depth={depth}", f"data.sequence={sequence}"]
    with pytest.raises(ConfigError) as error:
        from_mapping(tree, words)
    (problem,) = error.value.problems
    assert str(problem).startswith(f"model.mtp_depth={depth} leaves no target in a sample of data.sequence={sequence}")
    assert problem.legal == legal
    from_mapping(tree, ["model.mtp_depth=63"])


def one_further(ids, documents, by, real=data._shifted):
    return real(ids, documents, by + (by > 0))


def own_embedding(self, h, embedded, *rest, real=Prediction.forward):
    return real(self, h, embedded.detach(), *rest)


def shared_denominator(counted, tokens, ahead, weight):
    return Denominators(counted, tokens, [counted] * len(ahead), weight)


def without_aux(self, batch, *part, real=Decoder.forward):
    return real(self, batch, *part)._replace(aux=real(self, dataclasses.replace(batch, ahead=())).aux)


@pytest.mark.parametrize(
    "where, what, fault",
    [
        (data, "_shifted", one_further),
        (Prediction, "forward", own_embedding),
        (loop, "Denominators", shared_denominator),
        (Decoder, "forward", without_aux),
    ],
)
def test_planted_faults(monkeypatch, where, what, fault):
    monkeypatch.setattr(where, what, fault)
    with pytest.raises(AssertionError):
        test_losses_and_every_gradient({}, 1)
