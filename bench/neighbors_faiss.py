"""The peer of bench/neighbors.py: all neighbours by one process of faiss IVF-Flat, from a Parquet file to another.

    python bench/neighbors_faiss.py tune|run|autofaiss FOLDER THREADS [RECALL]

FOLDER holds users.parquet (user_id, embedding: float16 as binary). `tune` chooses the number of lists and of probes
whose recall@10 on a sample is at least RECALL in the least time, and writes tuned.json; its time is not counted. `run`
uses it; `autofaiss` lets that library choose the index. Both print {"seconds", "search", "recall"} as JSON.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

K, SAMPLE = 10, 1_000
PROBES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)
TIMED = 20_000  # queries of which a setting's time is told


def vectors_of(folder: Path) -> np.ndarray:
    """Unit vectors [n, d], float32."""
    column = pq.read_table(folder / "users.parquet", columns=["embedding"]).column(0).combine_chunks()
    width = len(column[0].as_py()) // 2
    vectors = np.frombuffer(column.buffers()[-1], "<f2").reshape(-1, width).astype(np.float32)
    faiss.normalize_L2(vectors)
    return vectors


def index_of(vectors: np.ndarray, lists: int) -> Any:
    """Trained and filled, with as many rows a list in training as find_neighbors takes."""
    quantizer = faiss.IndexFlatIP(vectors.shape[1])
    index = faiss.IndexIVFFlat(quantizer, vectors.shape[1], lists, faiss.METRIC_INNER_PRODUCT)
    index.cp.max_points_per_centroid = 64
    index.train(vectors)
    index.add(vectors)
    return index


def search(index: Any, vectors: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The K nearest others [rows, K] of those rows."""
    found = index.search(np.ascontiguousarray(vectors[rows]), K + 1)[1]
    others = np.argsort(found == rows[:, None], axis=1, kind="stable")[:, :K]  # the row itself goes last
    return np.take_along_axis(found, others, 1)


def recall_of(found: np.ndarray, truth: np.ndarray) -> float:
    """Mean share of the true neighbours that were found."""
    return float(np.mean([len(set(a) & set(b)) / K for a, b in zip(found.tolist(), truth.tolist(), strict=True)]))


def exact(vectors: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The K nearest others of those rows, by comparing with all."""
    flat = faiss.IndexFlatIP(vectors.shape[1])
    flat.add(vectors)
    return search(flat, vectors, rows)


def sample_of(count: int, seed: int, size: int = SAMPLE) -> np.ndarray:
    """Distinct rows, ascending."""
    return np.sort(np.random.default_rng(seed).choice(count, min(size, count), replace=False))


def tune(folder: Path, target: float) -> dict[str, float]:
    """The quickest setting that reaches the recall."""
    vectors = vectors_of(folder)
    rows, timed = sample_of(len(vectors), 1), sample_of(len(vectors), 2, TIMED)
    truth, best = exact(vectors, rows), None
    for factor in (0.5, 1, 2, 4):
        lists = max(1, round(factor * len(vectors) ** 0.5))
        clock = time.perf_counter()
        index = index_of(vectors, lists)
        built = time.perf_counter() - clock
        for probes in PROBES:
            index.nprobe = probes
            if recall_of(search(index, vectors, rows), truth) >= target:
                clock = time.perf_counter()
                search(index, vectors, timed)
                total = built + (time.perf_counter() - clock) * len(vectors) / len(timed)
                if best is None or total < best["estimate"]:
                    best = {"lists": lists, "probes": probes, "estimate": total}
                break
    assert best is not None, f"no setting reaches a recall of {target}"
    best["target"] = target
    (folder / "tuned.json").write_text(json.dumps(best))
    return best


def timed(folder: Path, build: Callable[[np.ndarray], Any]) -> dict[str, float]:
    """Reads, builds, searches every row, writes; the recall is measured afterwards, on rows that tune did not see."""
    clock = time.perf_counter()
    vectors = vectors_of(folder)
    index = build(vectors)
    begin = time.perf_counter()
    found = search(index, vectors, np.arange(len(vectors)))
    searched = time.perf_counter() - begin
    ids = pa.ListArray.from_arrays(np.arange(len(found) + 1, dtype=np.int32) * K, pa.array(found.ravel()))
    pq.write_table(pa.table({"neighbors": ids}), folder / "found.parquet")
    seconds = time.perf_counter() - clock
    rows = sample_of(len(vectors), 3)
    return {"seconds": seconds, "search": searched, "recall": recall_of(found[rows], exact(vectors, rows))}


def run(folder: Path) -> dict[str, float]:
    """With what tune chose."""
    tuned = json.loads((folder / "tuned.json").read_text())

    def build(vectors: np.ndarray) -> Any:
        index = index_of(vectors, tuned["lists"])
        index.nprobe = tuned["probes"]
        return index

    return timed(folder, build)


def autofaiss(folder: Path) -> dict[str, float]:
    """With an index that autofaiss chooses and tunes, at its defaults, for inner products."""
    from autofaiss import build_index

    def build(vectors: np.ndarray) -> Any:
        return build_index(vectors, save_on_disk=False, metric_type="ip", verbose=50)[0]

    return timed(folder, build)


if __name__ == "__main__":
    action, folder, threads, *more = sys.argv[1:]
    faiss.omp_set_num_threads(int(threads))
    print(json.dumps({"tune": tune, "run": run, "autofaiss": autofaiss}[action](Path(folder), *map(float, more))))
