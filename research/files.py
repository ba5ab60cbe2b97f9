"""Files that are whole or absent."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def write_atomically(path: Path, content: bytes) -> None:
    """A reader sees the old file or the whole new one, after a crash too."""
    with atomically(path) as file:
        file.write(content)


@contextmanager
def atomically(path: Path) -> Iterator[IO[bytes]]:
    """As `write_atomically`, for content that comes piece by piece: the file appears when the block ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).chmod(0o644)
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def sync(path: Path) -> None:
    """To the disk, where it outlives a power failure: the content of a file, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def writable(folder: Path) -> bool:
    """Whether files can be made in a folder, which may have to be made first."""
    try:
        absolute = folder.absolute()
        there = next(f for f in (absolute, *absolute.parents) if f.exists())
        return there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    except OSError:
        return False
