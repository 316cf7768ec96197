"""The descriptions of jobs in `scripts/jobs`: what they would submit. Only who takes it is made up."""

from __future__ import annotations

import http.server
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

ROOT = Path(__file__).resolve().parents[2]
APPLY = """
import sys
from scripts.jobs.{0} import job
job.apply()
job.dump(".monarch/job_state.pkl")
"""
CHECK = (
    "from meshes.monarch.applied import check_applied_job; check_applied_job({'default': 2, 'rollout': 1})"
)


def python(code: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a program; in its own process, since a job sets how Monarch is reached."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *extra_path()]), **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def extra_path() -> list[str]:
    spec = importlib.util.find_spec("kubernetes")
    return [] if spec is None or spec.origin is None else [str(Path(spec.origin).parents[1])]


def tool(folder: Path, name: str, script: str) -> None:
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


SLURM_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=neoproto_PID
#SBATCH --ntasks-per-node=1
#SBATCH --nodes=3
#SBATCH --output=FOLDER/outputs/slurm/slurm_%j_neoproto_PID.out
#SBATCH --error=FOLDER/outputs/slurm/slurm_%j_neoproto_PID.err
#SBATCH --time=01:00:00
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --partition=gpu
#SBATCH --account=lab
#SBATCH --qos=high
export MONARCH_SERVICE_PROC_IDS='["ID", "ID", "ID"]'

srun PYTHON -c 'import os, socket; from monarch.actor import run_worker_loop_forever; \
from monarch._src.job.service_identity import service_proc_addr, ranked_service_proc_id_from_env; \
run_worker_loop_forever(address=service_proc_addr(\
f"tcp://{socket.gethostname()}:23456@tcp://10.0.0.0:23456", \
ranked_service_proc_id_from_env(rank_env="SLURM_NODEID")), \
ca="trust_all_connections")'
"""


def test_the_slurm_job_submits_one_script_and_is_known_by_its_number(tmp_path: Path) -> None:
    tool(tmp_path, "sbatch", f"cat > {tmp_path}/script; echo Submitted batch job 42")
    env = {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "NEOPROTO_MESHES": "default=2,rollout=1",
        "NEOPROTO_GPUS_PER_NODE": "8",
        "NEOPROTO_PARTITION": "gpu",
        "NEOPROTO_ACCOUNT": "lab",
        "NEOPROTO_QOS": "high",
        "NEOPROTO_TIME_LIMIT": "01:00:00",
        "NEOPROTO_PORT": "23456",
        "NEOPROTO_BIND": "10.0.0.0",
    }
    done = python(APPLY.format("slurm"), tmp_path, **env)
    assert done.returncode == 0, done.stderr
    script = (tmp_path / "script").read_text()
    script = re.sub(r"neoproto_\d+", "neoproto_PID", script).replace(str(tmp_path), "FOLDER")
    script = re.sub(r'"service<\w+>"', '"ID"', script).replace(sys.executable, "PYTHON")
    assert script == SLURM_SCRIPT

    for state, code in (("RUNNING", 0), ("PENDING", 0), ("CANCELLED", 1)):
        answer = json.dumps({"jobs": [{"job_state": [state]}]})
        tool(tmp_path, "squeue", f"""test "$2" = 42 && echo '{answer}'""")
        checked = python(CHECK, tmp_path, **env)
        assert checked.returncode == code, checked.stderr
    assert "is no longer running" in checked.stderr.splitlines()[-1]
    (tmp_path / "bin" / "squeue").unlink()
    checked = python(CHECK, tmp_path, **env)
    assert "cannot tell if the job in" in checked.stderr.splitlines()[-1]


class Cluster(http.server.BaseHTTPRequestHandler):
    """Takes what is posted to a Kubernetes API that has nothing yet."""

    posted: ClassVar[list[tuple[str, Any]]] = []

    def do_GET(self) -> None:
        self._answer(404, {"kind": "Status", "code": 404})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.posted.append((self.path, body))
        self._answer(201, body)

    def _answer(self, code: int, body: Any) -> None:
        text = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None: ...


def test_the_kubernetes_job_asks_for_a_mesh_of_pods_for_each_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("kubernetes", reason="an optional client")
    monkeypatch.setattr(Cluster, "posted", [])
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Cluster)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
        }
        (tmp_path / "kubeconfig").write_text(json.dumps(config))
        done = python(
            APPLY.format("kubernetes"),
            tmp_path,
            NEOPROTO_KUBECONFIG=str(tmp_path / "kubeconfig"),
            NEOPROTO_NAMESPACE="lab",
            NEOPROTO_IMAGE="registry/neoproto:1",
            NEOPROTO_GPUS_PER_NODE="8",
            NEOPROTO_SHARED_MEMORY="64Gi",
            NEOPROTO_MESHES="default=2,rollout=1",
        )
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 0, done.stderr
    where = "/apis/monarch.pytorch.org/v1alpha1/namespaces/lab/monarchmeshes"
    assert [path for path, _ in Cluster.posted] == [where, where]
    first, second = (body for _, body in Cluster.posted)
    assert first["metadata"] == {"name": "default", "namespace": "lab"}
    assert (first["kind"], first["spec"]["replicas"], first["spec"]["port"]) == ("MonarchMesh", 2, 26600)
    assert (second["metadata"]["name"], second["spec"]["replicas"]) == ("rollout", 1)
    pod = first["spec"]["podTemplate"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == "registry/neoproto:1"
    assert container["resources"] == {kind: {"nvidia.com/gpu": "8"} for kind in ("limits", "requests")}
    assert container["volumeMounts"] == [{"mountPath": "/dev/shm", "name": "dev-shm"}]
    assert pod["volumes"] == [{"name": "dev-shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}}]
    assert container["command"][:3] == ["python", "-u", "-c"]
    assert "run_worker_loop_forever(" in container["command"][3]
    env = {one["name"]: one.get("value") for one in container["env"]}
    assert env["MONARCH_PORT"] == "26600"
    assert len(json.loads(env["MONARCH_SERVICE_PROC_IDS"] or "")) == 2
    loaded = python("from monarch.job import job_load; print(sorted(job_load()._meshes))", tmp_path)
    assert loaded.stdout == "['default', 'rollout']\n"


@pytest.mark.parametrize(
    ("job", "env", "said"),
    [
        ("local", {}, "{'default': 1}"),
        ("local", {"NEOPROTO_MESHES": "a=2,b=1"}, "{'a': 2, 'b': 1}"),
        ("workers", {}, "{'default': ['tcp://127.0.0.1:26600']}"),
        (
            "workers",
            {"NEOPROTO_WORKERS": "tcp://10.0.0.1:1 tcp://10.0.0.2:1"},
            "{'default': ['tcp://10.0.0.1:1', 'tcp://10.0.0.2:1']}",
        ),
        ("slurm", {}, "{'default': 1}"),
    ],
)
def test_sizes_come_from_the_environment(job: str, env: dict[str, str], said: str, tmp_path: Path) -> None:
    done = python(f"from scripts.jobs.{job} import job; print(job._meshes)", tmp_path, **env)
    assert done.stdout == f"{said}\n", done.stderr


def test_sizes_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    done = python("import scripts.jobs.local", tmp_path, NEOPROTO_MESHES="2")
    assert done.stderr.splitlines()[-1] == (
        "ValueError: meshes are given as name=hosts,…, each name once; got '2'"
    )
