"""Where snapshots live: the few operations that publishing and reading need, on a local (or shared, mounted) disk.

An object store gets its own class with these methods; nothing else in the package renames, replaces or lists.
"""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from solaris_udf.snapshot.errors import SnapshotError

LOCK = ".publish.lock"


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError of a write, a full disk above all, says where: the system names only files that can't be opened."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


class LocalStorage:
    """One snapshots folder. Every change that a reader can see is a single atomic rename."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def read_text(self, name: str) -> str | None:
        """The text of a small file; None if it does not exist."""
        try:
            return (self.root / name).read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise SnapshotError(f"{self.root / name} can't be read: {error}") from None

    def write_text(self, name: str, text: str) -> None:
        """Writes a new file and flushes it to the disk."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with naming(path), path.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def replace_text(self, name: str, text: str) -> None:
        """Replaces a file at once: a reader sees the old text or the new, never a part."""
        temporary = f".{name}.{os.getpid()}.{time.monotonic_ns()}.tmp"
        try:
            self.write_text(temporary, text)
            (self.root / temporary).replace(self.root / name)
        finally:
            (self.root / temporary).unlink(missing_ok=True)
        self._sync_folder()

    def share_file(self, source: str, target: str) -> bool:
        """Makes target, an equal file, the same one on the disk as source. False if the disk can't."""
        temporary = self.root / f"{target}.link"
        try:
            temporary.hardlink_to(self.root / source)
            temporary.replace(self.root / target)
            # Renaming a file onto another link of itself does nothing.
            temporary.unlink(missing_ok=True)
        except OSError:
            temporary.unlink(missing_ok=True)
            return False
        return True

    def folders(self) -> list[str]:
        """The names of the folders directly below, sorted."""
        return sorted(path.name for path in self.root.iterdir() if path.is_dir()) if self.root.is_dir() else []

    def exists(self, name: str) -> bool:
        return (self.root / name).exists()

    def rename_folder(self, source: str, target: str) -> None:
        """Makes a finished folder visible under its name at once. The target must not exist."""
        (self.root / source).rename(self.root / target)
        self._sync_folder()

    def remove_folder(self, name: str) -> None:
        """Removes a folder. It loses its name first, so that no reader opens half of it."""
        doomed = self.root / f".removed-{name}-{time.monotonic_ns()}"
        try:
            (self.root / name).rename(doomed)
        except FileNotFoundError:
            return
        shutil.rmtree(doomed, ignore_errors=True)

    @contextmanager
    def lock(self, wait_seconds: float = 30.0, name: str = LOCK) -> Iterator[None]:
        """Holds a lock file, by default the publishers'. The system frees it when a process dies, so that a killed one
        blocks nobody.

        Raises SnapshotError if another process holds it for longer than wait_seconds.
        """
        import fcntl

        self.root.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + wait_seconds
        with (self.root / name).open("a") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        held = self.root / name
                        raise SnapshotError(f"another process holds {held}; try again when it is done") from None
                    time.sleep(0.05)
            yield

    def _sync_folder(self) -> None:
        handle = os.open(self.root, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
