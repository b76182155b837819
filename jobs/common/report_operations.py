"""The report's sections on neighbours, snapshots, jobs and rejected rows."""

from collections import Counter

from jobs.common import report_charts as charts
from jobs.common import report_format as fmt
from jobs.common.clock import as_of_of
from jobs.common.report_data import SIMILARITY_STEP, ReportData
from jobs.common.report_page import Section, TableView, table

MAP_COLORS = ("blue", "orange", "green", "purple", "sky", "vermillion")


def _user_map(data: ReportData) -> charts.Chart:
    """The largest clusters in colours of their own, all others in one."""
    sizes = Counter(row["cluster_id"] for row in data.user_map)
    largest = [cluster for cluster, _ in sorted(sizes.items(), key=lambda one: (-one[1], one[0]))[: len(MAP_COLORS)]]
    layers = [
        (
            f"{len(sizes) - len(largest)} other clusters",
            "none",
            [row for row in data.user_map if row["cluster_id"] not in largest],
        ),
        *(
            (f"cluster {cluster}", color, [row for row in data.user_map if row["cluster_id"] == cluster])
            for cluster, color in zip(largest, MAP_COLORS, strict=False)
        ),
    ]
    return charts.scatter(
        "Map of users by cluster",
        f"{len(data.user_map)} users on the two principal components of their embeddings "
        f"({data.user_map[0]['share']:.0%} of the variance), coloured by cluster.",
        [
            (label, color, [row["x"] for row in rows], [row["y"] for row in rows])
            for label, color, rows in layers
            if rows
        ],
        x="first and second component",
    )


def _user_places(data: ReportData) -> TableView:
    """Each point of the map."""
    users = data.user_map[0]["users"]
    sample = "all" if len(data.user_map) == users else "a sample by hash of"
    return table(
        f"Places on the map, {sample} {fmt.count(users)} users",
        ("cluster", "first component", "second component"),
        [
            (str(row["cluster_id"]), fmt.number(row["x"]), fmt.number(row["y"]))
            for row in sorted(data.user_map, key=lambda row: (row["cluster_id"], row["x"], row["y"]))
        ],
    )


def _recall(data: ReportData) -> list[charts.Chart]:
    """Recall of the full searches; those between two of them search in the last one's cells and measure none."""
    measured = [
        (as_of_of(row["slice"]), row["metrics"]["recall"])
        for row in data.neighbor_runs
        if (row["metrics"] or {}).get("recall") is not None
    ]
    if not measured:
        return []
    series = [("recall", "blue", "solid", [at for at, _ in measured], [recall for _, recall in measured])]
    alt = f"Recall of {len(measured)} full searches; the latest found {fmt.share(measured[-1][1])}."
    return [charts.lines("Recall of the search", alt, series, y="recall", percent_y=True)]


def neighbors(data: ReportData) -> Section:
    section = Section(
        "neighbors",
        "Neighbours",
        "How similar each user's nearest neighbour is (cosine in the foundation model's space). Mass at "
        "the right means that a neighbour is a good stand-in. Recall is the share of the true nearest users that a "
        "full search found, measured on a sample against exact search; an exact search has 1. On the map, users close "
        "to each other are similar, as far as a plane can show it.",
        job="find_neighbors",
    )
    if data.similarities:
        section.charts.append(
            charts.histogram(
                "Similarity to the nearest user",
                "Histogram of users by cosine similarity to their nearest neighbour.",
                [row["bucket"] for row in data.similarities],
                [row["users"] for row in data.similarities],
                SIMILARITY_STEP,
                x="cosine similarity",
                y="users",
            )
        )
    section.charts.extend(_recall(data))
    if data.user_map:
        section.charts.append(_user_map(data))
    for row in data.neighbors:
        section.tables.append(
            table(
                "Latest build",
                ("slice", "users", "clusters", "neighbours a user", "users without"),
                [
                    (
                        row["slice"],
                        fmt.count(row["users"]),
                        fmt.count(row["clusters"]),
                        fmt.number(row["mean_neighbors"]),
                        fmt.count(row["without"]),
                    )
                ],
                open=True,
            )
        )
    names = sorted({name for row in data.neighbor_runs for name in row["metrics"] or {}})
    if data.neighbor_runs:
        section.tables.append(
            table(
                "Searches",
                ("slice", "rows out", "time", *names),
                [
                    (
                        row["slice"],
                        fmt.count(row["rows_out"]),
                        fmt.seconds(row["seconds"]),
                        *(fmt.number((row["metrics"] or {}).get(name)) for name in names),
                    )
                    for row in data.neighbor_runs[::-1]
                ],
                open=True,
            )
        )
    if data.similarities:
        section.tables.append(
            table(
                "Users by similarity",
                ("similarity from", "to", "users"),
                [
                    (
                        fmt.number(row["bucket"]),
                        fmt.number(round(row["bucket"] + SIMILARITY_STEP, 2)),
                        fmt.count(row["users"]),
                    )
                    for row in data.similarities
                ],
                words=0,
            )
        )
    if data.user_map:
        section.tables.append(_user_places(data))
    return section


