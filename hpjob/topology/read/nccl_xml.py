"""NCCL and RCCL topology XML: what ``NCCL_TOPO_DUMP_FILE`` writes and ``NCCL_TOPO_FILE`` reads.

A file that a cloud hands to NCCL is partial: PCI devices only, GPUs told by their class, no links.
"""

from __future__ import annotations

import re
from itertools import combinations

from hpjob.topology.model import Gpu, Island, Link, Nic, Node, Topology
from hpjob.topology.read.graph import all_linked, largest_cliques
from hpjob.topology.read.nccl_links import NcclLinks, read_links
from hpjob.topology.read.reading import LOCAL_NODE, Facts, Reader, Reading
from hpjob.topology.read.text import Source
from hpjob.topology.read.xml_elements import Element, Wholeness, parse_elements

TITLE = "NCCL topology XML"
_GPU_CLASSES = ("0x0302", "0x0300", "0x0380")
_WHOLENESS_NOTES = {
    "cut": "the end of the XML is missing",
    "damaged": "the XML is damaged; devices were counted, links cannot be told",
}
_MARKS = (("<cpu ", "numaid="), ("<pci ", "busid="), ("<gpu ", "dev="))
_ELEMENTS = re.compile(r"<(?:system|cpu|pci|gpu|nic|net)[\s>]")


def confidence(source: Source) -> float:
    """High when system, cpu or pci elements are there."""
    if "<" not in source.text:
        return 0.0
    if re.search(r"<system[\s>]", source.text):
        return 0.95
    found = any(tag in source.text and name in source.text for tag, name in _MARKS)
    return 0.9 if found else (0.5 if _ELEMENTS.search(source.text) else 0.0)


def read(source: Source) -> Reading:
    """Read the whole file, or what a damaged one still shows."""
    root, wholeness = parse_elements(source.text)
    elements = [element for element in root.walk() if element.tag]
    system = next((element for element in elements if element.tag == "system"), None)
    pci = [element for element in elements if element.tag == "pci"]
    gpu_elements = [element for element in elements if element.tag == "gpu"]
    partial = not gpu_elements
    classes = any(element.get("class") for element in pci)
    gpus = _gpus(pci, partial) if classes or not partial else None
    fragment = system is None
    if _has_doubles(gpus or []) or _has_lost_number(gpus or [], partial):
        wholeness = "damaged"
    links = None if partial else read_links(gpus or [], pci)
    index = {id(element): number for number, element in _indexed(gpus or [], partial)}
    facts: Facts = {
        "version": system.get("version") or None if system else None,
        "fragment": fragment,
        "numa_nodes": [_number(cpu.get("numaid")) for cpu in elements if cpu.tag == "cpu"] or None,
        "pci_devices": len(pci),
        "gpus": None if gpus is None else len(gpus),
        "ranks": len(gpu_elements),
        "gpu_pci": None if gpus is None else [element.get("busid") for element in gpus],
        "rank_of_dev": _ranks(gpus or [], partial),
        "numa_of_gpu": _numa_of_gpus(gpus, elements),
    }
    facts |= _net_facts(elements, pci, classes)
    facts["same_switch_gpus_and_nics"] = None if gpus is None else _same_switch(pci, gpus, index, partial)
    facts |= _link_facts(links, fragment, wholeness)
    notes = _notes(links, wholeness, fragment)
    inside = _islands(facts, links, wholeness)
    topology = _topology(facts, gpus, index, inside, notes)
    return Reading(kind="nccl_xml", facts=facts, topology=topology, notes=tuple(notes))


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else None


def _pci_key(busid: str) -> tuple[int, ...]:
    parts = re.split(r"[:.]", busid)
    return tuple(int(part, 16) if re.fullmatch(r"[0-9A-Fa-f]{1,8}", part) else -1 for part in parts)


def _own_gpus(element: Element) -> list[Element]:
    return [child for child in element.children if child.tag == "gpu"]


