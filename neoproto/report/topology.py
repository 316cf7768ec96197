"""Where a run's models were, from its configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshes.topology import compile_topology
from neoproto.config import load_config
from neoproto.errors import ConfigError


def placement_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Clusters with the models on each device, and a row for each model, ready for JSON.

    A configuration that this version does not take (another version wrote it) gives `{"problem": why}`.
    """
    try:
        checked = load_config(config)
        topology = checked.resolved_topology()
        placement = compile_topology(topology)
    except ConfigError as error:
        more = f" (and {len(error.problems) - 1} more)" if len(error.problems) > 1 else ""
        return {"problem": f"this version does not take the configuration: {error.problems[0]}{more}"}
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
