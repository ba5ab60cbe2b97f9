"""What only a GPU can say, in five minutes: proofs in float32 and bfloat16, and MFU of a dense and an MoE model.

    make gpu

Without a CUDA device it says so and exits 0.
"""

import importlib.util
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from experiments.command import launch, main, read_config
from experiments.tables import show
from research.config import RunConfig, replace
from research.launch.environment import Joined
from research.launch.local import RankError
from research.train.proof import compare, reference_of, snapshots, worst_by_kind
from research.train.run import run

CONFIGS = Path(__file__).parent / "configs"
# Rounding of the dtype (2**-24, 2**-9), grown by sums of a few hundred terms through four layers.
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.2}
# Dense bfloat16 peaks of the data sheets, TFLOP/s.
PEAK_TFLOPS = {"A100": 312.0, "H100": 989.0, "H200": 989.0, "B200": 2250.0}


def proofs(device: str) -> bool:
    """One step of the proof model on a device against float64 on the CPU, by every gradient."""
    base = replace(read_config([str(CONFIGS / "tiny.yaml")]), {"train.steps": 1, "train.warmup_steps": 0})
    table = Table("dtype", "compared", "worst relative error", "where", "")
    passed = True
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        one = replace(reference_of(base), {"launch.device": "cpu"})
        reference = next(snapshots(one, Path(folder, "reference")))
        for dtype, tolerance in TOLERANCES.items():
            config = replace(base, {"train.dtype": dtype, "launch.device": device})
            for f in worst_by_kind(compare(reference, snapshots(config, Path(folder, dtype)))):
                passed &= f.error <= tolerance
                table.add_row(dtype, f.what, f"{f.error:.1e}", f.name, "pass" if f.error <= tolerance else "FAIL")
    Console().print(table)
    return passed


def arms(peak_tflops: float) -> Iterator[RunConfig]:
    """Dense and MoE, by each attention kernel that is installed."""
    kernels = ["sdpa", *(["flash"] if importlib.util.find_spec("flash_attn") else [])]
    for model in ("llama_1b", "moe_gpu"):
        for kernel in kernels:
            words = [f"train.kernel={kernel}", "record.ablation=gpu", f"record.arm={model}_{kernel}"]
            yield read_config([str(CONFIGS / f"{model}.yaml"), *words, f"record.peak_tflops={peak_tflops}"])


def gpu(words: Sequence[str], where: Joined | None) -> int:
    # Asked without starting CUDA here: the ranks are forked from this process.
    if not torch.cuda.device_count():
        print("no CUDA device: nothing to measure here")
        return 0
    passed = proofs("cuda")
    name = launch(lambda place, device: torch.cuda.get_device_name(device), read_config([]), None)
    peak = next((p for key, p in PEAK_TFLOPS.items() if re.search(rf"\b{key}\b(?!.*(PCIe|NVL))", name)), 0.0)
    for config in arms(peak):
        try:
            row = launch(partial(run, config), config, None)
        except RankError as error:  # out of memory, say: the other arms are still worth having
            print(f"{config.record.arm} failed: {error}", file=sys.stderr, flush=True)
            passed = False
            continue
        assert row is not None, "it keeps no checkpoints, so nothing ends it early"
        mfu = "no peak known" if row.mfu is None else f"MFU {row.mfu:.1%}"
        print(f"{row.arm}: {row.tokens_per_s:,.0f} tokens/s, {row.tflops_per_rank:.0f} TFLOP/s, {mfu}", flush=True)
    show("results", "gpu")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(__doc__, gpu))
