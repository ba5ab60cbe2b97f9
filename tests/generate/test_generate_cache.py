"""Logits with the cache equal those without it, for all kinds of attention in all layouts; and what the cache holds."""

import pytest
import torch
from einops import rearrange

from research.build import build
from research.config import ModelConfig, RunConfig, replace
from research.generate import cache as caches
from research.generate.blocks import Blocks, blocks_needed
from research.generate.cache import Cache, HeadsCache, LatentCache
from research.generate.decode import Generation
from research.launch.process import fake_process_group
from research.mesh import Mesh
from research.models import seams
from research.settings import preset_values
from tests.generate.forced import CPU, MADE, Forced, config_of, distance, texts
from tests.models.cache_size import cache_elements

TOLERANCE = 1e-9
MLA = "model.attention=mla model.rotary_dim=4 model.value_dim=12 model.q_latent=24"
KINDS = [
    "",
    "model.kv_heads=8",
    "model.kv_heads=1 generate.block=1",
    "model.window=7",
    "model.window=6 model.window_from=2 generate.block=5",
    "model.window=1 generate.block=3",
    "model.qk_norm=all model.rotary_dim=4",
    "model.qk_norm=head model.qkv_bias=true model.out_bias=true model.mlp_bias=true",
    "model.tied=true model.document_mask=true model.norm=sandwich",
    "model.router_score=sigmoid model.bias_rate=0.1 model.expert_groups=4 model.top_groups=2",
    "model.balance_scope=sequence model.moe_every=2 generate.block=64",
    "model.rope_scaling=yarn model.rope_factor=4 model.rope_context=16 model.rope_mscale_all=1",
    f"{MLA}",
    f"{MLA} model.q_latent=0 model.kv_heads=3",
    f"{MLA} model.window=7 model.window_from=1",
    "generate.cache_tokens=36",  # the longest prompt and one other
    f"{MLA} generate.cache_tokens=36 model.window=9",
]
LAYOUTS = [
    "tp.degree=2",
    "tp.degree=2 tp.sequence=false",
    "tp.degree=4",  # two ranks with a copy of each kv head
    "tp.degree=4 tp.sequence=false model.qk_norm=all model.window=7",
    "tp.degree=2 tp.overlap=7",  # more pieces than tokens
    "tp.degree=2 tp.overlap=7 tp.sequence=false",
    "dp.degree=3",
    "dp.degree=6",  # ranks without a text
    "tp.degree=2 dp.degree=2 model.vocab=251 model.tied=true generate.cache_tokens=36",
    "dp.degree=2 ep.degree=2 ep.overlap=7",  # more pieces than tokens
    "dp.degree=2 tp.degree=2 ep.degree=2 ep.tensor=2 tp.sequence=false",
    "dp.degree=6 ep.degree=2 ep.dispatch=all_gather",
    "pp.degree=2",
    "pp.degree=4 model.tied=true model.window=6 model.window_from=2 generate.cache_tokens=36",
    "pp.degree=2 tp.degree=2 dp.degree=2 ep.degree=4 model.vocab=251",
    f"pp.degree=2 tp.degree=2 tp.sequence=false pp.schedule=interleaved pp.stages_per_rank=2 {MLA}",
    f"tp.degree=2 {MLA}",
    f"tp.degree=4 tp.sequence=false {MLA} model.window=6 model.window_from=2",
]


@pytest.mark.parametrize("words", [*KINDS, *LAYOUTS])
def test_logits_with_the_cache_equal_those_without(words):
    assert distance(config_of(*words.split())) < TOLERANCE


class Late(Blocks):
    """A single token takes the place of the one before it."""

    def slots(self, sequence, positions):
        positions = list(positions)
        return super().slots(sequence, [p - 1 for p in positions] if len(positions) == 1 < positions[0] else positions)


def test_planted_faults(monkeypatch):
    """Each is far outside of the tolerance; none changes a shape."""

    def shows(*words):
        return distance(config_of(*words)) > 1e-4

    with monkeypatch.context() as patch:  # heads that share a kv head are not neighbours
        patch.setattr(caches, "rearrange", lambda t, how, **n: rearrange(t, how.replace("(g r)", "(r g)"), **n))
        assert shows()
    with monkeypatch.context() as patch:
        patch.setattr("research.generate.cache.Blocks", Late)
        assert shows()
    with monkeypatch.context() as patch:  # a window that single tokens do not know
        plain = Cache._lines

        def wide(self, blocks, *more):
            lines = plain(self, blocks, *more)
            lines.seen[...] |= lines.seen.roll(-1, -1)
            return lines

        patch.setattr(Cache, "_lines", wide)
        assert shows("model.window=7")
    with monkeypatch.context() as patch:  # latents that no norm has passed would be turned keys, too
        plain_keep = LatentCache.keep
        patch.setattr(LatentCache, "keep", lambda self, both: plain_keep(self, both.roll(1, -1)))
        assert shows(*MLA.split())
    with monkeypatch.context() as patch:  # rows of another text
        batch = Generation.batch

        def swapped(self, new):
            made, rows = batch(self, new)
            return made, rows.flip(0)

        patch.setattr(Generation, "batch", swapped)
        assert shows()


