"""Packed documents that do not see each other: a sample is as good as its documents one by one."""

import dataclasses

import pytest
import torch

from research.config import RunConfig, replace
from research.mesh import Mesh
from research.models import seams
from research.models.batch import NOT_COUNTED, Batch
from research.train.loop import Trainer

LENGTHS = [(9, 1, 6), (16,), (3, 13)]  # of the documents of each sample
CHANGES = {"model.vocab": 50, "model.layers": 2, "model.balance": 0.0, "model.z_loss": 0.0, "train.dtype": "float64"}


def packed() -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(50, (len(LENGTHS), 17), generator=generator)
    documents = torch.stack([torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in LENGTHS])
    follows = torch.nn.functional.pad(documents[:, 1:] == documents[:, :-1], (0, 1))
    targets = torch.where(follows, ids[:, 1:], NOT_COUNTED)
    return Batch(ids[:, :-1], targets, torch.arange(16).expand(ids.shape[0], 16), documents)


def gradients(config: RunConfig, batches: list[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, summed over batches, and all its gradients in one vector."""
    model = Trainer(config, Mesh({}), torch.device("cpu")).built.model
    loss = sum(model(batch).loss for batch in batches)
    return loss.detach(), torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def apart(batch: Batch) -> list[Batch]:
    """Each document as a sample of its own, at positions from 0."""
    rows = [
        dataclasses.replace(one, positions=one.positions - one.positions[:, :1])
        for i, lengths in enumerate(LENGTHS)
        for one in map(Batch, *(t[i : i + 1].split(lengths, 1) for t in dataclasses.astuple(batch)))
    ]
    return [one for one in rows if (one.targets >= 0).any()]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model.window": 4},
        {"model.kv_heads": 8, "train.recompute": "full"},
        {"model.attention": "mla", "model.rotary_dim": 4},
    ],
)
def test_documents_are_apart(changes, monkeypatch):
    config = replace(RunConfig(), {**CHANGES, "model.document_mask": True, **changes})
    batch = packed()
    want = gradients(config, apart(batch))
    torch.testing.assert_close(gradients(config, [batch]), want, rtol=1e-11, atol=1e-13)
    together = gradients(replace(config, {"model.document_mask": False}), [batch])
    assert (together[1] - want[1]).norm() > 1e-3 * want[1].norm()
    real = seams.causal_attention  # planted: one token of the document before is seen
    monkeypatch.setattr(seams, "causal_attention", lambda *given: real(*given[:-1], given[-1].roll(1, 1)))
    assert (gradients(config, [batch])[1] - want[1]).norm() > 1e-3 * want[1].norm()
