"""On a CPU: a request with a seed whose prompt is read in several steps.

vLLM takes a sample behind every step and drops those of a prompt that goes on. It then sets the request's random
numbers back by moving an offset, which torch's generators for the CPU do not have: the step fails, and with it the
engine.
"""

import functools
from typing import Any

MARK = "_batchserve_sets_seeds_back"


def install() -> None:
    """Have vLLM's runner for the CPU set them back by their state; harmless when that has been done."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if hasattr(CPUModelRunner, MARK):
        return
    setattr(CPUModelRunner, MARK, True)
    CPUModelRunner._sample = _keeping_states(CPUModelRunner._sample)
    CPUModelRunner._bookkeeping_sync = _without_offsets(CPUModelRunner._bookkeeping_sync)


def _dropped(runner: Any) -> dict[int, Any]:
    """The generators, by place, of requests whose sample of this step is dropped."""
    generators = runner.input_batch.generators
    if not generators:
        return {}
    places = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0].tolist()
    return {place: generators[place] for place in places if place in generators}


def _keeping_states(sample: Any) -> Any:
    @functools.wraps(sample)
    def keeping(self: Any, *args: Any, **kwargs: Any) -> Any:
        states = [(generator, generator.get_state()) for generator in _dropped(self).values()]
        sampled = sample(self, *args, **kwargs)
        for generator, state in states:
            generator.set_state(state)
        return sampled

    return keeping


def _without_offsets(bookkeeping: Any) -> Any:
    @functools.wraps(bookkeeping)
    def without(self: Any, *args: Any, **kwargs: Any) -> Any:
        dropped = _dropped(self)
        for place in dropped:
            del self.input_batch.generators[place]
        try:
            return bookkeeping(self, *args, **kwargs)
        finally:
            self.input_batch.generators.update(dropped)

    return without
