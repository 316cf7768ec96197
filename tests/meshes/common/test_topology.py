"""Topologies are placed, or refused with everything that is wrong; a naive oracle judges random ones too."""

from __future__ import annotations

import copy
import pickle
import time
from collections import Counter
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshes.common.topology import compile_here, compile_topology
from neoproto.config import TopologyConfig, preset_topology
from neoproto.errors import ConfigError, TopologyError
from neoproto.runtime.placement import Block, Placement

SAMPLE: dict[str, Any] = {
    "clusters": [{"name": "default", "nnodes": 2, "n_gpus_per_node": 8, "device_type": "gpu"}],
    "device_pools": [{"name": "train", "cluster": "default", "nnodes": 2, "n_gpus_per_node": 8}],
    "models": [
        {"name": "actor", "worker": "actor", "config_key": "actor_rollout_ref", "resource_pool": "train"},
        {"name": "rollout", "worker": "rollout", "config_key": "actor_rollout_ref", "resource_pool": "train"},
        {"name": "critic", "worker": "critic", "config_key": "critic", "resource_pool": "train"},
    ],
}


def changed(**values: Any) -> dict[str, Any]:
    """The sample with `models_1_device_range=...` and the like set."""
    tree = copy.deepcopy(SAMPLE)
    for path, value in values.items():
        for key in ("clusters", "device_pools", "models"):
            if path.startswith(key):
                index, _, name = path.removeprefix(f"{key}_").partition("_")
                tree[key][int(index)][name] = value
    return tree


def violations(topology: Any, **options: Any) -> tuple[str, ...]:
    with pytest.raises(TopologyError) as caught:
        compile_topology(topology, **options)
    return caught.value.problems


def test_the_sample_is_colocated_on_the_whole_pool() -> None:
    placement = compile_topology(SAMPLE, roles_needed=("actor", "rollout", "critic"))
    actor = placement.model("actor")
    assert (actor.start, actor.stop, actor.world_size, actor.whole_pool) == (0, 16, 16, True)
    assert (actor.cluster, actor.pool, actor.device_type) == ("default", "train", "gpu")
    assert actor.colocated_with == ("rollout", "critic")
    assert placement.num_devices == 16
    assert [model.name for model in placement.models_of("rollout")] == ["rollout"]
    assert actor.block.device_of(9) == (1, 1)


def test_a_typed_topology_compiles_to_the_same() -> None:
    assert compile_topology(TopologyConfig.model_validate(SAMPLE)) == compile_topology(SAMPLE)


def test_a_placement_travels_and_is_not_changed_by_its_source() -> None:
    tree = changed(device_pools_0_attributes={"rack": "a", "slots": [1, 2]})
    placement = compile_topology(tree)
    assert pickle.loads(pickle.dumps(placement)) == placement
    assert placement.pool("train").attributes == {"rack": "a", "slots": [1, 2]}


def test_what_a_cluster_does_not_say_is_decided_by_the_caller() -> None:
    tree = changed(clusters_0_device_type=None)
    assert compile_topology(tree).cluster("default").device_type == "cpu"
    assert compile_topology(tree, device_type="gpu").model("actor").device_type == "gpu"


def test_ranges_become_views_of_the_pool() -> None:
    tree = changed(models_0_device_range=[0, 8], models_1_device_range=[8, 12], models_2_device_range=[0, 8])
    placement = compile_topology(tree)
    assert placement.model("actor").colocated_with == ("critic",)
    assert placement.model("rollout").colocated_with == ()
    assert placement.model("rollout").block == Block(
        first_node=1, nnodes=1, first_device=0, devices_per_node=4
    )
    assert placement.num_devices == 12


def test_a_whole_range_is_the_same_as_none() -> None:
    placement = compile_topology(changed(models_0_device_range=[0, 16]))
    assert placement.model("actor").colocated_with == ("rollout", "critic")


