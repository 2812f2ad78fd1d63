"""What to do about Slurm's refusals, in words."""

from __future__ import annotations

_HINTS: tuple[tuple[str, str], ...] = (
    ("invalid account", "give an account that you may use with --account; `sacctmgr show assoc user=$USER` lists them"),
    ("invalid qos", "give a quality of service that you may use with --qos; `sacctmgr show qos` lists them"),
    ("invalid partition", "`sinfo -s` lists the partitions; choose one with --partition"),
    ("partition configuration is not available", "ask for fewer nodes or GPUs, or another --partition (`sinfo -s`)"),
    (
        "node configuration is not available",
        "ask for fewer nodes, GPUs or CPUs, or another --partition (`sinfo -N -l`)",
    ),
    ("more processors requested", "lower job.cpus_per_rank or job.gpus_per_node with --set, or ask for more nodes"),
    ("time limit", "shorten --time; `scontrol show partition` names the limit"),
    ("generic resource", "the nodes lack such GPUs; `sinfo -o '%N %G'` shows what they have"),
    ("node count", "change --nodes; `sinfo -s` shows how many nodes a partition has"),
    (
        "job violates accounting",
        "your account's limits forbid this size, count or length; `sacctmgr show assoc` shows them",
    ),
    ("memory specification", "ask for memory with `-- --mem=0` (all of a node) or another amount"),
    ("partition is down", "the partition takes no jobs now; `sinfo -s` shows which do"),
    ("unable to contact", "the Slurm controller does not answer; `scontrol ping` shows its state"),
    ("user's group not permitted", "you may not use this partition; `sinfo -s` lists the others"),
)


def refusal_hint(words: str) -> str:
    """Return what a person can do about sbatch's ``words``."""
    lowered = words.lower()
    for phrase, hint in _HINTS:
        if phrase in lowered:
            return hint
    return "compare the options with `scontrol show partition`; `hpjob submit --dry-run` shows the whole script"
