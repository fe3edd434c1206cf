"""A deployment file to begin with: the text of one, with comments, from a few facts."""

import posixpath
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from prfaas.cli.common import CliError
from prfaas.core.deployment.addresses import checked_host, is_loopback, plain_host
from prfaas.core.deployment.field_types import NAME_PATTERN
from prfaas.core.deployment.model import HUB_NAME, ModelSource, made_model, made_model_names
from prfaas.core.units import parse_bits_per_s
from prfaas.tools.emit.template import rendered, yaml_scalar

_HTTP, _KV = 8100, 8200
# Ranks of one engine, and so ports between the KV ports of two on one host.
_MOST_RANKS = 16
_EVERY_ADDRESS = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class DraftSite:
    """A cluster: one engine on each of its hosts; a host that is named twice has two."""

    name: str
    kind: Literal["prfaas", "pd"]
    hardware: str
    gpus: int
    """Of one engine."""
    hosts: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "DraftSite":
        """Read "NAME:KIND:HARDWARE:HOST,HOST", where HARDWARE may end in "x8" for eight GPUs.

        Raises:
            CliError: it is something else.
        """
        parts = text.split(":", 3)
        if len(parts) < 4:
            raise CliError(
                f'"{text}" is no site; write NAME:KIND:HARDWARE:HOST,HOST, for example east:prfaas:h200x8:192.0.2.10'
            )
        name, kind, hardware, hosts = parts
        _check_name(name, "site")
        if kind not in ("prfaas", "pd"):
            raise CliError(
                f'"{kind}" is no kind of site; write prfaas (only prefills) or pd (serves clients)'
            )
        count = re.fullmatch(r"([A-Za-z][A-Za-z0-9._-]*?)(?:x([1-9][0-9]*))?", hardware)
        if count is None:
            raise CliError(f'"{hardware}" is no hardware; write for example h200x8, cpu or synthetic')
        gpus = int(count[2] or 1)
        if gpus > _MOST_RANKS:
            raise CliError(
                f'"{hardware}" has more than {_MOST_RANKS} GPUs for one engine; write the file by hand'
            )
        listed = tuple(host.strip() for host in hosts.split(",") if host.strip())
        if not listed:
            raise CliError(
                f"site {name} has no hosts; write addresses or names with commas between, for example 192.0.2.10"
            )
        for host in listed:
            check_host(host, f"site {name}:")
            if host in _EVERY_ADDRESS:
                raise CliError(
                    f'site {name}: "{host}" is no address that others can connect to; write the machine\'s own'
                )
        return cls(name, "prfaas" if kind == "prfaas" else "pd", count[1], gpus, listed)


@dataclass(frozen=True, slots=True)
class DraftLink:
    """From where to where KVCache goes, and how much of it."""

    source: str
    target: str
    bandwidth: str

    @classmethod
    def parse(cls, text: str) -> "DraftLink":
        """Read "SOURCE:TARGET:BANDWIDTH", for example "east:home:40 Gbit/s".

        Raises:
            CliError: it is something else.
        """
        parts = text.split(":", 2)
        if len(parts) < 3:
            raise CliError(
                f'"{text}" is no link; write SOURCE:TARGET:BANDWIDTH, for example east:home:40 Gbit/s'
            )
        try:
            parse_bits_per_s(parts[2])
        except ValueError as error:
            raise CliError(f'link "{text}": {error}') from None
        return cls(*parts)


