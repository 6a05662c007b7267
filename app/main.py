"""``create_app``: the parts put together, started in order and stopped in reverse. No work at import."""

import asyncio
import contextlib
import gc
import logging
import os
from collections.abc import AsyncIterator
from importlib import metadata
from pathlib import Path

from fastapi import FastAPI

from app.api import docs, errors, v1
from app.api.edge import Edge
from app.api.routes import router
from app.api.service import Service
from app.backends import fake, lora, offline, python  # noqa: F401 -- backends register themselves
from app.backends.args import BackendArgs, parse_args
from app.backends.registry import Backend
from app.backends.thread import EngineThread
from app.batching.batcher import Batcher
from app.batching.window import WindowLimits
from app.errors import EngineDead, StartError
from app.lifecycle import Lifecycle, State
from app.log import complain
from app.metrics import Metrics
from app.models import embedded
from app.prompts.templates import load_request_format
from app.settings import EMBEDDED, Settings, load_settings

logger = logging.getLogger("batchserve")

DEAD_ANSWERS_S = 5.0
"""How long a service with a dead engine answers 503 before the process ends."""
FLUSH_S = 1.5
"""How long answers may still leave once ``drain_timeout_s`` has passed."""
CLOSE_TIMEOUT_S = 2.5
"""With ``drain_timeout_s`` of 25 a stop stays within Kubernetes' grace of 30 seconds."""

VLLM_SETTINGS = (
    "vllm_config",
    "engine_process",
    "tool_call_parser",
    "reasoning_parser",
    "lora_modules",
    "allowed_media_domains",
    "allowed_media_networks",
    "max_media_bytes",
    "max_image_pixels",
    "max_audio_s",
    "media_timeout_s",
)
"""What the backends on vLLM have beside what every backend has."""

DESCRIPTION = """Offline batch inference with vLLM over HTTP. Requests are gathered into windows, each window goes
through one `LLM.generate()`, and every answer carries its own timings, taken from vLLM's `RequestStateStats`."""


def create_app(settings: Settings | None = None, backend: Backend | None = None) -> FastAPI:
    """The application.

    Args:
        settings: None reads the environment.
        backend: None makes the one that the settings name.

    Raises:
        StartError: a setting is wrong.
    """
    settings = settings or load_settings()
    service = _assemble(settings, backend or Backend.create(backend_args(settings)))
    app = FastAPI(
        title="Batchserve",
        version=metadata.version("batchserve"),
        description=DESCRIPTION,
        lifespan=_lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        root_path=settings.root_path,
    )
    app.state.service = service
    app.include_router(router)
    app.include_router(v1.router)
    docs.install(app)
    errors.install(app)
    app.add_middleware(
        Edge,
        api_keys=settings.api_key,
        root_path=settings.root_path,
        lifecycle=service.lifecycle,
        count_error=lambda code: service.metrics.errors.labels(code).inc(),
    )
    return app


def backend_args(settings: Settings) -> BackendArgs:
    """What the settings say to the backend; ``request_format`` only when somebody has set it.

    Raises:
        StartError: an unknown backend, a wrong value for it, a model or a template that cannot be there.
    """
    _check_model(settings.model)
    of_vllm = {name: getattr(settings, name) for name in VLLM_SETTINGS}
    own = {"vllm_offline": of_vllm, "vllm_python": of_vllm, "fake": settings.fake_config}.get(settings.backend, {})
    asked = {"request_format": settings.request_format} if "request_format" in settings.model_fields_set else {}
    shared = {
        "kind": settings.backend,
        "model": os.path.expanduser(settings.model) if settings.model.startswith("~") else settings.model,
        "served_model_name": settings.model_name,
        "batch_size": settings.batch_size,
        "scheduling": settings.scheduling,
        "default_max_tokens": settings.default_max_tokens,
        "image_placeholder": settings.image_placeholder,
        "audio_placeholder": settings.audio_placeholder,
        **asked,
    }
    lora.parse_modules(settings.lora_modules, settings.model_name)
    load_request_format(settings.request_format)  # what is wrong with it shows before anything slow is begun
    if both := shared.keys() & own.keys():
        raise StartError(f"fake_config: {', '.join(sorted(both))} belongs to the service's own settings")
    return parse_args({**shared, **own})


def _check_model(model: str) -> None:
    """Refuse at once what no library could find."""
    if model.startswith("embedded:") and model != EMBEDDED:
        raise StartError(f"model: {model!r} is not there; the embedded model is {EMBEDDED}")
    if model.startswith(("/", "./", "../", "~")) and not _is_folder(model):
        raise StartError(f"model: there is no folder {model}")


