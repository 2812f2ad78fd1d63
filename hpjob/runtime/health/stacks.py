"""What the threads of a process are doing, read from another thread, and even where Python itself stands still."""

from __future__ import annotations

import faulthandler
import linecache
import re
import sys
import sysconfig
import threading
import traceback
from pathlib import Path
from types import FrameType
from typing import TextIO

_WAITING_FILES = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "hpjob/runtime/checkpoint/notes.py",
    "hpjob/runtime/health/preflight.py",
)
# Calls into C that return when other ranks, or the GPU that waits for them, are ready.
_WAITING_LINE = re.compile(
    r"\.wait\(|\.item\(\)|\.tolist\(\)|\.cpu\(\)|synchronize\(|wait_tensor\("
    r"|\b(?:all_reduce|all_gather\w*|reduce_scatter\w*|all_to_all\w*|broadcast\w*|gather_object|barrier|recv)\("
)
_DUMP_START = "Timeout ("
_DUMP_LINE = re.compile(r"(?:Timeout \(|Thread 0x|Current thread 0x|  File \"|  <|  \.\.\.|Extension modules|\s*$)")
_TAIL_BYTES = 256 * 1024
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
BLOCKED_S = 10
"""A process whose Python stands still for so long writes its stacks by itself."""


def main_thread_frame() -> FrameType | None:
    """Return the innermost Python frame of the main thread."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def deciding_frame() -> FrameType | None:
    """Return the innermost Python frame of the thread that the main thread waits for, usually of itself."""
    frame, frames = main_thread_frame(), sys._current_frames()
    caller = frame
    while caller is not None and caller.f_code.co_filename == threading.__file__:
        thread = caller.f_locals.get("self")
        if caller.f_code is threading.Thread.join.__code__ and isinstance(thread, threading.Thread):
            return frames.get(thread.ident or 0, frame)
        caller = caller.f_back
    return frame


def waits_for_others(frame: FrameType | None) -> bool:
    """Tell by its innermost frame whether a thread waits for other ranks, not for something of its own."""
    if frame is None:
        return False
    path = frame.f_code.co_filename.replace("\\", "/")
    if path.endswith(_WAITING_FILES):
        return True
    number: int | None = frame.f_lineno  # None at some instructions, whatever the stubs say
    return bool(number and _WAITING_LINE.search(linecache.getline(frame.f_code.co_filename, number)))


def innermost(frame: FrameType | None) -> str:
    """Return where a thread is, such as ``wait (threading.py:327) called by rows (tokens.py:61)``."""
    if frame is None:
        return "?"
    caller: FrameType | None = frame
    while caller is not None and _is_library(caller.f_code.co_filename):
        caller = caller.f_back
    if caller is None or caller is frame:
        return _place(frame)
    return f"{_place(frame)} called by {_place(caller)}"


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def _is_library(path: str) -> bool:
    return path.startswith(("<", _STANDARD_LIBRARY)) or "site-packages" in path


def all_stacks() -> str:
    """Return the Python stacks of all threads, that of the main thread last."""
    frames = sys._current_frames()
    main, own = threading.main_thread(), threading.get_ident()
    parts = []
    for thread in sorted(threading.enumerate(), key=lambda thread: thread is main):
        frame = frames.get(thread.ident or 0)
        if frame is not None and thread.ident != own:
            parts.append(f"thread {thread.name}:\n{''.join(traceback.format_stack(frame)).rstrip()}")
    return "\n\n".join(parts)


class BlockedDump:
    """Writes all stacks when Python stands still, because a call into C keeps the interpreter's lock.

    Someone has to say every now and then that Python still runs; a thread of C, which needs no lock, acts when
    nobody does.

    Args:
        stream: A real file, usually stderr, which is the rank's log.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr

    def still_running(self) -> None:
        """Put the dump off."""
        faulthandler.dump_traceback_later(BLOCKED_S, repeat=False, file=self._stream)

    def stop(self) -> None:
        """Write no dump any more."""
        faulthandler.cancel_dump_traceback_later()


def last_dump(log: Path) -> str:
    """Return the stacks at the end of a log that :class:`BlockedDump` wrote, or an empty text."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            text = stream.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    start = text.rfind(_DUMP_START)
    lines = text[start:].splitlines() if start >= 0 else []
    # What the rank wrote afterwards shows that it went on.
    return "\n".join(lines).rstrip() if lines and all(_DUMP_LINE.match(line) for line in lines) else ""
