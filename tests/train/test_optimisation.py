"""Learning rate, AdamW, clipping, precision, non-finite steps, reproducibility."""

import dataclasses
import math

import pytest
import torch

from research import comm
from research.config import RunConfig, TrainConfig, replace
from research.data.tokens import open_tokens
from research.launch.local import start
from research.mesh import Mesh, total_ranks
from research.settings import load
from research.train import loop, storage
from research.train.loop import Trainer, train
from research.train.optim import learning_rate
from research.train.proof import ignore_some
from research.train.run import global_batches
from research.train.storage import Storage, square_sum

LIMIT_S = 60.0


@pytest.fixture
def config(text, tmp_path):
    words = [f"data.path={text}", f"data.cache={tmp_path}/cache", "train.steps=6", "train.warmup_steps=2"]
    return load("experiments/configs/tiny.yaml", [*words, "model.layers=2", "train.dtype=float32"])


def batches_of(config: RunConfig):
    return global_batches(config, open_tokens(config.data)).microbatches_of


def steps_of(config: RunConfig, poison=lambda trainer, index: None):
    """(steps, the error that ended them, weights after) of every rank."""

    def body(place, device):
        trainer = Trainer(config, Mesh.from_config(config, place.world, place.rank), device)
        batches = batches_of(config)

        def spoiled(index):
            poison(trainer, index)
            return batches(index)

        steps, error = [], None
        try:
            for step in train(trainer, spoiled):
                steps.append(step)
        except FloatingPointError as caught:
            error = str(caught)
        return steps, error, {n: w.clone() for n, _, w in trainer.storage.weights()}

    return start(body, total_ranks(config), config.launch, LIMIT_S)


def test_cosine_and_wsd_by_hand():
    cosine = TrainConfig(steps=40, warmup_steps=10, lr=2.0, min_lr_ratio=0.25)
    want = [2.0 * (i + 1) / 10 for i in range(10)]
    want += [2.0 * (0.25 + 0.75 * (1 + math.cos(math.pi * i / 30)) / 2) for i in range(1, 31)]
    assert [learning_rate(cosine, i) for i in range(40)] == pytest.approx(want, abs=1e-12)
    wsd = dataclasses.replace(cosine, schedule="wsd", decay_share=0.25)
    want = [2.0 * (i + 1) / 10 for i in range(10)] + [2.0] * 20 + [2.0 * (1 - 0.75 * i / 10) for i in range(1, 11)]
    assert [learning_rate(wsd, i) for i in range(40)] == pytest.approx(want, abs=1e-12)
    everything_warms = TrainConfig(steps=3, warmup_steps=3, lr=3.0)
    assert [learning_rate(everything_warms, i) for i in range(3)] == pytest.approx([1, 2, 3])


def test_norm_of_many_elements(monkeypatch):
    """To the precision of float32, whatever the length; planted: one norm of all."""
    for length in (0, 5, 1024, 2**22 + 7):
        x = torch.randn(length, generator=torch.Generator().manual_seed(0)) * 1e-3
        want = float(x.double().square().sum())
        assert float(square_sum(x, torch.float32)) == pytest.approx(want, rel=1e-6)
        assert float(square_sum(x.bfloat16(), torch.float32)) == pytest.approx(want, rel=1e-2)
    monkeypatch.setattr(storage, "ROW", length)
    assert float(square_sum(x, torch.float32)) != pytest.approx(want, rel=1e-5)


ADAM = {"beta1": 0.8, "beta2": 0.7, "adam_eps": 1e-4, "weight_decay": 0.3}  # none of them a default


def assert_adamw(config):
    """Three steps, against AdamW written out (Loshchilov and Hutter 2019, algorithm 2), decay on matrices only."""
    config = replace(config, {"train.dtype": "float64", "train.clip": 0.05})
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, **ADAM))
    trainer = Trainer(config, Mesh({}), torch.device("cpu"))
    batches = batches_of(config)
    t = config.train
    first: dict[str, torch.Tensor] = {}
    second: dict[str, torch.Tensor] = {}
    weights = {n: w.clone() for n, _, w in trainer.storage.weights()}
    for index in range(3):
        sums = trainer.backward(batches(index))
        gradients = {n: g.clone() for n, _, g in trainer.storage.gradients()}
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        assert norm > t.clip
        (_, _, reported), _ = trainer.update(index, sums)
        assert reported == pytest.approx(norm, rel=1e-12)
        lr = learning_rate(t, index)
        for name, grad in gradients.items():
            g = grad * t.clip / norm
            first[name] = t.beta1 * first.get(name, 0) + (1 - t.beta1) * g
            second[name] = t.beta2 * second.get(name, 0) + (1 - t.beta2) * g**2
            m, v = first[name] / (1 - t.beta1 ** (index + 1)), second[name] / (1 - t.beta2 ** (index + 1))
            decay = t.weight_decay if weights[name].dim() > 1 else 0.0
            weights[name] = weights[name] * (1 - lr * decay) - lr * m / (v.sqrt() + t.adam_eps)
        for name, _, got in trainer.storage.weights():
            torch.testing.assert_close(got, weights[name], rtol=1e-10, atol=1e-13)