def _gpus(pci: list[Element], partial: bool) -> list[Element]:
    if partial:
        return sorted(
            (e for e in pci if e.get("class").startswith(_GPU_CLASSES)), key=lambda e: _pci_key(e.get("busid"))
        )
    found = [element for element in pci if _own_gpus(element)]
    return sorted(
        found, key=lambda e: min((n for g in _own_gpus(e) if (n := _number(g.get("dev"))) is not None), default=1 << 30)
    )


def _indexed(gpus: list[Element], partial: bool) -> list[tuple[int, Element]]:
    """GPU numbers: ``dev`` where each is given once, else the position."""
    devs = [] if partial else [_number(_own_gpus(element)[0].get("dev")) for element in gpus]
    if devs and None not in devs and len(set(devs)) == len(devs):
        return [(dev, element) for dev, element in zip(devs, gpus, strict=True) if dev is not None]
    return list(enumerate(gpus))


def _ranks(gpus: list[Element], partial: bool) -> list[int | None] | None:
    if partial or any(len(_own_gpus(element)) > 1 for element in gpus):
        return None
    devs = [_own_gpus(element)[0].get("dev") for element in gpus]
    if len(set(devs)) != len(devs) and not _several_hosts(gpus):
        return None
    return [_number(_own_gpus(element)[0].get("rank")) for element in gpus]


def _has_doubles(gpus: list[Element]) -> bool:
    """Whether one device stands twice: lines were doubled, and what nests in what cannot be told."""
    hosts = [next((at.get("host_hash") for at in e.ancestors() if at.tag == "cpu"), "") for e in gpus]
    places = [(host, e.get("busid")) for host, e in zip(hosts, gpus, strict=True) if e.get("busid")]
    return len(set(places)) != len(places)


def _has_lost_number(gpus: list[Element], partial: bool) -> bool:
    """Whether a GPU's number cannot be read while others can: none can be given to it."""
    return not partial and any(_number(gpu.get("dev")) is None for element in gpus for gpu in _own_gpus(element))


def _several_hosts(gpus: list[Element]) -> bool:
    return len({at.get("host_hash") for element in gpus for at in element.ancestors() if at.tag == "cpu"}) > 1


def _numa_of_gpus(gpus: list[Element] | None, elements: list[Element]) -> list[int | None] | None:
    if gpus is None or not any(element.tag == "cpu" for element in elements):
        return None
    return [
        next((_number(at.get("numaid")) for at in element.ancestors() if at.tag == "cpu"), None) for element in gpus
    ]


def _is_nic(element: Element) -> bool:
    return element.get("class").startswith("0x02")


def _net_facts(elements: list[Element], pci: list[Element], classes: bool) -> Facts:
    nets = [element.get("name") for element in elements if element.tag == "net"]
    nics = sorted((element.get("busid") for element in pci if _is_nic(element)), key=_pci_key)
    return {
        "nets": nets,
        "virtual_nets": [name for name in nets if name.startswith("veth")],
        "nic_pci": nics if classes else None,
    }


def _nets_below(element: Element) -> list[str]:
    return [child.get("name") for child in element.walk() if child.tag == "net"]


def _same_switch(
    pci: list[Element], gpus: list[Element], index: dict[int, int], partial: bool
) -> list[list[list[int] | list[str]]]:
    """For each NIC the lowest bridge that also holds a GPU; NICs of one bridge together."""
    groups: dict[int, tuple[Element, list[str]]] = {}
    gpus_below: dict[int, list[int]] = {}
    for element in gpus:
        for at in element.ancestors():
            if at.tag == "pci" and at.get("class").startswith("0x0604"):
                gpus_below.setdefault(id(at), []).append(index[id(element)])
    for element in pci:
        if not (_is_nic(element) or (not partial and any(child.tag == "nic" for child in element.children))):
            continue
        names = [element.get("busid")] if partial else _nets_below(element)
        bridge = next((at for at in element.ancestors() if id(at) in gpus_below), None)
        if bridge is not None and names:
            groups.setdefault(id(bridge), (bridge, []))[1].extend(names)
    found: list[tuple[list[int], list[str]]] = [(sorted(gpus_below[key]), names) for key, (_, names) in groups.items()]
    return [[below, names] for below, names in sorted(found, key=lambda group: group[0])]


