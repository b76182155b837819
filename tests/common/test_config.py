import importlib

import pytest

from jobs.common.config import Serving, Window, load_config
from jobs.common.errors import UserError
from jobs.common.session import PROJECT


def test_later_layers_win(tmp_path):
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text('[window]\nhours = 1\n[serving]\nttl_hours = 5\n[storage]\nroot = "a"\n')
    second.write_text('[window]\nhours = 2\n[storage]\nroot = "b"\n')
    config = load_config(
        [first, second], ["storage.root=d"], {"SOLARIS__WINDOW__HOURS": "3", "SOLARIS__STORAGE__ROOT": "c"}
    )
    assert (config.get(Window).hours, config.get(Serving).ttl_hours, config.storage.root) == (3, 5, "d")


def test_values_keep_their_type():
    config = load_config(
        overrides=[
            "log.dataset=world",
            "serving.tiers=['pair']",
            "serving.min_similarity=0.25",
            'spark.conf={"spark.x"="1"}',
        ],
        environ={},
    )
    assert config.log.dataset == "world"
    assert config.serving.tiers == ("pair",)
    assert config.serving.min_similarity == 0.25
    assert config.spark.conf == {"spark.x": "1"}


def test_every_fault_is_named_at_once_with_the_nearest_key():
    with pytest.raises(UserError) as error:
        load_config(
            overrides=["sparkk.master=x", "serving.ttl_hour=4", "window.hours=0", "serving.tiers=['pairs']"], environ={}
        )
    message = str(error.value)
    assert "unknown section [sparkk]; did you mean spark?" in message
    assert "unknown key serving.ttl_hour; did you mean ttl_hours?" in message
    assert "window.hours: Input should be greater than 0 (got 0)" in message
    assert "serving.tiers.0" in message


def test_contradictions_fail_when_the_config_is_built():
    for tiers in (["pair", "cold"], ["user_mean", "cold"], ["cold", "user_mean", "neighbor_mean"]):
        with pytest.raises(UserError, match="cold after user_mean and neighbor_mean"):
            load_config(overrides=[f"serving.tiers={tiers}"], environ={})
    with pytest.raises(UserError, match="tiers names one twice"):
        load_config(overrides=["serving.tiers=['pair', 'pair']"], environ={})


@pytest.mark.parametrize("text", ["window.hours", "hours=3", "=3", "window.=3"])
def test_a_malformed_override_says_how_to_write_it(text):
    with pytest.raises(UserError, match=r"section\.key=value"):
        load_config(overrides=[text], environ={})


def test_a_malformed_environment_variable_says_how_to_write_it():
    with pytest.raises(UserError, match="SOLARIS__SECTION__KEY"):
        load_config(environ={"SOLARIS__WINDOW": "3"})


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"none\.toml does not exist"):
        load_config([tmp_path / "none.toml"], environ={})
    broken = tmp_path / "broken.toml"
    broken.write_text("[window\n")
    with pytest.raises(UserError, match=r"broken\.toml is not valid TOML"):
        load_config([broken], environ={})
    with pytest.raises(UserError, match="can't be read"):
        load_config([tmp_path], environ={})


def test_a_section_given_as_a_value_is_an_error(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text("window = 3\n")
    with pytest.raises(UserError, match=r"write \[window\]"):
        load_config([file], environ={})


def test_a_bom_is_no_fault(tmp_path):
    file = tmp_path / "a.toml"
    file.write_bytes(b"\xef\xbb\xbf[window]\r\nhours = 2\r\n")
    assert load_config([file], environ={}).window.hours == 2


def test_the_hash_follows_what_decides_results_and_nothing_else():
    base = load_config(environ={}).hash
    assert load_config(overrides=["spark.shuffle_partitions=7"], environ={}).hash == base
    assert load_config(overrides=["window.hours=7"], environ={}).hash != base


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("window.hours=inf", "window.hours: .*finite"),
        ("serving.ttl_hours=nan", "serving.ttl_hours: .*finite"),
        ("serving.min_similarity=nan", "serving.min_similarity: .*finite"),
        ("serving.ttl_hours=1e300", "ttl_hours = 1e\\+300 is more than a century"),
        ("find_neighbors.embedding_days=40000", "embedding_days = 40000 is more than a century"),
        ("maintain_tables.retention_days={ranking_log = 99999}", "retention_days = 99999 is more than a century"),
        ("window.hours=0.0001", "window: hours = 0.0001 is no whole number of seconds"),
        ("storage.root=''", "storage.root: .*at least 1 character"),
        ("spark.driver_memory=lots", "spark.driver_memory: .*pattern"),
        ("storage.root=s3a://ads/solaris", "storage: root = s3a://ads/solaris is a URI and files is empty"),
        ("storage.files=s3a://ads/solaris", "storage: files = s3a://ads/solaris is a URI; .* must be a mounted folder"),
    ],
)
def test_values_that_would_break_a_run_later_fail_when_the_config_is_built(override, says):
    with pytest.raises(UserError, match=says):
        load_config(overrides=[override], environ={})


def test_a_window_of_any_whole_number_of_seconds_is_fine():
    for hours, seconds in ((0.1, 360), (0.25, 900), (1 / 3, 1200), (24 * 7, 604800)):
        config = load_config(overrides=[f"window.hours={hours}"], environ={})
        assert round(config.window.hours * 3600) == seconds


def test_tables_may_be_on_an_object_store_and_what_readers_map_is_on_a_disk():
    config = load_config(overrides=["storage.root=s3a://ads/solaris/", "storage.files=/mnt/solaris"], environ={})
    assert config.path("tables") == "s3a://ads/solaris/tables" and config.path("raw", "w") == "s3a://ads/solaris/raw/w"
    for kind in ("models", "staging", "snapshots", "reports"):
        assert config.path(kind, "x") == f"/mnt/solaris/{kind}/x"
    assert config.roots == ["s3a://ads/solaris", "/mnt/solaris"]
    plain = load_config(overrides=["storage.root=file:///mnt/solaris"], environ={})
    assert plain.path("models") == "/mnt/solaris/models" and plain.roots == ["/mnt/solaris"]


@pytest.mark.parametrize(
    "override",
    [
        "storage.root=s3a://AKIAexample:wJalr/XUtn@ads/solaris",
        "log.path=s3a://AKIAexample:wJalrXUtn@ads/log",
        "export_snapshot.push_to=s3://AKIAexample:wJalrXUtn@ads/served",
    ],
)
def test_credentials_in_a_uri_are_refused_and_not_repeated(override):
    with pytest.raises(UserError, match=r"holds credentials; give them as AWS_\* environment variables") as caught:
        load_config(overrides=[override, "storage.files=/mnt/solaris"], environ={})
    assert "wJalr" not in str(caught.value) and "AKIA" not in str(caught.value)


@pytest.mark.parametrize("file", sorted((PROJECT / "conf").glob("*.toml")), ids=lambda file: file.name)
def test_every_config_file_of_the_project_is_valid(file):
    load_config([file], environ={})


def test_what_the_benchmark_of_the_whole_pipeline_sets_is_valid(monkeypatch):
    monkeypatch.syspath_prepend(PROJECT / "bench")
    bench = importlib.import_module("uplift")
    for more in (
        (*bench.SMALL_WORLD, *bench.SMALL_EVALUATION),
        bench.SWEEPS,
        *((*bench.MEAN_EVALUATION, setting) for setting in bench.MEANS.values()),
    ):
        load_config([bench.FILE], more, environ={})
