"""Stages of a pipeline: each has some of the model's layers, and what engines compare is of all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group

from prfaas.core.kv.groups import KvGroup
from prfaas.serving.engines.vllm.layout import KvLayout, transfer_place


@dataclass(frozen=True, slots=True)
class ModelRegion:
    """A region of the model's KV, on whichever stage it is."""

    place: tuple[Any, ...]
    """Orders the regions of a model as those of a transfer."""
    layer_name: str
    part: int
    group: KvGroup
    page_bytes: int
    copies: int
    """How many ranks of its stage keep the same."""
    is_drafters: bool
    element: str
    """See `PageLayout`."""


@dataclass(frozen=True, slots=True)
class LayerStage:
    """A stage of an engine's pipeline, or all of an engine that has none."""

    number: int
    count: int
    model: tuple[ModelRegion, ...]
    """Of all stages."""
    places: tuple[int, ...]
    """Of each of this stage's own regions, its number among those of the model."""

    @classmethod
    def of_engine(cls, layout: KvLayout, count: int = 1) -> "LayerStage":
        """Read it. All stages of an engine call this at the same time: they meet.

        Args:
            layout: of this rank's KV.
            count: of stages.
        """
        own = regions_of(layout)
        if count == 1:
            return cls.among([own], 0)
        group = get_pp_group()
        found: list[Any] = [None] * group.world_size
        torch.distributed.all_gather_object(found, own, group=group.cpu_group)
        return cls.among(found, group.rank_in_group)

    @classmethod
    def among(cls, stages: Sequence[Sequence[ModelRegion]], number: int) -> "LayerStage":
        """A stage, by the regions of all."""
        model = sorted((region for stage in stages for region in stage), key=lambda region: region.place)
        numbers = {(region.layer_name, region.part): place for place, region in enumerate(model)}
        places = tuple(numbers[region.layer_name, region.part] for region in stages[number])
        return cls(number, len(stages), tuple(model), places)


def regions_of(layout: KvLayout) -> list[ModelRegion]:
    """The regions of one rank's KV."""
    return [
        ModelRegion(
            place=(region.is_drafters, *transfer_place(region.group, region.layer_name), region.part),
            layer_name=region.layer_name,
            part=region.part,
            group=region.group,
            page_bytes=region.page_bytes,
            copies=copies,
            is_drafters=region.is_drafters,
            element=region.layout.element,
        )
        for region, copies in zip(layout.regions, layout.copies, strict=True)
    ]
