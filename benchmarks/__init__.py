"""Comparisons that run both sides in one run, interleaved, and write their own tables and plots into ``docs/``.

Each module is a command: ``.venv/bin/python -m benchmarks.overhead``.
"""

from importlib.util import find_spec

if find_spec("matplotlib") is None:
    raise SystemExit("benchmarks: packages are missing; run scripts/setup --dev")
