import importlib.util
from pathlib import Path

import pytest

from jobs.common.config import section_types
from schemas import TABLES

SCRIPT = Path(__file__).parents[2] / "scripts" / "generate_docs.py"


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("generate_docs", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_up_to_date(generate):
    assert [path.name for path in generate.stale()] == [], "run: python scripts/generate_docs.py"


def first_cells(section):
    return [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]


def test_pages_name_every_table_column_and_setting(generate):
    tables, config = generate.tables_page(), generate.config_page()
    for table in TABLES.values():
        section = tables.split(f"\n## {table.name}\n")[1].split("\n## ")[0]
        assert first_cells(section) == list(table.column_names)
    for name, kind in section_types().items():
        section = config.split(f"\n### [{name}]\n")[1].split("\n### ")[0]
        assert first_cells(section) == list(kind.model_fields)
    assert "| `neighbors` | int, >= 1 | `10` | Neighbours kept for each user |" in config
    assert "| `tiers` | list of one of pair, user_mean, neighbor_pair, neighbor_mean, cold |" in config
    assert "| `position` | `INT` | yes | Rank in the request, 0 first; null if unknown |" in tables


def test_every_setting_has_a_meaning():
    unexplained = [
        f"{name}.{key}"
        for name, kind in section_types().items()
        for key, field in kind.model_fields.items()
        if not field.description and name in ("aggregate_users", "find_neighbors", "maintain_tables")
    ]
    assert unexplained == []


def test_a_changed_page_is_noticed(generate, tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "DOCS", tmp_path)
    assert [path.name for path in generate.stale()] == ["tables.md", "config.md"]
    monkeypatch.setattr("sys.argv", ["generate_docs.py"])
    assert generate.main() == 0 and generate.stale() == []
    (tmp_path / "tables.md").write_text("old")
    monkeypatch.setattr("sys.argv", ["generate_docs.py", "--check"])
    assert generate.main() == 1 and (tmp_path / "tables.md").read_text() == "old"
