"""What went wrong, in one line, and the exit code that goes with it."""

import errno
import os
import re
import sys
import traceback
from pathlib import Path

from jobs.common.errors import RunFailed, UserError

S3_PACKAGE = "org.apache.hadoop:hadoop-aws:3.5.0"
AGAIN = "the same command goes on where it stopped"
# Where files can't be written or read: the place and its owner are the user's to choose.
PLACE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}


def explain(error: BaseException) -> int:
    """Prints what went wrong, one clear line first; with a traceback only where it may be a fault of this code.

    Returns the exit code: 2 what is the user's to fix, 130 interrupted, 1 the rest.
    """
    if isinstance(error, KeyboardInterrupt):
        print(f"interrupted; {AGAIN}", file=sys.stderr)
        return 130
    if isinstance(error, RunFailed):
        print(f"failed: {error}", file=sys.stderr)
        return 1
    message = str(error) if isinstance(error, UserError) else outside_fault(error)
    if message is not None:
        print(f"error: {message}", file=sys.stderr)
        return 2
    if competing(error):
        print(f"failed: another run wrote the same slice of a table meanwhile; {AGAIN}", file=sys.stderr)
        return 1
    print(f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}", file=sys.stderr)
    traceback.print_exception(error)
    return 1


def outside_fault(error: BaseException) -> str | None:
    """What is wrong outside this code (a folder that can't be used, a damaged file), in one line, or None."""
    if isinstance(error, OSError) and error.errno in PLACE and error.filename:
        return f"{error.filename}: {error.strerror}; choose another place, or give this user the right to it"
    text = str(error)
    if re.search(r"No space left on device|Disk quota exceeded", text):
        place = re.search(r"writing rows to (?:file:/*(?=/))?(/\S+?)\.?\s", text) or re.search(
            r"(?:No space left on device|Disk quota exceeded): '(/[^']+)'", text
        )
        where = place[1] if place else getattr(error, "filename", None) or "storage.root or spark.local.dir"
        return f"the disk of {where} is full; nothing half-written was published; free space there, then {AGAIN}"
    if re.search(r"No FileSystem for scheme \"s3|ClassNotFoundException: Class org\.apache\.hadoop\.fs\.s3a", text):
        return (
            f"Spark has no jars for s3a://; add {S3_PACKAGE} to spark.jars.packages, or run make s3 and add "
            ".jars/s3/*.jar to spark.jars"
        )
    refused = re.search(r"solaris_udf\.foundation\.features\.ModelError: (.+)", text)  # by a worker, in its traceback
    if refused:
        return f"foundation model: {refused[1]}; solaris model check tells more"
    damaged = re.search(r"\[FAILED_READ_FILE[^\]]*\] .*? file (?:file:/*(?=/))?(\S+?)\.?\s", text)
    if damaged:
        return (
            f"{damaged[1]} is damaged or gone, and a table or log needs it; restore it from a copy; without one, "
            "remove the table's folder and run its slices again (solaris run --force)"
        )
    denied = re.search(
        r"(?:AccessDeniedException|Permission denied|Read-only file system|mkdirs? failed).*", text, re.I
    )
    if denied:
        return f"a folder can't be written: {denied[0].strip()[:300]}; set storage.root to one that this user may write"
    return None


def competing(error: BaseException) -> bool:
    """Whether two runs wrote the same place at the same time, and this one lost."""
    # By name: importing Delta takes longer than `solaris lookup` does.
    if any(kind.__module__ == "delta.exceptions.base" for kind in type(error).__mro__):
        return True
    return bool(re.search(r"\[DELTA_(?:CONCURRENT_|METADATA_CHANGED|PROTOCOL_CHANGED)", str(error)))


def writable(*roots: str) -> None:
    """Raises UserError if a local storage root can't be written, before a run begins; URIs are left to their stores."""
    for root in roots:
        if "://" in root:
            continue
        folder = Path(root)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"storage.root {root} can't be made: {error.strerror}; choose another place") from None
        for place in (folder, *(child for child in folder.iterdir() if child.is_dir())):
            if not os.access(place, os.W_OK | os.X_OK):
                raise UserError(
                    f"{place} can't be written by this user; set storage.root to a folder of theirs, or change its "
                    "owner"
                )
