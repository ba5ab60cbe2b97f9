"""A run that goes on equals one in peace: bit by bit in its own layout, to the proof tolerance in others."""

import dataclasses
import math
from functools import partial

import pytest
import torch

from research import record
from research.config import replace
from research.launch.local import start
from research.mesh import Mesh, total_ranks
from research.problems import ConfigError
from research.record import row_path
from research.train import loop
from research.train.checkpoint import state as state_module
from research.train.checkpoint.choice import folder_of, reopen
from research.train.checkpoint.index import newest, read_index, step_folder
from research.train.checkpoint.saving import Checkpoints
from research.train.checkpoint.whole import StoredWeights, read_tensor
from research.train.loop import Trainer, train
from research.train.optim import learning_rate
from research.train.proof import TOLERANCE
from research.train.run import global_batches, open_tokens, run

OF_THE_RUN = (
    *("losses", "grad_norms", "loss", "tokens", "skipped_steps", "evals", "eval_loss", "mtp_losses"),
    *("expert_choices", "dropped_choices", "max_violation"),
)


def all_tensors(place):
    checkpoint = newest(place)
    index = read_index(checkpoint)
    return {name: read_tensor(checkpoint, index, name) for name in index.tensors}


def interrupted(config, at, **changes):
    """The row of a run that stops after step `at` and goes on with changed keys, from the folder of the first one."""

    def first(place, device):
        import research.train.run as run_module

        class Stopped(Checkpoints):
            def saving(self, steps, stop):
                return super().saving(steps, stop=lambda: self.history.steps == at)

        run_module.Checkpoints = Stopped
        return run(config, place, device)

    assert start(first, total_ranks(config), config.launch, 60.0)[0] is None  # no row of a run that is not done
    assert newest(folder_of(config)) == step_folder(folder_of(config), at)
    going_on = replace(config, {"checkpoint.resume": str(folder_of(config)), "checkpoint.folder": "", **changes})
    return start(partial(run, going_on), total_ranks(going_on), config.launch, 60.0)[0], folder_of(going_on)


@pytest.mark.parametrize(
    "words",
    [
        "dp.degree=1",
        "dp.degree=3 train.dtype=float32 train.schedule=wsd model.mtp_depth=2 model.capacity=1.2",
        "dp.degree=2 train.dtype=bfloat16 model.tied=true train.recompute=full",
        "dp.degree=2 train.dtype=bfloat16 train.bucket_mib=0.01 model.router_score=sigmoid",
        "dp.degree=3 dp.zero=1 train.dtype=bfloat16",
        "dp.degree=3 dp.zero=3 train.dtype=bfloat16 dp.grad_dtype=bfloat16 model.tied=true",
        "tp.degree=2 cp.degree=2 train.dtype=bfloat16 model.tied=true",
        "pp.degree=2 pp.schedule=dualpipe dp.degree=2 dp.zero=1 train.microbatches=4 model.mtp_depth=1",
        "pp.degree=2 pp.schedule=zbv dp.degree=2 dp.zero=2 ep.degree=2 train.dtype=bfloat16 train.microbatches=4",
    ],
)
def test_same_layout_is_bitwise(configure, words):
    config = configure(*words.split(), "checkpoint.every=6")
    whole = start(partial(run, config), total_ranks(config), config.launch, 60.0)[0]
    reference = all_tensors(folder_of(config))
    apart = replace(config, {"checkpoint.folder": f"{config.record.folder}/apart"})
    resumed, folder = interrupted(apart, 3)
    assert resumed.resumed_step == 3 and resumed.resumed_from.endswith("apart/step-00000003") and not whole.resumed_step
    for name in OF_THE_RUN:
        assert getattr(resumed, name) == getattr(whole, name), name
    found = all_tensors(folder)
    assert found.keys() == reference.keys()
    assert [n for n in found if found[n].dtype != reference[n].dtype or not torch.equal(found[n], reference[n])] == []


