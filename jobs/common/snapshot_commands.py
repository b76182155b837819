"""The `solaris snapshot` commands. None needs Spark."""

from dataclasses import asdict
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from jobs.common import snapshot_copies, snapshots
from jobs.common.errors import RunFailed
from jobs.common.main import resolve
from jobs.common.terminal import ConfigFiles, Overrides, console

app = typer.Typer(no_args_is_help=True, help="The lookup snapshots.")

Id = Annotated[str, typer.Argument(help="Snapshot id")]
LiveOrId = Annotated[str | None, typer.Argument(help="Snapshot id (default: the live one)")]
Prefix = Annotated[str, typer.Option(help="What every key in Redis begins with")]
KeepHours = Annotated[float, typer.Option(min=0.01, help="The keys of this version in Redis expire after this long")]


def _root(files: list[str] | None, overrides: list[str] | None) -> str:
    return resolve(files, overrides).path("snapshots")


@app.command("list")
def list_snapshots(files: ConfigFiles = None, overrides: Overrides = None) -> None:
    """List the snapshots on disk; the live and the pinned ones are marked."""
    root = _root(files, overrides)
    table = Table(title=root, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("snapshot", no_wrap=True)
    table.add_column("state")
    for name in ("pairs", "own mean", "neighbour", "cold", "bytes"):
        table.add_column(name, justify="right")
    found = snapshots.list_all(root)
    if not found:
        console.print(f"no snapshots below {root} yet; solaris run exports one", highlight=False)
        return
    for info in found:
        marks = " ".join(mark for mark, held in (("live", info.live), ("pinned", info.pinned)) if held)
        if info.fault:
            table.add_row(info.snapshot_id, f"{marks} damaged: {info.fault}", "", "", "", "", "")
        else:
            counts = (info.pairs, info.users_own, info.users_neighbor, info.users_cold, info.bytes)
            table.add_row(info.snapshot_id, marks, *(f"{count:,}" for count in counts))
    console.print(table)


@app.command()
def inspect(snapshot_id: LiveOrId = None, files: ConfigFiles = None, overrides: Overrides = None) -> None:
    """Show what a snapshot's manifest says."""
    table = Table("what", "value", show_header=False)
    for key, value in snapshots.inspect(_root(files, overrides), snapshot_id).items():
        table.add_row(key, str(value))
    console.print(table)


@app.command()
def verify(snapshot_id: LiveOrId = None, files: ConfigFiles = None, overrides: Overrides = None) -> None:
    """Read every byte of a snapshot and check it against its hashes."""
    faults = snapshots.verify(_root(files, overrides), snapshot_id)
    if faults:
        raise RunFailed("; ".join(faults))
    console.print("every file is what the manifest says")


@app.command("diff")
def compare(old: Id, new: Id, files: ConfigFiles = None, overrides: Overrides = None) -> None:
    """Count what a snapshot added, removed and changed against another."""
    found = snapshots.compare(_root(files, overrides), old, new)
    columns = list(asdict(found.pairs))
    table = Table("rows of", title=f"{old} → {new}", title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    for name, part in (("pairs", asdict(found.pairs)), ("users", asdict(found.users))):
        table.add_row(name, *(f"{part[column]:,}" for column in columns))
    console.print(table)


@app.command()
def pin(snapshot_id: Id, files: ConfigFiles = None, overrides: Overrides = None) -> None:
    """Keep a snapshot whatever its age."""
    snapshots.pin(_root(files, overrides), snapshot_id)
    console.print(f"{snapshot_id} is pinned", highlight=False)


@app.command()
def unpin(snapshot_id: Id, files: ConfigFiles = None, overrides: Overrides = None) -> None:
    """Let a pinned snapshot age again."""
    snapshots.unpin(_root(files, overrides), snapshot_id)
    console.print(f"{snapshot_id} is no longer pinned", highlight=False)


@app.command()
def rollback(
    snapshot_id: Annotated[
        str | None, typer.Argument(help="Snapshot id (default: the one before the live one)")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(metavar="URI", help="There, not in the folder: s3://BUCKET/PREFIX or redis://HOST:PORT/DB"),
    ] = None,
    prefix: Prefix = "solaris",
    keep_hours: KeepHours = 24.0,
    files: ConfigFiles = None,
    overrides: Overrides = None,
) -> None:
    """Make an earlier snapshot live (default: the one before), after verifying it in full."""
    root = _root(files, overrides)
    if to is None:
        console.print(f"{snapshots.rollback(root, snapshot_id)} is live", highlight=False)
    else:
        name = snapshot_copies.roll_back_in(to, root, snapshot_id, prefix, keep_hours)
        console.print(f"{name} is current there, and pinned here until solaris snapshot unpin {name}", highlight=False)


@app.command()
def gc(
    keep: Annotated[
        int | None, typer.Option(help="Newest snapshots to keep (default: maintain_tables.keep_snapshots)")
    ] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Really remove; without it, only list")] = False,
    files: ConfigFiles = None,
    overrides: Overrides = None,
) -> None:
    """Remove old snapshots, as maintain_tables does; the live, recent, pinned and leased ones stay."""
    config = resolve(files, overrides)
    settings = config.sections["maintain_tables"].model_dump()
    found = snapshots.gc(
        config.path("snapshots"),
        settings["keep_snapshots"] if keep is None else keep,
        days=settings["snapshot_days"],
        lease_hours=settings["lease_hours"],
        abandoned_hours=settings["min_vacuum_hours"],
        dry_run=not delete,
    )
    names = [*found.snapshots, *found.leftovers]
    verb = "removed" if delete else "would remove (--delete does)"
    console.print(f"{verb}: {', '.join(names) or 'nothing'}", highlight=False)


@app.command()
def push(
    uri: Annotated[str, typer.Argument(help="Such as s3://BUCKET/PREFIX")],
    snapshot_id: LiveOrId = None,
    files: ConfigFiles = None,
    overrides: Overrides = None,
) -> None:
    """Copy a snapshot to an object store and make it current there, for fleets without a shared disk."""
    done = snapshot_copies.to_object_store(_root(files, overrides), snapshot_id, uri)
    state = "is current there" if done.live else "is there; a later one is current"
    console.print(f"{done.bytes:,} bytes sent to {uri}; {done.snapshot_id} {state}", highlight=False)


@app.command()
def pull(
    uri: Annotated[str, typer.Argument(help="Such as s3://BUCKET/PREFIX")],
    folder: Annotated[str, typer.Argument(help="Snapshots folder on this host")],
) -> None:
    """Bring an object store's live snapshot to this host and make it live here."""
    console.print(f"{snapshot_copies.from_object_store(folder, uri)} is live in {folder}", highlight=False)


@app.command()
def redis(
    url: Annotated[str, typer.Argument(help="Such as redis://127.0.0.1:6379/0")],
    snapshot_id: LiveOrId = None,
    prefix: Prefix = "solaris",
    keep_hours: KeepHours = 24.0,
    files: ConfigFiles = None,
    overrides: Overrides = None,
) -> None:
    """Copy a snapshot to Redis and make it current there, for fleets that want a network store."""
    copied, name = snapshot_copies.to_redis(_root(files, overrides), snapshot_id, url, prefix, keep_hours)
    console.print(f"{copied:,} keys; {name} is in Redis below {prefix}:", highlight=False)
