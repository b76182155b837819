import io

import numpy as np
import pytest
from rich.console import Console

from jobs.common.errors import UserError
from jobs.common.neighbor_view import show_neighbors
from jobs.common.report_map import principal_plane, user_map
from solaris_udf.codec import encode
from tests.conftest import AS_OF, hours, log_row

LARGEST = 2**63 - 1


def shown(spark, config, user):
    out = io.StringIO()
    show_neighbors(spark, config, user, Console(file=out, width=120))
    return [line.split() for line in out.getvalue().splitlines()]


def test_a_users_neighbors_with_what_they_have_in_common(spark, make_config, fill):
    config = make_config()
    with pytest.raises(UserError, match="no neighbours have been searched yet"):
        show_neighbors(spark, config, 1, Console(quiet=True))
    row = {"embedding_at": AS_OF - hours(30)}
    fill("user_neighbors", [{**row, "user_id": 1, "neighbors": [(9, 0.1)]}], AS_OF - hours(24))  # an earlier build
    fill(
        "user_neighbors",
        [
            {**row, "user_id": 1, "neighbors": [(LARGEST, 0.97), (3, 0.5)], "cluster_id": 2},
            {**row, "user_id": 3, "neighbors": []},
        ],
    )
    later = {"build": "20260103T000000Z", "cluster_id": 2, **row}
    fill("user_neighbors", [{**later, "user_id": -4, "neighbors": [(1, 0.25)]}], AS_OF + hours(6))
    rows = {1: [10, 10, 11, 12, 12, 13], LARGEST: [12, 12, 10, 10, 11, 99], 3: [50]}
    log = [log_row(user, item, AS_OF - hours(5 + n)) for user, items in rows.items() for n, item in enumerate(items)]
    old = log_row(3, 13, AS_OF - hours(24 * 8))  # before the days that find_neighbors looks at
    fill("ranking_log", [*log, old], AS_OF)

    lines = shown(spark, config, 1)
    assert lines[0][:7] == ["user", "1,", "cluster", "2", "of", "2", "users,"]
    assert "build 20260103T000000Z" in " ".join(lines[0]) and "2026-01-01 18:00 UTC" in " ".join(lines[0])
    cells = [line for line in lines if line and line[0] in (str(LARGEST), "3")]
    assert cells == [[str(LARGEST), "0.970", "4", "3", "10,", "12,", "11"], ["3", "0.500", "1", "0"]]
    assert ["1", "0.250", "4", "0"] in shown(spark, config, -4)  # new since the build, not in the log
    assert shown(spark, config, 3)[1][:2] == ["no", "neighbours:"]
    with pytest.raises(UserError, match="user 77 has no row in user_neighbors up to 20260103T060000Z"):
        show_neighbors(spark, config, 77, Console(quiet=True))
    with pytest.raises(UserError, match="no 64-bit integer"):
        show_neighbors(spark, config, 2**63, Console(quiet=True))


def test_the_map_is_of_the_vectors_that_were_searched_with(tables, fill):
    assert user_map(tables) == []
    at = AS_OF - hours(6)
    vectors = {1: [2, 0, 0], 2: [0, 5, 0], 3: [-1, 0, 0], 4: [0, -1, 0]}
    stored = [
        {"user_id": user, "embedding": encode([vector])[0].as_py(), "newest_at": at} for user, vector in vectors.items()
    ]
    fill("user_embeddings", stored, at)
    fill("user_embeddings", [{**stored[0], "embedding": encode([[0, 0, 9]])[0].as_py()}])  # later than the search
    fill(
        "user_neighbors",
        [{"user_id": user, "neighbors": [], "embedding_at": at, "cluster_id": user % 2} for user in vectors],
    )
    rows = user_map(tables)
    assert [row["cluster_id"] for row in rows] == [1, 0, 1, 0]
    assert [row["share"] for row in rows] == pytest.approx([1.0] * 4)
    places = np.array([[row["x"], row["y"]] for row in rows])
    # A square of unit vectors, whatever its turn.
    assert np.linalg.norm(places, axis=1) == pytest.approx([1] * 4, abs=1e-6)
    assert places[0] == pytest.approx(-places[2], abs=1e-6) and places[0] @ places[1] == pytest.approx(0, abs=1e-6)


def test_the_principal_plane_keeps_what_varies_most():
    flat = np.array([[3, 0, 1], [-3, 0, 1], [0, 2, 1], [0, -2, 1]], dtype=np.float32)
    places, share = principal_plane(flat)
    assert places.tolist() == [[3, 0], [-3, 0], [0, 2], [0, -2]] and share == pytest.approx(1.0)
    assert principal_plane(np.ones((3, 1), np.float32))[0].tolist() == [[0, 0]] * 3
    line, share = principal_plane(np.array([[1], [2], [3]], dtype=np.float32))
    assert line.tolist() == [[-1, 0], [0, 0], [1, 0]] and share == 1.0