def test_each_step_is_adamw_on_the_clipped_gradient(config):
    assert_adamw(config)


@pytest.mark.parametrize("key", ADAM)
def test_planted_default_in_place_of_a_key(config, monkeypatch, key):
    def adamw(given, parameters, real=storage.adamw):
        return real(dataclasses.replace(given, **{key: getattr(TrainConfig(), key)}), parameters)

    monkeypatch.setattr(storage, "adamw", adamw)
    with pytest.raises(AssertionError, match="not close"):
        assert_adamw(config)


@pytest.mark.parametrize("gradients_of", ["float32", "bfloat16"])
@pytest.mark.parametrize("clip", [0.05, 1e6])
def test_float32_masters_are_clipped_as_well(config, gradients_of, clip):
    """By the kernel itself. AdamW hardly sees the scale of a gradient, its moments do."""
    dtypes = {"train.dtype": gradients_of, "dp.grad_dtype": gradients_of}
    assert worst_moment(replace(config, {**dtypes, "train.clip": clip}), clip) <= 1e-5


def test_planted_gradient_that_is_not_clipped(config, monkeypatch):
    monkeypatch.setattr(Storage, "_clip", lambda self, divisor: None)
    assert worst_moment(replace(config, {"train.dtype": "float32", "train.clip": 0.05}), 0.05) > 1e-2


def worst_moment(config, clip):
    """Of two steps, how far AdamW's first moments are from those of gradients that are clipped by hand."""
    trainer, beta = Trainer(config, Mesh({}), torch.device("cpu")), config.train.beta1
    want, worst = {}, 0.0
    for index in range(2):
        sums = trainer.backward(batches_of(config)(index))
        gradients = {n: g.double() for n, _, g in trainer.storage.gradients()}
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        assert 0.05 < norm < 1e6
        (_, _, reported), _ = trainer.update(index, sums)
        assert reported == pytest.approx(norm, rel=1e-5)
        for name, grad in gradients.items():
            want[name] = beta * want.get(name, 0) + (1 - beta) * grad * min(1, clip / norm)
            error = (trainer.storage.moments(name)["exp_avg"].double() - want[name]).norm()
            worst = max(worst, float(error / want[name].norm()))
    return worst


