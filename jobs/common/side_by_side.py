"""Driver-side work at the same time: planning and committing a query leave most of the cluster idle."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def side_by_side(*tasks: Callable[[], Any]) -> list[Any]:
    """Runs the tasks in threads; returns their results in order. If some raise, the error of the first of them in order
    goes to the caller once all have ended."""
    with ThreadPoolExecutor(len(tasks), thread_name_prefix="solaris") as pool:
        futures = [pool.submit(task) for task in tasks]
    return [future.result() for future in futures]
