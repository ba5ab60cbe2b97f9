"""Model states of each stage against the formulas of its README, to the byte; and how much is gathered at once."""

import weakref

import pytest

from research import build
from research.data.tokens import open_tokens
from research.launch.local import start
from research.mesh import Mesh, total_ranks
from research.parallel.dp.gather import Unit
from research.parallel.dp.shards import Sharded
from research.settings import load
from research.train.loop import Trainer
from research.train.memory import peak_bytes
from research.train.run import global_batches

STATES = ("parameters", "master", "gradients", "optimizer")


def configured(text, folder, *words):
    small = ["model.vocab=256", "model.experts=0", "data.sequence=16", "train.dtype=float32", *words]
    return load("experiments/configs/tiny.yaml", [f"data.path={text}", f"data.cache={folder}", *small])


def on_ranks(config, body):
    def trained(place, device):
        trainer = Trainer(config, Mesh.from_config(config, place.world, place.rank), device)
        batches = global_batches(config, open_tokens(config.data))
        trainer.update(0, trainer.backward(batches.microbatches_of(0)))
        return body(trainer, batches.microbatches_of(1))

    return start(trained, total_ranks(config), config.launch, 60.0)


def counted(trainer, microbatches):
    """Peak by category, parameters, and tensors."""
    parameters = list(trainer.built.model.parameters())
    return peak_bytes(trainer, microbatches), sum(p.numel() for p in parameters), len(parameters)


@pytest.mark.parametrize("ranks, zero", [(2, 0), (2, 1), (4, 2), (2, 3), (4, 3)])
def test_states_in_float32(text, tmp_path, ranks, zero):
    """4 bytes each of parameters and gradients, 8 of moments, of which the parameters are the masters as well."""
    for peak, p, tensors in on_ranks(configured(text, tmp_path, f"dp.degree={ranks}", f"dp.zero={zero}"), counted):
        over = [ranks if zero >= stage else 1 for stage in (3, 2, 1)]
        states = 4 * p // over[0], 0, 4 * p // over[1], 8 * p // over[2] + 4 * tensors  # and a step count each
        assert tuple(peak[category] for category in STATES) == states


@pytest.mark.parametrize("ranks, zero", [(2, 0), (4, 1), (2, 2), (4, 3)])
def test_states_of_the_paper(text, tmp_path, ranks, zero):
    """Section 3.1: 2 bytes each of parameters and gradients, K = 12 of masters and moments."""
    words = ["train.dtype=bfloat16", "dp.grad_dtype=bfloat16", f"dp.degree={ranks}", f"dp.zero={zero}"]
    for peak, p, tensors in on_ranks(configured(text, tmp_path, *words), counted):
        over = [ranks if zero >= stage else 1 for stage in (3, 2, 1)]
        states = sum(peak[category] for category in STATES)
        assert states == 2 * p // over[0] + 2 * p // over[1] + 12 * p // over[2] + 4 * tensors


@pytest.mark.parametrize("words", ["", "train.recompute=full train.microbatches=4", "model.experts=8 tp.degree=2"])
def test_two_gathered_layers_at_most(text, tmp_path, monkeypatch, words):
    """One that computes, one on its way; and gradients of one in backward, beside those on their way."""
    most = {"layers": 0, "gradients": 0}

    def look(units, buckets):
        most["layers"] = max(most["layers"], sum(u.gathered or bool(u.coming) for u in units))
        of = {id(u): u for u in units for b in u.buckets if b.rows is not None or b.pending is not None}
        most["gradients"] = max(most["gradients"], len(of))

    def watched(trainer, microbatches):
        layers = trainer.storage._gathering.units

        def after(real):
            def wrapped(self, *args):
                result = real(self, *args)
                look(layers, trainer.storage.buckets)
                return result

            return wrapped

        for owner, name in ((Unit, "start"), (Unit, "gather"), (Sharded, "add"), (Sharded, "reduce")):
            monkeypatch.setattr(owner, name, after(getattr(owner, name)))
        trainer.backward(microbatches)
        return dict(most)

    config = configured(text, tmp_path, "dp.degree=2", "dp.zero=3", *words.split())
    assert on_ranks(config, watched) == [{"layers": 2, "gradients": 2}] * total_ranks(config)


def test_kept_parameters_are_all_there_between_forward_and_backward(text, tmp_path):
    def gathered(trainer, microbatches):
        units, found = trainer.storage._gathering.units, []
        real = trainer.storage.begin_backward

        def begin(stage, last):
            found.append(sum(u.gathered for u in units) == len(units))
            real(stage, last)

        trainer.storage.begin_backward = begin
        trainer.backward(microbatches)
        return found, [u.memory.untyped_storage().nbytes() for u in units]

    config = configured(text, tmp_path, "dp.degree=2", "dp.zero=3", "dp.keep_gathered=true")
    for found, left in on_ranks(config, gathered):
        assert found == [True, True] and not any(left)


def test_no_rank_makes_all_parameters(text, tmp_path, monkeypatch):
    """In stage 3 each is made, cut and dropped before the next one."""
    made, most = [], []

    def watched(config, mesh, device, real=build.initial_values):
        values = real(config, mesh, device)

        def noted(*about):
            most.append(sum(m() is not None for m in made))
            tensor = values(*about)
            made.append(weakref.ref(tensor.untyped_storage()))
            return tensor

        return noted

    monkeypatch.setattr(build, "initial_values", watched)

    def trained(place, device):
        Trainer(config, Mesh.from_config(config, place.world, place.rank), device)
        return max(most), len(made)

    config = configured(text, tmp_path, "dp.degree=2", "dp.zero=3", "train.dtype=bfloat16")
    assert start(trained, 2, config.launch, 60.0) == [(0, 39), (0, 39)]
