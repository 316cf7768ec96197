"""Where a run's models were, from its configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshes.common.topology import compile_topology
from neoproto.config import load_config
from neoproto.errors import ConfigError

MOST_DEVICES = 10_000


def placement_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Clusters with the models on each device, and a row for each model, ready for JSON.

    A configuration that this version does not take (another version wrote it) gives `{"problem": why}`, and
    so does one of more devices than can be drawn.
    """
    try:
        checked = load_config(config)
        topology = checked.resolved_topology()
        devices = sum(cluster.nnodes * cluster.n_gpus_per_node for cluster in topology.clusters)
        if devices > MOST_DEVICES:
            return {"problem": f"more than {MOST_DEVICES:,} devices are not drawn: {devices:,}"}
        placement = compile_topology(topology)
    except ValueError as error:  # ConfigError, or of pydantic where a value reaches a topology unchecked
        problems = error.problems if isinstance(error, ConfigError) else (" ".join(str(error).split()),)
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return {"problem": f"this version does not take the configuration: {problems[0]}{more}"}
    kinds = {cluster.name: cluster.device_type or "" for cluster in topology.clusters}
    clusters = []
    for cluster in placement.clusters:
        nodes: list[list[list[str]]] = [
            [[] for _ in range(cluster.devices_per_node)] for _ in range(cluster.nnodes)
        ]
        for model in placement.models:
            if model.cluster == cluster.name:
                for node in model.block.nodes:
                    for device in model.block.devices:
                        nodes[node][device].append(model.name)
        clusters.append({"name": cluster.name, "kind": kinds[cluster.name], "nodes": nodes})
    rows = [
        {
            "model": row.model,
            "role": row.worker,
            "pool": row.pool,
            "cluster": row.cluster,
            "nodes": row.nodes,
            "devices": row.devices,
            "ranks": row.ranks,
            "shares devices with": row.colocated_with or "–",
        }
        for row in placement.placement_rows()
    ]
    return {"clusters": clusters, "rows": rows, "mode": checked.trainer.mode}
