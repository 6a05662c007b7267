"""Code blocks of the deployment guide."""

import re

from tests.container.dockerfile import ROOT

GUIDE = ROOT / "docs/deployment.md"


def blocks(language: str) -> list[str]:
    """The text of each fence of this kind, in the guide's order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
