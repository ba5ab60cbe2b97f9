"""CSV: ours is read back, torch reads ours, we read torch's; what is no action is told by place."""

import pytest

from research.parallel.pp.check import check
from research.parallel.pp.csv_file import parse, to_csv
from research.parallel.pp.generate import FAMILIES, generate
from tests.schedules.torch_order import MULTI, schedule_of


@pytest.mark.parametrize("name", FAMILIES)
def test_written_and_read_back(name, tmp_path):
    schedule = generate(name, 4, 6)
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(schedule))
    back = generate(f"file:{path}", 4, 6)
    assert (back.actions, back.stages, back.microbatches) == (schedule.actions, schedule.stages, 6)
    assert [set(held) for held in back.holds] == [set(held) for held in schedule.holds]
    check(back)


@pytest.mark.parametrize("name", MULTI)
def test_torch_writes_what_we_read(name, tmp_path):
    """With its sends, receives and sharding, too."""
    per_rank = FAMILIES[name].per_rank or 2
    torchs = schedule_of(name, 2, 8, per_rank)
    wanted = generate(name, 2, 8, per_rank)
    for form in ("compute_only", "compute_comms"):
        torchs._dump_csv(str(tmp_path / form), form)
        read = parse((tmp_path / form).read_text(), form)
        check(read)
        if form == "compute_only":
            assert read.actions == wanted.actions


@pytest.mark.parametrize("name", MULTI)
def test_torch_reads_what_we_write(name, tmp_path):
    """torch's own reader and its check accept it, and it says the same again."""
    per_rank = FAMILIES[name].per_rank or 2
    ours = generate(name, 2, 8, per_rank)
    path = tmp_path / "ours.csv"
    path.write_text(to_csv(ours))
    torchs = schedule_of(name, 2, 8, per_rank)
    torchs._load_csv(str(path))
    torchs._dump_csv(str(tmp_path / "again.csv"), "compute_only")
    assert parse((tmp_path / "again.csv").read_text(), "again").actions == ours.actions


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0F0,0B0\n1F0,1X0\n", r"mine, row 2, column 2: '1X0' is no action; legal: 0F3"),
        ("0F0,(0F1;0B0\n", r"row 1, column 2: '\(0F1;0B0' is no action"),
        ("0F0,(0B1;0F0)OVERLAP_F_B\n", r"column 2: .* is not a forward and a backward"),
        ("0F0,(0F1;x)OVERLAP_F_B\n", r"column 2: .* is no action"),
        (",,\n", "mine holds no action"),
        ("", "mine holds no action"),
    ],
)
def test_faults_of_a_file_are_told_by_place(text, told):
    with pytest.raises(ValueError, match=told):
        parse(text, "mine")


def test_a_file_is_checked_and_keeps_its_numbers(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0B0\n1F0\n")
    with pytest.raises(ValueError, match="stage 1, microbatch 0 runs BW 0, B 0, W 0"):
        check(generate(f"file:{path}", 2, 1))
    with pytest.raises(ValueError, match="ranks=4; legal: 2; microbatches=8; legal: 1; stages per rank=3; legal: 1"):
        generate(f"file:{path}", 4, 8, 3)
    with pytest.raises(ValueError, match=r"nowhere\.csv cannot be read"):
        generate("file:nowhere.csv", 4, 8)


def test_a_mistyped_number_is_no_endless_list():
    with pytest.raises(ValueError, match="4 actions are too few for 1000000000 stages"):
        check(parse("0F0,0B0\n999999999F0,999999999B0\n", "mine"))
