"""The address at which rank 0 is reached by all others."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping

from hpjob.core.errors import EnvironmentProblemError


def master_address(first_host: str, addresses: Mapping[str, str], own_node: str | None) -> str:
    """Return an address of ``first_host`` that is usable from every node.

    A site's hosts file often maps a node's own name to 127.0.1.1, so a loopback address counts only when all nodes
    have it (several virtual nodes on one machine).

    Args:
        first_host: Host of rank 0.
        addresses: Node name -> what Slurm has as its address, an IP address or a name.
        own_node: Slurm's name of the node on which this runs.

    Raises:
        EnvironmentProblemError: Only a loopback address is known, and the nodes do not share it.
    """
    address = addresses.get(first_host, first_host)
    shared = len(addresses) > 0 and set(addresses.values()) == {address}
    resolved = _resolve(address)
    if resolved is None:
        return address
    if not resolved.is_loopback or shared:
        return str(resolved)
    if own_node == first_host and (own := _own_address()) is not None:
        return own
    if address != str(resolved):
        # A name that only this node takes for its own loopback; the others resolve it as they do for ssh.
        return address
    raise EnvironmentProblemError(
        f"the address of node {first_host} is {address}, which other nodes cannot reach",
        hint="ask your administrator to set NodeAddr of the node to an address on the cluster's network",
    )


def _resolve(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = socket.getaddrinfo(address, None, proto=socket.IPPROTO_TCP)
        return ipaddress.ip_address(found[0][4][0])
    except (OSError, ValueError):
        return None


def _own_address() -> str | None:
    import psutil  # noqa: PLC0415

    for interface in psutil.net_if_addrs().values():
        for entry in interface:
            if entry.family == socket.AF_INET and not ipaddress.ip_address(entry.address).is_loopback:
                return str(entry.address)
    return None