PUBLISHED = {"deepseek_v3": 70_272, "qwen25_72b": 327_680, "llama3_405b": 516_096}  # ISCA'25, table 1: bytes a token


def empty(preset, **degrees):
    """The cache of one rank, for 4,096 tokens in bfloat16, without memory."""
    config, meta = replace(RunConfig(), preset_values(preset)), torch.device("meta")
    config = replace(config, {f"{axis}.degree": n for axis, n in degrees.items()})

    def values(name, spec, layout):
        return torch.empty(layout.local_shape(), dtype=torch.bfloat16, device=meta)

    return Cache(build(config, Mesh(degrees, fake=True), meta, values).model, [4096], 16), config.model


@pytest.mark.parametrize("preset", PUBLISHED)
def test_bytes_of_a_token(preset):
    cache, model = empty(preset)
    assert cache.token_bytes == 2 * cache_elements(model) == PUBLISHED[preset]
    assert sum(p.nbytes for layer in cache.layers for p in layer.pools) == 4096 * PUBLISHED[preset]


def test_bytes_of_a_token_on_each_of_8_ranks():
    """Kv heads are shared out, a latent is for all heads."""
    with fake_process_group(8, 0):
        assert empty("llama3_405b", tp=8)[0].token_bytes * 8 == PUBLISHED["llama3_405b"]
        assert empty("deepseek_v3", tp=8)[0].token_bytes == PUBLISHED["deepseek_v3"]


@pytest.mark.parametrize("words", ["", MLA, "model.kv_heads=8 model.window=40"])
def test_bytes_that_are_written(words):
    """Counted from what is no zero any more in the pools, after prompts and after each token."""
    config = config_of(*words.split(), "generate.block=1")
    made = Forced(config, Mesh({}), texts())
    for _ in made.run():
        if any(t.ended for t in made.texts):
            break
        held = sum(t.length - 1 for t in made.texts)
        written = sum(p.count_nonzero().item() * p.element_size() for layer in made.cache.layers for p in layer.pools)
        assert written == held * 8 * cache_elements(config.model)


def test_windows_give_blocks_back():
    config = config_of("model.window=6", "model.window_from=2", "generate.block=4")
    made = Forced(config, Mesh({}), texts((30,)))
    whole, near = made.cache.blocks[0], made.cache.blocks[6]
    assert (whole.count, near.count) == (11, 3) and len(made.cache.layers) == 4
    for step, _ in enumerate(made.run()):
        if step < MADE - 1:
            assert len(whole.tables[0]) == -(-(30 + step) // 4) and len(near.tables[0]) <= 3
    assert sorted(whole.free) == [*range(11)] and sorted(near.free) == [*range(3)]


@pytest.mark.parametrize("window", [0, 1, 2, 5, 8, 9])
@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_blocks_have_one_holder_and_are_as_many_as_promised(size, window):
    generator = torch.Generator().manual_seed(size + window)

    def number(most):
        return int(torch.randint(1, most + 1, (), generator=generator))

    blocks = Blocks(17, size, window)
    going, started = {}, 0
    for _ in range(300):
        if len(going) < 4:
            length, most = number(20), number(20)
            if blocks.reserve(started, length + most):
                going[started] = (length, length + most)
            started += 1
        for text, (length, most) in list(going.items()):
            blocks.extend(text, length)
            seen = range(max(length - window, 0) if window else 0, length)
            slots = blocks.slots(text, seen)
            assert len(set(slots)) == len(seen) and {s // size for s in slots} <= set(blocks.tables[text])
            assert len(blocks.tables[text]) <= blocks_needed(most, size, window)
            going[text] = (length + 1, most)
            if length == most:
                blocks.release(text)
                del going[text]
        held = [b for table in blocks.tables.values() for b in table]
        assert sorted(held + blocks.free) == list(range(17))
    assert started > 20


def test_model_files_know_no_cache():
    """Without a generation the seams of a model are those of training."""
    model = build(RunConfig(model=ModelConfig()), Mesh({}), CPU).model
    assert model.layers["0"].attention.seams.attend is seams.attend
    Cache(model, [10], 4)
    assert isinstance(model.layers["0"].attention.seams.attend.__self__, HeadsCache)
    assert model.layers["0"].ffn.seams.attend is seams.attend
