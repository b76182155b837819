"""Raw files in, tables out. Expected values are worked out by hand beside each file."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from jobs.common.clock import slice_of
from jobs.common.errors import RunFailed, UserError
from jobs.ingest_log import run as ingest
from tests.conftest import AS_OF, hours

BASE = """
replay = {replay}
[ids]
user = "{ids}"
item = "{ids}"
[time]
{time}
[log]
{source}
[log.columns]
{columns}
"""
COLUMNS = {"user_id": "user", "item_id": "item", "event_time": "time", "shown": "shown", "clicked": "clicked"}


@pytest.fixture
def dataset(tmp_path, make_run, tables):
    """Writes a mapping and its log; ingest(as_of) runs the job on them."""

    class Here:
        folder = tmp_path / "in"
        mapping = tmp_path / "mapping.toml"

        def map(
            self, *, time='unit = "iso"', source='format = "csv"', ids="integer", replay="true", more="", **columns
        ):
            self.folder.mkdir(exist_ok=True)
            lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in {**COLUMNS, **columns}.items() if value)
            self.mapping.write_text(
                BASE.format(replay=replay, ids=ids, time=time, source=source, columns=lines) + more, encoding="utf-8"
            )

        def write(self, text, name="log.csv", encoding="utf-8"):
            (self.folder / name).write_bytes(text.encode(encoding))

        def ingest(self, as_of=AS_OF, *overrides, path=None):
            run, settings = make_run(
                "ingest_log", as_of, f"log.dataset={self.mapping}", f"log.path={path or self.folder}", *overrides
            )
            return ingest(run, settings)

        def log(self, *columns):
            rows = tables.read("ranking_log").orderBy("slice", "event_time", "request_id", "item_id")
            return [tuple(row) for row in rows.select(*columns).collect()]

        def rejected(self, *columns):
            rows = tables.read("rejected_rows").select(*(columns or ("reason", "row"))).collect()
            return sorted(tuple(row) for row in rows)

    return Here()


def at(text):
    """What Spark gives for a UTC time: naive, because the process runs in UTC."""
    return datetime.fromisoformat(text)


def test_csv_with_bom_crlf_quoted_newlines_and_every_kind_of_bad_row(dataset, tables):
    dataset.map(
        source='format = "csv"\nmultiline = true',
        position="rank",
        surface="page",
        request_id="request",
        more='[log.labels]\nrating = "rating"\nnote = "length(note)"\n',
    )
    big, negative = 9_007_199_254_740_993, -9_223_372_036_854_775_808
    lines = [
        "request,user,item,time,shown,clicked,rank,page,rating,note",
        f"r1,{big},{negative},2026-01-02T10:00:00Z,1,0,0,feed,3.5,plain",
        'r1, 7 ,8,2026-01-02T15:30:00.250+05:30,true,TRUE,1,feed,,"two\r\nlines, and ""quotes"""',
        "r1,7,8,2026-01-02T10:00:00.250Z,true,TRUE,1,feed,,later copy",  # duplicate: its rest sorts after `plain`'s
        "r2,9223372036854775808,1,2026-01-02T10:00:00Z,1,0,0,feed,,too big",
        "r3,1.0,1,2026-01-02T10:00:00Z,1,0,0,feed,,not an integer",
        "r4,,1,2026-01-02T10:00:00Z,1,0,0,feed,,no user",
        "r5,1,1,2026-01-02T10:00:00,1,0,0,feed,,no zone",
        "r6,1,1,yesterday,1,,0,feed,,two faults",
        "r7,1,1,2026-01-02T10:00:00Z,0,1,0,feed,,click unseen",
        "r8,1,1,2026-01-02T10:00:00Z,1,0,-1,feed,,rank",
        "r9,1,1,2026-01-02T10:00:00Z,1,0,0,feed,high,label",
        "only,three,columns",
        "r10,1,1,2026-01-03T00:00:00Z,1,0,0,feed,,exactly as_of: waits",
        "r11,5,6,2026-01-02T23:59+00:00,0,0,,,4,no rank and surface",
    ]
    dataset.write("﻿" + "\r\n".join(lines) + "\r\n")
    report = dataset.ingest(AS_OF, "quality.max_reject_rate=0.9")

    assert dataset.log(
        "request_id",
        "user_id",
        "item_id",
        "event_time",
        "arrived_at",
        "surface",
        "position",
        "shown",
        "clicked",
        "labels",
    ) == [
        (
            "r1",
            big,
            negative,
            at("2026-01-02T10:00:00"),
            at("2026-01-02T10:00:00"),
            "feed",
            0,
            True,
            False,
            {"rating": 3.5, "note": 5.0},
        ),
        (
            "r1",
            7,
            8,
            at("2026-01-02T10:00:00.250"),
            at("2026-01-02T10:00:00.250"),
            "feed",
            1,
            True,
            True,
            {"note": 10.0},
        ),
        (
            "r11",
            5,
            6,
            at("2026-01-02T23:59:00"),
            at("2026-01-02T23:59:00"),
            "unknown",
            None,
            False,
            False,
            {"rating": 4.0, "note": 19.0},
        ),
    ]
    reasons = {}
    for reason, row in dataset.rejected():
        reasons[json.loads(row)["request"] if row.startswith("{") else row.strip()] = reason
    assert reasons == {
        "r2": "user_id is not a 64-bit integer",
        "r3": "user_id is not a 64-bit integer",
        "r4": "user_id is missing",
        "r5": "event_time has no zone; set time.zone",
        "r6": "event_time is not an ISO 8601 time; clicked is missing",
        "r7": "clicked but not shown",
        "r8": "position is negative",
        "r9": "label rating is not a number (double)",
        "only,three,columns": "malformed record",
    }
    assert (report.rows_out, report.rows_rejected) == (3, 9)
    assert report.metrics["duplicates"] == 1
    assert report.metrics["waiting"] == 1
    assert sorted(row.item_id for row in tables.read("items").collect()) == [negative, 6, 8]


