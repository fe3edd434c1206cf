"""A model of the hub through the hub's own client, from a hub on loopback: pinned, whole, and in one sentence if not.

Each case has a process of its own, as the client reads its environment when it is imported.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import FIRST, SECOND, Hub, serving

from prfaas.core.deployment import ModelSource, default_state_dir
from prfaas.serving.engines.fetching import ModelFetchError
from prfaas.serving.engines.model_identity import ModelIdentity
from prfaas.serving.engines.tiny import tiny_model
from prfaas.serving.engines.trained import trained_model

pytestmark = pytest.mark.slow("a process that imports the hub's client for each fetch")
OTHER_FAULT = pytest.mark.extended(
    "one fault of each kind is in `make test`: of the network, of the hub, of leave"
)

PROGRAM = """
import json, sys
from pathlib import Path
from prfaas.core.deployment import ModelSource
from prfaas.serving.engines import EngineError
from prfaas.serving.engines.hub_model import hub_model
class Report:
    notices, done = [], []
    def notice(self, line): self.notices.append(line)
    def fetched(self, what, done_bytes, total_bytes): self.done.append((done_bytes, total_bytes))
name, revision, link, weights, update = json.loads(sys.argv[1])
try:
    hub_model(ModelSource("hub", name, revision), Path(link), Report(), weights=weights, update=update)
except EngineError as error:
    print(json.dumps({"error": str(error)}))
else:
    print(json.dumps({"folder": str(Path(link).resolve()), "notices": Report.notices, "done": Report.done}))
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tiny_model("qwen3", tmp_path_factory.mktemp("models"))
    kept = {file.name: file.read_bytes() for file in path.iterdir() if not file.name.startswith("prfaas")}
    return {**kept, "pytorch_model.bin": b"pickle", "model.gguf": b"gguf", "README.md": b"read me"}


@pytest.fixture
def hub(files: dict[str, bytes]) -> Iterator[Hub]:
    moved = {**files, "config.json": files["config.json"] + b"\n"}
    with serving(Hub({FIRST: files, SECOND: moved})) as server:
        yield server


class Machine:
    """A cache and a pin."""

    def __init__(self, hub: Hub, folder: Path) -> None:
        self.hub, self.home, self.link = hub, folder / "hf", folder / "pins" / "org--tiny"

    def fetch(
        self,
        name: str = "org/tiny",
        revision: str | None = None,
        *,
        weights: bool = True,
        update: bool = False,
        **environment: str,
    ) -> dict[str, object]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
        settings = {
            "HF_ENDPOINT": self.hub.url,
            "HF_HOME": str(self.home),
            "HF_HUB_DISABLE_XET": "1",
            "no_proxy": "*",
        }
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, json.dumps([name, revision, str(self.link), weights, update])],
            env={**clean, **settings, **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
        return found

    def failed(self, name: str = "org/tiny", revision: str | None = None, **environment: str) -> str:
        sentence = str(self.fetch(name, revision, **environment)["error"])
        assert "\n" not in sentence
        return sentence


@pytest.fixture
def machine(hub: Hub, tmp_path: Path) -> Machine:
    return Machine(hub, tmp_path)


def test_what_vllm_needs_is_fetched_and_nothing_that_runs(machine: Machine, files: dict[str, bytes]) -> None:
    found = machine.fetch()
    folder = Path(str(found["folder"]))
    assert folder.name == FIRST and machine.link.readlink() == folder
    left_out = {"pytorch_model.bin", "model.gguf", "README.md"}
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        name: content for name, content in files.items() if name not in left_out
    }
    total = sum(len(content) for name, content in files.items() if name not in left_out)
    done = found["done"]
    assert isinstance(done, list) and done[0] == [0, total] and done[-1] == [total, total]
    assert done == sorted(done)
    (notice,) = found["notices"]  # type: ignore[misc]
    assert FIRST in notice and "--update" in notice


def test_a_branch_that_moves_is_followed_only_when_asked(machine: Machine) -> None:
    first = machine.fetch()
    machine.hub.branches["main"] = SECOND
    machine.hub.asked.clear()
    assert machine.fetch()["folder"] == first["folder"] and machine.hub.asked == []
    moved = machine.fetch(update=True)
    assert str(moved["folder"]).endswith(SECOND) and SECOND in str(moved["notices"])
    assert machine.fetch()["folder"] == moved["folder"]


@OTHER_FAULT
def test_what_was_left_in_the_middle_goes_on_with_the_pinned_commit(machine: Machine) -> None:
    """The gateway's machine has no weights; an engine on it fetches those of the gateway's commit."""
    gateways = Path(str(machine.fetch(weights=False)["folder"]))
    assert not list(gateways.glob("*.safetensors")) and (gateways / "tokenizer.json").is_file()
    machine.hub.branches["main"] = SECOND
    assert machine.fetch()["folder"] == str(gateways)
    assert (gateways / "model.safetensors").is_file()


