"""What is installed, built on and run by others is named exactly: versions, hashes, commits, digests."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tools import lock
from tools.house import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
# What pip chooses by itself, with the reason.
FREE = {"triton": "each CUDA build of torch wants its own"}
RUNTIME = {**lock.locked("requirements.lock"), **lock.locked("torch.lock")}


def closure(lines: Iterable[str]) -> set[str]:
    """Return the names of all packages that an install of ``lines`` brings, as the installed ones say."""
    names: set[str] = set()
    todo = [Requirement(line) for line in lines]
    seen = set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        extras = {"", *requirement.extras}
        if (name, *sorted(extras)) in seen or not applies(requirement, {""}):
            continue
        seen.add((name, *sorted(extras)))
        names.add(name)
        try:
            further = [Requirement(line) for line in requires(name) or ()]
        except PackageNotFoundError:
            pytest.skip(f"{name} is not installed")
        todo += [Requirement(bare(each)) for each in further if applies(each, extras)]
    return names


def applies(requirement: Requirement, extras: set[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)


def bare(requirement: Requirement) -> str:
    """Return a requirement without its marker, which has been looked at."""
    return f"{requirement.name}[{','.join(requirement.extras)}]" if requirement.extras else requirement.name


def test_constraints_name_every_package_of_an_install() -> None:
    installed = [
        name for name in EXTRAS if name not in ("ray", "smollm2")
    ]  # not a part of the developers' environment
    lines = PROJECT["project"]["dependencies"] + [line for name in installed for line in EXTRAS[name]]
    missing = closure(lines) - set(lock.constraints()) - set(FREE)
    assert not missing, "write them into constraints.txt, as `pip freeze` prints them"


def test_constraints_name_what_the_package_asks_for() -> None:
    """Of every extra, those included that developers do not have installed."""
    lines = PROJECT["project"]["dependencies"] + [line for extra in EXTRAS.values() for line in extra]
    pins = lock.constraints()
    for requirement in map(Requirement, lines):
        name = canonicalize_name(requirement.name)
        assert name in FREE or requirement.specifier.contains(pins[name]), requirement


def test_locks_name_the_versions_of_constraints() -> None:
    pins = lock.constraints()
    for locked in (lock.locked("requirements.lock"), lock.locked("build.lock")):
        assert {name: pins.get(name) for name in locked} == locked, "run `make lock`"
    assert lock.locked("torch.lock") == {"torch": f"{pins['torch']}+cpu"}


def test_locks_have_all_that_the_image_needs() -> None:
    lines = PROJECT["project"]["dependencies"] + [line for extra in lock.EXTRAS for line in EXTRAS[extra]]
    assert not closure(lines) - set(RUNTIME), "run `make lock`"
    assert not closure(PROJECT["build-system"]["requires"]) - set(lock.locked("build.lock"))


def test_locks_bring_nothing_else() -> None:
    lines = PROJECT["project"]["dependencies"] + [line for extra in lock.EXTRAS for line in EXTRAS[extra]]
    assert not set(RUNTIME) - closure(lines)


@pytest.mark.parametrize("name", ["requirements.lock", "build.lock", "torch.lock"])
def test_every_locked_package_has_hashes(name: str) -> None:
    text = (ROOT / "deploy" / name).read_text()
    entries = [entry for entry in re.split(r"^(?=\w)", text, flags=re.MULTILINE) if "==" in entry]
    assert len(entries) == len(lock.locked(name)) > 0
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry) for entry in entries)


def test_the_image_installs_only_what_is_locked() -> None:
    text = re.sub(r"\\\n", " ", (ROOT / "deploy" / "Dockerfile").read_text())
    installs = re.findall(r"/pip (?:install|wheel) [^&\n]*", text)
    assert len(installs) == 5
    for each in installs:
        assert "--no-deps" in each
        assert "--require-hashes" in each or "--no-index" in each, each
    assert f"for extra in {lock.EXTRAS!r}" in text


def test_base_images_are_digests() -> None:
    images = re.findall(r"^FROM (\S+)", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
    compose = yaml.safe_load((ROOT / "deploy" / "compose" / "compose.yaml").read_text())
    images += [service["image"] for service in compose["services"].values() if service["image"] != "quire"]
    assert len(images) == 4
    assert all(re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", image) for image in images), images
    assert images[0] == images[1], "the wheels are built for the Python that runs them"


def test_actions_are_commits() -> None:
    uses = [
        line.strip()
        for file in (ROOT / ".github" / "workflows").glob("*.yml")
        for line in re.findall(r"uses: (.*)$", file.read_text(), re.MULTILINE)
    ]
    assert len(uses) >= 6
    wrong = [use for use in uses if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}  # v\d+(\.\d+)+", use)]
    assert not wrong, "name the commit, and behind it the version for people and for the update bot"
    assert len({use.partition("@")[0] for use in uses}) == len(set(uses)), "one commit per action"


def test_the_update_bot_follows_all_that_is_pinned() -> None:
    config = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text())
    followed = {(entry["package-ecosystem"], entry["directory"]) for entry in config["updates"]}
    assert followed == {
        ("github-actions", "/"),
        ("docker", "/deploy"),
        ("docker-compose", "/deploy/compose"),
        ("pip", "/"),
    }


def test_known_vulnerabilities_are_looked_for() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "audit.yml").read_text())
    triggers = workflow[True]  # YAML 1.1 reads the key `on` so
    assert {"schedule", "pull_request", "push"} <= triggers.keys()
    (step,) = (step["run"] for step in workflow["jobs"]["audit"]["steps"] if "run" in step)
    assert re.search(r"pip-audit .*-r constraints\.txt", step)
