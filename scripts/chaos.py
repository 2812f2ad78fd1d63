#!/usr/bin/env python3
"""Hits runs on the Slurm sandbox with random faults at random moments, and compares each with an undisturbed one.

    scripts/chaos.py --runs 10 --seed 1 [--report FILE] [--release NAME] [--lanes 3] [--only FAULT …]

The last line reads ``N of N survived``; exit code 1 unless all did. Needs Slurm's packages and a Python with hpjob's
dependencies; everything it starts ends with it.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from cluster_chaos.cli import main  # noqa: E402  (needs the path above)

if __name__ == "__main__":
    sys.exit(main())