def _is_folder(model: str) -> bool:
    """Whether it is there; one that may not be looked at is for the backend to tell of."""
    try:
        return Path(model).expanduser().is_dir()
    except PermissionError:
        return True
    except (OSError, RuntimeError, ValueError):
        return False


def _assemble(settings: Settings, backend: Backend) -> Service:
    lifecycle, metrics = Lifecycle(), Metrics()
    batcher = Batcher(
        backend,
        WindowLimits(settings.batch_size, settings.max_wait_ms / 1000),
        max_queue_requests=settings.max_queue_requests,
        max_queue_tokens=settings.max_queue_tokens,
        max_queue_media_bytes=settings.max_queue_media_bytes,
        lifecycle=lifecycle,
        metrics=metrics,
    )
    metrics.watch(
        queue_requests=lambda: batcher.queue_requests,
        queue_tokens=lambda: batcher.queue_tokens,
        queue_media_bytes=lambda: batcher.queue_media_bytes,
        running_requests=lambda: batcher.running_requests,
        ready=lambda: lifecycle.state is State.READY,
    )
    return Service(settings, backend, batcher, lifecycle, metrics)


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Listen at once, load beside it; at the end drain, unless that has been done, and close."""
    service: Service = app.state.service
    batcher = asyncio.create_task(service.batcher.run(), name="batcher")
    watch = asyncio.create_task(_watch_batcher(service, batcher), name="watch-batcher")
    tasks = [asyncio.create_task(_start(service), name="start"), watch, batcher]
    try:
        yield
    finally:
        await stop(service)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await service.backend.close(CLOSE_TIMEOUT_S)
        service.parser.close()


async def _start(service: Service) -> None:
    """Prepare the model, open the backend, then watch over it."""
    try:
        await _prepare_model(service)
        await service.backend.open()
        await service.backend.validate()
    except StartError as error:
        complain(str(error))
        service.lifecycle.fail(str(error))
        return
    except Exception as error:
        logger.exception("the start failed")
        complain(f"{type(error).__name__}: {error}")
        service.lifecycle.fail(f"{type(error).__name__}: {error}")
        return
    gc.collect()
    gc.freeze()  # what is loaded by now stays: the collector need not look at it again
    service.lifecycle.ready()
    assert service.backend.death is not None
    await _die(service, await service.backend.death)


async def _prepare_model(service: Service) -> None:
    """The embedded model becomes a folder; anything else is vLLM's to find."""
    if service.settings.model != EMBEDDED or service.settings.backend == "fake":
        return
    # A thread of this kind does not keep the process, should a stop be asked for meanwhile.
    thread = EngineThread("model", on_death=logger.error)
    thread.start()
    try:
        folder = await thread.call(embedded.prepare, logger.info)
    except embedded.EmbeddedModelError as error:
        raise StartError(str(error)) from error
    finally:
        thread.end()
    service.backend.args = service.backend.args.model_copy(update={"model": str(folder)})


async def _watch_batcher(service: Service, batcher: "asyncio.Task[None]") -> None:
    """The batcher ends only when it is cancelled; anything else is the end of the service."""
    await asyncio.wait((batcher,))
    if not batcher.cancelled() and (error := batcher.exception()) is not None:
        logger.error("the batcher has ended", exc_info=error)
        await _die(service, f"the batcher has ended: {type(error).__name__}: {error}")


async def _die(service: Service, reason: str) -> None:
    """Fail who waits, answer 503 for a while, then end the process."""
    service.lifecycle.die(reason)
    service.batcher.abandon(EngineDead(reason))
    await asyncio.sleep(DEAD_ANSWERS_S)
    service.lifecycle.is_over.set()


async def stop(service: Service) -> None:
    """Refuse new work and finish what was accepted, within ``drain_timeout_s``. May be called again."""
    lifecycle = service.lifecycle
    if lifecycle.has_drained:
        return
    lifecycle.drain()
    timeout_s = service.settings.drain_timeout_s if lifecycle.state is State.DRAINING else 0
    deadline = asyncio.get_running_loop().time() + timeout_s
    if not await service.batcher.drain(timeout_s):
        lifecycle.cut_short()
    lifecycle.has_drained = True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(max(deadline, asyncio.get_running_loop().time() + FLUSH_S)):
            await lifecycle.all_answered()
    if lifecycle.answers_owed:
        logger.warning("%d answers were cut on their way", lifecycle.answers_owed)
        lifecycle.cut_short()