def test_pools_are_packed_in_the_order_they_are_declared() -> None:
    pools = [("a", 1, 3), ("b", 2, 2), ("c", 1, 2), ("d", 1, 1), ("e", 1, 3)]
    tree = {
        "clusters": [{"name": "c", "nnodes": 2, "n_gpus_per_node": 8}],
        "device_pools": [
            {"name": name, "cluster": "c", "nnodes": nodes, "n_gpus_per_node": devices}
            for name, nodes, devices in pools
        ],
    }
    blocks = {pool.name: pool.block for pool in compile_topology(tree).pools}
    corners = {name: (block.first_node, block.first_device) for name, block in blocks.items()}
    assert corners == {"a": (0, 0), "b": (0, 3), "c": (0, 5), "d": (0, 7), "e": (1, 0)}


def test_the_rows_of_the_table() -> None:
    tree = changed(models_0_device_range=[0, 8], models_1_device_range=[8, 16], models_2_device_range=[0, 8])
    rows = compile_topology(tree).placement_rows()
    assert [(row.model, row.nodes, row.devices, row.ranks, row.colocated_with) for row in rows] == [
        ("actor", "0", "0-7", 8, "critic"),
        ("rollout", "1", "0-7", 8, ""),
        ("critic", "0", "0-7", 8, "actor"),
    ]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"models_1_resource_pool": "trian"},
            "topology.models[1].resource_pool: 'trian' is not in topology.device_pools; did you mean 'train'",
        ),
        (
            {"device_pools_0_cluster": "other"},
            "topology.device_pools[0].cluster: 'other' is not in topology.clusters; there is 'default'",
        ),
        ({"device_pools_0_nnodes": 3}, "topology.device_pools[0].nnodes: wants 3, cluster 'default' has 2"),
        (
            {"device_pools_0_n_gpus_per_node": 9},
            "topology.device_pools[0].n_gpus_per_node: wants 9, cluster 'default' has 8",
        ),
        ({"models_1_name": "actor"}, "topology.models[1].name: 'actor' is the name of models[0] already"),
        (
            {"models_1_device_range": [4, 12]},
            "topology.models[1].device_range: pool 'train': [4, 12) is neither inside one node nor whole",
        ),
        (
            {"models_1_device_range": [8, 8]},
            "topology.models[1].device_range: pool 'train': [8, 8) is not a range within 16 devices",
        ),
        (
            {"models_1_device_range": [8, 24]},
            "topology.models[1].device_range: pool 'train': [8, 24) is not a range within 16 devices",
        ),
        (
            {"models_2_device_range": [0, 8]},
            "topology.models[2].device_range: [0, 8) overlaps [0, 16) of 'actor' in pool 'train'",
        ),
        (
            {"clusters_0_nnodes": 0},
            "topology.clusters[0].nnodes: wanted a value greater than or equal to 1, got 0",
        ),
        ({"clusters_0_nnodes": "2"}, "topology.clusters[0].nnodes: wanted an integer, got '2' (str)"),
        ({"clusters_0_nodes": 2}, "topology.clusters[0].nodes: unknown key; did you mean 'nnodes'?"),
        ({"models_0_name": "a b"}, "topology.models[0].name: wanted a name that matches"),
        ({"models_0_device_range": [0]}, "topology.models[0].device_range"),
    ],
)
def test_one_mistake_is_one_sentence(values: dict[str, Any], said: str) -> None:
    (only,) = violations(changed(**values))
    assert only.startswith(said)


