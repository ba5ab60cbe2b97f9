"""A run that is asked to end: SIGUSR1 (a notice before a time limit) or SIGTERM (pre-emption, an impatient user)."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

NOTICES = (signal.SIGUSR1, signal.SIGTERM)


@contextlib.contextmanager
def asked_to_end(heeds: bool) -> Iterator[Callable[[], bool]]:
    """Whether a notice has come to this process while the body runs. The first one is only noted, so that training can
    save and end; a SIGTERM after it ends the process as ever. A run that cannot save does not heed: SIGTERM ends it,
    SIGUSR1 means nothing. Handlers belong to the main thread; in another one nothing is heard."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if came and number == signal.SIGTERM:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        came.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = {n: signal.getsignal(n) for n in NOTICES}
    signal.signal(signal.SIGUSR1, note if heeds else signal.SIG_IGN)
    if heeds:
        signal.signal(signal.SIGTERM, note)
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
