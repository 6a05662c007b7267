"""What a check has found: a line of ``batchserve doctor``, and the reason of a start that fails."""

from dataclasses import asdict, dataclass
from typing import Literal

from app.errors import StartError

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One check and its outcome.

    Attributes:
        check: name of the check.
        status: ``fail`` when a start would fail, ``warn`` when it would run worse than it could.
        found: what is there.
        advice: what to do; empty for ``ok``.
    """

    check: str
    status: Status
    found: str
    advice: str = ""

    def require(self) -> None:
        """For a start: nothing, unless the check failed.

        Raises:
            StartError: with what was found and what to do.
        """
        if self.status == "fail":
            raise StartError(f"{self.found}; {self.advice}" if self.advice else self.found)

    def as_dict(self) -> dict[str, str]:
        """The finding as JSON values."""
        return asdict(self)


def not_checked(check: str, reason: str) -> Finding:
    """The finding of a check that another one has made impossible."""
    return Finding(check, "warn", f"not checked: {reason}", "mend that first")