def test_every_violation_is_reported_at_once() -> None:
    tree = changed(clusters_0_nodes=1, models_0_device_range=[4, 12], models_1_resource_pool="nowhere")
    tree["device_pools"].append({"name": "late", "cluster": "nowhere"})
    tree["clusters"].append({"name": "b"})
    tree["device_pools"].append({"name": "large", "cluster": "b", "nnodes": 2, "n_gpus_per_node": 2})
    said = violations(tree, roles_needed=("actor", "rollout", "critic", "reference"))
    assert [line.partition(": ")[0] for line in said] == [
        "topology.clusters[0].nodes",
        "topology.device_pools[1].cluster",
        "topology.device_pools[2].nnodes",
        "topology.device_pools[2].n_gpus_per_node",
        "topology.models[0].device_range",
        "topology.models[1].resource_pool",
        "topology.models",
    ]
    assert isinstance(TopologyError(*said), ConfigError)


def test_what_cannot_be_read_hides_nothing_and_adds_nothing() -> None:
    """A broken pool is not reported as missing; a list that is none makes no reference wrong."""
    tree = changed(device_pools_0_nnodes="two", models_0_device_range=[3, 3])
    assert [line.partition(": ")[0] for line in violations(tree)] == [
        "topology.device_pools[0].nnodes",
        "topology.models[0].device_range",
    ]
    said = violations({"clusters": 3, "device_pools": SAMPLE["device_pools"], "models": SAMPLE["models"]})
    assert [line.partition(": ")[0] for line in said] == ["topology.clusters"]
    unknown_role = changed(models_2_resource_pool=None)
    (only,) = violations(unknown_role, roles_needed=("actor", "rollout", "critic"))
    assert only.startswith("topology.models[2].resource_pool")
    assert violations(None) == ("topology: wanted a mapping, got None (NoneType)",)


@pytest.mark.parametrize("extra", ["reference", "reward", "teacher"])
def test_replacement_topologies(extra: str) -> None:
    """A role of its own must be declared when it is needed, and not when it is not."""
    tree = copy.deepcopy(SAMPLE)
    tree["clusters"].append({"name": "side", "device_type": "cpu"})
    tree["device_pools"].append({"name": "apart", "cluster": "side"})
    tree["models"].append({"name": "mine", "worker": extra, "resource_pool": "apart"})
    roles = ("actor", "rollout", "critic")
    assert compile_topology(tree, roles_needed=(*roles, extra)).model("mine").cluster == "side"
    assert compile_topology(tree, roles_needed=roles, roles_allowed=(extra,)).models_of(extra)
    (undeclared,) = violations(SAMPLE, roles_needed=(*roles, extra))
    assert undeclared.startswith(f"topology.models: no model with worker {extra!r}")
    (not_enabled,) = violations(tree, roles_needed=roles)
    assert not_enabled.startswith(f"topology.models[3].worker: {extra!r} is declared, but nothing")


def test_rollout_alone_on_its_own_cluster() -> None:
    tree = changed(models_1_resource_pool="generate")
    tree["clusters"].append({"name": "more", "nnodes": 1, "n_gpus_per_node": 4, "device_type": "gpu"})
    tree["device_pools"].append({"name": "generate", "cluster": "more", "nnodes": 1, "n_gpus_per_node": 4})
    placement = compile_topology(tree, roles_needed=("actor", "rollout", "critic"))
    assert placement.model("rollout").world_size == 4
    assert placement.model("actor").colocated_with == ("critic",)
    assert placement.num_devices == 20


def test_without_roles_any_worker_will_do() -> None:
    tree = changed(models_0_worker="my_worker", models_1_worker="my_worker")
    assert len(compile_topology(tree).models_of("my_worker")) == 2
    assert len(violations(tree, roles_needed=("critic",))) == 2


def test_private_hosts_have_the_gpus_of_this_machine() -> None:
    assert compile_topology(SAMPLE, local_gpus=16).num_devices == 16
    (only,) = violations(SAMPLE, local_gpus=8)
    assert only.startswith("topology.clusters[0]: wants 2 x 8 GPUs, this machine has 8")
    compile_topology(changed(clusters_0_device_type="cpu"), local_gpus=0)
    tree = copy.deepcopy(SAMPLE)
    tree["clusters"].append({"name": "more", "device_type": "gpu"})
    (only,) = violations(tree, local_gpus=16)
    assert "topology.clusters[1]: wants 1 x 1 GPUs, this machine has 16 (0 not taken" in only


