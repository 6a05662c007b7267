"""The metrics under the names that dashboards rely on; gauges are read when they are asked for."""

from prometheus_client.parser import text_string_to_metric_families

from app.metrics import Metrics

DOCUMENTED = {
    "batchserve_queue_requests",
    "batchserve_queue_tokens",
    "batchserve_window_size",
    "batchserve_window_fill_ratio",
    "batchserve_window_releases_total",
    "batchserve_window_wait_seconds",
    "batchserve_ttft_seconds",
    "batchserve_e2e_seconds",
    "batchserve_tokens_total",
    "batchserve_errors_total",
    "batchserve_client_disconnected_total",
}


def samples(metrics: Metrics) -> dict[str, float]:
    """By name with labels."""
    text = metrics.exposition().decode()
    return {
        sample.name + "".join(f"{{{key}={value}}}" for key, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_documented_names_are_exposed() -> None:
    text = Metrics().exposition().decode()
    helped = {line.split()[2] for line in text.splitlines() if line.startswith("# HELP batchserve_")}

    assert helped >= DOCUMENTED


def test_series_are_there_before_anything_has_happened() -> None:
    """So that a rate over them is zero, not unknown."""
    shown = samples(Metrics())

    assert {
        shown[f"batchserve_window_releases_total{{reason={reason}}}"] for reason in ("full", "max_wait", "drain")
    } == {0}
    assert {shown[f"batchserve_tokens_total{{kind={kind}}}"] for kind in ("prompt", "completion", "cached")} == {0}
    assert shown["batchserve_client_disconnected_total"] == 0


def test_gauges_are_read_at_the_moment_of_the_scrape() -> None:
    queue = {"requests": 0, "tokens": 0, "ready": 0}
    metrics = Metrics()
    metrics.watch(
        queue_requests=lambda: queue["requests"],
        queue_tokens=lambda: queue["tokens"],
        queue_media_bytes=lambda: 0,
        running_requests=lambda: 0,
        ready=lambda: queue["ready"],
    )
    assert samples(metrics)["batchserve_queue_requests"] == 0
    queue.update(requests=3, tokens=70, ready=1)
    shown = samples(metrics)

    assert shown["batchserve_queue_requests"] == 3
    assert shown["batchserve_queue_tokens"] == 70
    assert shown["batchserve_ready"] == 1


def test_errors_are_counted_by_code() -> None:
    metrics = Metrics()
    metrics.errors.labels("queue_full").inc()

    assert samples(metrics)["batchserve_errors_total{code=queue_full}"] == 1


def test_two_services_in_one_process_count_apart() -> None:
    first, second = Metrics(), Metrics()
    first.disconnected.inc()

    assert samples(second)["batchserve_client_disconnected_total"] == 0


def test_the_process_and_other_libraries_are_shown_beside_them() -> None:
    assert "python_info" in {name.split("{")[0] for name in samples(Metrics())}
