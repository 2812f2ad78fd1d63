"""What every reader returns, and how readers are described to the recogniser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hpjob.topology.model import Topology
from hpjob.topology.read.text import Source

Facts = dict[str, Any]

LOCAL_NODE = "this-node"
"""Name of the node in a text that does not say which node printed it."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The plain findings of one text and what they say about the topology."""

    kind: str
    facts: Facts
    topology: Topology | None = None
    """None = this source alone says nothing about nodes or switches."""
    notes: tuple[str, ...] = field(default=())
    """What looks wrong or was left unread."""


@dataclass(frozen=True, kw_only=True)
class Reader:
    """One source: how to tell it by content and how to read it."""

    kind: str
    title: str
    """What a person calls the source."""
    confidence: Callable[[Source], float]
    """0 = certainly something else, 1 = certainly this."""
    read: Callable[[Source], Reading]
