"""NetworkPolicies: each pod takes connections from those that need it, on the ports that they need."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address

from prfaas.core.deployment import GATEWAY
from prfaas.tools.emit.blueprint import Blueprint
from prfaas.tools.emit.openings import CLIENTS, OPERATORS, Opening, openings_of
from prfaas.tools.emit.pod import MEMBER_LABEL
from prfaas.tools.emit.pod_plan import PodPlan, bad_field, is_address
from prfaas.tools.emit.site import gateway_site
from prfaas.tools.emit.template import Fields


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
        rules = [
            self._rule(opening)
            for opening in openings_of(self.blueprint.deployment)
            if opening.owner in plan.members
        ]
        return {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": plan.name},
            "spec": {
                "podSelector": {"matchLabels": {MEMBER_LABEL: plan.name}},
                "policyTypes": ["Ingress"],
                "ingress": rules,
            },
        }

    def _rule(self, opening: Opening) -> Fields:
        ports = [{"port": port, "protocol": "TCP"} for port in opening.ports]
        if CLIENTS in opening.sources:
            return {"ports": ports}
        # Without ports: all of them.
        return ({"ports": ports} if ports else {}) | {"from": _once(self._peers(opening))}

    def _peers(self, opening: Opening) -> Iterator[Fields]:
        for source in opening.sources:
            if source == OPERATORS:
                namespace = {"kubernetes.io/metadata.name": self.blueprint.containers.monitoring_namespace}
                yield {"namespaceSelector": {"matchLabels": namespace}}
            elif source in self.pods:
                plan = self.pods[source]
                yield {"podSelector": {"matchLabels": {MEMBER_LABEL: plan.name}}}
                if plan.host is not None:
                    # Pods on their machine's network are seen with its address, not with their labels.
                    yield _block(plan.host)
            else:
                yield from self._elsewhere(source)

    def _elsewhere(self, source: str) -> Iterator[Fields]:
        """From where connections of another site's member come."""
        deployment = self.blueprint.deployment
        if source == GATEWAY:
            site, host = gateway_site(deployment), deployment.gateway.host
        else:
            member = self.blueprint.placed(source)
            site, host = member.cluster, member.host
        networks = self.blueprint.containers.networks.get(site)
        if networks is not None:
            yield from ({"ipBlock": {"cidr": network}} for network in networks)
        elif is_address(host) and not ip_address(host).is_unspecified:
            yield _block(host)
        else:
            raise bad_field(
                self.blueprint,
                f"containers.networks.{site}",
                f'is missing: from which addresses "{source}" is seen at {self.site} is not known; give blocks like '
                "[10.0.2.0/24]",
            )


def _block(host: str) -> Fields:
    address = ip_address(host)
    return {"ipBlock": {"cidr": f"{address}/{address.max_prefixlen}"}}


def _once(peers: Iterable[Fields]) -> list[Fields]:
    found: list[Fields] = []
    for peer in peers:
        if peer not in found:
            found.append(peer)
    return found