def ms(moment):
    return int(moment.timestamp() * 1000)


def naive(moment):
    return moment.astimezone(UTC).replace(tzinfo=None)


def test_each_row_enters_in_the_run_that_first_sees_it_and_a_rerun_changes_nothing(dataset, tables):
    dataset.map(time='unit = "ms"', source='format = "jsonl"', arrived_at="arrived")
    first, second, last_id = AS_OF, AS_OF + hours(6), 2**63 - 1
    rows = [  # item, event, arrival
        (1, first - hours(1), first - hours(1)),
        (2, first - hours(1), first + hours(2)),  # late
        (3, first, first),  # at as_of exactly: the future of the first run
        (4, first - hours(2), first),  # arrived at as_of exactly: in time
        (1, first - hours(1), first + hours(1)),  # the first row again
        (5, second + hours(100), first - hours(1)),  # from the future
        (6, second + hours(1), second + hours(1)),  # not yet
        (7, first - hours(1 / 12), first - hours(1 / 6)),  # five minutes ahead of its arrival: clocks differ
        (8, first + hours(30), first + hours(1)),  # from the future, arrives after the first run
    ]
    dataset.write(
        "".join(
            json.dumps(
                {"user": last_id, "item": item, "time": ms(event), "arrived": ms(arrival), "shown": True, "clicked": 0}
            )
            + "\n"
            for item, event, arrival in rows
        )
        + '{"user": 1, "item"\n'
    )
    reports = [dataset.ingest(first), dataset.ingest(second)]

    slices = slice_of(first), slice_of(second)
    expected = [
        (slices[0], last_id, 4, naive(first - hours(2)), naive(first)),
        (slices[0], last_id, 1, naive(first - hours(1)), naive(first - hours(1))),
        (slices[0], last_id, 7, naive(first - hours(1 / 12)), naive(first - hours(1 / 6))),
        (slices[1], last_id, 2, naive(first - hours(1)), naive(first + hours(2))),
        (slices[1], last_id, 3, naive(first), naive(first)),
    ]
    columns = ("slice", "user_id", "item_id", "event_time", "arrived_at")
    assert dataset.log(*columns) == expected
    refused = [(where, reason) for where, reason, _ in dataset.rejected("slice", "reason", "row")]
    assert refused == [
        (slices[0], "from the future: event_time is after arrived_at"),
        (slices[0], "malformed record"),
        (slices[1], "from the future: event_time is after arrived_at"),
    ]
    assert [report.metrics["duplicates"] for report in reports] == [0, 1]
    assert [report.metrics["waiting"] for report in reports] == [5, 1]
    assert [report.rows_rejected for report in reports] == [2, 1]
    assert tables.last_slice("ranking_log") == slices[1]  # the row dated 100 h ahead moved nothing

    dataset.ingest(first)
    assert dataset.log(*columns) == expected
    assert [(where, reason) for where, reason, _ in dataset.rejected("slice", "reason", "row")] == refused