@pytest.mark.parametrize(
    "before, after",
    [
        ({"dp.degree": 1}, {"dp.degree": 4}),
        ({"dp.degree": 4}, {"dp.degree": 1}),
        ({"dp.degree": 3}, {"dp.degree": 2}),
        ({"dp.degree": 2}, {"dp.degree": 3}),
        ({"tp.degree": 4}, {"tp.degree": 2, "dp.degree": 2, "tp.sequence": False}),
        ({"tp.degree": 2}, {"tp.degree": 1}),
        ({"dp.degree": 2}, {"tp.degree": 4, "dp.degree": 1}),
        ({"dp.degree": 3, "dp.zero": 3}, {"dp.degree": 2, "dp.zero": 0}),
        ({"dp.degree": 2, "dp.zero": 0}, {"dp.degree": 4, "dp.zero": 2, "dp.replicas": 2}),
        ({"dp.degree": 2, "dp.zero": 1}, {"tp.degree": 2, "dp.zero": 3}),
        ({"dp.degree": 4, "dp.zero": 2, "dp.replicas": 2, "ep.degree": 2}, {"dp.replicas": 1, "dp.zero": 1}),
        ({"dp.degree": 4, "ep.degree": 4}, {"dp.degree": 1, "tp.degree": 2, "ep.degree": 1, "ep.tensor": 2}),
        ({"pp.degree": 2, "model.tied": True}, {"pp.degree": 1, "cp.degree": 2, "dp.zero": 3, "dp.degree": 2}),
        ({"cp.degree": 2, "dp.zero": 2}, {"cp.degree": 1, "pp.degree": 2, "pp.schedule": "zb_h1", "dp.zero": 1}),
        (
            {"pp.degree": 2, "pp.schedule": "dualpipe", "model.mtp_depth": 1, "dp.degree": 2, "dp.zero": 1},
            {"pp.schedule": "1f1b", "tp.degree": 2, "dp.degree": 1, "ep.degree": 2},
        ),
    ],
    ids=str,
)
def test_other_layouts_to_the_proof_tolerance(configure, before, after):
    """257 rows of the vocabulary are 65 on each of four ranks, three of them padding; kv heads have copies there."""
    words = (f"{key}={value}" for key, value in before.items())
    config = configure(*words, "checkpoint.every=6", "model.vocab=257")
    whole = start(partial(run, config), total_ranks(config), config.launch, 60.0)[0]
    reference = all_tensors(folder_of(config))
    apart = replace(config, {"checkpoint.folder": f"{config.record.folder}/apart"})
    resumed, folder = interrupted(apart, 2, **after)
    assert resumed.hardware.ranks == total_ranks(replace(config, after)) and resumed.tokens == whole.tokens
    for got, want in zip(resumed.losses + resumed.grad_norms, whole.losses + whole.grad_norms, strict=True):
        assert abs(got - want) <= TOLERANCE * abs(want)
    for name, tensor in all_tensors(folder).items():
        error = float((tensor.double() - reference[name].double()).norm())
        assert error <= TOLERANCE * max(float(reference[name].double().norm()), 1e-6), name


def test_history_holds_evaluations_and_skipped_steps(configure, tmp_path):
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(f'{{"text": "line {i} of many short ones, {i * i}"}}\n' for i in range(200)))
    words = [f"data.path={lines}", "data.heldout=0.3", "train.eval_every=2", "dp.degree=2", "checkpoint.every=100"]
    config = configure(*words)
    whole = start(partial(run, config), 2, config.launch, 60.0)[0]
    resumed, _ = interrupted(replace(config, {"checkpoint.folder": f"{tmp_path}/apart"}), 3)
    assert len(whole.evals) == 3
    for name in (*OF_THE_RUN, "perplexity"):
        assert getattr(resumed, name) == getattr(whole, name), name


def test_learning_rates_go_on(configure, tmp_path, monkeypatch):
    """Warm-up over 10 steps, cosine to step 14, saved at 7: each step has the rate of its own number, once."""
    words = ["train.steps=14", "train.warmup_steps=10", "checkpoint.every=7"]
    config = configure(*words, f"checkpoint.folder={tmp_path}/c")
    seen = []

    def noted(c, step):
        seen.append((step, learning_rate(c, step)))
        return seen[-1][1]

    monkeypatch.setattr(loop, "learning_rate", noted)

    def steps_of(config, last):
        trainer = Trainer(config, Mesh({}), torch.device("cpu"))
        corpus = open_tokens(config.data)
        checkpoints = Checkpoints(trainer, corpus.digest)
        batches = global_batches(config, corpus).microbatches_of
        steps = train(trainer, batches, first=checkpoints.first)
        for step in checkpoints.saving(steps, stop=lambda: checkpoints.history.steps == last):
            assert step.index == checkpoints.history.steps - 1
        checkpoints.wait()

    steps_of(config, 7)
    steps_of(replace(config, {"checkpoint.resume": "latest"}), 14)
    assert seen == [(step, learning_rate(config.train, step)) for step in range(14)]


