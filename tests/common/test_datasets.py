import pytest

from jobs.common.datasets import ItemsFromLog, ItemsPart, known_datasets, load_dataset
from jobs.common.errors import UserError

SOUND = """
replay = true
[time]
unit = "s"
[log]
format = "csv"
[log.columns]
user_id = "u"
item_id = "i"
event_time = "t"
clicked = "c"
"""


def fault(tmp_path, text):
    path = tmp_path / "mapping.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as error:
        load_dataset(str(path))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_every_mapping_that_ships_is_valid():
    assert set(known_datasets()) == {"world", "movielens-100k", "kuairand", "taobao-userbehavior", "mind"}
    loaded = {name: load_dataset(name) for name in known_datasets()}
    assert all(dataset.replay and dataset.description for dataset in loaded.values())
    assert isinstance(loaded["world"].items, ItemsPart)
    assert isinstance(loaded["taobao-userbehavior"].items, ItemsFromLog)
    assert loaded["movielens-100k"].log.columns.clicked == "`rating:float` >= 4"


def test_a_mapping_file_by_path(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_bytes(b"\xef\xbb\xbf" + SOUND.replace("\n", "\r\n").encode())
    dataset = load_dataset(str(path))
    assert (dataset.time.unit, dataset.ids.user, dataset.log.columns.shown, dataset.items) == (
        "s",
        "integer",
        "true",
        None,
    )


def test_all_faults_are_listed_at_once_each_with_the_nearest_key(tmp_path):
    text = (
        SOUND.replace("user_id", "usr_id")
        .replace("[time]", "colour = 1\n[time]")
        .replace('format = "csv"', 'format = "csv"\nheder = 1')
    )
    message = fault(tmp_path, text)
    for part in (
        "unknown key log.columns.usr_id; did you mean log.columns.user_id?",
        "log.columns.user_id is missing",
        "unknown key log.heder; did you mean log.header?",
        "unknown key colour; known: description, replay, path",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("replay = true", "", "replay is missing (true: files of past events"),
        ('unit = "s"', 'unit = "s"\nzone = "Asia/Kolkata"', "counts from 1970-01-01 UTC"),
        ('unit = "s"', 'unit = "iso"\nzone = "Asia/Kolkatta"', "did you mean Asia/Kolkata?"),
        ('unit = "s"', 'unit = "iso"\nformat = "d.M.yyyy H:mm"', "zone must say which one"),
        ('unit = "s"', 'unit = "minutes"', "time.unit: Input should be 's', 'ms', 'us' or 'iso' (got 'minutes')"),
        ('format = "csv"', 'format = "csv"\nheader = false', "header = false needs names"),
        ('format = "csv"', 'format = "csv"\nnames = ["a"]', "names is only for csv and tsv files with header = false"),
        ('format = "csv"', 'format = "csv"\nencoding = "utf-88"', "unknown encoding (got 'utf-88')"),
        ('clicked = "c"', 'clicked = "c"\n[items.columns]\nitem_id = "i"', "remove columns.item_id"),
        (
            'clicked = "c"',
            'clicked = "c"\n[items]\nformat = "csv"\n[items.columns]\ncategory = "i"',
            "columns.item_id is missing",
        ),
        (
            'clicked = "c"',
            'clicked = "c"\n[items]\nformat = "csv"\n[items.columns]\nitem_id = "i"\nadvertisr = "a"',
            "did you mean items.columns.advertiser?",
        ),
        ("[time]", "[time", "is not valid TOML"),
    ],
)
def test_contradictions(tmp_path, old, new, told):
    assert told in fault(tmp_path, SOUND.replace(old, new))


def test_an_unknown_dataset_names_the_known_ones():
    with pytest.raises(UserError, match=r"did you mean world\? \(datasets: kuairand, mind, movielens-100k, taobao-"):
        load_dataset("word")