def test_in_a_live_log_without_arrival_times_late_rows_are_found_and_refused_ones_stay_out(dataset):
    dataset.map(time='unit = "s"', replay="false")
    first, second, third = AS_OF, AS_OF + hours(6), AS_OF + hours(31)

    def line(item, event):
        return f"1,{item},{event.timestamp():.0f},1,0\n"

    text = "user,item,time,shown,clicked\n" + line(1, first - hours(1)) + line(2, first + hours(30)) + "x\n"
    dataset.write(text)
    dataset.ingest(first)
    dataset.write(text + line(3, first - hours(3)) + line(4, first - hours(24 * 8)) + line(5, first + hours(1)))
    for as_of in (second, second, third):
        dataset.ingest(as_of)
    assert dataset.log("slice", "item_id", "arrived_at") == [
        (slice_of(first), 1, naive(first - hours(1))),
        (slice_of(second), 3, naive(second)),  # found late: it arrived with the run that found it
        (slice_of(second), 5, naive(first + hours(1))),
    ]  # 2 was refused; 4 is older than late_days
    assert dataset.rejected("slice", "reason") == [
        (slice_of(first), "from the future: event_time is after as_of"),
        (slice_of(first), "malformed record"),
    ]


def test_string_ids_local_time_and_a_collision(dataset, tables):
    dataset.map(ids="string", time='unit = "iso"\nzone = "Asia/Kolkata"')
    header = "user,item,time,shown,clicked\n"
    # xxhash64 (seed 42, as Spark has it) of user-219869 is 850818383756522123, and so is that of 3XuC6OYO.
    dataset.write(
        header + "user-219869,N1,2026-01-02 05:29:59,1,0\nuser-219869,N1,2026-01-02T00:00:00Z,yes,no\n"
        "user-1,N1,2026-01-02T00:00:01+0530,1,0\n"
    )
    dataset.ingest()
    assert [row[:2] for row in dataset.log("event_time", "user_id")][:1] == [
        (at("2026-01-01T18:30:01"), _hash(tables, "user-1"))
    ]
    assert dataset.log("event_time", "user_id")[1:] == [
        (at("2026-01-01T23:59:59"), 850818383756522123),
        (at("2026-01-02T00:00:00"), 850818383756522123),
    ]
    ids = {(row.kind, row.original): row.id for row in tables.read("id_map").collect()}
    assert set(ids) == {("user", "user-219869"), ("user", "user-1"), ("item", "N1")}
    assert ids[("user", "user-219869")] == 850818383756522123

    dataset.write(header + "3XuC6OYO,N1,2026-01-03 06:00:00,1,0\n")
    with pytest.raises(RunFailed, match="'3XuC6OYO' and 'user-219869' have the same"):
        dataset.ingest(AS_OF + hours(6))
    assert tables.slices("ranking_log") == [slice_of(AS_OF)]
    assert tables.read("id_map").count() == 3


def _hash(tables, text):
    return tables.spark.sql(f"SELECT xxhash64('{text}')").first()[0]


def test_too_many_bad_rows_publish_nothing_but_stand_in_rejected_rows(dataset, tables):
    dataset.map()
    lines = [f"1,{'x' if item < 10 else item},2026-01-02T10:00:00Z,1,0" for item in range(100)]
    dataset.write("user,item,time,shown,clicked\n" + "\n".join(lines))
    with pytest.raises(RunFailed, match="10 of 100 rows were rejected"):
        dataset.ingest()
    assert len(dataset.rejected()) == 10
    assert not any(tables.exists(name) for name in ("ranking_log", "items", "id_map"))


