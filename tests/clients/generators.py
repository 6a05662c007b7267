"""Runs the generators of clients as a user would."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from app.settings import child_environment, user_cache
from tests.clients.support import DOCUMENT

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
TYPESCRIPT = HERE / "typescript"
JAVA = HERE / "java"
SCHEMA_MAPPINGS = (
    "ChatMessage_content=Object,BatchDefaults_stop=Object,CompletionRequest_prompt=Object,StructuredOutputs_json=Object"
)
"""The Java generator writes classes that do not compile for a choice between a text and a list or an object."""


def run(*command: str | Path, cwd: Path | None = None, code: int = 0, timeout_s: float = 300) -> str:
    """Run a command that ends with ``code``; what it printed."""
    environment = child_environment({"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"})
    done = subprocess.run(
        command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == code, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def python_client(target: Path, document: Path = DOCUMENT) -> Path:
    """A package made by openapi-python-client; a warning of the generator is a failure."""
    command = (BIN / "openapi-python-client", "generate", "--path", document, "--output-path", target, "--meta", "none")
    run(*command, "--fail-on-warning")
    return target


def java_jar() -> Path:
    """The generator's own jar, which also holds the Jackson that its clients need."""
    import openapi_generator_cli

    return Path(str(openapi_generator_cli.__file__)).with_name("openapi-generator.jar")


def java_classes(work: Path, *programs: Path) -> str:
    """Generate the Java client, compile it together with ours and ``programs``; the class path to run them with."""
    generator, sources, classes = BIN / "openapi-generator-cli", work / "generated", work / "classes"
    run(
        *(generator, "generate", "-g", "java", "--library", "native", "-i", DOCUMENT, "-o", sources),
        *("--additional-properties", "openApiNullable=false", "--schema-mappings", SCHEMA_MAPPINGS),
    )
    files = [*(sources / "src" / "main" / "java").rglob("*.java"), *JAVA.rglob("*.java"), *programs]
    run("javac", "-proc:none", "-cp", java_jar(), "-d", classes, *files)
    return f"{classes}{os.pathsep}{java_jar()}"


def node_modules() -> Path:
    """The packages of ``typescript/package-lock.json``, installed once into the user's cache."""
    digest = hashlib.sha256((TYPESCRIPT / "package-lock.json").read_bytes()).hexdigest()[:16]
    target = user_cache() / "batchserve" / "test-clients" / f"typescript-{digest}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _npm_ci(target)
    return target / "node_modules"


def _npm_ci(target: Path) -> None:
    """Renamed into place, so that what was cut short is made anew."""
    work = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    try:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(TYPESCRIPT / name, work)
        run("npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", cwd=work)
        work.rename(target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def typescript_project(work: Path) -> Path:
    """A folder with the generated client and types, our programs, and the packages in reach."""
    (work / "node_modules").symlink_to(node_modules())
    for file in (*TYPESCRIPT.glob("*.ts"), TYPESCRIPT / "tsconfig.json"):
        shutil.copy(file, work)
    tools = work / "node_modules" / ".bin"
    run(tools / "openapi-ts", "-i", DOCUMENT, "-o", "client", cwd=work)
    run(tools / "openapi-typescript", DOCUMENT, "-o", "types.ts", cwd=work)
    return work
