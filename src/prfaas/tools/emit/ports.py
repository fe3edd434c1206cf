"""The list of ports that a machine's firewall must let through."""

from prfaas.core.deployment import GATEWAY
from prfaas.tools.emit.blueprint import Blueprint, Place
from prfaas.tools.emit.openings import CLIENTS, OPERATORS, openings_of


def ports_table(blueprint: Blueprint, place: Place) -> str:
    """One line for each range of ports of a machine: the ports, whose it is, and who connects to it.

    Ports that only this machine reaches are left out.
    """
    rows = [("port", "of", "open to")]
    for opening in openings_of(blueprint.deployment):
        if opening.owner not in place.members:
            continue
        sources = ", ".join(_address(blueprint, each) for each in opening.sources)
        first, last = (opening.ports[0], opening.ports[-1]) if opening.ports else (1, 65535)
        ports = f"{first}-{last}/tcp" if last > first else f"{first}/tcp"
        rows.append((ports, f"{opening.owner} {opening.purpose}", sources))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "".join(f"{row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]}\n" for row in rows)


def _address(blueprint: Blueprint, name: str) -> str:
    if name in (CLIENTS, OPERATORS, GATEWAY):
        return name
    return f"{name} ({blueprint.placed(name).host})"
