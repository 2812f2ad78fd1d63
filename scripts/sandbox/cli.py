"""Command line of the sandbox."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path

from sandbox import cluster
from sandbox.errors import ENVIRONMENT, INTERRUPTED, SandboxError
from sandbox.folder import Folder, default_path
from sandbox.options import PREEMPT_MODES, TOPOLOGIES, Options
from sandbox.release import default_cache, programs_of
from sandbox.status import describe, render

EPILOG = """\
exit codes: 0 done, 2 wrong options, 3 something is missing or no sandbox runs, 130 interrupted

  eval "$(scripts/slurm-sandbox env)"    then sinfo, sbatch, squeue and hpjob use the sandbox

With --release, a command is about the sandbox of that release; it runs beside this machine's own.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(2, f"error: {message}\n\nhint: `{self.prog} --help` lists what there is\n")


def _parser() -> argparse.ArgumentParser:
    common = _Parser(add_help=False, allow_abbrev=False)
    common.add_argument(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help=f"state folder (default: {default_path()}, and with --release {default_path('RELEASE')})",
    )
    common.add_argument(
        "--release",
        type=_release,
        default="",
        metavar="NAME",
        help="Debian whose Slurm it is, such as trixie (default: this machine)",
    )
    parser = _Parser(
        prog="slurm-sandbox",
        description="A real Slurm on this machine: slurmctld, and one slurmd per virtual node.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, parents=[common], allow_abbrev=False)

    up = add("up", "start it, or repair the one that runs")
    _add_up_options(up)
    _add_cache_option(up)
    install = add("install", "install Slurm's packages when missing (needs root), or fetch those of --release")
    _add_cache_option(install)
    add("down", "end it with all its jobs and delete its folder")
    add("status", "say what runs").add_argument("--json", action="store_true", help="one JSON document")
    add("env", "print shell lines that point Slurm's commands at it")
    stop = add("stop-node", "kill one node's slurmd")
    stop.add_argument("node")
    stop.add_argument("--with-jobs", action="store_true", help="kill its job steps too, as when it loses power")
    add("start-node", "start one node's slurmd again").add_argument("node")
    add("restart-controller", "end slurmctld and start it again")
    return parser


def _release(text: str) -> str:
    if not re.fullmatch(r"[a-z]{0,30}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no code name of a Debian such as trixie")
    return text


def _add_up_options(up: argparse.ArgumentParser) -> None:
    """Add the options of ``up``; they are the fields of :class:`Options`."""
    default = Options()
    up.add_argument("--nodes", type=int, default=default.nodes, metavar="N", help="nodes (default: %(default)s)")
    up.add_argument("--gpus", type=int, default=default.gpus, metavar="G", help="GPUs a node (default: %(default)s)")
    up.add_argument("--gpu-type", default=default.gpu_type, metavar="TYPE", help="(default: %(default)s)")
    up.add_argument("--cpus", type=int, default=default.cpus, metavar="C", help="CPUs a node (default: %(default)s)")
    up.add_argument("--leafs", type=int, metavar="L", help="leaf switches or blocks (default: 2, or 1 for one node)")
    up.add_argument("--topology", choices=TOPOLOGIES, default=default.topology, help="(default: %(default)s)")
    up.add_argument(
        "--grace", type=int, default=default.grace, metavar="SECONDS", help="GraceTime of batch (default: %(default)s)"
    )
    up.add_argument(
        "--preempt-mode", choices=PREEMPT_MODES, default=default.preempt_mode, help="of batch (default: %(default)s)"
    )
    up.add_argument(
        "--kill-wait", type=int, default=default.kill_wait, metavar="SECONDS", help="KillWait (default: %(default)s)"
    )
    up.add_argument(
        "--requeue-delay",
        type=int,
        default=default.requeue_delay,
        metavar="SECONDS",
        help="before a requeued job starts again (default: %(default)s)",
    )
    up.add_argument(
        "--conf", action="append", default=[], metavar="KEY=VALUE", help="a slurm.conf line (may be repeated)"
    )


def _add_cache_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--root-cache",
        type=Path,
        default=default_cache(),
        metavar="DIR",
        help="where the Slurm of another --release is unpacked and kept (default: %(default)s)",
    )


def _options(arguments: argparse.Namespace) -> Options:
    leafs = arguments.leafs if arguments.leafs is not None else min(Options().leafs, max(arguments.nodes, 1))
    return Options(
        nodes=arguments.nodes,
        gpus=arguments.gpus,
        gpu_type=arguments.gpu_type,
        cpus=arguments.cpus,
        leafs=leafs,
        topology=arguments.topology,
        release=arguments.release,
        grace=arguments.grace,
        preempt_mode=arguments.preempt_mode,
        kill_wait=arguments.kill_wait,
        requeue_delay=arguments.requeue_delay,
        conf=tuple(arguments.conf),
    )


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "install":
        programs_of(arguments.release, _cache(arguments))
        return 0
    default = default_path(arguments.release)
    folder = Folder((arguments.state_dir or default).expanduser().absolute())
    match arguments.command:
        case "up":
            begun = time.monotonic()
            done = cluster.up(folder, _options(arguments), _cache(arguments))
            print(f"{done} in {time.monotonic() - begun:.1f} s\n{render(describe(folder))}")
            own = f" --release {arguments.release}" if arguments.release else ""
            own = own if folder.path == default else f" --state-dir {folder.path}"
            print(f'\neval "$({sys.argv[0]} env{own})"    points Slurm\'s commands at it')
        case "down":
            print(f"ended the sandbox in {folder.path}" if cluster.down(folder) else f"none runs in {folder.path}")
        case "status":
            document = describe(folder)
            print(json.dumps(document, indent=2) if arguments.json else render(document))
            return 0 if document["state"] == "running" else ENVIRONMENT
        case "env":
            print("\n".join(cluster.exports(folder)))
        case "stop-node":
            cluster.stop_node(folder, arguments.node, with_jobs=arguments.with_jobs)
        case "start-node":
            cluster.start_node(folder, arguments.node)
        case "restart-controller":
            cluster.restart_controller(folder)
    return 0


def _cache(arguments: argparse.Namespace) -> Path:
    cache: Path = arguments.root_cache.expanduser().absolute()
    return cache


def main() -> int:
    """Run one command and return its exit code."""
    try:
        return _run(_parser().parse_args())
    except SandboxError as error:
        print("\n".join(f"error: {line}" for line in error.message.splitlines()), file=sys.stderr)
        print(f"\nhint: {error.hint}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
