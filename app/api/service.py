"""The parts of a running service, made by ``create_app`` and handed to the routes."""

import time
from dataclasses import dataclass, field

from app.api.jsonbody import Parser
from app.backends.registry import Backend
from app.batching.batcher import Batcher
from app.lifecycle import Lifecycle
from app.metrics import Metrics
from app.settings import Settings


@dataclass(slots=True)
class Service:
    """What a route needs; no logic of its own.

    Attributes:
        parser: decodes bodies.
        created: when the service was put together, in Unix seconds.
    """

    settings: Settings
    backend: Backend
    batcher: Batcher
    lifecycle: Lifecycle
    metrics: Metrics
    parser: Parser = field(default_factory=Parser)
    created: int = field(default_factory=lambda: int(time.time()))
