"""Texts of slurm.conf, gres.conf and topology.conf."""

from __future__ import annotations

import os
import pwd
import socket

from sandbox.folder import Folder, Saved
from sandbox.options import Options, conf_key
from sandbox.packages import Programs

MEMORY_MIB_PER_CPU = 16_000


def slurm_conf(folder: Folder, saved: Saved) -> str:
    """Return slurm.conf.

    Time limits for messages are wide, because all nodes share the machine's few cores; scheduling intervals are
    short, and credentials live 5 s, because Slurm delays a requeued job by their lifetime.
    """
    options = saved.options
    user = pwd.getpwuid(os.getuid()).pw_name
    lines = [
        "ClusterName=sandbox",
        f"SlurmctldHost={_host()}(127.0.0.1)",
        f"SlurmctldPort={saved.controller_port}",
        f"SlurmUser={user}",
        f"SlurmdUser={user}",
        "AuthType=auth/munge",
        "CredType=cred/munge",
        f"AuthInfo=socket={folder.munge_socket},cred_expire={options.requeue_delay - 1}",
        "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny",
        f"StateSaveLocation={folder.controller_state}",
        f"SlurmdSpoolDir={folder.spool}/%n",
        f"SlurmctldPidFile={folder.path}/slurmctld.pid",
        f"SlurmdPidFile={folder.spool}/%n.pid",
        f"SlurmctldLogFile={folder.log}/slurmctld.log",
        f"SlurmdLogFile={folder.log}/slurmd.%n.log",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/none",
        "SwitchType=switch/none",
        "MpiDefault=none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core_Memory",
        f"DefMemPerCPU={MEMORY_MIB_PER_CPU}",
        f"TopologyPlugin=topology/{options.topology}",
        "SlurmdParameters=config_overrides",
        "ReturnToService=2",
        f"KillWait={options.kill_wait}",
        "JobFileAppend=1",
        "PreemptType=preempt/partition_prio" if options.preempt_mode != "off" else "PreemptType=preempt/none",
        f"PreemptMode={_cluster_preempt_mode(options)}",
        "SchedulerType=sched/backfill",
        "SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=1",
        "MessageTimeout=60",
        "TCPTimeout=15",
        "BatchStartTimeout=120",
        "UnkillableStepTimeout=300",
        "MailProg=/bin/true",
        "SlurmdTimeout=60",
        *(["GresTypes=gpu"] if options.gpus else []),
        *([f"PluginDir={saved.programs.plugins}"] if saved.programs.plugins else []),
        *[_node_line(name, saved.node_ports[name], options) for name in options.node_names()],
        f"PartitionName=batch Default=YES Nodes=ALL PriorityTier=1 PreemptMode={options.preempt_mode.upper()}"
        f" GraceTime={options.grace} DefaultTime=01:00:00 MaxTime=1-0",
        "PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF DefaultTime=01:00:00 MaxTime=1-0",
    ]
    replaced = {conf_key(line) for line in options.conf} - {"nodename", "partitionname"}
    return "\n".join([line for line in lines if conf_key(line) not in replaced] + list(options.conf)) + "\n"


def gres_conf(folder: Folder, options: Options) -> str:
    """Return gres.conf; with a File for each GPU Slurm sets CUDA_VISIBLE_DEVICES."""
    if not options.gpus:
        return "AutoDetect=off\n"
    last = f"-{options.gpus - 1}" if options.gpus > 1 else ""
    files = f"{folder.gpus}/nvidia[0{last}]" if last else f"{folder.gpus}/nvidia0"
    return f"AutoDetect=off\nNodeName=n[1-{options.nodes}] Name=gpu Type={options.gpu_type} File={files}\n"


def topology_conf(options: Options) -> str:
    """Return topology.conf: leaf switches, and a spine above them when there are several; or blocks of equal size."""
    if options.topology == "block":
        lines = [f"BlockName=block{i + 1} Nodes={_fold(nodes)}" for i, nodes in enumerate(options.leaf_nodes())]
        return "\n".join([*lines, f"BlockSizes={','.join(map(str, block_sizes(options)))}"]) + "\n"
    lines = [f"SwitchName=leaf{i + 1} Nodes={_fold(nodes)}" for i, nodes in enumerate(options.leaf_nodes())]
    if options.leafs > 1:
        lines.append(f"SwitchName=spine1 Switches=leaf[1-{options.leafs}]")
    return "\n".join(lines) + "\n"


def block_sizes(options: Options) -> list[int]:
    """Nodes of one block, of two together, of four …, until all blocks are together."""
    sizes = [options.nodes // options.leafs]
    while sizes[-1] < options.nodes:
        sizes.append(sizes[-1] * 2)
    return sizes


def cgroup_conf(programs: Programs) -> str | None:
    """Return cgroup.conf: without it newer releases of Slurm stop where no cgroups are mounted for them."""
    return "CgroupPlugin=disabled\n" if programs.release_number() >= (23, 11) else None


def _fold(nodes: list[str]) -> str:
    """Return consecutive node names as a host list."""
    return f"n[{nodes[0][1:]}-{nodes[-1][1:]}]" if len(nodes) > 1 else nodes[0]


def _host() -> str:
    """Return the name that Slurm's daemons compare with their own host's."""
    return socket.gethostname().partition(".")[0]


def _cluster_preempt_mode(options: Options) -> str:
    return "SUSPEND,GANG" if options.preempt_mode == "suspend" else options.preempt_mode.upper()


def _node_line(name: str, port: int, options: Options) -> str:
    sockets = 2 if options.cpus % 2 == 0 else 1
    gres = f" Gres=gpu:{options.gpu_type}:{options.gpus}" if options.gpus else ""
    return (
        f"NodeName={name} NodeHostname={_host()} NodeAddr=127.0.0.1 Port={port}"
        f" Sockets={sockets} CoresPerSocket={options.cpus // sockets} ThreadsPerCore=1"
        f" RealMemory={options.cpus * MEMORY_MIB_PER_CPU}{gres} State=UNKNOWN"
    )
