"""Python reads this at its start where the folder is on PYTHONPATH: ranks then run the quick runtime."""

import sys
from pathlib import Path

if "hpjob.runtime" in sys.orig_argv:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
    from cluster_chaos.quick.quick_runtime import main

    main(sys.orig_argv)
