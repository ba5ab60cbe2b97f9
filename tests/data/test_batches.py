"""Global batches: every sample once an epoch, from (seed, step) alone, with the right targets."""

import random

import numpy as np
import pytest
import torch

from research.data.batches import GlobalBatches
from research.data.tokens import Tokens
from research.models.batch import Batch

END = 7


def stream(count: int, dtype: type = np.uint16) -> Tokens:
    """`count` ids below END with an END here and there, twice in a row too."""
    ids: np.ndarray = np.random.Generator(np.random.PCG64(1)).integers(0, END + 1, count).astype(dtype)
    return Tokens(ids, vocab_size=END + 1, end=END, text_bytes=count, unigram_entropy=2.0, path="notes.txt")


def numbered(samples: int, sequence: int) -> Tokens:
    """A stream whose token at place p is p, so that a row tells which sample it is."""
    ids: np.ndarray = np.arange(samples * sequence + 1, dtype=np.uint32)
    return Tokens(ids, vocab_size=len(ids) + 1, end=len(ids), text_bytes=1, unigram_entropy=2.0, path="notes.txt")


def sample_numbers(batches: GlobalBatches, steps: range, sequence: int) -> list[int]:
    return [int(row[0]) // sequence for s in steps for b in batches.microbatches_of(s) for row in b.tokens]


def same(left: list[Batch], right: list[Batch]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.equal(getattr(a, f), getattr(b, f)) for a, b in pairs for f in ("tokens", "targets", "positions"))


@pytest.mark.parametrize(("samples", "global_batch"), [(12, 4), (13, 4), (10, 7), (5, 5), (9, 1)])
def test_every_epoch_is_a_permutation(samples: int, global_batch: int) -> None:
    """Also where a batch crosses the end of an epoch."""
    batches = GlobalBatches(numbered(samples, 3), 3, global_batch, 1, seed=5)
    assert batches.samples == samples
    seen = sample_numbers(batches, range(4 * samples), 3)  # 4*G whole epochs
    assert len(seen) == 4 * samples * global_batch
    epochs = [seen[i : i + samples] for i in range(0, len(seen), samples)]
    assert all(sorted(epoch) == list(range(samples)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1  # another order in another epoch


def test_the_order_depends_on_the_seed() -> None:
    orders = [sample_numbers(GlobalBatches(numbered(50, 2), 2, 10, 1, seed), range(5), 2) for seed in (0, 1, 2**40)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3 and list(range(50)) not in orders


def test_a_step_can_be_asked_for_directly() -> None:
    tokens = stream(1000)
    forward = GlobalBatches(tokens, 8, 10, 2, seed=3)
    walked = [forward.microbatches_of(step) for step in range(60)]  # 124 samples: almost five epochs
    for step in (59, 0, 31, 12, 12, 58):
        assert same(GlobalBatches(tokens, 8, 10, 2, seed=3).microbatches_of(step), walked[step])
        assert same(forward.microbatches_of(step), walked[step])


def test_global_random_generators_are_neither_read_nor_moved() -> None:
    def states() -> tuple[bytes, bytes, int]:
        return torch.get_rng_state().numpy().tobytes(), np.random.get_state()[1].tobytes(), hash(random.getstate())  # type: ignore[index]

    results = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        before = states()
        batches = GlobalBatches(stream(1000), 8, 10, 2, seed=3)
        results.append(batches.microbatches_of(11) + batches.microbatches_of(30))
        assert states() == before
    assert same(*results)


@pytest.mark.parametrize(("global_batch", "microbatches"), [(8, 1), (8, 4), (7, 3), (8, 5), (6, 6)])
def test_microbatches_cut_the_global_batch_in_order(global_batch: int, microbatches: int) -> None:
    tokens = stream(1000)
    (whole,) = GlobalBatches(tokens, 8, global_batch, 1, seed=0).microbatches_of(17)
    parts = GlobalBatches(tokens, 8, global_batch, microbatches, seed=0).microbatches_of(17)
    cut = [len(rows) for rows in np.array_split(np.arange(global_batch), microbatches)]
    assert [len(part.tokens) for part in parts] == cut
    assert torch.equal(torch.cat([p.tokens for p in parts]), whole.tokens)
    assert torch.equal(torch.cat([p.targets for p in parts]), whole.targets)
    assert torch.equal(torch.cat([p.positions for p in parts]), whole.positions)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("sequence", [1, 2, 5, 16])
def test_targets_token_by_token(sequence: int, dtype: type) -> None:
    """Against the definition written as loops. 161 tokens are exactly 10 samples of 16 and the last target."""
    tokens = stream(161, dtype)
    ids = tokens.ids.tolist()
    expected = {}
    for i in range(160 // sequence):
        places = range(i * sequence, i * sequence + sequence)
        expected[tuple(ids[p] for p in places)] = [-100 if ids[p] == END else ids[p + 1] for p in places]
    batches = GlobalBatches(tokens, sequence, 160 // sequence, 1, seed=0)
    (batch,) = batches.microbatches_of(0)  # one epoch
    rows = [tuple(row) for row in batch.tokens.tolist()]
    if sequence > 2:  # shorter rows are not unique: their targets are compared as counts below
        assert len(set(rows)) == len(rows)
        assert {row: target for row, target in zip(rows, batch.targets.tolist(), strict=True)} == expected
    flat = sorted(zip(batch.tokens.flatten().tolist(), batch.targets.flatten().tolist(), strict=True))
    used = range(160 // sequence * sequence)
    assert flat == sorted((ids[p], -100 if ids[p] == END else ids[p + 1]) for p in used)
    assert (batch.targets == -100).sum() == sum(ids[p] == END for p in used) > 0
    assert batch.positions.tolist() == [list(range(sequence))] * len(rows)
    for tensor in (batch.tokens, batch.targets, batch.positions):
        assert tensor.dtype == torch.int64 and tensor.shape == (160 // sequence, sequence)


def test_the_last_sample_needs_its_last_target() -> None:
    assert GlobalBatches(stream(161), 16, 1, 1, seed=0).samples == 10
    assert GlobalBatches(stream(160), 16, 1, 1, seed=0).samples == 9


def test_batches_are_their_own_memory() -> None:
    tokens = stream(161)
    batches, before = GlobalBatches(tokens, 16, 10, 2, seed=0), tokens.ids.copy()
    whole = batches.microbatches_of(0)
    for part in batches.microbatches_of(0):
        part.map(lambda tensor: tensor.zero_())
    assert (tokens.ids == before).all() and same(batches.microbatches_of(0), whole)


@pytest.mark.parametrize(("count", "made"), [(100, 9), (10, 0), (1, 0)])
def test_a_text_that_is_too_short_is_named_with_its_counts(count: int, made: int) -> None:
    with pytest.raises(ValueError, match=r"notes\.txt") as error:
        GlobalBatches(stream(count), 10, 10, 1, seed=0)
    for part in (f"{count} tokens", f"{made} samples", "data.sequence=10", "train.global_batch=10"):
        assert part in str(error.value)
