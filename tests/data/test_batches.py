"""Global batches: every sample once an epoch, from (seed, step) alone, with the right targets; the held-out ones."""

import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from research.data.batches import GlobalBatches, HeldOut
from research.data.packing import Packed, held_out
from research.data.tokens import Tokens
from research.models.batch import NOT_COUNTED, Batch
from research.problems import ConfigError

END = 7


def tokens_of(documents: list[np.ndarray], path: str = "notes.txt") -> Tokens:
    """A source of these documents; its text has three bytes a token."""
    offsets = np.cumsum([0, *map(len, documents)])
    ids = np.concatenate([*documents, np.zeros(0, np.uint32)])
    return Tokens(ids, offsets, offsets * 3, np.bincount(ids.astype(np.int64)), 1 << 32, path)


def random_documents(count: int, seed: int = 1, longest: int = 30) -> list[np.ndarray]:
    """Some of them empty, some longer than a sample."""
    draw = np.random.Generator(np.random.PCG64(seed))
    return [draw.integers(0, 1000, draw.integers(0, longest)).astype(np.uint32) for _ in range(count)]


def stream(count: int, dtype: type = np.uint16) -> Packed:
    """`count` ids below END with an END here and there, twice in a row too; a document ends with each."""
    ids: np.ndarray = np.random.Generator(np.random.PCG64(1)).integers(0, END + 1, count).astype(dtype)
    documents = np.split(ids, np.flatnonzero(ids == END) + 1)
    return Packed(tokens_of([d for d in documents if len(d)]))


def numbered(samples: int, sequence: int, first: int = 0) -> Packed:
    """A stream whose token at place p is first+p, so that a row tells which sample it is."""
    return Packed(tokens_of([np.arange(first, first + samples * sequence + 1, dtype=np.uint32)]))


def batches_of(source: Packed, sequence: int, global_batch: int, microbatches: int, seed: int) -> GlobalBatches:
    return GlobalBatches([source], sequence, global_batch, microbatches, seed)


