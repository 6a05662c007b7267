"""What the media of one request may cost, and where they may come from."""

from dataclasses import dataclass

MAX_PARTS = 1000
"""Images and audio files of one request; each costs a fraction of a millisecond however small it is."""


class Refused(Exception):
    """An image or audio cannot be taken; the message says why. The loader adds which one it is."""


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Limits for all media of one request together.

    Attributes:
        max_bytes: as they come, base64 decoded.
        max_image_pixels: of all images.
        max_audio_s: of all audio, in seconds.
        timeout_s: for all that is fetched, in seconds.
        domains: hosts that may be fetched from; ``.example.com`` stands for all below it.
        networks: networks that are not public, such as ``10.0.0.0/8``, in which such a host may be.
    """

    max_bytes: int
    max_image_pixels: int
    max_audio_s: float
    timeout_s: float
    domains: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()

    def allow_host(self, host: str) -> bool:
        """Whether a host, in ASCII, may be fetched from."""
        name = host.lower().rstrip(".")
        return any(_matches(name, domain.lower().strip("[]")) for domain in self.domains)


def _matches(host: str, domain: str) -> bool:
    return host.endswith(domain) and host != domain if domain.startswith(".") else host == domain


class ByteBudget:
    """Counts the bytes of a request's media.

    Args:
        limit: most bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.left = limit

    def take(self, count: int) -> None:
        """Count some.

        Raises:
            Refused: there were more than the limit.
        """
        self.check(count)
        self.left -= count

    def check(self, count: int) -> None:
        """Refuse so many more without counting them.

        Raises:
            Refused: there would be more than the limit.
        """
        if count > self.left:
            raise Refused(f"images and audio of one request may have {self.limit} bytes in all")