def _link_facts(links: NcclLinks | None, fragment: bool, wholeness: Wholeness) -> Facts:
    if links is None or wholeness == "damaged":
        names = ("islands", "linked_pairs", "all_to_all", "pair_links", "links_per_gpu", "nvswitches", "missing_peers")
        return dict.fromkeys(names)
    unknown = fragment or bool(links.missing)
    groups = None if unknown else links.islands
    return {
        "islands": groups,
        "linked_pairs": None if unknown else len(links.linked),
        "all_to_all": (links.complete or (False if wholeness == "whole" else None)) if groups else None,
        "pair_links": {f"{a}-{b}": count for (a, b), count in sorted(links.direct.items())},
        "links_per_gpu": links.per_gpu,
        "nvswitches": links.nvswitches,
        "missing_peers": links.missing,
    }


def _notes(links: NcclLinks | None, wholeness: Wholeness, fragment: bool) -> list[str]:
    notes = [_WHOLENESS_NOTES[wholeness]] if wholeness in _WHOLENESS_NOTES else []
    if fragment:
        notes.append("no system element: a part of a file")
    if links is not None and links.to_itself:
        notes.append("GPUs are linked to themselves: a file written to raise channel counts, not a finding")
    if links is not None and links.one_sided:
        pairs = ", ".join(f"{a}-{b}" for a, b in sorted(links.one_sided)[:8])
        notes.append(f"only the first of these GPUs shows their link, which is not believed: {pairs}")
    if links is not None and links.missing:
        notes.append(f"linked to devices that are not in the file: {', '.join(links.missing)}")
    return notes


Inside = tuple[tuple[Island, ...] | None, tuple[Link, ...] | None]
"""Islands and links of a node."""


def _islands(facts: Facts, links: NcclLinks | None, wholeness: Wholeness) -> Inside:
    """Only a whole file shows that two GPUs are not linked; a link that one end alone shows is not believed."""
    if links is None or facts["islands"] is None:
        return None, None
    doubted = {(min(pair), max(pair)) for pair in links.one_sided}
    sure = links.linked - doubted
    missing = False if wholeness == "whole" else None
    islands = []
    for group in facts["islands"]:
        whole = all_linked(group, sure) or (None if doubted.intersection(combinations(group, 2)) else missing)
        cliques = largest_cliques(group, sure, whole)
        islands.append(Island(kind=links.kind, gpus=tuple(group), all_to_all=whole, cliques=cliques))
    found = tuple(
        Link(a=a, b=b, linked=None if (a, b) in doubted else (a, b) in sure or missing, count=links.direct.get((a, b)))
        for a, b in combinations(links.gpus, 2)
    )
    return tuple(islands), found


def _topology(
    facts: Facts, gpus: list[Element] | None, index: dict[int, int], inside: Inside, notes: list[str]
) -> Topology | None:
    if gpus is None:
        return None
    numa: list[int | None] = facts["numa_of_gpu"] or [None] * len(gpus)
    found = tuple(
        Gpu(index=index[id(element)], pci=element.get("busid") or None, numa=number if number != -1 else None)
        for element, number in zip(gpus, numa, strict=True)
    )
    near: dict[str, list[int]] = {name: group for group, names in facts["same_switch_gpus_and_nics"] for name in names}
    names = facts["nets"] or facts["nic_pci"] or []
    nics = tuple(
        Nic(name=name, near_gpus=tuple(near[name]) if name in near else None)
        for name in dict.fromkeys(names)
        if not name.startswith("veth")
    )
    islands, links = inside
    node = Node(name=LOCAL_NODE, gpus=found, islands=islands, links=links, nics=nics)
    sources = {f"nodes.{LOCAL_NODE}.{name}": TITLE for name in ("gpus", "islands", "links", "nics")}
    return Topology(nodes=(node,), source=TITLE, notes=tuple(notes), sources=sources)


READER = Reader(kind="nccl_xml", title=TITLE, confidence=confidence, read=read)