def test_the_preset_places_all_roles_together() -> None:
    roles = ("actor", "rollout", "critic")
    placement = compile_topology(
        preset_topology(roles, nnodes=2, n_gpus_per_node=4, device_type="cpu"), roles_needed=roles
    )
    assert [model.name for model in placement.models] == list(roles)
    assert placement.num_devices == 8


@pytest.mark.parametrize("spread", [True, False])
def test_a_large_topology_takes_less_than_a_second(spread: bool) -> None:
    """1,024 nodes x 8 devices and 64 models, each with a pool of its own or with a part of one."""
    pools = 64 if spread else 1
    tree = {
        "clusters": [{"name": "c", "nnodes": 1024, "n_gpus_per_node": 8}],
        "device_pools": [
            {"name": f"p{pool}", "cluster": "c", "nnodes": 1024 // pools, "n_gpus_per_node": 8}
            for pool in range(pools)
        ],
        "models": [
            {
                "name": f"m{model}",
                "worker": "actor",
                "resource_pool": f"p{model % pools}",
                "device_range": None if spread else [model * 128, model * 128 + 128],
            }
            for model in range(64)
        ],
    }
    start = time.perf_counter()
    placement = compile_topology(tree)
    assert time.perf_counter() - start < 1.0
    assert placement.num_devices == 8192


def test_the_view_of_a_block() -> None:
    block = Block(first_node=2, nnodes=3, first_device=4, devices_per_node=4)
    assert block.view(0, 12) == block
    assert block.view(4, 12) == Block(first_node=3, nnodes=2, first_device=4, devices_per_node=4)
    assert block.view(5, 7) == Block(first_node=3, nnodes=1, first_device=5, devices_per_node=2)
    for start, stop in ((3, 5), (0, 13), (2, 2), (-1, 2), (4, 10)):
        with pytest.raises(ValueError, match=rf"^\[{start}, {stop}\)"):
            block.view(start, stop)
    assert [block.device_of(rank) for rank in (0, 3, 4, 11)] == [(2, 4), (2, 7), (3, 4), (4, 7)]
    with pytest.raises(IndexError):
        block.device_of(12)
    with pytest.raises(KeyError):
        compile_topology(SAMPLE).model("nobody")


NAMES = st.sampled_from(["a", "b", "c", "d"])
SMALL = st.integers(1, 4)
CLUSTERS = st.fixed_dictionaries(
    {"name": NAMES, "nnodes": SMALL, "n_gpus_per_node": SMALL}, optional={"device_type": st.just("cpu")}
)
POOLS = st.fixed_dictionaries({"name": NAMES, "cluster": NAMES, "nnodes": SMALL, "n_gpus_per_node": SMALL})
MODELS = st.fixed_dictionaries(
    {"name": st.text("uvwxyz", min_size=1, max_size=2), "worker": NAMES, "resource_pool": NAMES},
    optional={"device_range": st.lists(st.integers(0, 17), min_size=2, max_size=2).map(sorted)},
)
TOPOLOGIES = st.fixed_dictionaries(
    {
        "clusters": st.lists(CLUSTERS, max_size=3, unique_by=lambda one: one["name"])
        | st.lists(CLUSTERS, max_size=3),
        "device_pools": st.lists(POOLS, max_size=4, unique_by=lambda one: one["name"])
        | st.lists(POOLS, max_size=4),
        "models": st.lists(MODELS, max_size=5),
    }
)


@st.composite
def likely_topologies(draw: st.DrawFn) -> dict[str, Any]:
    """References that lead somewhere, pools within clusters, ranges that are views: most of them fit."""
    clusters = draw(st.lists(CLUSTERS, min_size=1, max_size=2, unique_by=lambda one: one["name"]))
    pools: list[dict[str, Any]] = []
    for name in "abc"[: draw(st.integers(1, 3))]:
        cluster = draw(st.sampled_from(clusters))
        nnodes = draw(st.integers(1, cluster["nnodes"]))
        per_node = draw(st.integers(1, cluster["n_gpus_per_node"]))
        pools.append(
            {"name": name, "cluster": cluster["name"], "nnodes": nnodes, "n_gpus_per_node": per_node}
        )
    models = []
    for name in "uvwxy"[: draw(st.integers(0, 5))]:
        pool = draw(st.sampled_from(pools))
        unit = draw(st.sampled_from([1, pool["n_gpus_per_node"]]))
        count = pool["n_gpus_per_node"] if unit == 1 else pool["nnodes"]
        start = draw(st.integers(0, count - 1))
        stop = draw(st.integers(start + 1, count))
        shift = draw(st.integers(0, pool["nnodes"] - 1)) * pool["n_gpus_per_node"] if unit == 1 else 0
        device_range = draw(st.sampled_from([None, [start * unit + shift, stop * unit + shift]]))
        models.append(
            {"name": name, "worker": "actor", "resource_pool": pool["name"], "device_range": device_range}
        )
    return {"clusters": clusters, "device_pools": pools, "models": models}


def repeated(key: str, items: list[dict[str, Any]]) -> list[str]:
    return [
        f"topology.{key}[{index}].name"
        for index, one in enumerate(items)
        if one["name"] in [earlier["name"] for earlier in items[:index]]
    ]


def first_of_each(items: list[dict[str, Any]]) -> dict[str, tuple[int, dict[str, Any]]]:
    found: dict[str, tuple[int, dict[str, Any]]] = {}
    for index, one in enumerate(items):
        found.setdefault(one["name"], (index, one))
    return found


def expected_pool_paths(tree: dict[str, Any]) -> list[str]:
    """Naively: mark single devices, try every corner."""
    clusters = first_of_each(tree["clusters"])
    taken: set[tuple[str, int, int]] = set()
    paths = []
    for index, pool in first_of_each(tree["device_pools"]).values():
        path = f"topology.device_pools[{index}]"
        if pool["cluster"] not in clusters:
            paths.append(f"{path}.cluster")
            continue
        cluster = clusters[pool["cluster"]][1]
        large = [key for key in ("nnodes", "n_gpus_per_node") if pool[key] > cluster[key]]
        paths += [f"{path}.{key}" for key in large]
        for node, device in product(range(cluster["nnodes"]), range(cluster["n_gpus_per_node"])):
            cells = {
                (pool["cluster"], node + i, device + j)
                for i, j in product(range(pool["nnodes"]), range(pool["n_gpus_per_node"]))
            }
            inside = node + pool["nnodes"] <= cluster["nnodes"]
            inside &= device + pool["n_gpus_per_node"] <= cluster["n_gpus_per_node"]
            if inside and not cells & taken:
                taken |= cells
                break
        else:
            paths += [] if large else [path]
    return paths


def expected_model_paths(tree: dict[str, Any]) -> list[str]:
    """Naively: compare every model with every earlier one, as sets of ranks."""
    pools = first_of_each(tree["device_pools"])
    paths, seen = [], []
    for index, model in first_of_each(tree["models"]).values():
        path = f"topology.models[{index}]"
        given_range = model.get("device_range")
        if model["resource_pool"] not in pools:
            paths.append(f"{path}.resource_pool")
            if given_range and given_range[0] == given_range[1]:
                paths.append(f"{path}.device_range")
            continue
        pool = pools[model["resource_pool"]][1]
        per_node, size = pool["n_gpus_per_node"], pool["nnodes"] * pool["n_gpus_per_node"]
        start, stop = given_range or (0, size)
        ranks = frozenset(range(start, stop))
        nodes = [rank // per_node for rank in ranks]
        whole = all(count == per_node for count in Counter(nodes).values())
        if not ranks or stop > size or not (whole or len(set(nodes)) == 1):
            paths.append(f"{path}.device_range")
            continue
        here = (model["resource_pool"], ranks)
        if here not in seen:
            others = [ranks for name, ranks in seen if name == model["resource_pool"]]
            paths += [f"{path}.device_range"] if any(ranks & other for other in others) else []
            seen.append(here)
    return paths


def check_invariants(tree: dict[str, Any], placement: Placement) -> None:
    """What a placement promises, looked at device by device."""
    assert [one.name for one in placement.models] == [one["name"] for one in tree["models"]]
    owners: Counter[tuple[str, int, int]] = Counter()
    for pool in placement.pools:
        cluster = placement.cluster(pool.cluster)
        assert pool.block.nodes.stop <= cluster.nnodes
        assert pool.block.devices.stop <= cluster.devices_per_node
        owners.update(
            (pool.cluster, node, device) for node, device in product(pool.block.nodes, pool.block.devices)
        )
    assert set(owners.values()) <= {1}
    cells = {}
    for model in placement.models:
        pool_block = placement.pool(model.pool).block
        own = [model.block.device_of(rank) for rank in range(model.world_size)]
        assert own == [pool_block.device_of(rank) for rank in range(model.start, model.stop)]
        cells[model.name] = {(model.cluster, *one) for one in own}
        assert model.whole_pool == (len(own) == pool_block.size)
    for one, other in combinations(placement.models, 2):
        shared = cells[one.name] & cells[other.name]
        assert not shared or cells[one.name] == cells[other.name]
        assert (other.name in one.colocated_with) == (one.name in other.colocated_with) == bool(shared)
    assert placement.num_devices == len(set().union(*cells.values()))
    assert pickle.loads(pickle.dumps(placement)) == placement


@settings(max_examples=2000)
@given(TOPOLOGIES | likely_topologies())
def test_random_topologies_are_placed_or_every_violation_is_listed(tree: dict[str, Any]) -> None:
    expected = [
        *(path for key in ("clusters", "device_pools", "models") for path in repeated(key, tree[key])),
        *expected_pool_paths(tree),
        *expected_model_paths(tree),
    ]
    if expected:
        said = violations(tree)
        assert Counter(line.partition(": ")[0] for line in said) == Counter(expected)
    else:
        check_invariants(tree, compile_topology(tree))


WRONG = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 0),
    st.floats(),
    st.sampled_from(["", "a b", "1x"]),
    st.just([]),
    st.just({}),
)


