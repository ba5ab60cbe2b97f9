"""Killed anywhere, truncated, altered or poisoned: a checkpoint is whole and exact, or named and not loaded."""

import hashlib
import json
import os
import pickle
import random
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from research.config import LaunchConfig, replace
from research.launch.local import start
from research.mesh import total_ranks
from research.problems import ConfigError
from research.train.checkpoint import tensor_file
from research.train.checkpoint.choice import folder_of
from research.train.checkpoint.index import CheckpointError, complete, newest, prune, step_folder, steps_in
from research.train.checkpoint.pieces import Piece
from research.train.checkpoint.transfer import Ranks, Saver
from research.train.run import run

LAUNCH = LaunchConfig(device="cpu", threads=1)
ONE = Ranks(1, 0)


def holding(value, numel=1000):
    """The pieces of a tiny training whose every number is `value`."""
    names = ("weight/a", "weight/b", "exp_avg/a")
    return [Piece(n, (numel,), ((0, numel),), torch.full((numel,), float(value))) for n in names]


def save(folder, step, value, numel=1000, keep=2, keep_every=0):
    saver = Saver(folder, ONE, keep, keep_every)
    saver.save(step, holding(value, numel), {"step": step})
    saver.wait()


def loaded(checkpoint, numel=1000):
    """The one number that a checkpoint holds everywhere."""
    pieces = holding(-1, numel)
    ONE.load(checkpoint, pieces, lambda name: True)
    (value,) = {float(v) for p in pieces for v in p.tensor.unique()}
    return value


OPERATIONS = ("fsync", "replace", "rename", "unlink", "rmdir", "mkdir", "chmod", "open")


def dying_at(number, body):
    """Run `body` in a process that dies at its `number`-th operation on files; True if it did."""
    pid = os.fork()
    if pid:
        return os.WEXITSTATUS(os.waitpid(pid, 0)[1]) == 9
    try:
        left = [number]

        def tick():
            left[0] -= 1
            if not left[0]:
                os._exit(9)

        def counted(real):
            def operation(*args, **keys):
                tick()
                return real(*args, **keys)

            return operation

        def chunks(tensors, real=tensor_file._chunks):
            for chunk in real(tensors):
                tick()  # the file holds what came before
                yield chunk

        for name in OPERATIONS:
            setattr(os, name, counted(getattr(os, name)))
        tensor_file._chunks = chunks
        body()
    except BaseException:
        os._exit(1)
    os._exit(0)


@pytest.mark.parametrize("step, keep", [(2, 1), (2, 2), (1, 1)])
def test_killed_at_any_operation(tmp_path, step, keep):
    """During the save of step 2, and of step 1 once more, the old checkpoint is there until the new one is."""
    number, values = 0, []
    while True:
        number += 1
        folder = tmp_path / str(number)
        save(folder, 1, 10, keep=keep)
        died = dying_at(number, lambda: save(folder, step, 20, keep=keep))  # noqa: B023
        found = newest(folder)
        assert found is not None
        values.append(loaded(found))
        assert values[-1] in (10, 20) and all(loaded(p) in (10, 20) for p in complete(folder))
        save(folder, 3, 30, keep=keep)  # what was left does not stand in the way
        assert loaded(newest(folder)) == 30 and len(complete(folder)) <= keep
        assert steps_in(folder) == sorted(complete(folder))
        if not died:
            break
    assert number > 15 and values == sorted(values) and set(values) == {10, 20}


def test_killed_at_random_moments(tmp_path):
    """A process that saves all the time, killed by the system; large enough to be met in the middle of a file."""
    numel, draw = 300_000, random.Random(0)
    for _ in range(12):
        pid = os.fork()
        if not pid:
            last = newest(tmp_path)
            step = 1 + (int(last.name[5:]) if last else 0)
            while True:
                save(tmp_path, step, step, numel)
                step += 1
        time.sleep(draw.uniform(0.05, 0.4))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for path in complete(tmp_path):
            assert loaded(path, numel) == int(path.name[5:])
    assert int(newest(tmp_path).name[5:]) > 12


def test_a_run_that_is_killed_again_and_again(configure, tmp_path):
    """Two ranks, a save each step, killed whole; `auto` goes on each time, and the end is that of a run in peace."""
    words = ["dp.degree=2", "checkpoint.every=1", "train.steps=40", "model.layers=1", "model.dense_layers=0"]
    config = configure(*words)
    want = start(partial(run, replace(config, {"checkpoint.every": 0})), 2, config.launch, 60.0)[0]
    config = replace(config, {"checkpoint.resume": "auto", "checkpoint.folder": f"{tmp_path}/c"})
    draw, seen = random.Random(1), [None]
    while len(seen) < 4 and seen[-1] != "step-00000040":
        pid = os.fork()
        if not pid:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            start(partial(run, config), 2, config.launch, 60.0)
            os._exit(0)
        found = seen[-1]
        while found == seen[-1]:  # until there is one more checkpoint
            time.sleep(0.01)
            found = getattr(newest(folder_of(config)), "name", None)
        time.sleep(draw.uniform(0, 0.05))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        seen.append(newest(folder_of(config)).name)
    assert len(seen) > 2
    if seen[-1] != "step-00000040":
        row = start(partial(run, config), total_ranks(config), config.launch, 60.0)[0]
        assert row.losses == want.losses and row.grad_norms == want.grad_norms


