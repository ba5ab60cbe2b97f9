"""The key-value cache of a model on this rank, and attention over it, in place of the seams of its attentions.

A forward takes a flat batch of one row: the tokens of new prompts, one prompt after another, then one token of each
sequence that goes on. No prompt is padded to the length of another.

T tokens of the batch, n sequences that go on, M blocks of the longest table, b tokens of a block, H heads, G kv heads,
h head dim, v of values, L latent, R turned elements of a head
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from research.generate.blocks import Blocks, blocks_needed
from research.models.attention import Attention
from research.models.decoder import Decoder
from research.models.kernels import causal_attention
from research.models.mla import LatentAttention
from research.models.seams import Seam, wire


@dataclass(frozen=True)
class Lines:
    """What a forward needs to know of some `Blocks`."""

    rows: Tensor  # (t,) tokens of the batch that are kept; of a prompt longer than the window its end
    slots: Tensor  # (t,) where
    table: Tensor  # (n, M) blocks of each sequence that goes on; shorter tables end in block 0
    seen: Tensor  # (n, 1, 1, M*b) whether its last token sees what is there


@dataclass(frozen=True)
class Step:
    """Who is in a forward's batch."""

    spans: Sequence[slice]  # of new prompts, each seeing itself alone
    new: int  # tokens of these
    going: int  # n, after those
    lines: Mapping[int, Lines]  # by window


