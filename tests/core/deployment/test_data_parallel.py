"""Data-parallel groups in a deployment file: what must fit together, where ranks listen, what may change."""

from pathlib import Path

import pytest

from prfaas.core.deployment import Deployment, DeploymentError, difference, load_deployment, load_planned
from prfaas.tools.emit.openings import openings_of

EXAMPLE = Path(__file__).parents[3] / "examples" / "moe-group.yaml"
RANK_1 = "{name: home-1, roles: [prefill]"


def loaded(tmp_path: Path, *changes: tuple[str, str]) -> Deployment:
    text = EXAMPLE.read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new, 1)
    (tmp_path / "file.yaml").write_text(text)
    return load_deployment(tmp_path / "file.yaml", state_dir=tmp_path)


def rank_1(old: str, new: str) -> tuple[str, str]:
    """A change of home-1's second line."""
    line = f"{RANK_1}, host: 198.51.100.11, http_port: 8100, kv_port: 8200,\n         "
    fields = "tensor_parallel: 8, data_parallel: moe-a, expert_parallel: true}"
    assert old in fields
    return line + fields, line + fields.replace(old, new)


def test_ranks_are_in_the_order_of_the_file(tmp_path: Path) -> None:
    deployment = loaded(tmp_path)
    groups = [[rank.name for rank in deployment.ranks_with(each)] for each in deployment.instances]
    assert groups == [
        ["east-0"],
        ["east-1"],
        *([["home-0", "home-1"]] * 2),
        *([["home-2", "home-3"]] * 2),
    ]
    assert deployment.instance("home-2").meeting_port == 8208


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (rank_1("moe-a", "alone"), r'group "moe-a" has one rank'),
        (
            rank_1("tensor_parallel: 8", "tensor_parallel: 4"),
            r'tensor_parallel is another than that of "home-0"',
        ),
        (rank_1(", expert_parallel: true", ""), r'expert_parallel is another than that of "home-0"'),
        ((RANK_1, RANK_1.replace("prefill", "decode")), r'roles is another than that of "home-0"'),
        (("tensor_parallel: 8}", "tensor_parallel: 8, data_parallel: moe-a}"), r'is a group of "east"'),
    ],
)
def test_ranks_are_alike_and_in_one_cluster(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    with pytest.raises(DeploymentError, match=says):
        loaded(tmp_path, change)


def test_where_ranks_meet_nothing_else_listens(tmp_path: Path) -> None:
    taken = "host: 198.51.100.13, http_port: 8100", "host: 198.51.100.13, http_port: 8208"
    with pytest.raises(DeploymentError, match="8208 is already used"):
        loaded(tmp_path, taken)


def test_the_place_where_ranks_meet_is_a_port(tmp_path: Path) -> None:
    port = (
        "host: 198.51.100.13, http_port: 8100, kv_port: 8200",
        "host: 198.51.100.13, http_port: 8100, kv_port: ",
    )
    loaded(tmp_path, (port[0], f"{port[1]}65527"))
    with pytest.raises(DeploymentError, match="65528 leaves no room for 8 ranks; take one up to 65527"):
        loaded(tmp_path, (port[0], f"{port[1]}65528"))


def test_every_rank_s_local_events_have_a_place_of_their_own(tmp_path: Path) -> None:
    hosts = [(f"198.51.100.{number}, http_port: 8100, kv_port: 8200", number) for number in (10, 11)]
    changes = [(old, f"127.0.0.1, http_port: {8100 + n}, kv_port: {7000 + 20 * n}") for old, n in hosts]
    deployment = loaded(tmp_path, *changes)
    first, second = (deployment.events_endpoint(deployment.instance(name)) for name in ("home-0", "home-1"))
    assert first.publish.endswith("/inproc-home-0") and second.publish.endswith("/inproc-home-1_dp1")
    assert second.replay.endswith("/inproc-home-1-replay_dp1")


def test_ranks_are_open_to_each_other(tmp_path: Path) -> None:
    opened = {
        each.owner: (each.ports, each.sources)
        for each in openings_of(loaded(tmp_path))
        if each.purpose == "ranks"
    }
    assert opened == {
        "home-0": ((), ("home-1",)),
        "home-1": ((), ("home-0",)),
        "home-2": ((), ("home-3",)),
        "home-3": ((), ("home-2",)),
    }


def test_a_group_that_runs_gets_no_further_rank(tmp_path: Path) -> None:
    before = loaded(tmp_path)
    other = "{name: home-4, roles: [decode], host: 198.51.100.14, http_port: 8100, kv_port: 8200"
    third = f"      - {other}, tensor_parallel: 8, data_parallel: moe-b, expert_parallel: true}}\n\nlinks:"
    found = difference(before, loaded(tmp_path, ("\nlinks:", third)))
    assert [(each.field, each.sentence) for each in found.refused] == [
        ("data_parallel[moe-b]", "group moe-b has other ranks: home-2, home-3, home-4")
    ]
    fourth = third.replace("home-4", "home-5").replace("100.14", "100.15").replace("\n\nlinks:", "\n")
    both = (fourth + third).replace("moe-b", "moe-c")
    assert not difference(before, loaded(tmp_path, ("\nlinks:", both))).refused


def test_plans_move_whole_groups(tmp_path: Path) -> None:
    text = EXAMPLE.read_text(encoding="utf-8").replace(
        "path: /models/qwen3-235b-a22b", "published: qwen3-235b"
    )
    (tmp_path / "plan.yaml").write_text(text)
    assert [cluster.group_ranks for cluster in load_planned(tmp_path / "plan.yaml").clusters] == [1, 2]
