"""Files that `prfaas init` writes from a few facts."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.cli.common import CliError
from prfaas.cli.draft import Draft, DraftLink, DraftSite
from prfaas.core.deployment import Deployment, load_deployment

EAST = DraftSite("east", "prfaas", "h200", 8, ("192.0.2.10", "192.0.2.11"))
HOME = DraftSite("home", "pd", "h20", 8, ("198.51.100.10", "198.51.100.11", "198.51.100.12"))
LINK = DraftLink("east", "home", "40 Gbit/s")

HOSTS = st.sampled_from(
    ["127.0.0.1", "localhost", "192.0.2.10", "192.0.2.11", "2001:db8::1", "gpu-1.example", "yes", "1e3"]
)


def draft(**changes: object) -> Draft:
    fields: dict[str, object] = {
        "name": "llm",
        "model": "/models/qwen3-next",
        "served_name": "qwen3-next",
        "max_model_len": 131072,
        "sites": (EAST, HOME),
        "links": (LINK,),
        "gateway_host": "0.0.0.0",
        **changes,
    }
    return Draft(**fields)  # type: ignore[arg-type]


def loaded(made: Draft) -> Deployment:
    made.check()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file.yaml")
        path.write_text(made.text())
        return load_deployment(path)


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    gpus = draw(st.integers(1, 16))
    sites = []
    for number, kind in enumerate([*draw(st.lists(st.just("prfaas"), max_size=2)), "pd"]):
        hardware = draw(st.sampled_from(["h200", "cpu", "synthetic", "L40S"]))
        hosts = tuple(draw(st.lists(HOSTS, min_size=1, max_size=4)))
        sites.append(
            DraftSite(f"site-{number}", "prfaas" if kind == "prfaas" else "pd", hardware, gpus, hosts)
        )
    links = tuple(
        DraftLink(site.name, sites[-1].name, draw(st.sampled_from(["1 Gbit/s", "2.5 Gbit/s", "100Mbit/s"])))
        for site in sites[:-1]
    )
    return draft(
        name=draw(st.sampled_from(["llm", "a.b_c-d", "8b"])),
        model=draw(st.sampled_from(["/models/a b: c", "/m", "tiny:qwen3-next"])),
        served_name=draw(st.sampled_from(["yes", "1.5", "a: b", "org/model", "#1", "{x}", "'\""])),
        max_model_len=draw(st.integers(1, 1 << 20)),
        sites=tuple(sites),
        links=links,
        gateway_host=draw(st.sampled_from(["0.0.0.0", "127.0.0.1", "::"])),
    )


@given(drafts())
@settings(max_examples=30)
def test_every_draft_makes_a_file_that_says_the_same(made: Draft) -> None:
    deployment = loaded(made)
    assert deployment.name == made.name
    assert deployment.model.served_name == made.served_name
    assert deployment.gateway.host == made.gateway_host
    assert [(cluster.name, cluster.kind, cluster.hardware) for cluster in deployment.clusters] == [
        (site.name, site.kind, site.hardware) for site in made.sites
    ]
    for cluster, site in zip(deployment.clusters, made.sites, strict=True):
        assert tuple(instance.host for instance in cluster.instances) == site.hosts
        assert {instance.tensor_parallel for instance in cluster.instances} == {site.gpus}
    assert [link.name for link in deployment.links] == [
        f"{link.source}->{link.target}" for link in made.links
    ]


def test_the_roles_of_a_site() -> None:
    roles = {instance.name: instance.roles for instance in loaded(draft()).instances}
    assert roles == {
        "east-0": ("prefill",),
        "east-1": ("prefill",),
        "home-0": ("prefill",),
        "home-1": ("decode",),
        "home-2": ("decode",),
    }
    alone = DraftSite("home", "pd", "h20", 8, ("198.51.100.10",))
    assert loaded(draft(sites=(EAST, alone))).instance("home-0").roles == ("prefill", "decode")


def test_operators_need_a_token_where_others_reach_them() -> None:
    assert loaded(draft()).gateway.admin.token_file is not None
    assert loaded(draft(gateway_host="127.0.0.1")).gateway.admin.token_file is None


def test_a_file_explains_itself() -> None:
    text = draft().text()
    assert text.count("#") >= 8
    assert all(len(line) <= 160 for line in text.splitlines())


def test_sites_and_links_are_read() -> None:
    assert DraftSite.parse("east:prfaas:h200x8:192.0.2.10,192.0.2.11") == EAST
    assert DraftSite.parse("home:pd:cpu:2001:db8::1").hosts == ("2001:db8::1",)
    assert DraftSite.parse("home:pd:mx2x2:a").hardware == "mx2"
    assert DraftLink.parse("east:home:40 Gbit/s") == LINK


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("east:prfaas:h200x8", "is no site; write NAME:KIND:HARDWARE:HOST,HOST"),
        ("e st:prfaas:h200:a", "is no name of a site"),
        ("east:prefill:h200:a", "write prfaas (only prefills) or pd (serves clients)"),
        ("east:prfaas:8:a", "is no hardware"),
        ("east:prfaas:h200x32:a", "more than 16 GPUs"),
        ("east:prfaas:h200x8:http://a", 'site east: "http://a" is no host; write a name or an address'),
        ("east:prfaas:h200x8:,", "site east has no hosts"),
        (
            "east:prfaas:h200x8:192.0.2.10,198.51.100.999",
            'site east: "198.51.100.999" is no IPv4 address; write four numbers from 0 to 255, for example 192.0.2.10',
        ),
        ("east:prfaas:h200x8:0.0.0.0", '"0.0.0.0" is no address that others can connect to'),
        ("east:prfaas:h200x8:::", '"::" is no address that others can connect to'),
    ],
)
def test_what_is_no_site_is_said(text: str, said: str) -> None:
    with pytest.raises(CliError) as raised:
        DraftSite.parse(text)
    assert said in str(raised.value)


@pytest.mark.parametrize("text", ["east:home", "east:home:fast", "east:home:40 GB/s"])
def test_what_is_no_link_is_said(text: str) -> None:
    with pytest.raises(CliError):
        DraftLink.parse(text)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sites": ()}, "a deployment needs a site"),
        ({"sites": (EAST,), "links": ()}, "no site serves clients"),
        ({"model": "models/x"}, "is no absolute path"),
        (
            {"model": "tiny:nothing"},
            "is no model that prfaas has; choose one of trained:words, trained:smollm2",
        ),
        ({"model": "tiny:"}, "is no model that prfaas has"),
        ({"model": "/"}, "is the root of the file system; write the checkpoint's directory"),
        ({"model": "//x/.."}, "is the root of the file system"),
        ({"gateway_host": "198.51.100.999"}, '--gateway "198.51.100.999" is no IPv4 address'),
        ({"name": "-"}, "is no name of a deployment"),
    ],
)
def test_what_makes_no_deployment_is_said(changes: dict[str, object], said: str) -> None:
    with pytest.raises(CliError) as raised:
        draft(**changes).check()
    assert said in str(raised.value)
