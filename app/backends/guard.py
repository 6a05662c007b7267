"""Child processes of vLLM end when the service does, and do not hear the terminal's Ctrl-C.

``guard`` is an entry point of the group ``vllm.general_plugins``, which vLLM loads in every
process it starts; ``app/__main__.py`` calls it earlier still, when a child imports the program
it was started from, since vLLM's own imports take seconds.
"""

import contextlib
import multiprocessing
import os
import sys
import threading
import time

POLL_S = 0.5
ORPHANED_EXIT_CODE = 86

_started = False


def is_child() -> bool:
    """Whether this process was started by ``multiprocessing``; true before its own code runs, too."""
    return multiprocessing.current_process().name != "MainProcess"


def guard() -> None:
    """In a child: leave the service's process group, and exit once the parent is gone. Else nothing."""
    global _started
    if not is_child():
        return
    from app.backends import mending, reasons  # not at the top: the service itself has no use for them here

    reasons.report()  # each time: vLLM's configuration of the loggers, between the two calls, drops the handlers
    if "vllm" in sys.modules:
        mending.install()
    if _started:
        return
    _started = True
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)  # Ctrl-C is for the service: it drains first and needs its engine for that
    parent = multiprocessing.parent_process()
    expected = os.getppid() if parent is None or parent.pid is None else parent.pid
    threading.Thread(target=_watch, args=(expected,), daemon=True, name="parent-guard").start()


def _watch(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(POLL_S)
    os._exit(ORPHANED_EXIT_CODE)
