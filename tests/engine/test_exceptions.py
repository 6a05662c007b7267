"""vLLM's exceptions: should it gain one, somebody decides what callers see of it."""

import inspect

import pytest

pytestmark = pytest.mark.engine

AS_A_400_OF_THE_REQUEST = {
    "VLLMClientError",
    "VLLMValidationError",
    "VLLMNotFoundError",
    "LoRAAdapterNotFoundError",
    "VLLMUnprocessableEntityError",
}
AS_A_FAILED_GENERATION = {
    "VLLMError",
    "VLLMServerError",
    "GenerationError",
    "RetryableRequestError",
    "GracefulHTTPError",
    "QueueOverflowError",
    "MaxQueuedTokensError",
    "ProfilerAlreadyActiveError",
}


def test_each_of_vllms_exceptions_is_one_that_we_know() -> None:
    from vllm import exceptions

    known = {name for name, _ in inspect.getmembers(exceptions, inspect.isclass) if _.__module__ == exceptions.__name__}
    assert known == AS_A_400_OF_THE_REQUEST | AS_A_FAILED_GENERATION


def test_those_that_blame_the_request_are_one_family() -> None:
    from vllm import exceptions

    for name in AS_A_400_OF_THE_REQUEST:
        assert issubclass(getattr(exceptions, name), exceptions.VLLMClientError)
    for name in AS_A_FAILED_GENERATION:
        assert not issubclass(getattr(exceptions, name), exceptions.VLLMClientError)
