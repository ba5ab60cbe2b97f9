"""A link and a clock on which only work, and what is waited for, take time, so that no other process can change what
the ledger says of waiting."""

from types import SimpleNamespace

from research import comm, ledger

COLLECTIVES = [
    (comm.dist, "all_to_all_single"),
    (comm.dist, "all_reduce"),
    (comm, "_all_gather"),
    (comm, "_reduce_scatter"),
]


class Link:
    """Carries what a rank receives, one message after another: a second for each row of `width` elements or more,
    nothing else takes time."""

    def __init__(self, monkeypatch, width):
        self.now = self.free = 0.0
        self._width = width
        monkeypatch.setattr(ledger, "time", SimpleNamespace(perf_counter=lambda: self.now))
        for module, name in COLLECTIVES:
            monkeypatch.setattr(module, name, self._slowed(getattr(module, name)))

    def _slowed(self, real):
        def begun(out, *args, **more):
            real(out, *args, **more).wait()
            rows = out.shape[:-1].numel() if out.shape[-1] >= self._width else 0
            self.free = max(self.free, self.now) + rows
            return SimpleNamespace(wait=lambda arrives=self.free: setattr(self, "now", max(self.now, arrives)))

        return begun