def test_mistakes_are_told_in_one_line(dataset, make_run):
    def message(**mapping):
        path = mapping.pop("path", None)
        dataset.map(**mapping)
        with pytest.raises(UserError) as error:
            dataset.ingest(path=path)
        assert "\n" not in str(error.value)
        return str(error.value)

    dataset.map()
    dataset.write("user,item,time,shown,clicked,rating\n1,2,2026-01-02T10:00:00Z,1,0,3.9\n")
    assert "there is nothing at" in message(path=dataset.folder / "nowhere.csv")
    assert "log.user_id = 'usr': the files have no column usr; did you mean user?" in message(user_id="usr")
    assert "the files have no column ratings; did you mean rating?" in message(clicked="ratings >= 4")
    assert "log.clicked = 'rating >>>= 4' is neither a column nor valid Spark SQL" in message(clicked="rating >>>= 4")
    assert "log.clicked = 'nosuch(rating)' is not valid Spark SQL here" in message(clicked="nosuch(rating)")
    assert "types names 'ratng', but the files have no such column; did you mean rating?" in message(
        source='format = "csv"\ntypes = {ratng = "DOUBLE"}'
    )
    told = message(clicked="rating >= 4")  # 3.9 against a whole number: Spark would compare as BIGINT
    assert "declare the column's type below types" in told
    assert "'3.9'" in told
    dataset.write("user,time,item,shown,clicked,rating\n1,2026-01-02T10:00:00Z,2,1,0,3\n", "other.csv")
    assert "the files' headers differ" in message()
    (dataset.folder / "other.csv").unlink()
    dataset.write("")
    assert "is empty" in message()
    dataset.write("user,item,time,shown,clicked\n")
    assert "holds no rows" in message()
    run, settings = make_run("ingest_log", AS_OF, "log.dataset=wrld")
    with pytest.raises(
        UserError, match=r"no dataset 'wrld'; did you mean world\? \(datasets: kuairand, mind, movielens-100k, "
    ):
        ingest(run, settings)


def test_the_world(spark, make_run, tables, root):
    """Parquet, items that come to be and change, and labels that come later."""
    start = AS_OF - hours(2)

    def write(name, rows, schema):
        spark.createDataFrame(rows, schema).coalesce(1).write.mode("overwrite").parquet(f"{root}/raw/world/{name}")

    def items(bid):
        write(
            "items",
            [(1, 5, 9, start, bid, [0.5, 1.0]), (2, 5, 9, AS_OF, 2.0, [0.0, 0.0]), (3, None, None, None, None, None)],
            "item_id bigint, category_id bigint, advertiser_id bigint, created_at timestamp, bid double, "
            "features array<float>",
        )

    log = [
        ("r1", start + hours(1), start + hours(1), 7, 1, "feed", 0, True, True),
        ("r1", start + hours(1), start + hours(1), 7, 4, "feed", 1, True, False),
        ("r2", AS_OF + hours(1), AS_OF + hours(1), 7, 2, "feed", 0, True, False),
    ]
    write(
        "log",
        log,
        "request_id string, event_time timestamp, arrived_at timestamp, user_id bigint, item_id bigint, "
        "surface string, position int, shown boolean, clicked boolean",
    )
    write(
        "label_events",
        [
            ("r1", 1, "conversion", start + hours(1.5), AS_OF + hours(2), 1.0),
            ("r1", 1, "lead", start + hours(1.5), start + hours(1.5), 2.0),
        ],
        "request_id string, item_id bigint, label string, occurred_at timestamp, arrived_at timestamp, value double",
    )
    items(1.5)
    reports = []
    for as_of in (AS_OF, AS_OF + hours(6)):
        run, settings = make_run("ingest_log", as_of)
        reports.append(ingest(run, settings))
        items(1.75)

    def read(name, *columns):
        return sorted(tuple(row) for row in tables.read(name).select("slice", *columns).collect())

    first, second = slice_of(AS_OF), slice_of(AS_OF + hours(6))
    # Item 2 is created at the first as_of, that run's future; only the log knows item 4; item 1 gets another bid.
    assert read("items", "item_id", "category_id", "bid", "features") == [
        (first, 1, 5, 1.5, [0.5, 1.0]),
        (first, 3, None, None, None),
        (first, 4, None, None, None),
        (second, 1, 5, 1.75, [0.5, 1.0]),
        (second, 2, 5, 2.0, [0.0, 0.0]),
    ]
    assert read("label_events", "request_id", "item_id", "label", "value") == [
        (first, "r1", 1, "lead", 2.0),
        (second, "r1", 1, "conversion", 1.0),
    ]
    assert read("ranking_log", "request_id", "item_id", "position", "clicked") == [
        (first, "r1", 1, 0, True),
        (first, "r1", 4, 1, False),
        (second, "r2", 2, 0, False),
    ]
    assert [report.rows_out for report in reports] == [2, 1]


