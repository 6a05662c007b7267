"""The manifests that the deployment guide shows: what they say fits the service and its image."""

import re
from typing import Any

import yaml

from app.settings import PREFIX, Settings
from tests.container.dockerfile import last
from tests.container.guide import GUIDE, blocks

CLOSE_S = 5
"""What the guide gives the service for its close, after the drain."""


def documents() -> dict[str, Any]:
    """The manifests by kind; Prometheus's configuration has none."""
    found = [document for block in blocks("yaml") for document in yaml.safe_load_all(block)]
    return {document.get("kind", "Prometheus"): document for document in found}


def pod() -> Any:
    return documents()["Deployment"]["spec"]["template"]["spec"]


def container() -> Any:
    (only,) = pod()["containers"]
    return only


def test_the_service_finds_the_pods() -> None:
    deployment, service = documents()["Deployment"], documents()["Service"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels == service["spec"]["selector"]
    (port,) = container()["ports"]
    assert port["containerPort"] == Settings.model_fields["port"].default == int(last("cpu", "EXPOSE"))
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]


def test_its_settings_are_settings() -> None:
    names = {variable["name"] for variable in container()["env"]}
    assert names <= {PREFIX + name.upper() for name in Settings.model_fields}
    words = container()["args"]
    assert words[0] == "serve"
    assert {word for word in words if word.startswith("--")} <= {
        "--" + name.replace("_", "-") for name in Settings.model_fields
    }


def test_the_variables_of_kubernetes_do_not_set_ours() -> None:
    assert pod()["enableServiceLinks"] is False


def test_the_grace_holds_the_drain() -> None:
    values = {variable["name"]: variable.get("value") for variable in container()["env"]}
    drain_s = float(values[f"{PREFIX}DRAIN_TIMEOUT_S"])
    assert drain_s == Settings.model_fields["drain_timeout_s"].default
    pause_s = float(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod()["terminationGracePeriodSeconds"] >= pause_s + drain_s + CLOSE_S


def test_the_stop_timeout_of_the_commands_holds_the_drain() -> None:
    given = re.findall(r"(?:--stop-timeout |stop --time |stop_grace_period: )(\d+)", GUIDE.read_text())
    assert len(given) >= 5
    assert {int(seconds) for seconds in given} == {int(Settings.model_fields["drain_timeout_s"].default) + CLOSE_S}


def test_probes_ask_what_they_mean() -> None:
    probes = {name: container()[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    assert probes["startup"]["httpGet"]["path"] == probes["readiness"]["httpGet"]["path"] == "/readyz"
    assert probes["liveness"]["httpGet"]["path"] == "/livez"
    assert probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"] >= 15 * 60
    assert {probe["httpGet"]["port"] for probe in probes.values()} == {container()["ports"][0]["name"]}


def test_it_runs_as_the_image_s_user_and_shut() -> None:
    whole, own = pod()["securityContext"], container()["securityContext"]
    assert whole["runAsUser"] == int(last("cpu", "USER"))
    assert whole["runAsNonRoot"] is True
    assert own["readOnlyRootFilesystem"] is True
    assert own["allowPrivilegeEscalation"] is False
    assert own["capabilities"] == {"drop": ["ALL"]}


def test_all_that_it_writes_is_mounted_and_every_mount_is_a_volume() -> None:
    volumes = {volume["name"]: volume for volume in pod()["volumes"]}
    mounts = {mount["mountPath"]: mount for mount in container()["volumeMounts"]}
    assert {mount["name"] for mount in mounts.values()} == volumes.keys()
    assert mounts.keys() == {"/models", "/cache", "/tmp", "/dev/shm"}
    assert mounts["/models"]["readOnly"] is True
    assert volumes[mounts["/dev/shm"]["name"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}


def test_prometheus_asks_the_service_for_its_metrics() -> None:
    (job,) = documents()["Prometheus"]["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    assert job["authorization"]["type"] == "Bearer"
