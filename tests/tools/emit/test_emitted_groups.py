"""Ranks of a data-parallel group on machines and in Kubernetes: a pod each, open to each other."""

import kubernetes_validate
from tests.tools.emit.test_emitted import objects_of

from prfaas.core.shipped import example_path
from prfaas.tools.emit.blueprint import read_blueprint
from prfaas.tools.emit.kubernetes import kubernetes_files
from prfaas.tools.emit.ports import ports_table

EXAMPLE = example_path("moe-group")


def test_each_rank_is_a_pod_that_the_others_of_its_group_reach_at_any_port() -> None:
    objects = objects_of(kubernetes_files(read_blueprint(EXAMPLE)))
    policies = {each["metadata"]["name"]: each for each in objects if each["kind"] == "NetworkPolicy"}
    for each in policies.values():
        kubernetes_validate.validate(each, "1.34", strict=True)
    open_at_all = {
        name: [rule["from"] for rule in policy["spec"]["ingress"] if "ports" not in rule]
        for name, policy in policies.items()
    }
    label = {"podSelector": {"matchLabels": {"prfaas/member": "home-3"}}}
    assert label in open_at_all["home-2"][0] and len(open_at_all["home-2"]) == 1
    assert open_at_all["east-0"] == []
    assert {"StatefulSet"} == {
        each["kind"]
        for each in objects
        if each["metadata"]["name"] == "home-2" and "replicas" in each.get("spec", {})
    }


def test_a_machine_s_table_says_so_too() -> None:
    blueprint = read_blueprint(EXAMPLE)
    place = next(each for each in blueprint.places() if "home-3" in each.members)
    (line,) = [line for line in ports_table(blueprint, place).splitlines() if "ranks" in line]
    assert line.split() == ["1-65535/tcp", "home-3", "ranks", "home-2", "(198.51.100.12)"]
