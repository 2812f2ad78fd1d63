"""``python -m hpjob.runtime``: installs the signal handlers before anything slow is imported."""

import sys

from hpjob.runtime.signals import StopRequest


def _start() -> None:
    stop = StopRequest()
    stop.install()
    from hpjob.runtime.launch import main  # noqa: PLC0415

    main(sys.argv[1:], stop)


if __name__ == "__main__":
    _start()
