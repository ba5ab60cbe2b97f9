"""What stages hand to each other in one walk through a program: activations, and the gradients of their inputs.

B batch, S local sequence, D model
"""

from collections import deque
from collections.abc import Callable, Iterator

from torch import Tensor

from research import comm
from research.mesh import Mesh
from research.train.action import Action, Program, parts

PURPOSES = {"F": "activations", "B": "gradients"}


class Handover:
    """What the same rank needs next stays here, the rest travels. Nothing blocks but `take`, and `actions` before some.

    Messages of a sender are asked for in its order, each into a buffer of its own, and the next one as soon as the one
    before it is used: it travels beside what is computed meanwhile.
    """

    def __init__(self, program: Program, mesh: Mesh, fresh: Callable[[int], Tensor]) -> None:
        """`fresh(m)`: room for the residual stream (B, S, D) of microbatch m between two layers on this rank."""
        self._program, self._fresh = program, fresh
        me = mesh.at["pp"]
        self._here: dict[Action, Tensor] = {}
        self._leaving: dict[Action, comm.Pending] = {}
        self._out = {to: mesh.way(me, to) for to in program.sends.values()}
        self._in = {sender: mesh.way(sender, me) for sender in program.receives}
        self._sender = {name: sender for sender, names in program.receives.items() for name in names}
        self._due = {sender: deque(names) for sender, names in program.receives.items()}
        self._coming: dict[int, dict[Action, comm.Receiving]] = {sender: {} for sender in program.receives}
        for sender in program.receives:
            self._ask(sender)

    def actions(self) -> Iterator[Action]:
        """Those of the program, of a pair one after the other. Before an entry, what was sent and has been asked for is
        let go of; after the last one, everything."""
        for place, entry in enumerate(self._program.entries):
            for name in self._program.settled.get(place, ()):
                self._leaving.pop(name).wait()
            yield from parts(entry)
        while self._leaving:
            self._leaving.popitem()[1].wait()
        assert not self._here and not any(self._due.values()) and not any(self._coming.values())

    def stream(self, forward: Action) -> Tensor | None:
        """The residual stream (B, S, D) that a forward goes on from; None: from tokens."""
        return self.take(forward._replace(stage=forward.stage - 1)) if forward.stage else None

    def give(self, name: Action, t: Tensor) -> None:
        if name in self._program.sends:
            self._leaving[name] = comm.start_send(t, self._out[self._program.sends[name]], PURPOSES[name.kind])
        else:
            self._here[name] = t

    def take(self, name: Action) -> Tensor:
        if name not in self._sender:
            return self._here.pop(name)
        sender = self._sender[name]
        coming = self._coming[sender]
        while name not in coming:
            self._ask(sender)
        result = coming.pop(name).wait()
        if self._due[sender] and not coming:
            self._ask(sender)
        return result

    def _ask(self, sender: int) -> None:
        name = self._due[sender].popleft()
        room = self._fresh(name.microbatch)
        self._coming[sender][name] = comm.start_receive(room, self._in[sender], PURPOSES[name.kind])
