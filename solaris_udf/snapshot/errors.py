"""The one error of the snapshot reader and publisher."""


class SnapshotError(ValueError):
    """A snapshot, or a request to it, is wrong. The message is one line: what, where, and how to fix it."""
