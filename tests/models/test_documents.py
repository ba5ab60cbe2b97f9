"""Packed documents that do not see each other: a sample is as good as its documents one by one."""

import dataclasses

import pytest
import torch

from research.config import RunConfig, replace
from research.mesh import Mesh
from research.models import seams
from research.models.batch import NOT_COUNTED, Ahead, Batch
from research.train.loop import Trainer

LENGTHS = [(9, 1, 6), (16,), (3, 13)]  # of the documents of each sample
DEPTHS = 2
CHANGES = {"model.vocab": 50, "model.layers": 2, "model.balance": 0.0, "model.z_loss": 0.0, "train.dtype": "float64"}


def packed() -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(50, (len(LENGTHS), 17), generator=generator)
    documents = torch.stack([torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in LENGTHS])
    documents = torch.nn.functional.pad(documents, (0, DEPTHS + 1), value=-1)
    ids = torch.nn.functional.pad(ids, (0, DEPTHS))

    def further(places: int) -> tuple[torch.Tensor, torch.Tensor]:
        follows = documents[:, places + 1 : places + 17] == documents[:, :16]
        return ids[:, places : places + 16], torch.where(follows, ids[:, places + 1 : places + 17], NOT_COUNTED)

    ahead = tuple(Ahead(*further(k)) for k in range(1, DEPTHS + 1))
    positions = torch.arange(16).expand(ids.shape[0], 16)
    return Batch(*further(0), positions, documents[:, :16], ahead=ahead)


def gradients(config: RunConfig, batches: list[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, summed over batches, and all its gradients in one vector."""
    model = Trainer(config, Mesh({}), torch.device("cpu")).built.model
    batches = batches if model.mtp else [dataclasses.replace(batch, ahead=()) for batch in batches]
    loss = sum(out.loss + sum(out.ahead) for out in map(model, batches))
    return loss.detach(), torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def apart(batch: Batch) -> list[Batch]:
    """Each document as a sample of its own, at positions from 0, that knows no token of the next one."""
    rows = []
    for i, lengths in enumerate(LENGTHS):
        for n, length in enumerate(lengths):
            here = slice(sum(lengths[:n]), sum(lengths[: n + 1]))
            one = batch.map(lambda t, i=i, here=here: t[i : i + 1, here].clone())
            one.positions.sub_(here.start)
            for k, ahead in enumerate(one.ahead, 1):
                ahead.tokens[:, max(length - k, 0) :] = 7
            rows.append(one)
    return [one for one in rows if (one.targets >= 0).any()]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model.window": 4},
        {"model.kv_heads": 8, "train.recompute": "full"},
        {"model.attention": "mla", "model.rotary_dim": 4},
        {"model.mtp_depth": DEPTHS},
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
