"""What notebooks show of the runtime's objects, from what this process knows, without asking another.

It imports none of them, so that each can import it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from neoproto.tables import MOST_ROWS, short, table_html

if TYPE_CHECKING:
    from neoproto.runtime.base import RuntimeBase
    from neoproto.runtime.group import RemoteWorkerGroup
    from neoproto.runtime.group_state import GroupState
    from neoproto.runtime.placement import Placement
    from neoproto.runtime.pool import ResourcePool

MODEL_COLUMNS = (
    "model",
    "worker",
    "cluster",
    "pool",
    "nodes",
    "devices",
    "ranks",
    "device",
    "colocated with",
)
_MOST_SPANS = 12


def placement_html(placement: Placement) -> str:
    """The clusters, and where every model runs."""
    clusters = [
        (one.name, one.nnodes, one.devices_per_node, one.device_type)
        for one in placement.clusters[: MOST_ROWS + 1]
    ]
    machines = table_html(
        "Clusters",
        ("cluster", "nodes", "devices a node", "device"),
        clusters,
        total=len(placement.clusters),
    )
    return machines + table_html("Topology", MODEL_COLUMNS, model_cells(placement))


def model_cells(placement: Placement) -> list[tuple[str | int, ...]]:
    """A row for each model, under `MODEL_COLUMNS`."""
    return [
        (
            row.model,
            row.worker,
            row.cluster,
            row.pool,
            row.nodes,
            row.devices,
            row.ranks,
            row.device_type,
            row.colocated_with,
        )
        for row in placement.placement_rows()
    ]


def pool_html(pool: ResourcePool) -> str:
    """Where the slots of a pool are."""
    where = "beside the controller" if pool.beside_controller else f"cluster {pool.cluster}"
    rows = [
        ("where", where),
        ("nodes", spans(pool.block.nodes)),
        ("devices of each", spans(pool.block.devices)),
        ("ranks", pool.world_size),
        ("device", pool.device_type),
    ]
    return table_html(f"ResourcePool {pool.name}", (), rows)


def call_html(facts: Mapping[str, str], title: str) -> str:
    """How a call stands."""
    return table_html(title, (), list(facts.items()))


def group_html(
    group: RemoteWorkerGroup,
    state: GroupState | None,
    ranks: Sequence[int],
    methods: Iterable[str],
    role: str,
) -> str:
    """A group or view: its state, its methods, and its processes if they are of this process's runtime."""
    title = f"{type(group).__name__} {group.name}" + (f", role {role}" if role else "")
    rows: list[tuple[str, object]] = [("ranks", f"{len(ranks):,}: {spans(ranks)}")]
    if state is not None:
        rows.append(("state", state_text(state)))
    roles = [name for name in getattr(group, "_roles", ()) if name]
    rows.append(
        ("roles", ", ".join(sorted(roles))) if roles else ("methods", ", ".join(sorted(methods)) or "–")
    )
    whole = table_html(title, (), rows)
    if state is None:
        return whole
    infos = state.processes.processes
    processes = [
        (rank, infos[rank].host, infos[rank].pid, _rank_state(state, rank)) for rank in ranks[:MOST_ROWS]
    ]
    return whole + table_html("processes", ("rank", "host", "pid", "state"), processes, total=len(ranks))


def run_html(run: RuntimeBase, state: str, groups: Iterable[GroupState]) -> str:
    """A runtime: its folder, its worker groups, and the topology if it has one."""
    rows = [("state", state), ("run folder", str(run.run_dir)), ("run id", run.run_id)]
    whole = table_html(type(run).__name__, (), rows)
    placement = run.placement
    if placement is not None:
        whole += placement_html(placement)
    listed = [(one.name, one.world_size, state_text(one)) for one in groups]
    return whole + table_html("Worker groups", ("group", "ranks", "state"), listed)


def state_text(state: GroupState) -> str:
    """Whether a group takes calls."""
    if state.closed is not None:
        return "closed"
    if state.broken is not None:
        return f"broken: {state.broken}"
    living = set(state.living())
    gone = [rank for rank in range(state.world_size) if rank not in living]
    return f"open, without rank(s) {spans(gone)}" if gone else "open"


def _rank_state(state: GroupState, rank: int) -> str:
    if state.closed is not None:
        return "released"
    if not state.is_dying([rank]):
        return "alive"
    death = state.deaths.get(rank)
    return "gone" if death is None else f"died: {short(death.cause)}"


def spans(numbers: Iterable[int]) -> str:
    """Numbers in order as text: 0-3, 7, 9-12 …"""
    parts = list(islice(_spans(numbers), _MOST_SPANS + 1))
    return ", ".join([*parts[:_MOST_SPANS], *(["…"] if len(parts) > _MOST_SPANS else [])]) or "–"


def _spans(numbers: Iterable[int]) -> Iterator[str]:
    first: Any = None
    last: Any = None
    for number in numbers:
        if first is not None and number == last + 1:
            last = number
            continue
        if first is not None:
            yield _span(first, last)
        first = last = number
    if first is not None:
        yield _span(first, last)


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
