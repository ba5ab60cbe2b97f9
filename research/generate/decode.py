"""The loop that makes text: prompts are read at once, then each sequence goes on by a token at a time.

Every rank runs as many forwards as every other, each of one flat batch (`cache.py`). Sequences are dealt out along dp.
Which tokens come next is known to all ranks after each forward, so that all know the state of all sequences.

n sequences in a batch, T its tokens, V vocabulary
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from research import comm
from research.built import Built
from research.config import RunConfig
from research.generate.cache import Cache
from research.generate.sample import choose, draw
from research.generate.stages import Stages
from research.ledger import GENERATE
from research.models.batch import NOT_COUNTED, Batch
from research.models.moe import MoE
from research.models.seams import count, count_each, wire

PROMPT_TOKENS = 8192  # of new prompts in one forward, but of one that is longer
Ends = Callable[[Sequence[int]], str]  # made tokens -> why a sequence ends with the last of them, or ""


@dataclass
class Text:
    """One sequence."""

    number: int
    prompt: Sequence[int]
    made: list[int] = field(default_factory=list)
    ended: str = ""  # what `Ends` says, or "length"

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.made)


class Generation:
    """Texts that go on from prompts; `built` is used up by it, as its attentions then read the cache."""

    def __init__(
        self, built: Built, config: RunConfig, prompts: Sequence[Sequence[int]], ends: Ends, vocab: int
    ) -> None:
        """Only the first `vocab` ids are chosen."""
        self.config, self.ends, self.vocab, self.mesh = config.generate, ends, vocab, built.mesh
        self.stages = Stages(config, built)
        model = built.model.requires_grad_(False)
        self.device = next(model.parameters()).device
        self.world = self.mesh.group("world")
        self.texts = [Text(i, prompt) for i, prompt in enumerate(prompts)]
        mine = [t for t in self.texts if t.number % self.mesh.sizes["dp"] == self.mesh.at["dp"]]
        self.waiting, self.going = deque(mine), list[Text]()
        self.cache = Cache(model, [self.most(t) for t in mine], self.config.block, self.config.cache_tokens)
        for module in model.modules():
            if isinstance(module, MoE):  # counts are for losses: none need travel
                module.seams = wire(module.seams, {"generation": {"count": count, "count_each": count_each}})

    def most(self, text: Text) -> int:
        """Tokens of a text that are ever kept: the last one is not."""
        return len(text.prompt) + self.config.tokens - 1

    def run(self) -> Iterator[int]:
        """Tokens that all texts together were given by each forward, until all have ended."""
        self.mesh.ledger.phase = GENERATE
        while not all(t.ended for t in self.texts):
            new = self.admitted()
            batch, rows = self.batch(new)
            with torch.inference_mode():
                logits = self.stages.logits(batch, rows)
            self.going = new + self.going
            yield self.take(self.next(None if logits is None else logits[: len(self.going)]))

    def admitted(self) -> list[Text]:
        """The texts that begin now, in their order: as many as there is room for."""
        new, tokens = list[Text](), 0
        while self.waiting:
            text = self.waiting[0]
            tokens += len(text.prompt)
            if (new and tokens > PROMPT_TOKENS) or not self.cache.reserve(text.number, self.most(text)):
                break
            new.append(self.waiting.popleft())
        return new

    def batch(self, new: Sequence[Text]) -> tuple[Batch, Tensor]:
        """The batch (1, T), and the numbers (n,) of the last token of each of its texts, new ones first. T is padded to
        what ranks can cut, and is never 0: a rank without a text takes part in its stage's collectives."""
        tokens = [i for t in new for i in t.prompt]
        places = [p for t in new for p in range(t.length)]
        ends = torch.tensor([0, *(t.length for t in new)]).cumsum(0)[1:] - 1
        count, multiple = len(tokens) + len(self.going), self.mesh.sizes["tp"]
        padding = -count % multiple if count else multiple
        self.cache.begin(
            {t.number: t.length for t in new}, padding, {t.number: t.length for t in self.going}, self.device
        )
        tokens += [0] * padding + [t.made[-1] for t in self.going]
        places += [*range(padding), *(t.length - 1 for t in self.going)]
        flat = torch.tensor([tokens, places], device=self.device)[:, None]
        unused = torch.full_like(flat[0], NOT_COUNTED)
        batch = Batch(flat[0], unused, flat[1], torch.zeros_like(unused), whole_tokens=len(tokens))
        last = len(tokens) - len(self.going) + torch.arange(len(self.going))
        rows = torch.cat([ends, last]) if count else torch.zeros(1, dtype=torch.int64)
        return batch, rows.to(self.device)

    def next(self, logits: Tensor | None) -> Tensor:
        """logits (n, V) of `going` where they are known -> for each of all texts 1 + the id that comes next, 0 for none
        (texts,)."""
        found = torch.zeros(len(self.texts), dtype=torch.int64, device=self.device)
        if logits is not None and self.mesh.at["tp"] == 0:  # of the ranks that know it
            found[[t.number for t in self.going]] = 1 + self.chosen(logits[:, : self.vocab])
        return comm.all_reduce_(found, self.world, "next tokens")

    def chosen(self, logits: Tensor) -> Tensor:
        """logits (n, vocab) -> ids (n,), `vocab` where logits are not finite"""
        c = self.config
        draws = torch.tensor([draw(c.seed, t.number, t.length) for t in self.going], dtype=torch.float64)
        ids = choose(logits, c.temperature, c.top_p, draws.to(self.device))
        return ids.where(logits.isfinite().all(-1), self.vocab)

    def take(self, found: Tensor) -> int:
        """Give all texts their next tokens. Raises FloatingPointError on every rank where there is none."""
        taken = 0
        for text, token in zip(self.texts, found.tolist(), strict=True):
            if token > self.vocab:
                raise FloatingPointError(f"logits after token {text.length} of text {text.number} are not finite")
            if token:
                taken += 1
                text.made.append(token - 1)
                text.ended = self.ends(text.made) or ("length" if len(text.made) == self.config.tokens else "")
        for text in [t for t in self.going if t.ended]:
            self.cache.release(text.number)
            self.going.remove(text)
        return taken
