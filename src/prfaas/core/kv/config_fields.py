"""The fields of a Hugging Face `config.json`: read with checks, and what is meant where one is left out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

FULL = "full_attention"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"
LAYER_TYPES = (FULL, SLIDING, LINEAR)


# No model comes near them. Sizes are multiplied, and layers are listed one by one.
_MOST = 1 << 31
_MOST_LAYERS = 1 << 14


class ConfigError(ValueError):
    """A `config.json` that the KVCache can't be read out of, or a published model that isn't known."""


class UnknownModelError(ConfigError):
    """A model of which nobody has written what its layers keep. Its engines run all the same, and tell it."""


class CacheDtypeError(ConfigError):
    """A KV cache that the model can't have, or of a size that is not known: another dtype mends it."""


class ConfigFields:
    """The fields of one JSON object. Every error is a ConfigError that names the field; `inside` is its prefix."""

    def __init__(self, fields: Mapping[str, Any], inside: str = "") -> None:
        self.fields = fields
        self._inside = inside

    def whole(self, field: str, default: int | None = None, *, most: int = _MOST) -> int:
        """A whole number above 0; `default` where it is missing or null."""
        return self._number(field, default, least=1, most=most, needed="a whole number above 0")

    def layer_count(self, field: str, default: int | None = None) -> int:
        """The same of a number of layers, for each of which something is made."""
        return self.whole(field, default, most=_MOST_LAYERS)

    def count(self, field: str, default: int | None = None) -> int:
        """A whole number from 0 on; `default` where it is missing or null."""
        return self._number(field, default, least=0, most=_MOST, needed="a whole number from 0 on")

    def _number(self, field: str, default: int | None, *, least: int, most: int, needed: str) -> int:
        value = self.fields.get(field)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{self._inside}{field} must be {needed}, not {value!r:.100}")
        if value > most:
            raise ConfigError(f"{self._inside}{field} must be at most {most}, not {value!r:.100}")
        return value

    def given(self, field: str) -> bool:
        """True if the field is there and not null."""
        return self.fields.get(field) is not None

    def section(self, field: str) -> "ConfigFields":
        """The object in a field."""
        value = self.fields.get(field)
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self._inside}{field} must be an object, not {value!r:.100}")
        return ConfigFields(value, f"{self._inside}{field}.")

    def entries(self, field: str, length: int | None) -> Sequence[Any] | None:
        """The list in a field, of `length` entries unless that is None; None where the field is missing."""
        value = self.fields.get(field)
        if value is None:
            return None
        if not isinstance(value, list) or (length is not None and len(value) != length):
            needed = "a list" if length is None else f"a list of {length} entries, one per layer"
            raise ConfigError(f"{self._inside}{field} must be {needed}")
        return value

    def with_defaults(self, defaults: Mapping[str, Any]) -> "ConfigFields":
        """The same with `defaults` in place of missing fields. A null stays, as it does in transformers."""
        return ConfigFields({**defaults, **self.fields}, self._inside)

    @property
    def layers(self) -> int:
        """Layers of the decoder; NemotronHConfig of transformers 5.x counts them in a list."""
        blocks = self.entries("layers_block_type", None)
        if blocks and not self.given("num_hidden_layers"):
            return len(blocks)
        return self.layer_count("num_hidden_layers")

    @property
    def kv_heads(self) -> int:
        """KV heads of full attention; as many as query heads unless the file says otherwise."""
        if self.given("num_key_value_heads"):
            return self.whole("num_key_value_heads")
        return self.whole("num_attention_heads")

    @property
    def head_size(self) -> int:
        """Size of an attention head."""
        if self.given("head_dim"):
            return self.whole("head_dim")
        return self.whole("hidden_size") // self.whole("num_attention_heads")

    def layer_numbers(self, field: str, first: int) -> Sequence[int] | None:
        """Different numbers of layers, of which the first one has number `first`; None where the field is missing."""
        listed = self.entries(field, None)
        if listed is None:
            return None
        last = self.layers + first - 1
        if len({*listed}) != len(listed) or not {*listed} <= {*range(first, last + 1)}:
            raise ConfigError(
                f"{self._inside}{field} must be different layer numbers from {first} to {last}, not {listed!r:.100}"
            )
        return listed

    def layer_types(self, default: Callable[[int], str], longer_is_fine: bool = False) -> Sequence[str]:
        """The kind of every layer, from 0 on; `default` of its index where the file doesn't list them."""
        given = self.entries("layer_types", None if longer_is_fine else self.layers)
        if given is not None and len(given) < self.layers:
            raise ConfigError(
                f"{self._inside}layer_types must have an entry for each of {self.layers} layers"
            )
        types = [str(given[i]) if given is not None else default(i) for i in range(self.layers)]
        unknown = sorted(set(types) - set(LAYER_TYPES))
        if unknown:
            raise ConfigError(
                f'{self._inside}layer_types: "{unknown[0]:.100}" is not known; known are {", ".join(LAYER_TYPES)}'
            )
        return types


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """Bytes of one element: `kv` of attention, `state` of recurrent states, `conv` of convolutions' states.

    `fp8_layout` is the name in vLLM of what an fp8 cache of sparse MLA looks like; None where nobody said. With
    `is_default` nobody said what attention keeps, so some families have a form of their own.
    """

    kv: int
    state: int
    fp8_layout: str | None = None
    conv: int = 2
    is_default: bool = False


@cache
def _family_defaults() -> Mapping[str, Mapping[str, int]]:
    import yaml

    text = (resources.files(__package__) / "data" / "family_defaults.yaml").read_text(encoding="utf-8")
    return {
        family: entry["fields"] for entry in yaml.load(text, yaml.CSafeLoader) for family in entry["families"]
    }


def family_defaults(family: str) -> Mapping[str, int]:
    """What is meant by fields that a file of this `model_type` leaves out."""
    return _family_defaults().get(family, {})