# name, files by name, as_of, log rows (user, item, clicked, labels, event time), item categories by text
PUBLIC = {
    "movielens-100k": (
        {
            "ml-100k.inter": "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
            "196\t242\t3\t881250949\n186\t302\t4.0\t891717742\n",
            "ml-100k.item": "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
            '242\tKolya\t1996\tComedy\n302\t"L.A.\tConfidential\t1997\tCrime Film-Noir\n',
        },
        [
            (196, 242, False, {"rating": 3.0}, "1997-12-04T15:55:49"),
            (186, 302, True, {"rating": 4.0}, "1998-04-04T19:22:22"),
        ],
        {242: ["Comedy"]},
    ),
    "kuairand": (
        {
            "log_standard_4_08_to_4_21_pure.csv": "user_id,video_id,date,hourmin,time_ms,is_click,"
            "is_like,is_follow,is_comment,is_forward,is_hate,long_view,"
            "play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab\n"
            "0,3784,20220418,2300,1650296524793,0,0,0,0,0,0,0,2000,0,0,0,0,0,1\n"
            "0,3785,20220418,2300,1650296524794,1,1,0,0,0,0,1,5000,10000,0,0,0,0,1\n",
            "video_features_basic_pure.csv": "video_id,author_id,video_type,upload_dt,"
            "upload_type,visible_status,video_duration,server_width,server_height,"
            'music_id,music_type,tag\n3784,11,NORMAL,2022-04-10,ShortImport,1.0,10000.0,720,1280,5,9.0,"12,65"\n',
        },
        [
            (
                0,
                3784,
                False,
                {"like": 0.0, "follow": 0.0, "comment": 0.0, "forward": 0.0, "hate": 0.0, "long_view": 0.0},
                "2022-04-18T15:42:04.793",
            ),
            (
                0,
                3785,
                True,
                {
                    "like": 1.0,
                    "follow": 0.0,
                    "comment": 0.0,
                    "forward": 0.0,
                    "hate": 0.0,
                    "long_view": 1.0,
                    "watch_ratio": 0.5,
                },
                "2022-04-18T15:42:04.794",
            ),
        ],
        {3784: [12, 65]},
    ),
    "taobao-userbehavior": (
        {
            "UserBehavior.csv": "1,2268318,2520377,pv,1511544070\n1,2333346,2520771,buy,1511544071\n"
            "1,9,8,gift,1511544072\n"
        },
        [
            (1, 2268318, False, {"cart": 0.0, "favourite": 0.0, "purchase": 0.0}, "2017-11-24T17:21:10"),
            (1, 2333346, True, {"cart": 0.0, "favourite": 0.0, "purchase": 1.0}, "2017-11-24T17:21:11"),
        ],
        {2268318: 2520377, 2333346: 2520771},
    ),
    "mind": (
        {
            "behaviors.tsv": "1\tU13740\t11/11/2019 9:05:58 AM\tN55189 N42782\tN55689-1 N35729-0\n"
            "2\tU91836\t11/12/2019 6:11:30 PM\t\tN20678-0\n",
            "news.tsv": 'N55689\tsports\tfootball_nfl\tIt\'s "over\tAn abstract\thttps://x\t[{"Label": "NFL"}]\t[]\n',
        },
        [
            ("U13740", "N35729", False, None, "2019-11-11T09:05:58"),
            ("U13740", "N55689", True, None, "2019-11-11T09:05:58"),
            ("U91836", "N20678", False, None, "2019-11-12T18:11:30"),
        ],
        {"N55689": ["sports", "football_nfl"]},
    ),
}
FOLDERS = {"movielens-100k": "ml-100k", "kuairand": "kuairand", "taobao-userbehavior": "taobao", "mind": "mind"}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_datasets_in_their_documented_formats(name, root, make_run, tables):
    files, expected, categories = PUBLIC[name]
    folder = root / "raw" / FOLDERS[name]
    folder.mkdir(parents=True)
    for file, text in files.items():
        (folder / file).write_text(text, encoding="utf-8")
    run, settings = make_run("ingest_log", datetime(2025, 1, 1, tzinfo=UTC), f"log.dataset={name}")
    report = ingest(run, settings)

    texts = {(row.kind, row.id): row.original for row in tables.read("id_map").collect()}
    log = sorted(
        (
            (
                texts.get(("user", row.user_id), row.user_id),
                texts.get(("item", row.item_id), row.item_id),
                row.clicked,
                row.labels,
                row.event_time,
            )
            for row in tables.read("ranking_log").collect()
        ),
        key=lambda row: (row[4], row[1]),
    )
    assert log == [(user, item, clicked, labels, at(time)) for user, item, clicked, labels, time in expected]
    found = {}
    for row in tables.read("items").where("category_id IS NOT NULL").collect():
        item = texts.get(("item", row.item_id), row.item_id)
        found[item] = (
            row.category_id if row.categories is None else [texts.get(("category", one), one) for one in row.categories]
        )
        assert row.categories is None or row.categories[0] == row.category_id
    assert found == categories
    reasons = [reason for (reason,) in tables.read("rejected_rows").select("reason").collect()]
    assert reasons == {
        "taobao-userbehavior": ["clicked is missing"],
        "movielens-100k": ["items: malformed record"],
    }.get(name, [])
    assert report.rows_out == len(expected)
    if name == "kuairand":
        created = tables.read("items").where("item_id = 3784").first().created_at
        assert created == at("2022-04-10T00:00:00") - timedelta(hours=8)


