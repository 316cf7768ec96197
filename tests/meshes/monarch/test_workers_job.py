from __future__ import annotations

import pickle
import socket

import pytest

from meshes.monarch.workers_job import WorkersJob, _route_to, mesh_addresses, mesh_sizes


def test_sizes_are_read() -> None:
    assert mesh_sizes("train=2, rollout=10") == {"train": 2, "rollout": 10}


@pytest.mark.parametrize("text", ["", "2", "a=0", "a=1,a=2", "a=1;b=2", "1a=1"])
def test_sizes_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="name=hosts"):
        mesh_sizes(text)


def test_addresses_are_read() -> None:
    assert mesh_addresses("tcp://a:1 tcp://[::1]:2") == {"default": ["tcp://a:1", "tcp://[::1]:2"]}
    assert mesh_addresses("x=tcp://a:1, y=tcp://b.c:2") == {"x": ["tcp://a:1"], "y": ["tcp://b.c:2"]}


@pytest.mark.parametrize("text", ["", "a:1", "x=", "tcp://a", "x=tcp://a:1,x=tcp://b:1", "ipc://x"])
def test_addresses_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="tcp://HOST:PORT"):
        mesh_addresses(text)


def test_a_job_is_alive_as_long_as_its_workers_listen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        job = pickle.loads(pickle.dumps(WorkersJob({"default": [address]})))
        job.apply()
        assert job._is_running()
        assert not job.can_run(WorkersJob({"other": [address]}))
    assert not job._is_running()
    with pytest.raises(RuntimeError, match=f"no worker listens at {address}"):
        WorkersJob({"default": [address]}).apply()


def test_the_controller_is_reached_where_it_reaches_the_workers() -> None:
    assert _route_to("tcp://127.0.0.1:26600") == "127.0.0.1"
    assert _route_to("tcp://[::1]:26600") == "[::1]"


def test_a_script_inside_the_job_is_refused() -> None:
    with pytest.raises(RuntimeError, match="batch-mode"):
        WorkersJob({"default": ["tcp://127.0.0.1:1"]}).apply(client_script="train.py")


def test_job_files_import_by_the_documented_path() -> None:
    from meshes import workers_job
    from meshes.monarch import workers_job as own

    names = ["WorkersJob", "mesh_addresses", "mesh_sizes", "use_client_address"]
    assert [getattr(workers_job, name) for name in names] == [getattr(own, name) for name in names]
