"""The program ``batchserve``. A child process that vLLM starts imports it, too, and is guarded from then on."""

import sys

from app.backends.guard import guard
from app.cli import main

guard()

if __name__ == "__main__":
    sys.exit(main())
