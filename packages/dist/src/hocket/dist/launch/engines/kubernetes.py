"""A JobSet for Kubernetes: a pod with a launcher for each machine, started again as a whole."""

import json
import signal
from collections.abc import Iterator
from typing import Any

from hocket.dist.launch.agent_options import DEFAULT_PORT
from hocket.dist.launch.engines.job import EngineJob

_START_S = 900
"""Seconds in which all pods have to start; nodes may have to come first, and pull the image."""
_REPORT_S = 10
"""Seconds between the end of the ranks and that of the pod, for the launcher."""


def job_set(job: EngineJob) -> str:
    """Return a manifest of `jobset.x-k8s.io/v1alpha2` as YAML."""
    replicated = {"name": "machine", "replicas": 1, "template": {"spec": _indexed_job(job)}}
    manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            # An evicted pod, and ranks that saved on its notice, are no failures of the job.
            "failurePolicy": {
                "maxRestarts": job.max_restarts,
                "rules": [
                    {
                        "name": "evicted",
                        "action": "RestartJobSetAndIgnoreMaxRestarts",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": [replicated],
        },
    }
    return "\n".join(_yaml(manifest)) + "\n"


def _indexed_job(job: EngineJob) -> dict[str, Any]:
    """Return the specification of the job whose pods are the machines."""
    count = int(job.nodes)
    ended = {"operator": "In", "values": [128 + signal.SIGTERM]}
    rules = [
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": ended},
    ]
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": round(job.grace_s) + _REPORT_S,
        "containers": [_container(job, count)],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    return {
        "parallelism": count,
        "completions": count,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": rules},
        "template": {"spec": pod},
    }


def _container(job: EngineJob, count: int) -> dict[str, Any]:
    """Return the container of a launcher."""
    place: list[str] = []
    if count > 1:
        # A pod of a JobSet is named by the set, the replicated job, the job's number and the pod's index.
        place += ["--nnodes", str(count), "--node_rank", "$(JOB_COMPLETION_INDEX)"]
        place += ["--master_addr", f"{job.name}-machine-0-0.{job.name}"]
        for name, value in (("--master_port", DEFAULT_PORT), ("--start-timeout", _START_S)):
            if not any(word.partition("=")[0] == name for word in job.options):
                place += [name, str(value)]
    container: dict[str, Any] = {
        "name": "launcher",
        "image": job.image,
        # Kubernetes expands `$(…)` in a command, and `$$` is a dollar sign there.
        "command": [
            *("hocket-launch", *place, "--grace", f"{job.grace_s:g}"),
            *(word.replace("$", "$$") for word in [*job.options, *job.script]),
        ],
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    amounts = {"cpu": job.cpus, "nvidia.com/gpu": job.gpus}
    if limits := {name: amount for name, amount in amounts.items() if amount}:
        container["resources"] = {"limits": limits}
    return container


def _yaml(value: Any, indent: str = "") -> Iterator[str]:
    """Yield the lines of a document of YAML, whose texts are those of JSON."""
    pairs = value.items() if isinstance(value, dict) else ((None, item) for item in value)
    for key, item in pairs:
        head = f"{indent}-" if key is None else f"{indent}{key}:"
        if not isinstance(item, dict | list):
            yield f"{head} {json.dumps(item, ensure_ascii=False)}"
            continue
        inner = list(_yaml(item, indent + "  "))
        if key is None:
            yield f"{head} {inner[0].lstrip()}"
            yield from inner[1:]
        else:
            yield head
            yield from inner
