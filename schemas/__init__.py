"""The tables of the pipeline, one file each. `TABLES` holds them by name, in the order of the data flow."""

from schemas.candidate_pairs import CANDIDATE_PAIRS
from schemas.coverage_audit import COVERAGE_AUDIT
from schemas.id_map import ID_MAP
from schemas.items import ITEMS
from schemas.job_runs import JOB_RUNS
from schemas.label_events import LABEL_EVENTS
from schemas.pair_embeddings import PAIR_EMBEDDINGS
from schemas.precompute_ledger import PRECOMPUTE_LEDGER
from schemas.ranking_log import RANKING_LOG
from schemas.rejected_rows import REJECTED_ROWS
from schemas.score_histogram import SCORE_HISTOGRAM
from schemas.snapshots import SNAPSHOTS
from schemas.table import Column, Table
from schemas.training_rows import TRAINING_ROWS
from schemas.user_clusters import USER_CLUSTERS
from schemas.user_embeddings import USER_EMBEDDINGS
from schemas.user_histories import USER_HISTORIES
from schemas.user_neighbors import USER_NEIGHBORS
from schemas.user_sums import USER_SUMS
from schemas.vm_evaluations import VM_EVALUATIONS

TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        RANKING_LOG,
        LABEL_EVENTS,
        ITEMS,
        ID_MAP,
        USER_HISTORIES,
        CANDIDATE_PAIRS,
        SCORE_HISTOGRAM,
        PAIR_EMBEDDINGS,
        USER_SUMS,
        USER_EMBEDDINGS,
        USER_CLUSTERS,
        USER_NEIGHBORS,
        SNAPSHOTS,
        COVERAGE_AUDIT,
        PRECOMPUTE_LEDGER,
        TRAINING_ROWS,
        VM_EVALUATIONS,
        JOB_RUNS,
        REJECTED_ROWS,
    )
}

__all__ = ["TABLES", "Column", "Table"]
