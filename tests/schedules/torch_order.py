"""What torch.distributed.pipelining's schedules do, in our actions. They need stages; these stand in for them."""

from types import SimpleNamespace

from torch.distributed.pipelining import schedules as theirs

from research.parallel.pp.csv_file import parse

SINGLE = {"gpipe": theirs.ScheduleGPipe, "1f1b": theirs.Schedule1F1B}
MULTI = {
    "interleaved": theirs.ScheduleInterleaved1F1B,
    "looped_bfs": theirs.ScheduleLoopedBFS,
    "interleaved_zb": theirs.ScheduleInterleavedZeroBubble,
    "zbv": theirs.ScheduleZBVZeroBubble,
    "dualpipe_v": theirs.ScheduleDualPipeV,
}


def schedule_of(name, ranks, microbatches, per_rank=1):
    """torch's own object. Raises ValueError for what it does not allow."""
    stages = [
        SimpleNamespace(
            num_stages=ranks * per_rank, group_size=ranks, group_rank=0, is_last=False, submod=None, stage_index=i
        )
        for i in range(per_rank)
    ]
    return MULTI[name](stages, microbatches)


def order(name, ranks, microbatches, per_rank=1):
    """Each rank's list, idle slots and communication left out, as our reader understands torch's words."""
    if name in SINGLE:
        stand_in = SimpleNamespace(_num_stages=ranks, _n_microbatches=microbatches)
        rows = SINGLE[name]._get_pipeline_order(stand_in)
        if name == "1f1b":  # torch 2.13 counts the last rank's forwards from 1: F1 B0 F2 B1 ...
            shift = rows[ranks - 1][0].microbatch_index
            rows[ranks - 1] = [
                a._replace(microbatch_index=a.microbatch_index - shift) if a and a.computation_type == theirs.F else a
                for a in rows[ranks - 1]
            ]
    else:
        rows = schedule_of(name, ranks, microbatches, per_rank).pipeline_order
    text = "\n".join(",".join("" if a is None else str(a) for a in rows[rank]) for rank in range(ranks))
    return parse(text, "torch").actions
