"""`/docs` in a real browser that reaches nothing but this service."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.service.support import serving

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
OFFLINE = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--virtual-time-budget=10000",
]

pytestmark = pytest.mark.skipif(not Path(CHROMIUM).exists(), reason="chromium is not installed")


def rendered(url: str, folder: Path) -> str:
    """The page as a browser without the internet shows it."""
    done = subprocess.run(
        [CHROMIUM, *OFFLINE, f"--user-data-dir={folder}", "--dump-dom", url],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


@pytest.mark.parametrize("root_path", ["", "/llm"])
def test_the_page_shows_the_operations_without_the_internet(folder: Path, tmp_path: Path, root_path: str) -> None:
    with serving(folder, {}, root_path=root_path) as process:
        page = rendered(f"{process.url}{root_path}/docs", tmp_path / "profile")
        assert "swagger-ui" in page
        for path in ("/generate", "/batch", "/readyz"):
            assert f'data-path="{path}"' in page
        assert "Run one request" in page
        assert "Failed to load" not in page
        if root_path:
            assert process.get("/docs").status_code == 200
