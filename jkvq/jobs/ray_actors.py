"""Requests answered on a Ray cluster: actors of Ray Data, each with an engine of its own.

Ray places the actors, feeds them, and starts one again that has died, with its requests.
"""

import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

from jkvq.jobs.batch import Answer, Asked, Window
from jkvq.jobs.job import Answerer
from jkvq.llm import LLM
from jkvq.support.errors import UserError

_AT_ONCE = 16_384  # requests in the cluster: there may be any number of them
_BATCH = 8  # requests that an actor takes at a time, in its slots: the tail of a batch runs alone


def ray_answerer(
    load: Callable[[], LLM], address: str, actors: int | None = None, slots: int | None = None
) -> Answerer:
    """What has a cluster answer requests.

    Args:
        load: makes the model with its cache, in each actor.
        address: of the cluster; "auto" finds the one that this machine is part of, and "local"
            starts one on it.
        actors: engines; by default one for each GPU, or one where there is none.
        slots: requests that run at once in each engine.
    """
    ray = _connected(address)
    gpus = int(ray.cluster_resources().get("GPU", 0))
    actors = actors or max(1, gpus)
    if gpus and actors > gpus:
        raise UserError(f"actors={actors}: the cluster has {gpus} GPU(s), and each takes one")
    size = _BATCH * (slots or (64 if gpus else 8))

    def answers(requests: Iterator[Asked]) -> Iterator[tuple[Asked, Answer]]:
        while some := list(itertools.islice(requests, _AT_ONCE)):
            rows = [{"asked": pickle.dumps(asked)} for asked in some]
            blocks = min(len(rows), max(2 * actors, -(-len(rows) // size)))
            dataset = ray.data.from_items(rows, override_num_blocks=blocks).map_batches(
                _Engine,
                fn_constructor_args=(load, slots),
                batch_size=None,  # a block
                concurrency=actors,
                num_cpus=1,
                num_gpus=1 if gpus else 0,
            )
            for row in dataset.iter_rows():
                yield pickle.loads(row["answered"])

    return answers


class _Engine:
    """An actor: the model, and an engine that answers what it is given."""

    def __init__(self, load: Callable[[], LLM], slots: int | None):
        self._window = Window(load(), slots=slots)

    def __call__(self, rows: dict[str, Any]) -> dict[str, list[bytes]]:
        asked = (pickle.loads(row) for row in rows["asked"])
        return {"answered": [pickle.dumps(pair) for pair in self._window.answers(asked)]}


def _connected(address: str):
    """Ray, as part of the cluster."""
    try:
        import ray  # noqa: PLC0415 (an extra) # pyright: ignore[reportMissingImports]
        import ray.data  # noqa: PLC0415 # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError("Ray is not installed: pip install 'jkvq[ray]'") from None
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False)
        except (ConnectionError, ValueError) as error:
            raise UserError(
                f"there is no Ray cluster at {address} ({error}): start one with `ray start "
                "--head`, or give local"
            ) from None
    ray.data.DataContext.get_current().enable_progress_bars = False
    return ray