def test_what_a_user_declares_is_one_text(dataset):
    dataset.map(user_group="concat_ws(' ', country, age)")
    lines = [
        "1,1,2026-01-02T10:00:00Z,1,0,IN,30s",
        "2,1,2026-01-02T10:00:00Z,1,0,,30s",
        "3,1,2026-01-02T10:00:00Z,1,0,,",
    ]
    dataset.write("user,item,time,shown,clicked,country,age\n" + "\n".join(lines))
    dataset.ingest(AS_OF)
    assert dataset.log("user_id", "user_group") == [(1, "IN 30s"), (2, "30s"), (3, None)]


def test_vectors_logged_online_come_in_as_they_stand(dataset):
    dataset.map(served_embedding="unhex(vector)")
    lines = [
        "1,1,2026-01-02T10:00:00Z,1,0,003C00C0",
        "1,2,2026-01-02T10:00:00Z,1,0,",
        "1,3,2026-01-02T10:00:00Z,1,0,003C00",
    ]
    dataset.write("user,item,time,shown,clicked,vector\n" + "\n".join(lines))
    dataset.ingest(AS_OF, "quality.max_reject_rate=0.5")
    # An empty field of a CSV is null: nothing was logged. 1.0 and -2.0 as little-endian halves.
    assert dataset.log("item_id", "served_embedding") == [(1, b"\x00\x3c\x00\xc0"), (2, None)]
    assert [reason for reason, _ in dataset.rejected()] == ["served_embedding has an odd number of bytes"]
    dataset.map(served_embedding="vector")
    with pytest.raises(UserError, match=r"served_embedding is string, must be binary; use unbase64"):
        dataset.ingest(AS_OF)