@pytest.mark.parametrize("mode", ["stop", "skip"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_non_finite_step_is_seen_by_all_ranks(config, mode, ranks):
    """One rank alone has a NaN in one expert: every rank ends, or skips, the same step."""
    config = replace(config, {"train.nonfinite": mode, "dp.degree": ranks})

    def poison(trainer, index):
        if index == 3 and trainer.mesh.rank == ranks - 1:
            used = trainer.storage.held["layers.1.ffn.w_down"].parameter

            def once(grad):
                handle.remove()
                return grad.index_fill(0, torch.tensor([5]), math.nan)

            handle = used.register_hook(once)

    results = steps_of(config, poison)
    for steps, error, weights in results:
        if mode == "stop":
            assert len(steps) == 3 and "step 3" in error and "nan" in error
            assert all(w.isfinite().all() for w in weights.values())
        else:
            assert error is None
            assert [s.skipped for s in steps] == [False, False, False, True, False, False]
            assert all(w.isfinite().all() for w in weights.values())
            assert all(math.isfinite(s.loss) for s in steps)
    assert all(torch.equal(w, results[-1][2][n]) for n, w in results[0][2].items())


def test_a_skipped_step_changes_no_weight(config):
    config = replace(config, {"train.nonfinite": "skip"})
    trainer, straight = (Trainer(config, Mesh({}), torch.device("cpu")) for _ in range(2))
    batches = batches_of(config)
    for one in (trainer, straight):
        one.update(0, one.backward(batches(0)))
    before = {n: w.clone() for n, _, w in trainer.storage.weights()}
    sums = trainer.backward(batches(1))
    sums.totals[0] = math.inf
    _, made = trainer.update(1, sums)
    assert not made
    assert all(torch.equal(w, before[n]) for n, _, w in trainer.storage.weights())
    sums = trainer.backward(batches(2))
    straight.backward(batches(2))
    want = {n: g for n, _, g in straight.storage.gradients()}
    assert all(torch.equal(g, want[n]) for n, _, g in trainer.storage.gradients()), "nothing of it is left"
    _, made = trainer.update(2, sums)
    assert made and not all(torch.equal(w, before[n]) for n, _, w in trainer.storage.weights())


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_what_a_backward_does_not_reach_has_no_gradient(config, zero):
    """Nor what an earlier step, or another memory, has left in its place."""
    config = replace(config, {"dp.degree": 2, "dp.zero": zero})

    def body(place, device):
        trainer = Trainer(config, Mesh.from_config(config, place.world, place.rank), device)
        trainer.update(0, trainer.backward(batches_of(config)(0)))
        trainer.storage.begin_backward(0, last=True)
        trainer.storage.end_backward(0, last=True)
        trainer.storage.finish_backward()
        return [name for name, _, g in trainer.storage.gradients() if g.any()]

    assert start(body, 2, config.launch, LIMIT_S) == [[], []]


def test_bfloat16_keeps_float32_masters_and_gradients(config):
    config = replace(config, {"train.dtype": "bfloat16", "train.microbatches": 4})
    trainer = Trainer(config, Mesh({}), torch.device("cpu"))
    exact = Trainer(replace(config, {"train.dtype": "float32"}), Mesh({}), torch.device("cpu"))
    batches = batches_of(config)
    for held in trainer.storage.held.values():
        routes = held.name.endswith("router")
        assert held.parameter.dtype == (torch.float32 if routes else torch.bfloat16)
        assert held.master.dtype == held.grad.dtype == torch.float32
        assert torch.equal(held.master, exact.storage.held[held.name].master), "masters start unrounded"
    trainer.backward(batches(0))
    exact.backward(batches(0))
    for held in trainer.storage.held.values():
        want = exact.storage.held[held.name].grad
        assert (held.grad - want).norm() < 0.1 * want.norm() + 1e-4, held.name
    mixed = [s.loss for s in steps_of(replace(config, {"train.steps": 12}))[0][0]]
    full = [s.loss for s in steps_of(replace(config, {"train.steps": 12, "train.dtype": "float32"}))[0][0]]
    assert full[-1] < full[0] - 0.5
    assert mixed == pytest.approx(full, abs=0.05)


def test_small_updates_are_not_lost_in_bfloat16(config):
    """A weight of 1 does not move by 1e-4 in bfloat16; its master does."""
    config = replace(config, {"train.dtype": "bfloat16", "train.lr": 1e-4, "train.warmup_steps": 0})
    weights = steps_of(config)[0][2]
    assert (weights["head.norm.weight"] != 1).any()


def test_the_same_run_twice_is_bitwise_equal(config):
    config = replace(config, {"train.deterministic": True, "dp.degree": 2})
    (a, _, weights_a), (b, _, weights_b) = steps_of(config)[0], steps_of(config)[0]
    assert [(s.loss, s.norm) for s in a] == [(s.loss, s.norm) for s in b]
    assert all(torch.equal(weights_a[n], weights_b[n]) for n in weights_a)


def test_replicas_stay_bitwise_equal(config):
    (_, _, a), (_, _, b) = steps_of(replace(config, {"dp.degree": 2}))
    assert all(torch.equal(a[n], b[n]) for n in a)


def test_a_step_without_counted_tokens_changes_no_weight(config):
    """Nothing is divided by zero, and neither decay nor momentum nor the auxiliary losses move what no token taught."""
    trainer = Trainer(config, Mesh({}), torch.device("cpu"))
    trainer.update(0, trainer.backward(batches_of(config)(0)))
    before = {n: w.clone() for n, _, w in trainer.storage.weights()}
    ignored = [dataclasses.replace(b, targets=torch.full_like(b.targets, -100)) for b in batches_of(config)(1)]
    (loss, aux, norm), made = trainer.update(1, trainer.backward(ignored))
    assert loss == 0 and math.isfinite(aux) and math.isfinite(norm) and not made
    assert all(torch.equal(w, before[n]) for n, _, w in trainer.storage.weights())


def test_skipping_has_an_end(config, monkeypatch):
    """Weights that are lost do not come back: the run ends, and does not look like one that trained."""
    monkeypatch.setattr(loop, "MOST_SKIPPED", 3)
    config = replace(config, {"train.nonfinite": "skip", "train.steps": 9})

    def poison(trainer, index):
        if index >= 2:
            trainer.storage.held["head.norm.weight"].master.fill_(math.nan)

    (steps, error, _) = steps_of(config, poison)[0]
    assert len(steps) == 4 and "(3 steps in a row)" in error


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_microbatches_add_up_to_the_batch(config, microbatches, depth):
    """Without the balance loss, which is one over each microbatch, the cut into microbatches changes no gradient."""
    config = replace(config, {"train.dtype": "float64", "model.balance": 0.0, "model.mtp_depth": depth})
    whole = ignore_some(batches_of(replace(config, {"train.microbatches": 1}))(0)[0], seed=3)
    sides = []
    for m in (1, microbatches):
        trainer = Trainer(replace(config, {"train.microbatches": m}), Mesh({}), torch.device("cpu"))
        sums = trainer.backward([whole.map(lambda t, m=m, i=i: t.chunk(m)[i]) for i in range(m)])
        sides.append((sums.totals, {n: g.clone() for n, _, g in trainer.storage.gradients()}))
    torch.testing.assert_close(sides[0][0], sides[1][0], rtol=1e-13, atol=0)
    for name, want in sides[0][1].items():
        assert (sides[1][1][name] - want).norm() <= 1e-12 * want.norm() + 1e-18, name


@pytest.mark.parametrize("changes", [{}, {"model.tied": True}])
def test_bfloat16_gradients_of_a_long_batch(config, changes):
    """Thousands of terms add up to one row of the embedding: they must add up in float32."""
    base = {"train.global_batch": 64, "train.microbatches": 1, "data.sequence": 64} | changes
    sides = []
    for dtype in ("float64", "bfloat16"):
        part = replace(config, base | {"train.dtype": dtype})
        trainer = Trainer(part, Mesh({}), torch.device("cpu"))
        trainer.backward(batches_of(part)(0))
        sides.append({n: g.double() for n, _, g in trainer.storage.gradients()})
    for name, want in sides[0].items():
        assert (sides[1][name] - want).norm() < 0.04 * want.norm(), (name, (sides[1][name] - want).norm() / want.norm())


def test_buckets_travel_beside_the_backward(config, monkeypatch):
    """The sum of the last layers' gradients is under way before those of the first are known, in one order."""
    config = replace(config, {"dp.degree": 2, "train.bucket_mib": 0.02, "train.microbatches": 2})

    def body(place, device):
        events = []
        trainer = Trainer(config, Mesh.from_config(config, place.world, place.rank), device)
        real = comm.start_all_reduce

        def noted(x, group, purpose, op=comm.SUM):
            if purpose == "gradients":
                events.append(next(i for i, b in enumerate(trainer.storage.buckets) if b.flat is x))
            return real(x, group, purpose, op)

        monkeypatch.setattr(comm, "start_all_reduce", noted)
        trainer.storage.held["embedding.weight"].parameter.register_post_accumulate_grad_hook(
            lambda p: events.append("embedding")
        )
        trainer.backward(batches_of(config)(0))
        return events, [list(b.held) for b in trainer.storage.buckets]

    for events, names in start(body, 2, config.launch, LIMIT_S):
        started = [e for e in events if e != "embedding"]
        assert started == list(range(len(names))) and len(names) > 5
        assert "head.weight" in names[0] + names[1] and "embedding.weight" in names[-1]
        first, last = (i for i, e in enumerate(events) if e == "embedding")  # one a microbatch
        assert first == 0, "nothing travels in a backward that is not the last"
        assert len([e for e in events[:last] if e != "embedding"]) >= len(names) - 2


def test_recompute_keeps_choices_of_tied_experts(config):
    """All router scores equal: whichever expert wins the tie, the second run must take it too."""
    config = replace(config, {"train.dtype": "float64"})
    sides = []
    for recompute in ("none", "full"):
        trainer = Trainer(replace(config, {"train.recompute": recompute}), Mesh({}), torch.device("cpu"))
        with torch.no_grad():
            trainer.built.model.layers["1"].ffn.router.zero_()
        trainer.backward(batches_of(config)(0))
        sides.append({n: g.clone() for n, _, g in trainer.storage.gradients()})
    for name, want in sides[0].items():
        torch.testing.assert_close(sides[1][name], want, rtol=1e-12, atol=1e-15)