def snapshots(data: ReportData) -> Section:
    section = Section(
        "snapshots",
        "Snapshots",
        "What each published snapshot holds. The one with the latest live-from time answers lookups; a "
        "sudden drop in pairs or users is a reason to roll back.",
        job="export_snapshot",
    )
    if data.snapshots:
        section.charts.append(
            charts.stacked_bars(
                "Users with a user-level vector",
                f"Users by own mean, neighbour's mean and group's centroid in {len(data.snapshots)} snapshots.",
                [row["live_from"] for row in data.snapshots],
                [
                    ("own mean", "green", [row["users_own"] for row in data.snapshots]),
                    ("neighbour's mean", "sky", [row["users_neighbor"] for row in data.snapshots]),
                    ("group's centroid", "purple", [row["users_cold"] for row in data.snapshots]),
                ],
                unit="users",
            )
        )
        section.charts.append(
            charts.lines(
                "Pair embeddings",
                f"Pair embeddings in {len(data.snapshots)} snapshots.",
                [
                    (
                        "pair embeddings",
                        "blue",
                        "solid",
                        [row["live_from"] for row in data.snapshots],
                        [row["pairs"] for row in data.snapshots],
                    )
                ],
                y="pairs",
            )
        )
        section.tables.append(
            table(
                "Snapshots",
                (
                    "snapshot",
                    "live from (UTC)",
                    "status",
                    "model version",
                    "pairs",
                    "users, own mean",
                    "users, neighbour's mean",
                    "users, group's centroid",
                    "size",
                ),
                [
                    (
                        row["snapshot_id"],
                        fmt.when(row["live_from"]),
                        row["status"],
                        row["model_version"],
                        fmt.count(row["pairs"]),
                        fmt.count(row["users_own"]),
                        fmt.count(row["users_neighbor"]),
                        fmt.count(row["users_cold"]),
                        fmt.size(row["bytes"]),
                    )
                    for row in data.snapshots[::-1]
                ],
                words=4,
            )
        )
    return section


def jobs(data: ReportData) -> Section:
    section = Section(
        "jobs",
        "Jobs",
        "Mean wall time of a successful run of each job, and the rows it read, wrote and refused. Failed "
        "runs stand with their error below.",
        job="ingest_log",
    )
    if data.jobs:
        timed = sorted(
            ((row["job"], row["mean_seconds"]) for row in data.jobs if row["mean_seconds"] is not None),
            key=lambda row: (-row[1], row[0]),
        )
        if timed:
            section.charts.append(
                charts.horizontal_bars(
                    "Mean seconds a run", f"Mean wall time by job; {timed[0][0]} takes longest.", timed, x="seconds"
                )
            )
        section.tables.append(
            table(
                "Runs by job",
                (
                    "job",
                    "runs",
                    "failed",
                    "mean time",
                    "total time",
                    "rows in",
                    "rows out",
                    "rejected",
                    "last rows in",
                    "last rows out",
                ),
                [
                    (
                        row["job"],
                        fmt.count(row["runs"]),
                        fmt.count(row["failed"]),
                        fmt.seconds(row["mean_seconds"]),
                        fmt.seconds(row["total_seconds"]),
                        *(
                            fmt.count(row[name])
                            for name in ("sum_in", "sum_out", "sum_rejected", "rows_in", "rows_out")
                        ),
                    )
                    for row in data.jobs
                ],
                open=True,
            )
        )
        figures = [
            (row["job"], name, fmt.number(value))
            for row in data.jobs
            for name, value in sorted((row["metrics"] or {}).items())
        ]
        if figures:
            section.tables.append(
                table("Figures of each job's latest run", ("job", "figure", "value"), figures, words=2)
            )
        if data.failures:
            section.tables.append(
                table(
                    "Latest failures",
                    ("started (UTC)", "job", "slice", "error"),
                    [
                        (fmt.when(row["started_at"]), row["job"], row["slice"], fmt.text(row["error"]))
                        for row in data.failures
                    ],
                    words=4,
                    open=True,
                )
            )
    return section


def rejected(data: ReportData) -> Section:
    section = Section(
        "rejected",
        "Rejected rows",
        "Rows that broke a rule stand in rejected_rows with their reason and the row as it came; a run "
        "that refuses more than quality.max_reject_rate publishes nothing.",
        hint="No row was refused so far.",
    )
    if data.rejected:
        longest = data.rejected[:12]
        section.charts.append(
            charts.horizontal_bars(
                "Rejected rows by reason",
                f"{fmt.count(sum(row['rows'] for row in data.rejected))} rejected rows by source and reason.",
                [(_short(f"{row['source']}: {row['reason']}"), row["rows"]) for row in longest],
                x="rows",
                color="vermillion",
            )
        )
        section.tables.append(
            table(
                "Rejected rows",
                ("source", "reason", "rows", "slices", "last slice"),
                [
                    (
                        row["source"],
                        row["reason"],
                        fmt.count(row["rows"]),
                        fmt.count(row["slices"]),
                        row["last_slice"],
                    )
                    for row in data.rejected
                ],
                words=2,
                open=True,
            )
        )
    return section


def _short(label: str, most: int = 26) -> str:
    return label if len(label) <= most else label[: most - 1] + "…"