def test_keeps_the_last_and_every_so_many(tmp_path):
    for step in range(1, 10):
        save(tmp_path, step, step, keep=2, keep_every=3)
    assert [p.name for p in complete(tmp_path)] == [f"step-0000000{n}" for n in (3, 6, 8, 9)]
    for step in range(10, 13):
        save(tmp_path, step, step, keep=0)
    assert len(complete(tmp_path)) == 7


def test_only_files_of_saves_are_removed(tmp_path):
    save(tmp_path, 1, 1)
    (tmp_path / "step-00000001" / "notes.txt").write_text("mine")
    (tmp_path / "step-1-copy").mkdir()
    for step in (2, 3, 4):
        save(tmp_path, step, step)
    assert [p.name for p in (tmp_path / "step-00000001").iterdir()] == ["notes.txt"]
    assert (tmp_path / "step-1-copy").exists()


def test_the_newest_is_the_one_made_last(tmp_path):
    """A run that went back to step 3 and on from there: its step 4 is newer than the step 6 that it left behind."""
    for step in (3, 6, 4):
        save(tmp_path, step, step, keep=3)
    assert newest(tmp_path).name == "step-00000004"
    assert [p.name for p in complete(tmp_path)] == ["step-00000003", "step-00000006", "step-00000004"]
    prune(tmp_path, 1, 0)
    assert newest(tmp_path).name == "step-00000004" and len(steps_in(tmp_path)) == 1


def test_a_folder_without_an_index_is_no_checkpoint(configure, tmp_path):
    """Of a save that was killed: resuming passes over it, and the save of that step succeeds on all ranks."""
    config = configure("dp.degree=2", "checkpoint.every=3", "train.steps=4", f"checkpoint.folder={tmp_path}/c")
    start(partial(run, config), 2, config.launch, 60.0)
    (tmp_path / "c" / "step-00000004" / "index.json").unlink()
    half = tmp_path / "c" / "step-00000006"
    half.mkdir()
    (half / "00000000-00000-weights.safetensors").write_bytes(b"")
    config = replace(config, {"checkpoint.resume": "latest", "train.steps": 6})
    row = start(partial(run, config), 2, config.launch, 60.0)[0]
    assert row.resumed_step == 3 and newest(tmp_path / "c") == half
    assert len(list(half.glob("*.safetensors"))) == 4


def rewritten(path, change):
    path.write_bytes(change(path.read_bytes()))


def flipped(content):
    return content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]


