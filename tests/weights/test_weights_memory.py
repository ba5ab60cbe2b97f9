"""Memory of export and import: near one shard, whatever the model holds."""

import subprocess
import sys
from pathlib import Path

import pytest

MIB = 2**20
SHARD = 16 * MIB
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

def read_all(path):
    folder = HuggingFaceFolder(path)
    for name in folder.meta:
        assert (folder.read(name) == 0.5).all()

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

out, shard_bytes, step = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
small = out.with_name(f"{out.name}-{step}-small")
export(Made(SMALL), small)  # what code and libraries take
read_all(small)
before = peak()
export(Made(LARGE), out, shard_bytes=shard_bytes) if step == "export" else read_all(out)
print(peak() - before)
"""


def peak_bytes(folder: Path, step: str, shard_bytes: int = SHARD) -> int:
    command = [sys.executable, "-c", SCRIPT, str(folder), str(shard_bytes), step]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has another unit")
def test_memory_stays_near_one_shard(tmp_path):
    peaks = {step: peak_bytes(tmp_path / "out", step) for step in ("export", "import")}
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    whole = sum(f.stat().st_size for f in files)
    assert whole > 12 * SHARD and max(f.stat().st_size for f in files) < 1.01 * SHARD
    assert max(peaks.values()) < 2.5 * SHARD, peaks
    assert peak_bytes(tmp_path / "one", "export", shard_bytes=whole) > 0.9 * whole  # what the measure sees of one file
