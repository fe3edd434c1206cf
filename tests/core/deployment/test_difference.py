"""What one deployment says other than another: no field is overlooked."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.core.deployment import AppliedDeployment, Deployment, Instance, difference, load_deployment
from prfaas.core.deployment.pool import PoolSpace
from prfaas.core.deployment.section import FieldFacts, fields_of
from prfaas.core.shipped import example_path

TEXT = """
name: two
model: {served_name: m, path: models/m, max_model_len: 32768, adapters: {a: adapters/a}}
clusters:
  - name: far
    kind: prfaas
    hardware: h200
    profile: internal-1t-h200
    instances:
      - {name: far-0, roles: [prefill], host: 10.0.0.1, http_port: 8100, kv_port: 8200}
      - {name: far-1, roles: [prefill], host: 10.0.0.2, http_port: 8100, kv_port: 8200}
  - name: home
    kind: pd
    hardware: h20
    profile: internal-1t-h20
    instances:
      - {name: home-p, roles: [prefill], host: 10.1.0.1, http_port: 8100, kv_port: 8200}
      - {name: home-d, roles: [decode], host: 10.1.0.2, http_port: 8100, kv_port: 8200}
links:
  - {source: far, target: home, bandwidth: 10 Gbit/s}
  - {source: home, target: far, bandwidth: 10 Gbit/s}