DAMAGES = {
    "truncated": (lambda b: b[:-7], "bytes instead of"),
    "empty": (lambda b: b"", "has 0 bytes instead of"),
    "altered": (flipped, "was altered: its checksum differs"),
    "missing": (None, "cannot be read: No such file or directory"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", ["weights", "rest"])
def test_a_damaged_file_is_named_and_the_one_before_offered(tmp_path, damage, kind):
    for step in (1, 2, 3):
        save(tmp_path, step, step, keep=3)
    last = newest(tmp_path)
    (path,) = last.glob(f"*-{kind}.safetensors")
    change, told = DAMAGES[damage]
    path.unlink() if change is None else rewritten(path, change)
    pieces = holding(-1)
    with pytest.raises(CheckpointError) as caught:
        ONE.load(last, pieces, lambda name: True)
    head, line = str(caught.value).splitlines()
    assert head == f"{last} is damaged:" and line.startswith(f"  - {path} ") and told in line
    assert line.endswith(f"; the complete checkpoint before it is {step_folder(tmp_path, 2)}")
    assert all((p.tensor == -1).all() for p in pieces), "half loaded"
    rest = step_folder(tmp_path, 2)
    for file in rest.glob("*.safetensors"):
        rewritten(file, lambda b: b[:-1])
    with pytest.raises(CheckpointError, match=f"before it is {step_folder(tmp_path, 1)}$"):
        ONE.load(last, pieces, lambda name: True)
    with pytest.raises(CheckpointError, match=f"before it is {step_folder(tmp_path, 1)}$"):
        ONE.load(rest, pieces, lambda name: True)


def test_one_after_a_damaged_one_is_offered_where_there_is_none_before(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, step, keep=3)
    first = step_folder(tmp_path, 1)
    rewritten(next(first.glob("*-rest.safetensors")), flipped)
    with pytest.raises(CheckpointError, match=f"the complete checkpoint after it is {step_folder(tmp_path, 2)}$"):
        ONE.load(first, holding(-1), lambda name: True)


def test_each_damaged_file_is_named_once(configure, tmp_path):
    """By ranks that verify one file each."""
    config = configure("dp.degree=2", "checkpoint.every=3", "train.steps=3", f"checkpoint.folder={tmp_path}/c")
    start(partial(run, config), 2, config.launch, 60.0)
    files = sorted(newest(tmp_path / "c").glob("*.safetensors"))
    for path in files:
        rewritten(path, flipped)
    config = replace(config, {"checkpoint.resume": "latest", "train.steps": 6})
    with pytest.raises(ConfigError) as caught:
        start(partial(run, config), 2, config.launch, 60.0)
    _, head, *lines = str(caught.value).splitlines()
    assert head == f"  - checkpoint.resume=latest cannot be followed: {newest(tmp_path / 'c')} is damaged:"
    assert sorted(line.split()[1] for line in lines) == [str(f) for f in files]


def test_weights_alone_do_not_need_the_other_files(tmp_path):
    save(tmp_path, 1, 5)
    (path,) = newest(tmp_path).glob("*-rest.safetensors")
    path.unlink()
    pieces = [p for p in holding(-1) if p.name.startswith("weight/")]
    ONE.load(newest(tmp_path), pieces, lambda name: name.startswith("weight/"))
    assert all((p.tensor == 5).all() for p in pieces)


def relabelled(content):
    return content.replace(b'"step": 3', b'"step": 4')


@pytest.mark.parametrize("change", [lambda b: b[:-9], flipped, lambda b: b"", relabelled])
def test_a_damaged_index_is_named(tmp_path, change):
    for step in (2, 3):
        save(tmp_path, step, step)
    path = newest(tmp_path) / "index.json"
    rewritten(path, change)
    assert newest(tmp_path) == path.parent  # not passed over silently
    with pytest.raises(CheckpointError, match=f"{path} is truncated or was altered; .* {step_folder(tmp_path, 2)}$"):
        loaded(path.parent)
    save(tmp_path, 4, 4, keep=1)  # and it does not count as the one that is kept
    assert loaded(step_folder(tmp_path, 4)) == 4 and path.exists()


def test_every_rank_is_told_of_damage(configure, tmp_path):
    config = configure("dp.degree=3", "checkpoint.every=3", "train.steps=4", f"checkpoint.folder={tmp_path}/c")
    start(partial(run, config), 3, config.launch, 60.0)
    path = next(newest(tmp_path / "c").glob("*-00001-rest.safetensors"))
    rewritten(path, flipped)
    config = replace(config, {"checkpoint.resume": "latest", "train.steps": 6, "launch.timeout_s": 30.0})
    with pytest.raises(ConfigError) as caught:
        start(partial(run, config), 3, config.launch, 60.0)
    assert str(caught.value).endswith(
        f"  - {path} was altered: its checksum differs; the complete checkpoint before it is {tmp_path}/c/step-00000003"
    )


class Malice:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_planted_pickle_is_never_executed(tmp_path):
    """In place of any file, and with an index that vouches for it: a load fails, and nothing was run."""
    save(tmp_path / "c", 1, 1)
    checkpoint, proof = newest(tmp_path / "c"), tmp_path / "executed"
    poison = pickle.dumps(Malice(proof))
    pickle.loads(poison)
    assert proof.exists(), "the plant works"
    proof.unlink()
    for name in (".metadata", "__0_0.distcp"):
        (checkpoint / name).write_bytes(poison)
    assert loaded(checkpoint) == 1  # nobody looks at them
    torch.save(Malice(proof), tmp_path / "saved.pt")
    for content in (poison, (tmp_path / "saved.pt").read_bytes()):
        for path in checkpoint.glob("*.safetensors"):
            path.write_bytes(content)
        with pytest.raises(CheckpointError, match="instead of"):
            loaded(checkpoint)
        vouch(checkpoint)
        with pytest.raises(CheckpointError, match="SafetensorError"):
            loaded(checkpoint)
        (checkpoint / "index.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"index.json"):
            loaded(checkpoint)
        (checkpoint / "index.json").unlink()
        save(tmp_path / "c", 1, 1)
    assert not proof.exists()


def vouch(checkpoint):
    """Rewrite the index as someone would who may write there: sizes and checksums fit what the files hold now."""
    content = json.loads((checkpoint / "index.json").read_text())["content"]
    for name in content["files"]:
        held = (checkpoint / name).read_bytes()
        content["files"][name] = [len(held), hashlib.sha256(held).hexdigest()]
    text = json.dumps(content)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (checkpoint / "index.json").write_text(f'{{"sha256": "{digest}", "content": {text}}}')


def test_planted_file_outside_the_checkpoint_is_not_read(tmp_path):
    """An index that points elsewhere."""
    save(tmp_path / "c", 1, 1)
    save(tmp_path / "other", 1, 2)
    checkpoint = newest(tmp_path / "c")
    text = (checkpoint / "index.json").read_text()
    for path in checkpoint.glob("*.safetensors"):
        other = next(newest(tmp_path / "other").glob(f"*-{path.stem.rpartition('-')[2]}.safetensors"))
        text = text.replace(path.name, f"../../other/{other.parent.name}/{other.name}")
    (checkpoint / "index.json").write_text(text)
    content = text.partition('"content": ')[2][:-1]
    digest = hashlib.sha256(content.encode()).hexdigest()
    (checkpoint / "index.json").write_text(f'{{"sha256": "{digest}", "content": {content}}}')
    with pytest.raises(CheckpointError, match="names a file outside"):
        loaded(checkpoint)
