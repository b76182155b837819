"""Snapshots to an object store, for fleets without a shared disk: files first, manifest next, CURRENT last.

CURRENT moves by a conditional put: of two publishers that move it at once one wins, and the other looks again. Hosts
read with solaris_udf.snapshot.pull, or a SnapshotFollower with `source`.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jobs.common.errors import UserError
from solaris_udf.snapshot.errors import SnapshotError
from solaris_udf.snapshot.layout import CURRENT, MANIFEST, is_safe_name
from solaris_udf.snapshot.manifest import FileEntry, Manifest
from solaris_udf.snapshot.opening import check_files, find_snapshot

THREADS = 8
TRIES = 20  # of moving CURRENT; each but the last was lost to another publisher's move


@dataclass(frozen=True)
class Pushed:
    """What a push did. bytes: sent, without what was there. live: whether CURRENT names the snapshot afterwards."""

    snapshot_id: str
    bytes: int
    live: bool


def push(root: str | Path, snapshot_id: str | None, uri: str, *, replaces: str | None = None) -> Pushed:
    """Copies a snapshot (default: the live one) of the folder `root` to s3://BUCKET/PREFIX and makes it current there,
    unless the store's current one is of a later as_of.

    replaces: a rollback: what `current_in` said. CURRENT moves whatever the as_of, and not at all (a UserError) if
    another publisher has moved it since. Credentials, region and endpoint come from the AWS_* environment or an
    instance role. Raises UserError, one line, for a wrong URI, a missing bucket or credentials that don't fit;
    SnapshotError if the snapshot is damaged.
    """
    folder, manifest = find_snapshot(Path(root), snapshot_id)
    check_files(folder, manifest, range(manifest.shards), hashes=True)
    store = _Store(uri)
    return store.push(folder, manifest, replaces)


def current_in(uri: str) -> str:
    """What CURRENT of s3://BUCKET/PREFIX holds; an empty text if there is none. Raises UserError as `push` does."""
    return _Store(uri).current()


class _Store:
    def __init__(self, uri: str) -> None:
        try:
            import boto3
            from boto3.exceptions import Boto3Error
            from botocore.exceptions import BotoCoreError, ClientError
        except ImportError:
            raise UserError("pushing to S3 needs boto3: pip install 'solaris-pipeline[s3]'") from None
        place = urlsplit(uri)
        if place.scheme != "s3" or not place.netloc or "@" in place.netloc:
            raise UserError("a place for snapshots is s3://BUCKET/PREFIX, without credentials in it")
        self.uri, self.bucket, prefix = uri, place.netloc, place.path.strip("/")
        self.prefix = f"{prefix}/" if prefix else ""
        self.errors, self.refused = (Boto3Error, BotoCoreError, ClientError), ClientError
        try:
            self.client: Any = boto3.Session().client("s3")  # a session of its own: credentials may have changed
        except self.errors as error:
            raise UserError(f"{uri}: {str(error).splitlines()[0][:300]}") from None

    def current(self) -> str:
        try:
            return self._get(CURRENT)[0].strip()
        except self.errors as error:
            raise self._fault(error) from None

    def push(self, folder: Path, manifest: Manifest, replaces: str | None) -> Pushed:
        name = manifest.snapshot_id
        try:
            with ThreadPoolExecutor(THREADS) as pool:
                sent = sum(pool.map(lambda file: self._send(folder, name, file), manifest.files))
            self._put(f"{name}/{MANIFEST}", manifest.to_json())
            return Pushed(name, sent, self._move_current(manifest, replaces))
        except self.errors as error:
            raise self._fault(error) from None

    def _fault(self, error: Exception) -> UserError:
        return UserError(f"{self.uri}: {str(error).splitlines()[0][:300]}")

    def _send(self, folder: Path, name: str, file: FileEntry) -> int:
        """Sends one file unless it is there. Returns the bytes sent.

        An object is taken at its word: its hash came with its bytes, which the store checked as they came, and every
        host checks them again. One that was damaged since has to be deleted before it is sent again.
        """
        key = f"{self.prefix}{name}/{file.path}"
        try:
            there = self.client.head_object(Bucket=self.bucket, Key=key)
            if there["ContentLength"] == file.bytes and there["Metadata"].get("sha256") == file.sha256:
                return 0
        except self.refused as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
                raise
        self.client.upload_file(
            str(folder / file.path), self.bucket, key, ExtraArgs={"Metadata": {"sha256": file.sha256}}
        )
        return file.bytes

    def _move_current(self, manifest: Manifest, replaces: str | None) -> bool:
        for _ in range(1 if replaces is not None else TRIES):
            text, tag = self._get(CURRENT)
            if replaces is None and text.strip() == manifest.snapshot_id:
                return True
            if replaces is None and self._as_of(text.strip()) > manifest.as_of_micros:
                return False
            if replaces is not None and text.strip() != replaces:
                break
            try:
                self._put(CURRENT, manifest.snapshot_id + "\n", **({"IfMatch": tag} if tag else {"IfNoneMatch": "*"}))
                return True
            except self.refused as error:
                if error.response["ResponseMetadata"]["HTTPStatusCode"] not in (409, 412):
                    raise
        if replaces is not None:
            raise UserError(f"{self.uri}: another publisher moved CURRENT meanwhile; see what it names, then try again")
        raise UserError(f"{self.uri}: CURRENT was moved by others {TRIES} times meanwhile; push again")

    def _as_of(self, name: str) -> int:
        """as_of of a snapshot in the store; -1 without one, or if it can't be read: a new one repairs that."""
        try:
            return Manifest.parse(self._get(f"{name}/{MANIFEST}")[0], name).as_of_micros if is_safe_name(name) else -1
        except SnapshotError:
            return -1

    def _get(self, name: str) -> tuple[str, str]:
        """Text and tag of a small object; two empty strings if it does not exist."""
        try:
            found = self.client.get_object(Bucket=self.bucket, Key=self.prefix + name)
        except self.refused as error:
            if error.response["Error"]["Code"] == "NoSuchKey":
                return "", ""
            raise
        return found["Body"].read().decode("utf-8", "replace"), found["ETag"]

    def _put(self, name: str, text: str, **conditions: str) -> None:
        self.client.put_object(Bucket=self.bucket, Key=self.prefix + name, Body=text.encode(), **conditions)
