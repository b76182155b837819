"""Searching the users of some cells: the in-memory index of one group, and which cells are near a vector."""

import numpy as np

from solaris_udf.knn import MARGIN, Float32, Hits, Int64, no_hits, rank, search_all, settle, top_k


def nearest_cells(vectors: Float32, centroids: Float32, probes: int) -> Int64:
    """The places of the most similar centroids [n, min(probes, c)], most similar first, equal ones by place."""
    places = np.arange(len(centroids), dtype=np.int64)
    return top_k(vectors, centroids, places, min(probes, len(centroids))).ids


class CellIndex:
    """The users of one group, ordered by cell."""

    def __init__(self, ids: Int64, vectors: Float32, cells: Int64) -> None:
        order = np.lexsort((ids, cells))
        self.ids, self.vectors = ids[order], np.ascontiguousarray(vectors[order])
        self.cells, self.starts = np.unique(cells[order], return_index=True)
        self.ends = np.append(self.starts[1:], len(ids))

    def search(self, queries: Float32, query_ids: Int64, lengths: Int64, wanted: Int64, k: int) -> Hits:
        """The k nearest of each query [q, d] among the users of its probed cells.

        lengths [q]: how many cells each query searches; wanted: the distinct cells of the first query, then those of
        the second, and so on.
        """
        import faiss

        if len(self.cells) == 0 or len(wanted) == 0:
            return no_hits(len(queries), k)
        fetch = k + 1 + MARGIN
        owner = np.repeat(np.arange(len(queries)), lengths)
        visits = list[tuple[int, Int64]]()  # (place of the cell, rows of queries that probe it)
        order = np.argsort(wanted, kind="stable")
        asked, begin = np.unique(wanted[order], return_index=True)
        place = np.minimum(np.searchsorted(self.cells, asked), len(self.cells) - 1)
        for cell, at, first, last in zip(asked, place, begin, [*begin[1:], len(order)], strict=True):
            if self.cells[at] == cell:
                visits.append((int(at), owner[order[first:last]]))
        if not visits:
            return no_hits(len(queries), k)

        # The best `fetch` candidates of each query over its visits, and a bound on all that were left out.
        candidates = np.full((len(queries), fetch), -1, dtype=np.int64)
        values = np.full((len(queries), fetch), -np.inf, dtype=np.float32)
        left_out = np.full(len(queries), -np.inf, dtype=np.float32)
        visited = np.zeros(len(queries), dtype=bool)
        for at, who in visits:
            start, end = int(self.starts[at]), int(self.ends[at])
            count = min(fetch, end - start)
            value, local = faiss.knn(
                np.ascontiguousarray(queries[who]), self.vectors[start:end], count, metric=faiss.METRIC_INNER_PRODUCT
            )
            local += start
            if count < end - start:
                left_out[who] = np.maximum(left_out[who], value[:, -1])
            again = visited[who]
            once, twice = who[~again], who[again]
            candidates[once, :count], values[once, :count] = local[~again], value[~again]
            if len(twice):
                value = np.concatenate([values[twice], value[again]], axis=1)
                local = np.concatenate([candidates[twice], local[again]], axis=1)
                order = np.argpartition(-value, fetch - 1, axis=1)
                best, rest = order[:, :fetch], order[:, fetch:]
                candidates[twice] = np.take_along_axis(local, best, 1)
                values[twice] = np.take_along_axis(value, best, 1)
                left_out[twice] = np.maximum(left_out[twice], np.take_along_axis(value, rest, 1).max(axis=1))
            visited[who] = True

        ids, similarity, unsure = settle(queries, self.vectors, self.ids, k, query_ids, candidates, left_out)
        if len(unsure):
            self._search_fully(queries, query_ids, visits, unsure, ids, similarity, k)
        return Hits(ids, similarity, np.isfinite(similarity).sum(axis=1))

    def _search_fully(
        self,
        queries: Float32,
        query_ids: Int64,
        visits: list[tuple[int, Int64]],
        unsure: Int64,
        ids: Int64,
        similarity: Float32,
        k: int,
    ) -> None:
        """Overwrites the rows `unsure` of ids and similarity by an exact search of their cells."""
        doubt = np.zeros(len(queries), dtype=bool)
        doubt[unsure] = True
        similarity[unsure] = -np.inf
        for at, who in visits:
            who = who[doubt[who]]
            if len(who):
                part = slice(int(self.starts[at]), int(self.ends[at]))
                more_ids, more = search_all(queries[who], self.vectors[part], self.ids[part], k, query_ids[who])
                ids[who], similarity[who] = rank(
                    np.concatenate([ids[who], more_ids], axis=1), np.concatenate([similarity[who], more], axis=1), k
                )
