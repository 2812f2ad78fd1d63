"""Lets ``python -m hpjob`` behave as the ``hpjob`` command."""

from hpjob.cli.app import main

if __name__ == "__main__":
    main()
