"""Reads YAML files that people write."""

import yaml
from yaml._yaml import CParser
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver


def fault_in(error: Exception) -> tuple[int | None, str]:
    """The line of what a loader has raised, and what is wrong there, in some words; None: no line is told."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "it can't be parsed"
    return None if mark is None else mark.line + 1, f"is no valid YAML ({problem})"


class YamlLoader(Composer, CParser, SafeConstructor, Resolver):
    """As `yaml.SafeLoader`, with libyaml as its parser: six times as fast.

    `yaml.CSafeLoader` is faster still. But it composes nodes in C too, and a file of brackets that nest deeply ends the
    process; here such a file is a RecursionError.
    """

    def __init__(self, text: str) -> None:
        """Of a document's text."""
        CParser.__init__(self, text)
        Composer.__init__(self)
        SafeConstructor.__init__(self)
        Resolver.__init__(self)

    def document(self) -> tuple[yaml.Node | None, object]:
        """The text's only document, as a node and as the value that it is; None and None where there is none.

        Raises:
            yaml.YAMLError: it is no YAML.
            RecursionError: it nests too deeply.
        """
        node = self.get_single_node()
        return node, None if node is None else self.construct_document(node)
