"""What benches on real engines share: a home that has this machine's models, and figures with their goals."""

import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prfaas.core.deployment.model import default_state_dir

Figure = dict[str, Any]


@contextmanager
def home_with_models(prefix: str) -> Iterator[Path]:
    """A state directory for one run. Models stay where everything else keeps them, and are fetched once."""
    with tempfile.TemporaryDirectory(prefix=prefix) as home:
        models = default_state_dir() / "models"
        models.mkdir(parents=True, exist_ok=True)
        Path(home, "models").symlink_to(models)
        yield Path(home)


def goal(name: str, value: float, limit: float, *, is_least: bool) -> dict[str, Any]:
    """What a figure is to reach, and whether it does."""
    met = value >= limit if is_least else value <= limit
    return {"name": name, "value": value, "goal": limit, "is_least": is_least, "met": met}


def report(
    measured: Iterable[Figure],
    sentence: Callable[[Mapping[str, Any]], str],
    goals_of: Callable[[Mapping[str, Any]], Iterable[dict[str, Any]]],
    *,
    as_json: bool,
) -> None:
    """Print each figure on stderr when it is there, and in the end all of them with their goals."""
    figures = []
    for figure in measured:
        figures.append(figure)
        print(sentence(figure), file=sys.stderr, flush=True)
    goals = [each for figure in figures for each in goals_of(figure)]
    if as_json:
        print(json.dumps({"figures": figures, "goals": goals}, indent=2))
        return
    for figure in figures:
        print(sentence(figure))
    for each in goals:
        word = "at least" if each["is_least"] else "at most"
        print(f"{each['name']}: {each['value']:.3f}, goal {word} {each['goal']:g}: {each['met']}")
