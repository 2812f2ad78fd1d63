"""From a cluster to a running, fast, restartable training job in one command."""

__version__ = "0.1.0"
