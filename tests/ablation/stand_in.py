"""In place of `python -m experiments.run ATTEMPT`: says that it was started, and ends as the name of its arm says."""

import json
import os
import signal
import sys
import time
from pathlib import Path

attempt = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
results, arm = Path(sys.argv[1]).parents[2], attempt["arm"]
results.mkdir(exist_ok=True)
with (results / "starts").open("a") as log:
    log.write(f"{arm}{attempt['seed']}\n")
if arm.startswith("bad"):
    raise ValueError(f"{arm} is bad")
if arm.startswith("memory"):
    bytearray(1 << 62)
if arm.startswith("SIG"):
    os.kill(os.getpid(), signal.Signals[arm])
if arm.startswith("slow"):
    time.sleep(60)
if arm.startswith("steps"):
    time.sleep(0.3)
if not arm.startswith("quiet"):
    row = json.loads((Path(__file__).parents[1] / "report" / "row.json").read_text(encoding="utf-8"))
    row |= {key: attempt[key] for key in ("run_id", "ablation", "arm", "seed", "config")}
    draft = results / "rows" / f".{attempt['run_id']}"
    draft.parent.mkdir(exist_ok=True)
    draft.write_text(json.dumps(row), encoding="utf-8")
    draft.replace(results / "rows" / f"{attempt['run_id']}.json")