class Cache:
    """Takes the place of `attend` and `attend_latent` in all attentions of a model."""

    def __init__(self, model: Decoder, lengths: Sequence[int], size: int, most_tokens: int = 0) -> None:
        """For sequences that grow to these lengths, all at once, or as many as `most_tokens` have room for."""
        attentions = [m for m in model.modules() if isinstance(m, Attention | LatentAttention)]
        self.blocks: dict[int, Blocks] = {}
        # Those of layers on other ranks, too: all stages let the same texts in.
        for window in sorted({model.c.window_of(layer) for layer in range(model.c.layers)}):
            count = sum(blocks_needed(length, size, window) for length in lengths)
            self.blocks[window] = Blocks(min(count, most_tokens // size or count), size, window)
        self.step = Step([], 0, 0, {})
        self.layers: list[HeadsCache | LatentCache] = []
        for a in attentions:
            self.layers.append(LatentCache(a, self) if isinstance(a, LatentAttention) else HeadsCache(a, self))
            a.seams = wire(a.seams, {"cache": self.layers[-1].seams()})

    @property
    def token_bytes(self) -> int:
        """Of one token in all layers of this rank."""
        return sum(pool.shape[2:].numel() * pool.itemsize for layer in self.layers for pool in layer.pools)

    def reserve(self, sequence: int, tokens: int) -> bool:
        """Let a sequence in, that grows to so many tokens, where there is room for it."""
        got = [b for b in self.blocks.values() if b.reserve(sequence, tokens)]
        if len(got) == len(self.blocks):
            return True
        for blocks in got:
            blocks.release(sequence)
        return False

    def release(self, sequence: int) -> None:
        for blocks in self.blocks.values():
            blocks.release(sequence)

    def begin(self, new: Mapping[int, int], padding: int, going: Mapping[int, int], device: torch.device) -> None:
        """The next forward's batch: sequences by number with their lengths. Rows of `padding` are kept nowhere."""
        spans, low = [], 0
        for length in [*new.values(), *[padding] * (padding > 0)]:
            spans.append(slice(low, low + length))
            low += length
        lines = {w: self._lines(b, new, going, low, device) for w, b in self.blocks.items()}
        self.step = Step(spans, low, len(going), lines)

    def _lines(
        self, blocks: Blocks, new: Mapping[int, int], going: Mapping[int, int], low: int, device: torch.device
    ) -> Lines:
        rows, slots, start = list[int](), list[int](), 0
        for sequence, length in new.items():
            blocks.extend(sequence, length)
            kept = range(blocks.first[sequence], length)
            rows += (start + p for p in kept)
            slots += blocks.slots(sequence, kept)
            start += length
        for i, (sequence, length) in enumerate(going.items()):
            blocks.extend(sequence, length)
            rows.append(low + i)
            slots += blocks.slots(sequence, [length - 1])
        tables = [blocks.tables[s] for s in going]
        longest = max(map(len, tables), default=0)
        table = torch.tensor([[*t, *[0] * (longest - len(t))] for t in tables], dtype=torch.int64, device=device)
        first = torch.tensor([blocks.first[s] for s in going], dtype=torch.int64, device=device)[:, None]
        lengths = torch.tensor([*going.values()], dtype=torch.int64, device=device)[:, None]
        places = first + torch.arange(longest * blocks.size, device=device)
        seen = (places < lengths) & (places >= lengths - (blocks.window or lengths))
        where = torch.tensor([rows, slots], dtype=torch.int64, device=device)
        return Lines(where[0], where[1], table, seen[:, None, None])


class LayerCache:
    """Pools of one layer, each (blocks, b, ..)."""

    def __init__(
        self, attention: Attention | LatentAttention, cache: Cache, like: Tensor, *shapes: Sequence[int]
    ) -> None:
        self.window, self.scale, self._cache = attention.window, attention.scale, cache
        blocks = cache.blocks[attention.window]
        # Zeros: what is masked is multiplied with a probability of 0, which would not help against NaN.
        self.pools = [like.new_zeros(blocks.count, blocks.size, *shape, requires_grad=False) for shape in shapes]

    @property
    def step(self) -> Step:
        return self._cache.step

    @property
    def lines(self) -> Lines:
        return self.step.lines[self.window]

    def keep(self, *values: Tensor) -> None:
        """(1, T, ..) of each pool."""
        for pool, value in zip(self.pools, values, strict=True):
            pool.flatten(0, 1)[self.lines.slots] = value[0, self.lines.rows]

    def past(self) -> list[Tensor]:
        """(n, M*b, ..) of each pool, the tokens of each sequence that goes on; some of them are not `seen`."""
        return [pool[self.lines.table].flatten(1, 2) for pool in self.pools]

    def prompts(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """(1, tokens, ..) of new prompts -> (1, S, H, v) of each."""
        return [causal_attention(q[:, s], k[:, s], v[:, s], self.scale, self.window) for s in self.step.spans]


class HeadsCache(LayerCache):
    """Keys and values of each kv head."""

    def __init__(self, attention: Attention, cache: Cache) -> None:
        width = attention.c.head_dim
        shape = len(attention.wk) // width, width
        super().__init__(attention, cache, attention.wk, shape, shape)

    def seams(self) -> Mapping[str, Seam]:
        return {"attend": self.attend}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, **_: object) -> Tensor:
        """(1, T, H, h), (1, T, G, h), (1, T, G, h) -> (1, T, H, h). A sequence is one document."""
        self.keep(k, v)
        parts = self.prompts(q, k, v)
        if self.step.going:
            past_k, past_v = (rearrange(t, "n s g h -> n g s h") for t in self.past())
            # The heads that share a kv head are as many queries of one sequence.
            asked = rearrange(q[0, self.step.new :], "n (g r) h -> n g r h", g=past_k.shape[1])
            o = F.scaled_dot_product_attention(asked, past_k, past_v, self.lines.seen, scale=self.scale)
            parts.append(rearrange(o, "n g r h -> 1 n (g r) h"))
        return torch.cat(parts, 1)


class LatentCache(LayerCache):
    """The latent and the turned key of a token, for all heads (DeepSeek-V2, section 2.1)."""

    def __init__(self, attention: LatentAttention, cache: Cache) -> None:
        self.c = attention.c
        super().__init__(attention, cache, attention.wkv_up, (self.c.kv_latent + self.c.rotary_dim,))

    def seams(self) -> Mapping[str, Seam]:
        return {"attend": self.attend, "attend_latent": self.attend_latent}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, **_: object) -> Tensor:
        return torch.cat(self.prompts(q, k, v), 1)

    def attend_latent(
        self, q: Tensor, latent: Tensor, key: Tensor, up: Tensor, expanded: Callable[..., Tensor]
    ) -> Tensor:
        """(1, T, H, h), (1, T, L), (1, T, 1, R) -> (1, T, H, v). New prompts expand their latents, which costs least
        for many queries; single tokens do not."""
        self.keep(torch.cat([latent, key[:, :, 0]], -1))
        new = self.step.new
        parts = [expanded(q[:, :new], latent[:, :new], key[:, :new])] if new else []
        if self.step.going:
            parts.append(self.absorbed(q[0, new:], up)[None])
        return torch.cat(parts, 1)

    def absorbed(self, q: Tensor, up: Tensor) -> Tensor:
        """q (n, H, h), up (H (h - R + v), L) -> (n, H, v). What would make keys of latents is multiplied with queries,
        and values are made of the sum of latents: (W c) . q = c . (W^T q) (DeepSeek-V2, section 2.1.2)."""
        rest = self.c.head_dim - self.c.rotary_dim
        of_keys, of_values = up.unflatten(0, (q.shape[1], -1)).split([rest, self.c.value_dim], 1)
        turned, plain = q.split([self.c.rotary_dim, rest], -1)
        asked = torch.cat([torch.einsum("nhk,hkl->nhl", plain, of_keys), turned], -1)
        (past,) = (t[:, None] for t in self.past())
        o = F.scaled_dot_product_attention(
            asked[:, None], past, past[..., : self.c.kv_latent], self.lines.seen, scale=self.scale
        )
        return torch.einsum("nhl,hvl->nhv", o[:, 0], of_values)