@settings(max_examples=300)
@given(TOPOLOGIES, st.data())
def test_a_wrong_type_anywhere_is_named_beside_the_rest(tree: dict[str, Any], data: st.DataObject) -> None:
    lists = [key for key in tree if tree[key]]
    if not lists:
        return
    key = data.draw(st.sampled_from(lists))
    index = data.draw(st.integers(0, len(tree[key]) - 1))
    field = data.draw(st.sampled_from(sorted(tree[key][index].keys() - {"device_range", "device_type"})))
    untouched = {
        line
        for line in expected_pool_paths(tree) + expected_model_paths(tree)
        if f".{key}[{index}]" not in line
    }
    tree[key][index][field] = data.draw(WRONG)
    said = [line.partition(": ")[0] for line in violations(tree)]
    assert f"topology.{key}[{index}].{field}" in said
    assert len(said) == len(set(said))
    if key == "models":
        others = {line for line in said if not line.endswith(".name") and f".{key}[{index}]" not in line}
        assert {line for line in untouched if "device_pools" in line} <= others


def test_what_a_run_is_placed_on_has_a_cluster() -> None:
    with pytest.raises(TopologyError, match=r"^topology\.clusters: wanted at least one cluster, got none$"):
        compile_here({}, hosts_are_here=True)
