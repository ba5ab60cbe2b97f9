"""The command prints, draws, writes, compares; bad words are one line that names what is legal."""

import pytest

from experiments.schedule import main


def run(capsys, words):
    status = main(words.split())
    done = capsys.readouterr()
    return status, done.out, done.err


def test_what_it_prints(capsys, tmp_path):
    words = f"zbv --ranks 4 --microbatches 8 --compare 1f1b --out {tmp_path}/a.svg --csv {tmp_path}/a.csv"
    status, out, err = run(capsys, words)
    assert (status, err) == (0, "")
    assert "rank 3  ...FfFfFfFfbwFBWfbwFBW" in out
    rows = {line.split("│")[1].strip(): line for line in out.splitlines() if line.startswith("│")}
    assert [cell.strip() for cell in rows["zbv"].split("│")[2:-1]] == ["2", "25.5", "0.0588", "0.0000", "4, 4, 4, 4"]
    assert [cell.strip() for cell in rows["1f1b"].split("│")[2:-1]] == ["1", "33", "0.2727", "0.2727", "4, 3, 2, 1"]
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")
    status, again, _ = run(capsys, f"file:{tmp_path}/a.csv")
    assert status == 0 and "25.5" in again and "4, 4, 4, 4" in again


def test_times(capsys):
    status, out, _ = run(capsys, "1f1b --ranks 2 --microbatches 3 --times 1,1,1,0.5")
    # Rank 1 works 9, starts after F and a transfer, waits for the third microbatch from 7.5 to 8.5; back: 0.5 and BW.
    assert status == 0 and "│ 14 " in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("zbw", "schedule=zbw is unknown; legal: gpipe, 1f1b"),
        ("zbv --compare zbw", "schedule=zbw is unknown; legal: gpipe"),
        ("zbv --ranks 0", "ranks=0 is out of range; legal: an integer, at least 1"),
        ("zbv --stages 3", "stages per rank=3 does not fit schedule=zbv; legal: 2"),
        ("dualpipe --ranks 5", "ranks=5 must be a multiple of 2 for schedule=dualpipe; legal: 2, 4, 6"),
        ("zbv --times 1,1", "--times 1,1 must be F,B,W or F,B,W,comm; legal: numbers of at least 0, not all 0"),
        ("zbv --times 1,1,x", "--times 1,1,x must be"),
        ("zbv --times 1,1,-1", "--times 1,1,-1 must be"),
        ("zbv --times 1,1,nan", "--times 1,1,nan must be"),
        ("zbv --times 0,0,0", "--times 0,0,0 must be"),
        ("zbv --overlap 0", "--overlap 0 must be a share; legal: above 0, up to 1"),
        ("zbv --out a.gif", "--out a.gif names no picture; legal: FILE.svg, FILE.png"),
        ("file:nowhere.csv", "schedule=file:nowhere.csv cannot be read"),
    ],
)
def test_bad_words_are_one_clear_line(capsys, words, told):
    status, out, err = run(capsys, words)
    assert (status, out) == (2, "") and err.startswith(told) and err.count("\n") == 1


@pytest.mark.parametrize("words", ["", "zbv --ranks x", "zbv --nope 3"])
def test_words_that_cannot_be_parsed(capsys, words):
    with pytest.raises(SystemExit) as left:
        main(words.split())
    assert left.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_a_file_asked_for_other_numbers(capsys, tmp_path):
    (tmp_path / "a.csv").write_text("0F0,0B0\n")
    status, _, err = run(capsys, f"file:{tmp_path}/a.csv --ranks 0")
    assert status == 2 and "ranks=0" in err
    (tmp_path / "b.csv").write_text("0F0,0B0\n1F0,1B0,1B0\n")
    status, _, err = run(capsys, f"file:{tmp_path}/b.csv")
    assert status == 2 and "stage 1, microbatch 0 runs BW 2" in err