routing: {policy: tilted, params: {patience: 2.0}}
security: {tenant_header: x-tenant, tenant_weights: {a: 2}}
engine: {env: {A: b}}
"""


def loaded(folder: Path, text: str = TEXT) -> Deployment:
    path = folder / "deployment.yaml"
    path.write_text(text)
    return load_deployment(path, state_dir=folder / "state")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    text = TEXT.replace(", params: {patience: 2.0}", "")
    found = loaded(tmp_path_factory.mktemp("two"), text)
    return replace(found, routing=replace(found.routing, params={"patience": 2.0}))


FieldPath = tuple[str, ...]


def places(section: type, path: FieldPath = ()) -> Iterator[tuple[FieldPath, FieldFacts]]:
    """All fields that are compared, by their places in a deployment: `*` for the name of an element."""
    for field in fields_of(section).values():
        # What says where an element is, is its name.
        is_name = path[-1:] == ("*",) and field.name in ("name", "cluster", "source", "target")
        here = (*path, field.name)
        if is_name or (field.on_change is not None and not field.on_change.is_compared):
            continue
        if field.is_list_of_sections:
            assert field.section is not None
            yield from places(field.section, (*here, "*"))
        elif field.section is not None and not field.is_optional:
            yield from places(field.section, here)
        else:
            yield (*here, "*") if get_origin(field.kind) is Mapping else here, field


PLACES = dict(places(Deployment))


def test_every_field_says_what_its_change_needs() -> None:
    assert len(PLACES) > 90
    assert [path for path, field in PLACES.items() if field.on_change is None] == []


def needs(path: FieldPath) -> str | None:
    on_change = PLACES[path].on_change
    assert on_change is not None
    return on_change.needs


def other(value: Any, path: FieldPath) -> Any:
    """Another value of the same kind."""
    if path[-1] == "pool":
        return PoolSpace(1 << 30)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, Path):
        return value / "other"
    if isinstance(value, tuple):
        return (*value, "other")
    return 7 if value is None else f"{value}-other"


def changed(value: Any, rule: FieldPath, path: FieldPath = ()) -> Any:
    """`value` with another one at the place of a rule; the first element where the rule has a name."""
    if not rule:
        return other(value, path)
    head, rest = rule[0], rule[1:]
    if isinstance(value, tuple):
        return (changed(value[0], rest, path), *value[1:])
    if isinstance(value, Mapping):
        name = next(iter(value))
        return {**value, name: changed(value[name], rest, path)}
    return replace(value, **{head: changed(getattr(value, head), rest, (*path, head))})


@pytest.mark.parametrize("rule", PLACES, ids=".".join)
def test_a_change_of_any_field_is_seen_once_and_needs_what_it_says(base: Deployment, rule: FieldPath) -> None:
    after = changed(base, rule)
    for found in (difference(base, after), difference(after, base)):
        (change,) = found.changes
        assert change.needs == needs(rule)
        assert (len(found.refused) < len(found.changes)) == (needs(rule) is None)
        assert not found.added and not found.removed


@given(st.sets(st.sampled_from(sorted(PLACES))))
def test_many_changes_are_all_seen(base: Deployment, rules: set[FieldPath]) -> None:
    after = base
    for rule in rules:
        after = changed(after, rule)
    found = difference(base, after)
    assert len(found.changes) == len(rules)
    assert sorted(str(change.needs) for change in found.changes) == sorted(str(needs(r)) for r in rules)
    assert not difference(after, after)


def test_nothing_changes_in_a_file_read_twice(tmp_path: Path) -> None:
    for name in ("local.yaml", "synthetic.yaml"):
        one, two = (load_deployment(example_path(name), state_dir=tmp_path) for _ in range(2))
        assert not difference(one, two)


def test_sentences_name_fields_as_the_file_does(tmp_path: Path) -> None:
    text = TEXT.replace(", params: {patience: 2.0}", "")
    before = loaded(tmp_path, text)
    after = loaded(
        tmp_path,
        text.replace("target: home, bandwidth: 10 Gbit/s", "target: home, bandwidth: 40 Gbit/s")
        .replace("{name: home-d, roles: [decode]", "{name: home-d, roles: [prefill, decode]")
        .replace("{a: 2}", "{b: 3}"),
    )
    assert [change.sentence for change in difference(before, after).changes] == [
        "clusters[home].instances[home-d].roles is now prefill, decode; it was decode",
        "links[far->home].bandwidth is now 40 Gbit/s; it was 10 Gbit/s",
        "security.tenant_weights[a] is left out; it was 2",
        "security.tenant_weights[b] is now 3",
    ]


NEW = "      - {name: home-new, roles: [decode], host: 10.1.0.3, http_port: 8100, kv_port: 8200}\n"


def test_instances_join_leave_and_move(tmp_path: Path) -> None:
    text = TEXT.replace(", params: {patience: 2.0}", "")
    before, after = loaded(tmp_path, text), loaded(tmp_path, text.replace("links:", f"{NEW}links:"))
    found = difference(before, after)
    assert [change.sentence for change in found.changes] == [
        "instance home-new joins home (decode, 10.1.0.3:8100)"
    ]
    assert [instance.name for instance in found.added] == ["home-new"] and not found.refused
    back = difference(after, before)
    assert [change.sentence for change in back.changes] == [
        "instance home-new leaves home when its work has ended"
    ]
    assert [instance.name for instance in back.removed] == ["home-new"]
    far = NEW.replace("decode", "prefill")
    moved = difference(after, loaded(tmp_path, text.replace("  - name: home", f"{far}  - name: home", 1)))
    assert [change.sentence for change in moved.refused] == [
        "instance home-new is in far now; it was in home"
    ]


def test_links_and_clusters_are_added_live_and_removed_by_a_restart(base: Deployment) -> None:
    without = replace(base, links=base.links[:1])
    (removed,) = difference(base, without).changes
    assert (removed.field, removed.sentence) == ("links[home->far]", "link home->far is removed")
    assert removed.needs == "start the engines again, then the gateway"
    (added,) = difference(without, base).changes
    assert (added.field, added.needs) == ("links[home->far]", None)
    assert added.sentence == "link home->far is added, 10 Gbit/s"
    fewer = replace(base, clusters=base.clusters[1:], links=())
    gone = difference(base, fewer)
    assert [change.field for change in gone.refused] == [
        "clusters[far]",
        "links[far->home]",
        "links[home->far]",
    ]
    more = difference(replace(base, clusters=base.clusters[1:], links=base.links[:0]), base)
    assert more.changes[0].sentence == "cluster far is added, with far-0, far-1"
    assert [instance.name for instance in more.added] == ["far-0", "far-1"]


def test_a_new_link_needs_certificates_that_engines_have_from_their_start(base: Deployment) -> None:
    """Where it is encrypted, and one that runs already has none."""
    plain = tuple(replace(link, encryption=False) for link in base.links)
    alone = replace(base, links=())
    assert not difference(alone, replace(base, links=plain)).refused
    assert {change.needs for change in difference(alone, base).refused} == {
        "make certificates for both ends, start the engines again, then the gateway"
    }
    # Those of a cluster that is added are started with the whole file.
    home = replace(base, clusters=base.clusters[1:], links=())
    assert [change.field for change in difference(home, base).refused] == [
        "links[far->home]",
        "links[home->far]",
    ]
    encrypted_inside = replace(home, security=replace(home.security, encrypt_inside=True))
    whole = replace(base, security=encrypted_inside.security)
    assert not difference(encrypted_inside, whole).refused


def test_new_links_and_clusters_with_pools_need_a_restart(base: Deployment) -> None:
    far, home = base.clusters
    pooled = replace(base, clusters=(replace(far, pool=PoolSpace(1 << 30)), home))
    added = difference(replace(base, clusters=(home,), links=()), replace(pooled, links=()))
    (refused,) = added.refused
    assert (refused.field, refused.needs) == (
        "clusters[far]",
        "start the pools and the engines again, then the gateway",
    )
    linked = difference(replace(pooled, links=base.links[:1]), pooled)
    assert [(change.field, change.needs) for change in linked.refused] == [
        ("links[home->far]", refused.needs)
    ]


def test_a_machine_more_would_need_other_pools(tmp_path: Path) -> None:
    text = TEXT.replace(", params: {patience: 2.0}", "").replace(
        "hardware: h20\n", "hardware: h20\n    pool: {memory: 1 GiB, kv_port: 9000}\n"
    )
    before = loaded(tmp_path, text)
    elsewhere = difference(before, loaded(tmp_path, text.replace("links:", f"{NEW}links:")))
    assert [change.field for change in elsewhere.refused] == ["clusters[home].pool"]
    beside = NEW.replace("10.1.0.3", "10.1.0.2").replace("8100", "8101").replace("8200", "8201")
    here = difference(before, loaded(tmp_path, text.replace("links:", f"{beside}links:")))
    assert not here.refused and len(here.added) == 1


def test_the_order_decides_little(base: Deployment) -> None:
    turned = replace(base, links=base.links[::-1])
    assert [change.sentence for change in difference(base, turned).changes] == [
        "the links are in another order"
    ]


def with_instances(base: Deployment, names: list[str]) -> Deployment:
    """A deployment whose home has these instances."""
    far, home = base.clusters
    instances = tuple(replace(home.instances[1], name=name) for name in names)
    return replace(base, clusters=(far, replace(home, instances=instances)))


names = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=5, unique=True)


@given(st.lists(st.tuples(names, st.integers(0, 3)), min_size=1, max_size=6))
def test_what_runs_is_what_was_said_and_what_leaves(
    base: Deployment, steps: list[tuple[list[str], int]]
) -> None:
    """Nobody is forgotten before it has left, and in the end exactly what the file says runs."""
    applied = AppliedDeployment(with_instances(base, ["a"]), "0")
    for number, (wanted, left) in enumerate(steps):
        was = {instance.name for instance in applied.running.instances}
        applied = applied.taking_on(with_instances(base, wanted), str(number))
        running = [instance.name for instance in applied.running.instances]
        assert len(running) == len(set(running))
        assert set(running) == was | {instance.name for instance in applied.said.instances}
        assert {instance.name for instance in applied.leaving} == set(running) - {
            instance.name for instance in applied.said.instances
        }
        for instance in applied.leaving[:left]:
            applied = applied.without(instance.name)
    for instance in applied.leaving:
        applied = applied.without(instance.name)
    assert applied.running == applied.said


def test_who_comes_back_while_it_leaves_is_the_same(base: Deployment) -> None:
    applied = AppliedDeployment(with_instances(base, ["a", "b"]), "0")
    applied = applied.taking_on(with_instances(base, ["a"]), "1")
    assert not applied.difference(with_instances(base, ["a", "b"])).refused
    moved = with_instances(base, ["a", "b"])
    far, home = moved.clusters
    changed_b: Instance = replace(home.instances[1], http_port=9)
    moved = replace(moved, clusters=(far, replace(home, instances=(home.instances[0], changed_b))))
    (refused,) = applied.difference(moved).refused
    assert refused.sentence == "instance b still leaves, and comes back as another one"