@dataclass(frozen=True, slots=True)
class Draft:
    """The facts that a deployment file is written from."""

    name: str
    model: str
    """A checkpoint's directory, or "trained:NAME", "hub:ORG/NAME" or "tiny:NAME" for one that prfaas has or fetches."""
    served_name: str
    max_model_len: int
    sites: tuple[DraftSite, ...]
    links: tuple[DraftLink, ...]
    gateway_host: str

    def check(self) -> None:
        """Check that a file of it can be good. Loading the file checks the rest.

        Raises:
            CliError: in one sentence, what would be right.
        """
        _check_name(self.name, "deployment")
        if not self.sites:
            raise CliError(
                "a deployment needs a site; give --site, for example east:prfaas:h200x8:192.0.2.10"
            )
        if not any(site.kind == "pd" for site in self.sites):
            raise CliError("no site serves clients; give one of kind pd")
        check_model(self.model)
        check_host(self.gateway_host, "--gateway")

    @property
    def is_on_one_machine(self) -> bool:
        """True if every engine is at a loopback address."""
        return all(is_loopback(host) for site in self.sites for host in site.hosts)

    def text(self) -> str:
        """The file."""
        source = drafted_source(self.model)
        on_host: Counter[str] = Counter()
        return rendered(
            "deployment.yaml.jinja",
            draft=self,
            source=source,
            instances=[list(_instances(site, on_host)) for site in self.sites],
            is_local=is_loopback(self.gateway_host),
            decoding=[site.name for site in self.sites if site.kind == "pd"],
            is_small=source is not None and source.kind != "hub",
            is_on_cpus=any(site.hardware == "cpu" for site in self.sites),
        )


def _instances(site: DraftSite, on_host: Counter[str]) -> Iterator[str]:
    """The fields of each; `on_host` counts the engines of each host, also those of other sites."""
    for number, host in enumerate(site.hosts):
        index = on_host[plain_host(host)]
        on_host[plain_host(host)] += 1
        if site.kind == "prfaas":
            roles = "prefill"
        elif len(site.hosts) == 1:
            roles = "prefill, decode"
        else:
            roles = "decode" if number else "prefill"
        fields = [
            f"name: {site.name}-{number}",
            f"roles: [{roles}]",
            f"host: {yaml_scalar(host)}",
            f"http_port: {_HTTP + index}",
            f"kv_port: {_KV + _MOST_RANKS * index}",
        ]
        if site.gpus > 1:
            fields.append(f"tensor_parallel: {site.gpus}")
        yield ", ".join(fields)


def drafted_source(model: str) -> ModelSource | None:
    """The model source of "trained:NAME", "hub:ORG/NAME" or "tiny:NAME"; None: a path."""
    kind, found, name = model.partition(":")
    if not found:
        return None
    if kind == "trained":
        return ModelSource("trained", name)
    if kind == "tiny":
        return ModelSource("tiny", name)
    return ModelSource("hub", name) if kind == "hub" else None


def check_model(model: str) -> None:
    """Check that every machine can find the model there.

    Raises:
        CliError: it is neither the absolute path of a directory below the root nor a model that prfaas makes.
    """
    source = drafted_source(model)
    if source is not None:
        if source.kind == "hub" and not re.fullmatch(HUB_NAME, source.name):
            raise CliError(f'--model "{model}" is no name of the hub; write hub:ORG/NAME')
        if source.kind != "hub" and made_model(source.name) != source:
            known = ", ".join(str(made_model(name)).replace(" ", "") for name in made_model_names())
            raise CliError(f'--model "{model}" is no model that prfaas has; choose one of {known}')
    elif not model.startswith("/"):
        raise CliError(
            f'--model "{model}" is no absolute path, which all machines need; or write trained:words, hub:ORG/NAME or '
            "tiny:qwen3-next"
        )
    elif not posixpath.normpath(model).strip("/"):
        raise CliError(
            f'--model "{model}" is the root of the file system; write the checkpoint\'s directory, for example '
            "/models/qwen3-next"
        )


def check_host(host: str, where: str) -> None:
    """Raise CliError if it is neither an address nor a name of a machine; `where` begins the sentence."""
    try:
        checked_host(host)
    except ValueError as error:
        raise CliError(f"{where} {error}") from None


def _check_name(name: str, what: str) -> None:
    if not re.fullmatch(NAME_PATTERN, name):
        raise CliError(
            f'"{name}" is no name of a {what}; take letters, digits, ".", "_" and "-", at most 63, a letter or '
            "digit first"
        )
