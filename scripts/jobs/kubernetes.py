"""Pods of a Kubernetes cluster: `pip install kubernetes`, then `monarch apply scripts.jobs.kubernetes.job`.

NEOPROTO_MESHES: name=pods for each cluster of the topology ("default=1"); lower-case letters and digits.
NEOPROTO_NAMESPACE: where the pods are ("default").
NEOPROTO_IMAGE: an image with this environment, at the same paths; pods of it are made by Monarch's operator,
which the cluster must have. If it is not set, pods that are there already are found by the operator's labels.
NEOPROTO_GPUS_PER_NODE: GPUs of a pod; none if it is not set.
NEOPROTO_SHARED_MEMORY: size of a pod's /dev/shm, where batches and weights lie ("16Gi").
NEOPROTO_PORT: where the pods listen ("26600").
NEOPROTO_KUBECONFIG: a kubeconfig file, for a controller outside the cluster; inside, the pod's own account.
NEOPROTO_WAIT_S: how long the pods are waited for, in seconds; for ever if not set.
"""

from __future__ import annotations

import os

from monarch.job.kubernetes import ImageSpec, KubeConfig, KubernetesJob

import neoproto  # noqa: F401 - first: it finds our meshes, whatever else has the name
from meshes.monarch.workers_job import mesh_sizes


def _job() -> KubernetesJob:
    kubeconfig, wait = os.environ.get("NEOPROTO_KUBECONFIG"), os.environ.get("NEOPROTO_WAIT_S")
    made = KubernetesJob(
        namespace=os.environ.get("NEOPROTO_NAMESPACE") or "default",
        timeout=int(wait) if wait else None,
        kubeconfig=KubeConfig.from_path(kubeconfig) if kubeconfig else None,
    )
    for name, pods in mesh_sizes(os.environ.get("NEOPROTO_MESHES", "default=1")).items():
        made.add_mesh(name, pods, image_spec=_image(), port=int(os.environ.get("NEOPROTO_PORT") or 26600))
    return made


def _image() -> ImageSpec | None:
    image, gpus = os.environ.get("NEOPROTO_IMAGE"), os.environ.get("NEOPROTO_GPUS_PER_NODE")
    if not image:
        return None
    return ImageSpec(
        image,
        resources={"nvidia.com/gpu": int(gpus)} if gpus else None,
        shared_memory_size=os.environ.get("NEOPROTO_SHARED_MEMORY") or "16Gi",
    )


job = _job()