def one(config, corpus=None):
    trainer = Trainer(config, Mesh({}), torch.device("cpu"))
    corpus = open_tokens(config.data)
    return trainer, Checkpoints(trainer, corpus.digest), global_batches(config, corpus)


def save_after(config, steps):
    trainer, checkpoints, batches = one(config)
    made = train(trainer, batches.microbatches_of)
    for _ in checkpoints.saving(made, stop=lambda: checkpoints.history.steps == steps):
        pass
    checkpoints.wait()
    return trainer


@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq", "step"])
def test_planted_moment_that_is_skipped(configure, tmp_path, monkeypatch, moment):
    """Neither saved nor loaded, so that nothing is missing: the next step differs."""
    config = configure("checkpoint.every=2", f"checkpoint.folder={tmp_path}/c")
    want = save_after(config, 2)
    real = state_module.pieces_of

    def forgetful(storage):
        return (p for p in real(storage) if not p.name.startswith((f"{moment}/", f"optimizer/{moment}")))

    def next_norm(trainer, batches):
        sums = trainer.backward(batches.microbatches_of(2))
        trainer.update(2, sums)
        return trainer.backward(batches.microbatches_of(3)).totals

    resume = replace(config, {"checkpoint.resume": "latest"})
    trainer, _, batches = one(resume)
    reference = next_norm(want, batches)
    assert torch.equal(next_norm(trainer, batches), reference)
    monkeypatch.setattr(state_module, "pieces_of", forgetful)
    again = replace(config, {"checkpoint.folder": f"{tmp_path}/d"})
    save_after(again, 2)
    trainer, _, batches = one(replace(again, {"checkpoint.resume": "latest"}))
    assert not torch.equal(next_norm(trainer, batches), reference)


def test_nothing_is_left_of_what_was_there_before(configure, tmp_path):
    """All weights and moments are NaN before the load: what is passed over would show. Names, dtypes and steps too."""
    config = configure("checkpoint.every=2", "train.dtype=bfloat16", f"checkpoint.folder={tmp_path}/c")
    want = save_after(config, 2)
    trainer, ranks = Trainer(config, Mesh({}), torch.device("cpu")), state_module.Ranks(1, 0)
    for piece in state_module.pieces_of(trainer.storage):
        piece.tensor.fill_(torch.nan)
    for parameter in trainer.built.model.parameters():
        parameter.data.fill_(torch.nan)
    state_module.restore(trainer, newest(tmp_path / "c"), ranks, open_tokens(config.data).digest)
    for got, kept in zip(state_module.pieces_of(trainer.storage), state_module.pieces_of(want.storage), strict=True):
        assert (got.name, got.tensor.dtype) == (kept.name, kept.tensor.dtype) and torch.equal(got.tensor, kept.tensor)
    used = dict(want.built.model.named_parameters())
    assert all(torch.equal(p, used[n]) for n, p in trainer.built.model.named_parameters())


def test_row_and_checkpoint_name_their_own_run(trained, tmp_path):
    """`latest` is the newest of the folder that belongs to this config; the run keeps its id."""
    row = trained("checkpoint.every=4", "train.steps=9")
    folder = tmp_path / "checkpoints" / row.run_id
    assert sorted(p.name for p in folder.iterdir()) == ["step-00000008", "step-00000009"]
    (folder / "step-00000009" / "index.json").unlink()
    again = trained("checkpoint.every=4", "train.steps=9", "checkpoint.resume=latest")
    assert (again.run_id, again.resumed_step, again.losses) == (row.run_id, 8, row.losses)
    assert [(r.run_id, r.resumed_step) for r in record.load(tmp_path)] == [(row.run_id, 8)]


