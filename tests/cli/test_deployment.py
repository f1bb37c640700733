"""The files of deploy/ are well-formed and agree with each other; every `quire` command line in them parses."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import typer
import yaml

from quire.cli import app
from quire.cli.flags import AutoscaleArgs, pick
from quire_gateway.config import HealthArgs
from quire_gateway.config_file import read_config
from quire_gateway.fleet import Fleet
from quire_gateway.metrics import GatewayMetrics
from quire_gateway.retries import RetryBudget
from quire_gateway.routing import Router
from quire_lab.cli.autoscale import policy_of

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
MANIFESTS = [
    manifest
    for file in yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())["resources"]
    for manifest in yaml.safe_load_all((DEPLOY / "kubernetes" / file).read_text())
]
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [manifest for manifest in MANIFESTS if manifest["kind"] == kind]


def containers() -> Iterator[dict[str, Any]]:
    for manifest in of_kind("Deployment"):
        yield from manifest["spec"]["template"]["spec"]["containers"]


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """(where, the arguments behind `quire`) of every command line."""
    entry, command = (json.loads(re.search(rf"^{word} (\[.*\])$", DOCKERFILE, re.MULTILINE)[1])  # type: ignore[index]
                      for word in ("ENTRYPOINT", "CMD"))  # fmt: skip
    assert entry == ["quire"]
    yield "Dockerfile", command
    for name, service in COMPOSE["services"].items():
        if service["image"] == "quire":
            yield f"compose {name}", service["command"]
    for each in containers():
        assert each["command"][0] == "quire"
        yield f"kubernetes {each['name']}", each["command"][1:]
    for unit in sorted((DEPLOY / "systemd").glob("*.service")):
        parser = configparser.ConfigParser(strict=False, interpolation=None)  # a list has a line per part
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read_string(unit.read_text())
        assert set(parser) == {"DEFAULT", "Unit", "Service", "Install"}
        words = shlex.split(parser["Service"]["ExecStart"])
        assert words[0] == "/opt/quire/bin/quire"
        yield unit.name, words[1:]


def parsed(arguments: list[str]) -> dict[str, Any]:
    """Parse a command line without running it; Typer raises for an unknown command, flag or value."""
    group: Any = typer.main.get_command(app)
    command = group.get_command(None, arguments[0])
    params: dict[str, Any] = command.make_context(arguments[0], arguments[1:]).params
    return params


LINES = list(command_lines())


@pytest.mark.parametrize(("where", "arguments"), LINES, ids=[where for where, _ in LINES])
def test_every_command_line_parses(where: str, arguments: list[str]) -> None:
    assert parsed(arguments)


def test_a_wrong_flag_in_a_command_line_is_found() -> None:
    with pytest.raises(Exception, match="no-such-flag"):
        parsed(["serve", "quill", "--no-such-flag"])


def test_configurations_of_gateways_are_valid() -> None:
    for file in ("compose/gateway.toml", "kubernetes/gateway.toml"):
        assert read_config(DEPLOY / file).backends
    (source,) = read_config(DEPLOY / "kubernetes" / "gateway.toml").backends
    (headless,) = (m for m in of_kind("Service") if m["spec"].get("clusterIP") == "None")
    assert source.dns == f"{headless['metadata']['name']}:{headless['spec']['ports'][0]['port']}"
    for backend in read_config(DEPLOY / "compose" / "gateway.toml").backends:
        assert backend.url == f"http://{backend.name}:8000"
        assert backend.name in COMPOSE["services"]


def test_files_that_compose_mounts_exist() -> None:
    mounted = [mount for service in COMPOSE["services"].values() for mount in service.get("volumes", ())]
    for mount in mounted:
        source = mount.split(":")[0]
        assert source in COMPOSE["volumes"] or (DEPLOY / "compose" / source).exists(), source
    scraped = yaml.safe_load((DEPLOY / "compose" / "prometheus.yml").read_text())["scrape_configs"]
    targets = [
        t.split(":")[0] for job in scraped for config in job["static_configs"] for t in config["targets"]
    ]
    assert set(targets) <= set(COMPOSE["services"])
    assert (
        DEPLOY / "compose" / COMPOSE["services"]["replica-1"]["build"]["context"] / "pyproject.toml"
    ).exists()


def test_manifests_name_what_exists() -> None:
    assert all({"apiVersion", "kind", "metadata", *()} <= manifest.keys() for manifest in MANIFESTS)
    labels = [m["spec"]["template"]["metadata"]["labels"] for m in of_kind("Deployment")]
    for deployment in of_kind("Deployment"):
        assert deployment["spec"]["selector"]["matchLabels"] in labels
    for service in of_kind("Service"):
        assert service["spec"]["selector"] in labels
    for each in containers():
        ports = {port["name"] for port in each.get("ports", ())}
        probes = [each[key]["httpGet"]["port"] for key in each if key.endswith("Probe")]
        assert set(probes) <= ports
        assert each["image"] == "quire"


@pytest.mark.parametrize("name", [m["metadata"]["name"] for m in of_kind("Deployment")])
def test_pods_run_without_privileges(name: str) -> None:
    (pod,) = (m["spec"]["template"]["spec"] for m in of_kind("Deployment") if m["metadata"]["name"] == name)
    context = pod["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    user = re.search(r"^USER (\d+)$", DOCKERFILE, re.MULTILINE)
    assert user is not None, "by number: the kubelet cannot tell that a name is not root"
    assert context["runAsUser"] == int(user[1])
    volumes = {volume["name"] for volume in pod["volumes"]}
    for each in pod["containers"]:
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        mounts = {mount["mountPath"]: mount for mount in each["volumeMounts"]}
        assert {mount["name"] for mount in mounts.values()} <= volumes
        assert "/tmp" in mounts, "sockets of processes"
        home = {variable["name"]: variable.get("value") for variable in each.get("env", ())}.get("HOME")
        assert home in (None, "/data")
        assert home is None or home in mounts
    needs_token = pod.get("serviceAccountName") is not None
    assert pod.get("automountServiceAccountToken", True) is needs_token


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("unit", sorted((DEPLOY / "systemd").glob("*.service")), ids=lambda unit: unit.name)
def test_units_expose_little(unit: Path) -> None:
    """The scale of `systemd-analyze security` ends at 10; a unit without any setting has 9.6."""
    command = ["systemd-analyze", "security", "--offline=true", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    level = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert level is not None, done.stderr
    assert float(level[1]) <= 4.0


@pytest.mark.parametrize("unit", sorted((DEPLOY / "systemd").glob("*.service")), ids=lambda unit: unit.name)
def test_units_keep_what_the_service_needs(unit: Path) -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(unit.read_text())
    service = parser["Service"]
    assert "ProcSubset" not in service, "memory and processors are read from /proc"
    assert {"AF_INET", "AF_INET6", "AF_UNIX"} <= set(service["RestrictAddressFamilies"].split())
    assert "@resources" not in unit.read_text().replace("~@resources, which", ""), (
        "threads are pinned to cores"
    )
    if unit.name == "quire.service":
        assert service["MemoryDenyWriteExecute"] == "no", "oneDNN writes machine code"


def test_the_autoscaler_may_do_what_it_does_and_no_more() -> None:
    (role,), (binding,) = of_kind("Role"), of_kind("RoleBinding")
    (line,) = (arguments for _, arguments in LINES if arguments[0] == "autoscale")
    params = {k: v for k, v in parsed(line).items() if v is not None and k not in ("config", "help_all")}
    args = pick(AutoscaleArgs, params)
    policy_of(args)
    (rule,) = role["rules"]
    assert rule == {"apiGroups": ["apps"], "resources": ["deployments/scale"], "verbs": ["get", "patch"],
                    "resourceNames": [str(args.target).partition("/")[2]]}  # fmt: skip
    assert rule["resourceNames"][0] in [m["metadata"]["name"] for m in of_kind("Deployment")]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": of_kind("ServiceAccount")[0]["metadata"]["name"]}
    ]
    (pod,) = (m["spec"]["template"]["spec"] for m in of_kind("Deployment")
              if m["metadata"]["name"] == "autoscale")  # fmt: skip
    assert pod["serviceAccountName"] == binding["subjects"][0]["name"]


def test_the_gateways_dashboard_names_metrics_that_exist() -> None:
    fleet = Fleet(Router("round-robin"), HealthArgs(), Random(0))
    metrics = GatewayMetrics(fleet, RetryBudget(0.2, 10))
    families = {family.name for family in metrics.collect()}
    board = json.loads((DEPLOY / "grafana" / "gateway.json").read_text())
    named = set()
    for panel in board["panels"]:
        for target in panel["targets"]:
            named |= set(re.findall(r"\b(?:vllm:|quire:|envoy_)\w+", target["expr"]))
    bare = {re.sub(r"_(bucket|total)$", "", name) for name in named}
    assert bare <= families | {re.sub(r"_total$", "", name) for name in families}
    assert len(bare) >= 8
