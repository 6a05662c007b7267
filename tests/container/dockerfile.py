"""The Dockerfile as data: its stages and their instructions."""

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "Dockerfile"


@dataclass(frozen=True)
class Instruction:
    """One instruction, its continued lines joined."""

    name: str
    text: str


@dataclass
class Stage:
    """A stage: what it starts from, and its own instructions."""

    name: str
    origin: str
    instructions: list[Instruction] = field(default_factory=list)


def default_of(argument: str) -> str:
    """The default of an ARG."""
    found = re.search(rf"^ARG {argument}=(\S+)$", DOCKERFILE.read_text(), re.MULTILINE)
    assert found, f"no ARG {argument}"
    return found[1]


def stages() -> dict[str, Stage]:
    """The stages by name."""
    found: dict[str, Stage] = {}
    for instruction in _instructions(DOCKERFILE.read_text()):
        if instruction.name == "FROM":
            origin, _, name = instruction.text.partition(" AS ")
            found[name] = Stage(name, origin)
        elif found:
            list(found.values())[-1].instructions.append(instruction)
    return found


def _instructions(text: str) -> list[Instruction]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", "", "\n".join(lines))
    words = [line.partition(" ")[::2] for line in joined.splitlines() if line.strip()]
    return [Instruction(name, " ".join(rest.split())) for name, rest in words]


def image(target: str) -> list[Instruction]:
    """All instructions that make up a target's image, the base's first."""
    stage = stages().get(target)
    return [] if stage is None else image(stage.origin) + stage.instructions


def last(target: str, name: str) -> str:
    """The instruction of this name that holds in a target's image."""
    return [instruction.text for instruction in image(target) if instruction.name == name][-1]
