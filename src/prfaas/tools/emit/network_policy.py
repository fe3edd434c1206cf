"""NetworkPolicies: each pod is connected to by those that need it, and engines and pools connect to no one else."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from urllib.parse import urlsplit

from prfaas.core.deployment import GATEWAY
from prfaas.tools.emit.blueprint import Blueprint
from prfaas.tools.emit.openings import CLIENTS, OPERATORS, Opening, openings_of
from prfaas.tools.emit.pod import MEMBER_LABEL
from prfaas.tools.emit.pod_plan import PodPlan, bad_field, is_address
from prfaas.tools.emit.site import gateway_site
from prfaas.tools.emit.template import Fields
from prfaas.tools.emit.volume import hub_folder


@dataclass(frozen=True, slots=True)
class PolicyMaker:
    """Makes the policies of one site."""

    blueprint: Blueprint
    site: str
    pods: Mapping[str, PodPlan]
    """The site's pods, by each member's name in the deployment file."""

    def policy(self, plan: PodPlan) -> Fields:
        """The NetworkPolicy of one pod: everything that it does not name is closed.

        Raises:
            DeploymentError: what another site's connections come from is not known.
        """
        openings = openings_of(self.blueprint.deployment)
        taken = [self._rule(opening) for opening in openings if opening.owner in plan.members]
        reached = [
            _ports(opening) | {"to": _once(self._peers(opening.owner))}
            for opening in openings
            if opening.owner not in plan.members and not set(plan.members).isdisjoint(opening.sources)
        ]
        # The gateway also reaches etcd and whatever else its file names.
        is_closed = plan.component != GATEWAY
        return {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": plan.name},
            "spec": {
                "podSelector": {"matchLabels": {MEMBER_LABEL: plan.name}},
                "policyTypes": ["Ingress", "Egress"] if is_closed else ["Ingress"],
                "ingress": taken,
            }
            | ({"egress": [_NAMES, *_once(reached), *self._outside(plan)]} if is_closed else {}),
        }

    def _rule(self, opening: Opening) -> Fields:
        if CLIENTS in opening.sources:
            return _ports(opening)
        return _ports(opening) | {
            "from": _once(each for name in opening.sources for each in self._peers(name))
        }

    def _outside(self, plan: PodPlan) -> Iterator[Fields]:
        """Where engines connect to that are no part of the deployment: anywhere, but on these ports only."""
        deployment = self.blueprint.deployment
        source, tracing = deployment.model.source, deployment.gateway.tracing
        web = bool(deployment.gateway.media_domains)
        if plan.instance is not None and (
            web or (source is not None and source.is_fetched and hub_folder(self.blueprint) is None)
        ):
            yield {"ports": [_port(443), *([_port(80)] if web else [])]}
        if plan.instance is not None and tracing is not None:
            url = urlsplit(tracing.endpoint)
            yield {"ports": [_port(url.port or (443 if url.scheme == "https" else 80))]}

    def _peers(self, member: str) -> Iterator[Fields]:
        """Where a member of the deployment is, or who operates it, as this site sees them."""
        if member == OPERATORS:
            yield _namespace(self.blueprint.containers.monitoring_namespace)
        elif member in self.pods:
            plan = self.pods[member]
            yield {"podSelector": {"matchLabels": {MEMBER_LABEL: plan.name}}}
            if plan.host is not None:
                # Pods on their machine's network are seen with its address, not with their labels.
                yield _block(plan.host)
        else:
            yield from self._elsewhere(member)

    def _elsewhere(self, source: str) -> Iterator[Fields]:
        """The addresses of another site's member."""
        deployment = self.blueprint.deployment
        if source == GATEWAY:
            site, host = gateway_site(deployment), deployment.gateway.host
        else:
            member = self.blueprint.placed(source)
            site, host = member.cluster, member.host
        networks = self.blueprint.containers.networks.get(site, ())
        yield from ({"ipBlock": {"cidr": network}} for network in networks)
        if is_address(host) and not ip_address(host).is_unspecified:
            # What leaves a site may be seen with another address than what is reached there.
            if not any(ip_address(host) in ip_network(network) for network in networks):
                yield _block(host)
        elif not networks:
            raise bad_field(
                self.blueprint,
                f"containers.networks.{site}",
                f'is missing: from which addresses "{source}" is seen at {self.site} is not known; give blocks like '
                "[10.0.2.0/24]",
            )


def _port(number: int, protocol: str = "TCP") -> Fields:
    return {"port": number, "protocol": protocol}


def _ports(opening: Opening) -> Fields:
    """Those of an opening; without any, a rule is about all ports."""
    return {"ports": [_port(number) for number in opening.ports]} if opening.ports else {}


def _namespace(name: str) -> Fields:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


_NAMES = {"ports": [_port(53, "UDP"), _port(53)], "to": [_namespace("kube-system")]}
"""The cluster's DNS."""


def _block(host: str) -> Fields:
    address = ip_address(host)
    return {"ipBlock": {"cidr": f"{address}/{address.max_prefixlen}"}}


def _once(peers: Iterable[Fields]) -> list[Fields]:
    found: list[Fields] = []
    for peer in peers:
        if peer not in found:
            found.append(peer)
    return found
