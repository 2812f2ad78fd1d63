"""Training from a script of one's own: ``HybridParallelPlugin`` and the model that it makes. See ``docs/api.md``.

Importing this needs no torch, so wrong settings are refused before anything heavy starts.
"""

from hpjob.runtime.api.plugin import HybridParallelPlugin

__all__ = ["HybridParallelPlugin"]
