"""What is mended of vLLM, in the service's process and in the engine's own."""

from app.backends import grammar_limit, seeds
from app.backends.packages import is_cpu_build


def install() -> None:
    """All of it; harmless when that has been done."""
    grammar_limit.install()
    if is_cpu_build():
        seeds.install()
