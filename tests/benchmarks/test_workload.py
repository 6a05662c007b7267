"""The requests of a comparison are the same each time, and ask every side for the same work."""

from app.prompts.spec import GenerateRequest
from benchmarks import workload


def test_a_workload_is_the_same_each_time_and_every_prompt_differs() -> None:
    requests = workload.mixed(200)
    assert requests == workload.mixed(200)
    assert len({request["prompt"] for request in requests}) == 200
    assert requests != workload.mixed(200, seed=1)


def test_requests_are_bodies_of_the_service_that_run_to_their_last_token() -> None:
    for request in [*workload.mixed(50), workload.alone()]:
        body = GenerateRequest.model_validate(request)
        assert body.ignore_eos
        assert body.max_tokens == request["max_tokens"]


def test_windows_hold_all_requests_in_order() -> None:
    requests = workload.mixed(70)
    windows = list(workload.windows_of(requests, 32))
    assert [len(window) for window in windows] == [32, 32, 6]
    assert [request for window in windows for request in window] == requests
    assert workload.tokens_of(requests) == sum(request["max_tokens"] for request in requests)
