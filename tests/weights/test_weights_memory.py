"""Memory of export and import: near one shard, whatever the model holds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 2**20
SHARD = 16 * MIB
PLAIN_MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}  # no address space in reserve
SCRIPT = """
import dataclasses, resource, sys
from pathlib import Path
import torch
from research.config import ModelConfig
from research.models.decoder import Decoder, specs
from research.weights.folder import HuggingFaceFolder, export

SMALL = ModelConfig(vocab=1024, dim=64, layers=1, heads=4, kv_heads=4, head_dim=64, dense_layers=0, experts=8,
                    expert_ffn=512, shared_experts=0)
LARGE = dataclasses.replace(SMALL, dim=256, layers=16)

class Made:
    def __init__(self, model):
        self.model = model
        with torch.device("meta"):
            self.meta = {n: torch.empty(s.shape) for n, s in specs(Decoder(model)).items()}

    def read(self, name, expert=None):
        meta = self.meta[name] if expert is None else self.meta[name][expert]
        return torch.full_like(meta, 0.5, device="cpu")

def read_all(path, keep=False):
    folder, kept = HuggingFaceFolder(path), []
    for name in folder.meta:
        kept = [*kept, folder.read(name)] if keep else [folder.read(name)]
        assert (kept[-1] == 0.5).all()

out, shard_bytes, step, limit = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
small = out.with_name(f"{out.name}-{step}-small")
export(Made(SMALL), small)  # what code and libraries take
read_all(small)
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + limit,) * 2)
export(Made(LARGE), out, shard_bytes=shard_bytes) if step == "export" else read_all(out, keep=step == "keep")
"""


def dies(folder: Path, step: str, shards: float, shard_bytes: int = SHARD) -> str:
    """Export or read a model where address space for so many shards is left; what it dies of, if it does."""
    command = [sys.executable, "-c", SCRIPT, str(folder), str(shard_bytes), step, str(int(shards * SHARD))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env={**os.environ, **PLAIN_MALLOC})
    assert done.returncode == 0 or "memory" in done.stderr, done.stderr
    return done.stderr if done.returncode else ""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
def test_memory_stays_near_one_shard(tmp_path):
    """A file that is read takes its size of address space twice: safetensors maps it, and torch does."""
    assert not dies(tmp_path / "out", "export", shards=3)
    assert not dies(tmp_path / "out", "import", shards=4)
    sizes = [f.stat().st_size for f in (tmp_path / "out").glob("*.safetensors")]
    assert sum(sizes) > 12 * SHARD and max(sizes) < 1.01 * SHARD
    assert dies(tmp_path / "one", "export", shards=8, shard_bytes=sum(sizes))  # planted: one file
    assert dies(tmp_path / "out", "keep", shards=8)  # planted: what was read stays
