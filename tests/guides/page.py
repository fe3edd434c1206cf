"""A guide, as a newcomer reads it: the commands and files of its sections."""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Self

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Guide:
    """A page of docs/guides."""

    text: str

    @classmethod
    def read(cls, name: str) -> Self:
        return cls((ROOT / f"docs/guides/{name}.md").read_text(encoding="utf-8"))

    def section(self, title: str) -> str:
        """The text below a heading that begins with `title`, up to the next one."""
        found = re.search(rf"(?ms)^##+ {re.escape(title)}[^\n]*\n(.*?)(?=^##+ |\Z)", self.text)
        assert found is not None, title
        return found[1]

    def blocks(self, title: str, language: str = "sh") -> list[str]:
        """The blocks of a section in one language, in their order; those of lists too."""
        found = re.finditer(rf"(?ms)^( *)```{language}\n(.*?)^\1```", self.section(title))
        return [textwrap.dedent(each[2]) for each in found]

    def commands(self, title: str) -> list[str]:
        """The commands of a section's shell blocks, each in one line, in their order."""
        whole = re.sub(r"\\\n\s*", "", "".join(self.blocks(title)))
        return [line for line in whole.splitlines() if line]
