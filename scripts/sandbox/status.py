"""Describes a sandbox, for people and as JSON."""

from __future__ import annotations

from typing import Any

from sandbox import daemons
from sandbox.folder import Folder
from sandbox.processes import DAEMONS, find


def describe(folder: Folder) -> dict[str, Any]:
    """Return one JSON document; its ``state`` is ``running``, ``partial`` or ``stopped``."""
    folder.check()
    saved = folder.load()
    processes = find(folder)
    pids = {(process.kind, process.node): process.pid for process in processes if process.kind in DAEMONS}
    document: dict[str, Any] = {"version": 1, "state_dir": str(folder.path), "state": "stopped"}
    if saved is None:
        return {**document, "state": "partial"} if processes else document
    controller, munge = pids.get(("slurmctld", "")), pids.get(("munged", ""))
    states = daemons.node_states(folder) if controller and munge else {}
    kind = "block" if saved.options.topology == "block" else "leaf"
    leaf_of = {node: f"{kind}{i + 1}" for i, nodes in enumerate(saved.options.leaf_nodes()) for node in nodes}
    nodes = [
        {
            "name": name,
            "switch": leaf_of[name],
            "port": saved.node_ports[name],
            "pid": pids.get(("slurmd", name)),
            "slurm_state": states.get(name),
        }
        for name in saved.options.node_names()
    ]
    complete = controller and munge and all(node["pid"] and node["slurm_state"] for node in nodes)
    return {
        **document,
        "state": "running" if complete else "partial" if processes else "stopped",
        "slurm_version": saved.programs.version(),
        "programs": str(saved.programs.directory) if saved.programs.directory else None,
        "slurm_conf": str(folder.slurm_conf),
        "controller": {"port": saved.controller_port, "pid": controller},
        "munge": {"socket": str(folder.munge_socket), "pid": munge},
        "nodes": nodes,
        "job_processes": sum(process.kind == "job" for process in processes),
        "options": saved.options.to_json(),
    }


def render(document: dict[str, Any]) -> str:
    """Return the document as text for a terminal."""
    head = f"Slurm sandbox in {document['state_dir']}: {document['state']}"
    if "nodes" not in document:
        return head
    options = document["options"]
    lines = [
        f"{head} (Slurm {document['slurm_version']})",
        f"  partitions  batch (preempted by {options['preempt_mode']}, grace {options['grace']} s), urgent",
        f"  each node   {options['gpus']} x {options['gpu_type']}, {options['cpus']} CPUs",
        f"  controller  127.0.0.1:{document['controller']['port']}  {_pid(document['controller'])}",
        f"  munge       {document['munge']['socket']}  {_pid(document['munge'])}",
    ]
    for node in document["nodes"]:
        state = node["slurm_state"] or "unknown"
        lines.append(f"  {node['name']:<11} 127.0.0.1:{node['port']}  {_pid(node)}  {node['switch']}  {state}")
    lines.append(f"  processes of jobs: {document['job_processes']}")
    return "\n".join(lines)


def _pid(part: dict[str, Any]) -> str:
    return f"pid {part['pid']}" if part["pid"] else "not running"
