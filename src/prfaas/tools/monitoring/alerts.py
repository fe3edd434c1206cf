"""Alert rules for Prometheus: `prfaas.rules.yaml` beside this file, with links to the guide of alerts."""

from pathlib import Path
from typing import Any

import yaml

from prfaas import __version__
from prfaas.core.shipped import page

_RULES = Path(__file__).with_name("prfaas.rules.yaml")
_HEAD = f"# Alert rules of prfaas {__version__}, by `prfaas monitoring alerts`.\n"


def rules() -> dict[str, Any]:
    """A document of Prometheus' rules, in the order of the guide's sections, to which each links."""
    document: dict[str, Any] = yaml.safe_load(_RULES.read_text(encoding="utf-8"))
    for group in document["groups"]:
        for rule in group["rules"]:
            rule["annotations"]["runbook_url"] = f"{page('guides/alerts')}#{rule['alert'].lower()}"
    return document


def rules_yaml() -> str:
    """The same as a file for `rule_files` of Prometheus."""
    return _HEAD + yaml.safe_dump(rules(), sort_keys=False, width=110)
