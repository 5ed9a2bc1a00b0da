"""Protects deploy/: what it passes to the commands exists there, and its parts agree with each other.

The schemas of the files themselves are checked by `make validate`.
"""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
import yaml

from cli.main import main
from gateway.settings import GatewaySettings
from models.settings import ModelSettings
from torchtpu.environment import read_settings
from workers.config import WorkerConfig

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
SECONDS = re.compile(r"(\d+)s")
VARIABLES = {f"TPUGATE_{name.upper()}" for name in GatewaySettings.model_fields} | {
    f"TPUGATE_{item.name.upper()}" for item in fields(WorkerConfig)
}


class Part(NamedTuple):
    """One started process of a compose file or manifest."""

    origin: str
    words: list[str]
    variables: set[str]
    grace_s: int


def compose_parts() -> Iterator[Part]:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for name, service in services.items():
        if "build" in service:
            grace = SECONDS.fullmatch(service["stop_grace_period"])
            assert grace is not None
            variables = set(service["environment"])
            yield Part(f"compose {name}", service["command"], variables, int(grace[1]))


def manifests() -> list[dict[str, Any]]:
    return [
        document
        for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text())
    ]


def workloads() -> list[dict[str, Any]]:
    return [m for m in manifests() if m["kind"] in ("Deployment", "StatefulSet")]


def kubernetes_parts() -> Iterator[Part]:
    for manifest in workloads():
        pod = manifest["spec"]["template"]["spec"]
        for container in pod["containers"]:
            if container["image"].startswith("tpugate-"):
                yield Part(
                    f"kubernetes {container['name']}",
                    container["args"],
                    {variable["name"] for variable in container["env"]},
                    pod["terminationGracePeriodSeconds"],
                )


def instructions(dockerfile: str) -> list[str]:
    """The instructions of a Dockerfile, continued lines joined, comments left out."""
    lines = (DEPLOY / dockerfile).read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    return text.replace("\\\n", " ").splitlines()


def image_parts() -> Iterator[Part]:
    for name in ("gateway", "worker"):
        command = next(i for i in instructions(f"{name}.Dockerfile") if i.startswith("CMD "))
        yield Part(f"{name}.Dockerfile", re.findall(r'"([^"]*)"', command), set(), 0)


PARTS = [*compose_parts(), *kubernetes_parts(), *image_parts()]
by_origin = pytest.mark.parametrize("part", PARTS, ids=lambda part: part.origin)


@by_origin
def test_the_command_line_has_every_flag(part: Part) -> None:
    name, *words = part.words
    command = main.get_command(click.Context(main), name)
    assert command is not None
    known = {flag for parameter in command.params for flag in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


@by_origin
def test_the_settings_have_every_variable(part: Part) -> None:
    assert part.variables <= VARIABLES


@pytest.mark.parametrize("part", [p for p in PARTS if "--drain-timeout-s" in p.words])
def test_a_worker_may_drain_before_it_is_killed(part: Part) -> None:
    drain_s = int(part.words[part.words.index("--drain-timeout-s") + 1])
    assert drain_s < part.grace_s


def test_the_gateway_image_has_no_model_stack() -> None:
    installs = [line for line in instructions("gateway.Dockerfile") if "pip install" in line]
    assert len(installs) == 1
    assert "'.[postgres]'" in installs[0]


@pytest.mark.parametrize("dockerfile", ["gateway.Dockerfile", "worker.Dockerfile"])
def test_images_copy_what_exists_and_the_build_context_has_it(dockerfile: str) -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    copies = [i.split()[1:-1] for i in instructions(dockerfile) if i.startswith("COPY ")]
    sources = {source for words in copies if "--from=build" not in words for source in words}
    assert sources <= kept
    assert all((ROOT / source).exists() for source in sources)


def image_variables(dockerfile: str) -> dict[str, str]:
    text = "\n".join(i for i in instructions(dockerfile) if i.startswith("ENV "))
    return dict(re.findall(r"(TPUGATE_\w+)=(\S+)", text))


def test_the_worker_image_keeps_weights_and_programs_on_its_volume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variables = image_variables("worker.Dockerfile")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    volume = Path("/var/lib/tpugate")
    assert ModelSettings.from_environment().cache_dir.is_relative_to(volume)
    assert read_settings().cache_dir.is_relative_to(volume)
    worker = next(w for w in workloads() if w["metadata"]["name"].startswith("worker"))
    mounts = worker["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert str(volume) in {mount["mountPath"] for mount in mounts}


def test_the_gateway_image_keeps_its_data_on_the_mounted_folder() -> None:
    settings = GatewaySettings.from_environment(image_variables("gateway.Dockerfile"))
    gateway = next(w for w in workloads() if w["metadata"]["name"] == "gateway")
    mounts = gateway["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert str(settings.data_dir) in {mount["mountPath"] for mount in mounts}
    # Every replica must hash keys with the same secret.
    assert f"{settings.data_dir}/secret.key" in {mount["mountPath"] for mount in mounts}


def test_images_contain_every_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    for dockerfile in ("gateway.Dockerfile", "worker.Dockerfile"):
        copies = {i.split()[1] for i in instructions(dockerfile) if i.startswith("COPY ")}
        assert packages <= copies


def test_the_worker_image_installs_the_torch_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    torch = next(
        r for r in project["project"]["optional-dependencies"]["worker"] if r.startswith("torch==")
    )
    assert any(line.endswith(f"install {torch}") for line in instructions("worker.Dockerfile"))
    assert f"TORCH := {torch}\n" in (ROOT / "Makefile").read_text()


def test_pods_run_without_privileges() -> None:
    assert {w["metadata"]["name"] for w in workloads()} >= {"gateway", "redis"}
    for workload in workloads():
        pod = workload["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["resources"]["limits"]["memory"]


def test_selectors_match_the_pods() -> None:
    labels = [w["spec"]["template"]["metadata"]["labels"] for w in workloads()]
    for manifest in manifests():
        if manifest["kind"] in ("Service", "PodDisruptionBudget"):
            selector = manifest["spec"]["selector"]
            wanted = selector.get("matchLabels", selector).items()
            assert any(wanted <= pod.items() for pod in labels), manifest["metadata"]["name"]


def test_a_worker_asks_for_the_chips_of_its_node() -> None:
    worker = next(w for w in workloads() if w["metadata"]["name"].startswith("worker"))
    pod = worker["spec"]["template"]["spec"]
    topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    rows, columns = (int(side) for side in topology.split("x"))
    resources = pod["containers"][0]["resources"]
    assert resources["limits"]["google.com/tpu"] == str(rows * columns)
    assert resources["requests"]["google.com/tpu"] == resources["limits"]["google.com/tpu"]


def test_the_gateway_is_probed_and_gets_its_secrets() -> None:
    gateway = next(w for w in workloads() if w["metadata"]["name"] == "gateway")
    pod = gateway["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    values = {variable["name"]: variable for variable in container["env"]}
    for name in ("TPUGATE_ADMIN_KEY", "TPUGATE_DATABASE_URL"):
        assert values[name]["valueFrom"]["secretKeyRef"]["name"] == "tpugate"
    shutdown_s = int(values["TPUGATE_GRACEFUL_SHUTDOWN_S"]["value"])
    sleep_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert sleep_s + shutdown_s < pod["terminationGracePeriodSeconds"]
