"""Resolution without an engine: vLLM's configuration and a tokenizer, no weights."""

import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from app.backends.args import VLLMOfflineArgs
from app.backends.base import VLLMBackendBase
from app.errors import ServiceError
from app.prompts.spec import GenerateRequest
from app.request import Outcome, Resolved, Window


class ResolvingBackend(VLLMBackendBase):
    """The base class with nothing behind it."""

    @property
    def _engine(self) -> Any:
        raise NotImplementedError

    def _build(self, values: dict[str, Any]) -> None:
        raise NotImplementedError

    def _open(self) -> None:
        from transformers import AutoTokenizer
        from vllm.engine.arg_utils import EngineArgs
        from vllm.tokenizers.hf import get_cached_tokenizer

        engine = EngineArgs(model=self.args.model, dtype="float32", enforce_eager=True, max_model_len=1024)
        config = engine.create_engine_config()
        self._prepare_resolution(
            config.model_config, get_cached_tokenizer(AutoTokenizer.from_pretrained(self.args.model))
        )
        self._use_vllm_config(config)

    async def _generated(self, prompt: dict[str, Any], params: Any, adapter: Any) -> Any:
        raise NotImplementedError

    async def _add_adapter(self, adapter: Any) -> None:
        raise NotImplementedError

    async def _remove_adapter(self, number: int) -> None:
        raise NotImplementedError

    def _run(self, window: Window) -> list[Outcome]:
        raise NotImplementedError

    def _close(self) -> None:
        pass

    def info(self) -> dict[str, Any]:
        return {}

    async def resolved(self, **body: Any) -> Resolved:
        """What a body becomes; it must be a good one."""
        (item,) = await self.resolve([GenerateRequest.model_validate(body)])
        assert isinstance(item, Resolved), item
        return item

    async def ids(self, **body: Any) -> list[int]:
        """The prompt that a body becomes."""
        return (await self.resolved(**body)).prompt_token_ids

    async def refusal(self, **body: Any) -> ServiceError:
        """The error that a body gets."""
        (item,) = await self.resolve([GenerateRequest.model_validate(body)])
        assert isinstance(item, ServiceError), item
        assert item.status == 400
        return item


@asynccontextmanager
async def resolving(model: Path, **args: Any) -> AsyncIterator[ResolvingBackend]:
    """An open backend for a model folder.

    Raises:
        StartError: it cannot be opened.
    """
    values = {"kind": "vllm_offline", "model": str(model), "served_model_name": "served", **args}
    backend = ResolvingBackend(VLLMOfflineArgs.model_validate(values))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of vLLM and torch, on being imported
            await backend.open()
        yield backend
    finally:
        await backend.close()
