"""YAML as it is emitted: the same bytes for the same content."""

from collections.abc import Mapping
from typing import Any

import yaml


class _Dumper(yaml.CSafeDumper):
    """Writes every value out where it stands, and texts of several lines as blocks."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


def _text(dumper: yaml.CSafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def yaml_text(*documents: Mapping[str, Any]) -> str:
    """One or several documents, their fields in the order that they were given."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