def test_data_that_would_go_on_elsewhere_is_refused(configure, trained, tmp_path):
    trained("checkpoint.every=3", f"checkpoint.folder={tmp_path}/c")
    other = tmp_path / "other.txt"
    other.write_text("some other text\n" * 400)
    words = [f"checkpoint.resume={tmp_path}/c/step-00000003", "train.global_batch=8", f"data.path={other}"]
    with pytest.raises(ConfigError) as caught:
        trained(*words)
    lines = str(caught.value).splitlines()
    assert lines[1].startswith(f"  - checkpoint.resume={tmp_path}/c/step-00000003 cannot be followed: checkpoint ")
    assert lines[-2] == "  - train.global_batch=8 was 16: the step would tell another place in the data"
    assert lines[-1].startswith(f"  - the text of data.path=['{other}'] is another one: its digest ")


def test_another_schedule_may_go_on(trained, tmp_path):
    """A branch: more steps, another rate."""
    trained("checkpoint.every=3", f"checkpoint.folder={tmp_path}/c")
    row = trained(f"checkpoint.resume={tmp_path}/c", "train.steps=8", "train.lr=0.01", "dp.degree=2")
    assert row.resumed_step == 6 and len(row.losses) == 8 and math.isfinite(row.loss)


def test_weights_alone_and_by_pattern(configure, tmp_path):
    """The optimizer starts anew; float32 weights serve a float64 run, whose other weights stay initial."""
    config = configure("checkpoint.every=2", "train.dtype=float32", f"checkpoint.folder={tmp_path}/c")
    save_after(config, 2)
    stored = StoredWeights(tmp_path / "c")
    patterns = ("layers.0.*", "head.*")
    words = {"checkpoint.weights": f"{tmp_path}/c", "checkpoint.every": 0, "train.dtype": "float64"}
    trainer, checkpoints, _ = one(replace(config, {**words, "checkpoint.weights_names": patterns}))
    fresh, _, _ = one(replace(config, {"checkpoint.every": 0, "train.dtype": "float64"}))
    assert checkpoints.first == 0 and checkpoints.source is None
    initial = dict(fresh.built.model.named_parameters())
    taken = {n for n in initial if n.startswith(("layers.0.", "head."))}
    assert taken and taken != set(initial)
    for name, parameter in trainer.built.model.named_parameters():
        assert torch.equal(parameter, stored.read(name).double() if name in taken else initial[name]), name
    assert all(not t.any() for s in trainer.storage.optimizer.state.values() for t in s.values())


def test_the_weights_of_another_shape_are_refused(configure, tmp_path):
    config = configure("checkpoint.every=2", f"checkpoint.folder={tmp_path}/c")
    save_after(config, 2)
    other = replace(config, {"checkpoint.weights": f"{tmp_path}/c", "checkpoint.every": 0, "model.ffn": 97})
    with pytest.raises(ValueError, match=r"layers.0.ffn.w_gate has shape \(96, 64\) instead of \(97, 64\)"):
        one(other)
    with pytest.raises(ValueError, match=r"no weight fits checkpoint.weights_names=\['nothing'\]"):
        one(replace(other, {"checkpoint.weights_names": ("nothing",)}))


def test_what_a_config_cannot_start_from(configure, tmp_path):
    config = configure("checkpoint.every=2", f"checkpoint.folder={tmp_path}/c")

    def told(**changes):
        with pytest.raises(ConfigError) as caught:
            one(replace(config, {f"checkpoint.{k}" if "." not in k else k: v for k, v in changes.items()}))
        return [str(p) for p in caught.value.problems]

    legal = "legal: the folder of a checkpoint or of a run"
    nothing = f"cannot be followed: {tmp_path}/c holds no complete checkpoint; {legal}, or auto"
    assert told(resume="latest") == [f"checkpoint.resume=latest {nothing}"]
    assert told(resume=f"{tmp_path}")[0].endswith(f"{tmp_path} holds no complete checkpoint; {legal}, or auto")
    nothing = f"cannot be followed: {tmp_path}/x does not exist; {legal}"
    assert told(weights=f"{tmp_path}/x") == [f"checkpoint.weights={tmp_path}/x {nothing}"]
    assert one(replace(config, {"checkpoint.resume": "auto"}))[1].source is None
    save_after(config, 2)
    last = f"{tmp_path}/c/step-00000002"
    rule = f"checkpoint.every=2 would write among the checkpoints of an earlier run, the last of them {last}; legal: "
    assert told() == [rule + "checkpoint.resume=latest or auto, or another checkpoint.folder"]
    done = f"train.steps=2 are made already in {last}; legal: more than 2"
    assert told(resume="auto", **{"train.steps": 2}) == [done]
    assert one(replace(config, {"checkpoint.resume": "auto"}))[1].first == 2