def test_without_a_network_what_is_there_is_used(machine: Machine) -> None:
    there = machine.fetch()
    assert machine.fetch(HF_HUB_OFFLINE="1") == {"folder": there["folder"], "notices": [], "done": []}
    machine.link.unlink()
    assert "HF_HUB_OFFLINE keeps it from being fetched" in machine.failed(HF_HUB_OFFLINE="1")


def test_a_hub_that_can_t_be_reached_is_one_sentence(machine: Machine) -> None:
    assert "can't be fetched from http://127.0.0.1:9 (" in machine.failed(HF_ENDPOINT="http://127.0.0.1:9")
    assert not machine.link.is_symlink()


@OTHER_FAULT
def test_unknown_names_are_said(machine: Machine) -> None:
    assert "has no org/other, or it is private" in machine.failed("org/other")
    assert machine.failed(revision="next") == "org/tiny has no revision next; see model.revision"


def test_gated_models_want_the_environments_token_which_is_never_told(machine: Machine) -> None:
    machine.hub.token = "hf_secret"
    assert f"do so at {machine.hub.url}/org/tiny, and set HF_TOKEN" in machine.failed()
    wrong = machine.failed(HF_TOKEN="hf_wrong")
    assert "HF_TOKEN" in wrong and "hf_wrong" not in wrong
    found = machine.fetch(HF_TOKEN="hf_secret")
    assert str(found["folder"]).endswith(FIRST) and "hf_secret" not in json.dumps(found)
    assert machine.hub.tokens == {"Bearer hf_wrong", "Bearer hf_secret"}
    kept = [
        file for file in (machine.home, machine.link.parent) for file in file.rglob("*") if file.is_file()
    ]
    assert kept and not any(b"hf_secret" in file.read_bytes() for file in kept)


@OTHER_FAULT
def test_a_person_s_login_is_not_a_deployment_s(machine: Machine) -> None:
    machine.home.mkdir(parents=True)
    (machine.home / "token").write_text("hf_person")
    machine.fetch()
    assert machine.hub.tokens == set()


def test_a_hub_that_goes_in_the_middle_is_one_sentence_and_later_whole(machine: Machine) -> None:
    machine.hub.cut_bytes = 100_000
    assert "org/tiny can't be fetched from" in machine.failed(HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert not machine.link.exists()
    machine.hub.cut_bytes = None
    assert str(machine.fetch()["folder"]).endswith(FIRST)


@OTHER_FAULT
def test_sizes_that_are_not_as_told_are_said(machine: Machine) -> None:
    machine.hub.lie_bytes = 5
    assert "has not the" in machine.failed() or "can't be fetched" in machine.failed()
    assert not machine.link.exists()


@OTHER_FAULT
def test_a_model_without_weights_is_said(machine: Machine) -> None:
    machine.hub.commits[FIRST] = {"config.json": b"{}"}
    assert machine.failed() == f"org/tiny at {FIRST} has no config.json, or weights are missing"


@OTHER_FAULT
def test_more_than_the_disk_holds_is_not_begun(machine: Machine) -> None:
    machine.hub.lie_bytes = 1 << 60
    assert "HF_HOME names another place" in machine.failed()
    assert not any("/resolve/" in path for path in machine.hub.asked)


@OTHER_FAULT
def test_a_commit_needs_no_word_of_where_a_branch_is(machine: Machine) -> None:
    found = machine.fetch(revision=SECOND)
    assert str(found["folder"]).endswith(SECOND) and found["notices"] == []


@pytest.mark.extended(
    "a tiny model comes from the hub in `make test`; this one has 98 MB, fetched and converted"
)
def test_trained_weights_from_the_hub_are_the_same_model_to_engines(tmp_path: Path) -> None:
    """SmolLM2's files: what engines compare of a model does not tell by which way it came."""
    try:
        made = trained_model("smollm2", default_state_dir() / "models")
    except ModelFetchError as error:
        pytest.skip(str(error))
    files = {file.name: file.read_bytes() for file in made.iterdir() if not file.name.startswith("prfaas")}
    with serving(Hub({FIRST: files})) as server:
        folder = str(Machine(server, tmp_path).fetch()["folder"])
    assert ModelIdentity.of(folder, folder) == ModelIdentity.of(str(made), str(made))


def test_each_revision_of_a_file_has_a_pin_of_its_own(tmp_path: Path) -> None:
    links = {
        ModelSource("hub", "org/tiny", revision).directory(tmp_path, "east")
        for revision in (None, "main", "refs/pr/1", FIRST)
    }
    assert len(links) == 4 and {link.parent for link in links} == {tmp_path / "east" / "hub"}
