"""Comparisons that run both sides in one run, interleaved, and write their own tables and plots into ``docs/``.

Each module is a command: ``.venv/bin/python -m benchmarks.overhead``.
"""