def test_a_run_that_lost_nothing_but_its_row_makes_its_last_steps_again(configure, trained, tmp_path):
    words = ("checkpoint.every=4", "checkpoint.resume=auto")
    config, whole = configure(*words), trained(*words)
    reopen(config)  # there is the row: nothing happens
    row_path(tmp_path, whole.run_id).unlink()
    with pytest.raises(ConfigError, match="are made already"):
        trained(*words)
    last = newest(folder_of(config))
    reopen(replace(config, {"checkpoint.folder": str(folder_of(config)), "train.lr": 0.1}))  # another run's
    assert newest(folder_of(config)) == last
    reopen(config)
    again = trained(*words)
    assert (again.resumed_step, again.losses) == (4, whole.losses)


@pytest.mark.parametrize("steps", [5, 9])
def test_what_watches_a_run_goes_on(trained, configure, tmp_path, steps):
    """TensorBoard keeps the steps before and replaces those after; a trace, also where a single step is left."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    keys = ["record.tensorboard=true", f"checkpoint.folder={tmp_path}/c", "checkpoint.every=4", f"train.steps={steps}"]
    row = trained(*keys)
    (newest(tmp_path / "c") / "index.json").unlink()
    again = trained(*keys, "record.profile=true", "checkpoint.resume=latest")
    assert (again.run_id, again.resumed_step) == (row.run_id, (steps - 1) // 4 * 4)
    assert (tmp_path / "traces" / f"{row.run_id}.json").exists()
    board = EventAccumulator(str(tmp_path / "tensorboard" / row.run_id)).Reload()
    told = [(e.step, e.value) for e in board.Scalars("loss/cross_entropy")]
    assert [step for step, _ in told] == list(range(steps))
    assert [value for _, value in told] == [torch.tensor(loss).float().item() for loss in row.losses]


def test_planted_ranks_that_see_different_folders(configure, tmp_path, monkeypatch):
    """A network file system may show a new checkpoint to some nodes only."""
    config = configure("checkpoint.every=1", f"checkpoint.folder={tmp_path}/c", "dp.degree=2")
    start(partial(run, replace(config, {"train.steps": 2})), 2, config.launch, 60.0)
    config = replace(config, {"checkpoint.resume": "latest"})

    def sees(place, device):
        from research.train.checkpoint import choice

        if place.rank:
            monkeypatch.setattr(choice, "newest", lambda folder: step_folder(folder, 1))
        return run(config, place, device)

    with pytest.raises(ConfigError, match="ranks see different checkpoints"):
        start(sees, 2, config.launch, 60.0)


def test_skipped_steps_in_a_row_are_remembered(configure, tmp_path, monkeypatch):
    words = ["train.nonfinite=skip", "train.steps=9", "checkpoint.every=2", f"checkpoint.folder={tmp_path}/c"]
    config = configure(*words)
    monkeypatch.setattr(loop, "MOST_SKIPPED", 3)
    trainer, checkpoints, batches = one(config)
    trainer.built.model.head.weight.data[0] = torch.nan
    for _ in checkpoints.saving(train(trainer, batches.microbatches_of), stop=lambda: checkpoints.history.steps == 2):
        pass
    checkpoints.wait()
    trainer, checkpoints, batches = one(replace(config, {"checkpoint.resume": "latest"}))
    assert checkpoints.history.skipped == 2 and all(math.isnan(v) for v in checkpoints.history.losses)
    with pytest.raises(FloatingPointError, match=r"step 2: .* \(3 steps in a row\)"):
        list(checkpoints.saving(train(trainer, batches.microbatches_of, first=checkpoints.first)))


def test_a_step_is_the_same_however_it_is_counted():
    history = state_module.History()
    step = loop.Step(0, 1.5, 0.0, 2.0, 64, False, 1.0, {}, {}, 3.0, (0.5,))
    history.add(step)
    history.add(dataclasses.replace(step, index=1, skipped=True, eval_loss=None))
    assert history == state_module.History([1.5, 1.5], [2.0, 2.0], [[1, 3.0]], [[0.5], [0.5]], 1, 64)