def sample_numbers(batches: GlobalBatches, steps: range, sequence: int) -> list[int]:
    return [int(row[0]) // sequence for s in steps for b in batches.microbatches_of(s) for row in b.tokens]


def same(left: list[Batch], right: list[Batch]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.equal(getattr(a, f), getattr(b, f)) for a, b in pairs for f in ("tokens", "targets", "positions"))


@pytest.mark.parametrize(("samples", "global_batch"), [(12, 4), (13, 4), (10, 7), (5, 5), (9, 1)])
def test_every_epoch_is_a_permutation(samples: int, global_batch: int) -> None:
    """Also where a batch crosses the end of an epoch."""
    batches = batches_of(numbered(samples, 3), 3, global_batch, 1, seed=5)
    assert batches.samples == [samples]
    seen = sample_numbers(batches, range(4 * samples), 3)  # 4*G whole epochs
    assert len(seen) == 4 * samples * global_batch
    epochs = [seen[i : i + samples] for i in range(0, len(seen), samples)]
    assert all(sorted(epoch) == list(range(samples)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1  # another order in another epoch


def test_the_order_depends_on_the_seed() -> None:
    orders = [sample_numbers(batches_of(numbered(50, 2), 2, 10, 1, seed), range(5), 2) for seed in (0, 1, 2**40)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3 and list(range(50)) not in orders


def test_a_step_can_be_asked_for_directly() -> None:
    tokens = stream(1000)
    forward = batches_of(tokens, 8, 10, 2, seed=3)
    walked = [forward.microbatches_of(step) for step in range(60)]  # 124 samples: almost five epochs
    for step in (59, 0, 31, 12, 12, 58):
        assert same(batches_of(tokens, 8, 10, 2, seed=3).microbatches_of(step), walked[step])
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
        batches = batches_of(stream(1000), 8, 10, 2, seed=3)
        results.append(batches.microbatches_of(11) + batches.microbatches_of(30))
        assert states() == before
    assert same(*results)


@pytest.mark.parametrize(("global_batch", "microbatches"), [(8, 1), (8, 4), (7, 3), (8, 5), (6, 6)])
def test_microbatches_cut_the_global_batch_in_order(global_batch: int, microbatches: int) -> None:
    tokens = stream(1000)
    (whole,) = batches_of(tokens, 8, global_batch, 1, seed=0).microbatches_of(17)
    parts = batches_of(tokens, 8, global_batch, microbatches, seed=0).microbatches_of(17)
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
    ids = tokens._ids.tolist()
    expected = {}
    for i in range(160 // sequence):
        places = range(i * sequence, i * sequence + sequence)
        expected[tuple(ids[p] for p in places)] = [-100 if ids[p] == END else ids[p + 1] for p in places]
    batches = batches_of(tokens, sequence, 160 // sequence, 1, seed=0)
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
    new_document = batch.documents[:, 1:] != batch.documents[:, :-1]
    assert torch.equal(new_document, batch.targets[:, :-1] == -100)  # where a document ends, another begins
    for tensor in (batch.tokens, batch.targets, batch.positions, batch.documents):
        assert tensor.dtype == torch.int64 and tensor.shape == (160 // sequence, sequence)


def test_the_last_sample_needs_its_last_target() -> None:
    assert batches_of(stream(161), 16, 1, 1, seed=0).samples == [10]
    assert batches_of(stream(160), 16, 1, 1, seed=0).samples == [9]


def test_batches_are_their_own_memory() -> None:
    tokens = stream(161)
    batches, before = batches_of(tokens, 16, 10, 2, seed=0), tokens._ids.copy()
    whole = batches.microbatches_of(0)
    for part in batches.microbatches_of(0):
        part.map(lambda tensor: tensor.zero_())
    assert (tokens._ids == before).all() and same(batches.microbatches_of(0), whole)


@pytest.mark.parametrize(("count", "made"), [(100, 9), (10, 0), (1, 0)])
def test_a_text_that_is_too_short_is_named_with_its_counts(count: int, made: int) -> None:
    with pytest.raises(ValueError, match=r"notes\.txt") as error:
        batches_of(stream(count), 10, 10, 1, seed=0)
    for part in (f"{count} tokens", f"{made} samples", "data.sequence=10", "train.global_batch=10"):
        assert part in str(error.value)


def test_a_batch_is_the_same_with_and_without_held_out_documents_elsewhere() -> None:
    """What is not held out is packed as if it were all there is."""
    documents = random_documents(50)
    chosen = held_out(50, 0.5, 3, 0)
    part = Packed(tokens_of(documents), chosen)
    alone = Packed(tokens_of([d for d, c in zip(documents, chosen, strict=True) if c]))
    assert len(part) == len(alone) > 100 and part.text_bytes == alone.text_bytes == 3 * len(part)
    assert part.targets == alone.targets
    assert same(batches_of(part, 8, 5, 2, 1).microbatches_of(3), batches_of(alone, 8, 5, 2, 1).microbatches_of(3))


@pytest.mark.parametrize("length", [1, 2, 7, 100])
def test_windows_token_by_token(length: int) -> None:
    """Against lists, past the end of the stream too."""
    documents = random_documents(40, longest=12)
    packed = Packed(tokens_of(documents))
    ids = [int(i) for d in documents for i in d] + [0] * length
    owners = [n for n, d in enumerate(documents) for _ in d] + [-1] * length
    starts = np.array([0, 5, 17, 17, len(packed) - 3, len(packed) - 1])
    got_ids, got_owners = packed.windows(starts, length)
    assert got_ids.tolist() == [ids[s : s + length] for s in starts]
    assert got_owners.tolist() == [owners[s : s + length] for s in starts]


def test_each_source_runs_through_its_own_epochs() -> None:
    """Weights 3:1 over sources of 20 and 10 samples: each is permuted again and again, whatever the other does."""
    sizes, sequence = [20, 10], 4
    sources = [numbered(n, sequence, 1000 * k) for k, n in enumerate(sizes)]
    batches = GlobalBatches(sources, sequence, 8, 2, 7, [0.75, 0.25])
    firsts = [int(row[0]) for s in range(50) for b in batches.microbatches_of(s) for row in b.tokens]
    for k, size in enumerate(sizes):
        mine = [(f - 1000 * k) // sequence for f in firsts if f // 1000 == k]
        assert len(mine) == [300, 100][k]
        epochs = [mine[i : i + size] for i in range(0, len(mine), size)]
        assert all(sorted(e) == list(range(size)) for e in epochs)
        assert len({tuple(e) for e in epochs}) == len(epochs)
    again = GlobalBatches(sources, sequence, 8, 2, 7, [0.75, 0.25])
    assert all(same(again.microbatches_of(s), batches.microbatches_of(s)) for s in (49, 0, 31))


def test_by_size_all_sources_end_their_epochs_together() -> None:
    sources = [numbered(n, 3, 1000 * k) for k, n in enumerate((7, 1, 16))]
    batches = GlobalBatches(sources, 3, 24, 3, 0)
    for step in range(5):
        firsts = sorted(int(row[0]) for b in batches.microbatches_of(step) for row in b.tokens)
        assert firsts == sorted(1000 * k + 3 * i for k, n in enumerate((7, 1, 16)) for i in range(n))


def test_a_source_without_a_sample_is_named() -> None:
    short = Packed(tokens_of([np.zeros(8, np.uint32)], "short.txt"))
    with pytest.raises(ValueError, match=r"short\.txt has 8 tokens in 1 documents for training, which make 0 samples"):
        GlobalBatches([numbered(50, 8), short], 8, 4, 1, 0)


def test_sources_without_a_target_are_named() -> None:
    """Among others, too: their share of the samples would teach nothing."""
    ends = [Packed(tokens_of([np.full(1, END, np.uint32)] * 60, f"{name}.jsonl")) for name in "ab"]
    with pytest.raises(ConfigError) as error:
        GlobalBatches([ends[0], numbered(50, 8), ends[1]], 8, 4, 1, 0)
    rule = "holds nothing to predict: 60 tokens in 60 documents for training, none of which has two"
    told = [str(p) for p in error.value.problems]
    assert told == [f"data.path={name}.jsonl {rule}; legal: longer documents" for name in "ab"]


@pytest.mark.parametrize("share", [0.02, 0.3])
@pytest.mark.parametrize("seed", [0, 5])
def test_held_out_documents_never_appear_in_training(share: float, seed: int) -> None:
    """Every token is unique: over an epoch training and evaluation see disjoint ones, and together all but the ends of
    the streams that fill no sample."""
    lengths = [int(n) for n in np.random.Generator(np.random.PCG64(seed)).integers(1, 40, 400)]
    starts = np.cumsum([0, *lengths])
    documents = [np.arange(a, b, dtype=np.uint32) for a, b in pairwise(starts)]
    tokens = tokens_of(documents)
    chosen = held_out(400, share, seed, 0)
    assert abs(chosen.mean() - share) < 4 * (share / 400) ** 0.5
    training, evaluation = Packed(tokens, ~chosen), Packed(tokens, chosen)
    batches, split = batches_of(training, 16, 8, 1, seed), HeldOut([evaluation], 16, 8)
    steps = range(-(-batches.samples[0] // 8))
    batched = [b for s in steps for b in batches.microbatches_of(s)]
    trained = {int(i) for b in batched for t in (b.tokens, b.targets) for i in t.flatten()}
    evaluated = [split.batch(n) for n in range(len(split))]
    targets = [int(i) for b in evaluated for i in b.targets.flatten() if i >= 0]
    held = {int(i) for d, c in zip(documents, chosen, strict=True) if c for i in d}
    assert not trained & held and len(trained - {-100}) > starts[-1] - len(held) - 17
    assert sorted(targets) == sorted(i for d, c in zip(documents, chosen, strict=True) if c for i in d[1:].tolist())
    assert len(targets) == split.counted and split.text_bytes == 3 * len(held)


def test_the_split_depends_on_seed_source_and_number_alone() -> None:
    one = held_out(3000, 0.1, 4, 1)
    assert (held_out(1000, 0.1, 4, 1) == one[:1000]).all()  # documents that are added change nothing before them
    assert (one & held_out(3000, 0.2, 4, 1)).sum() == one.sum()  # a larger share holds out these and others
    for other in (held_out(3000, 0.1, 5, 1), held_out(3000, 0.1, 4, 2)):
        assert 5 < (one & other).sum() < 80 and abs(int(other.sum()) - 300) < 80


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_the_tail_of_the_split_is_filled_with_rows_that_do_not_count(rows: int) -> None:
    nothing = np.zeros(0, np.uint32)
    sources = [Packed(tokens_of([nothing, *random_documents(9, seed), nothing])) for seed in (1, 2)]
    split = HeldOut([*sources, Packed(tokens_of([np.zeros(1, np.uint32)]))], 5, rows)
    windows = sum(-(-(len(s) - 1) // 5) for s in sources)
    assert len(split) == -(-windows // rows)
    found = [split.batch(n) for n in range(len(split))]
    assert all(b.tokens.shape == (rows, 5) and b.tokens.dtype == torch.int64 for b in found)
    assert sum(int((b.targets >= 0).sum()) for b in found) == split.counted
    empty = len(split) * rows - windows
    assert not empty or (found[-1].targets[-empty:] == -100).all()


def test_an_empty_split_is_named() -> None:
    tokens = tokens_of(random_documents(5))
    with pytest.raises(ValueError, match=r"holds out nothing: data\.path=notes\.txt gives 0 documents, 0 tokens"):
        HeldOut([Packed(tokens, np.zeros(5, bool))], 8, 4)


def test_further_tokens_and_targets_one_by_one() -> None:
    """At each depth, from the documents of the whole sample; the main tensors are those without."""
    source, sequence, depths = stream(400), 12, 4
    plain = batches_of(source, sequence, 5, 2, seed=3)
    ahead = GlobalBatches([source], sequence, 5, 2, 3, ahead=depths)
    for step in range(4):
        assert same(plain.microbatches_of(step), ahead.microbatches_of(step))
        for batch in ahead.microbatches_of(step):
            assert len(batch.ahead) == depths
            for row in range(len(batch.tokens)):
                last = int(batch.ahead[0].tokens[row, -1])  # of S + 1 tokens
                ids = [*batch.tokens[row].tolist(), last]
                document = [sum(i == END for i in ids[:place]) for place in range(len(ids))]
                for k, further in enumerate(batch.ahead, 1):
                    for place in range(sequence):
                        seen = ids[place + k] if place + k <= sequence else 0
                        target = place + k + 1
                        counts = target <= sequence and document[target] == document[place]
                        want = ids[target] if counts else NOT_COUNTED
                        assert further.tokens[row, place] == seen and further.targets[row, place] == want
