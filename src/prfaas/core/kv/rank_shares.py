"""Which heads a rank of one engine has in common with a rank of another that is divided into more or fewer.

vLLM gives consecutive heads to each rank. Heads that there are too few of are copied: ranks that follow each other have
the same one. So where one size divides the other, each rank of the smaller side shares its heads with as many ranks of
the larger side as that is larger, which follow each other too.
"""

from dataclasses import dataclass, replace

from prfaas.core.kv.groups import GroupKind
from prfaas.core.kv.page_layout import PageLayout, PagePart, unlike_pages


def paired_ranks(rank: int, ranks: int, others: int) -> range:
    """The ranks of an engine of `others` ranks that share heads with this rank of `ranks`; none where no size divides
    the other."""
    if others % ranks == 0:
        each = others // ranks
        return range(rank * each, (rank + 1) * each)
    if ranks % others == 0:
        return range(rank * others // ranks, rank * others // ranks + 1)
    return range(0)


def transfers_per_rank(producer_ranks: int, consumer_ranks: int, stages: int = 1) -> int:
    """How many transfers, each of another rank, bring one rank of a consumer its KV; `stages`: of the producer."""
    return stages * max(1, producer_ranks // consumer_ranks)


@dataclass(frozen=True, slots=True)
class RankGrid:
    """An engine's ranks: stages of a pipeline, each with some of the layers, whose heads its ranks divide.

    Numbers go through the ranks of a stage first, as vLLM's do.
    """

    tensor: int
    stages: int = 1

    @property
    def count(self) -> int:
        """Of all ranks."""
        return self.tensor * self.stages

    def paired(self, rank: int, others: "RankGrid") -> tuple[int, ...]:
        """The ranks of another engine that share heads and layers with one of these.

        None where no tensor-parallel size divides the other, or both engines have stages: only a prefill engine has.
        """
        if self.stages > 1 and others.stages > 1:
            return ()
        of_heads = paired_ranks(rank % self.tensor, self.tensor, others.tensor)
        return tuple(stage * others.tensor + each for stage in range(others.stages) for each in of_heads)


@dataclass(frozen=True, slots=True)
class RankPair:
    """A rank that sends, and one that it sends to."""

    producer: int
    producer_ranks: int
    consumer: int
    consumer_ranks: int
    stage: int = 0
    """Of the producer, whose ranks are numbered within it."""
    stages: int = 1

    def __post_init__(self) -> None:
        """Raises ValueError: the two share no heads."""
        if self.consumer not in paired_ranks(self.producer, self.producer_ranks, self.consumer_ranks):
            raise ValueError(
                f"rank {self.producer} of {self.producer_ranks} and rank {self.consumer} of {self.consumer_ranks} "
                "have no heads in common"
            )

    def told(self) -> tuple[int, ...]:
        """For a mark that both sides compute: without stages as it was before there were any."""
        heads = (self.producer, self.producer_ranks, self.consumer, self.consumer_ranks)
        return heads if self.stages == 1 else (*heads, self.stage, self.stages)

    @property
    def is_alike(self) -> bool:
        """Both sides divide heads among as many ranks."""
        return self.producer_ranks == self.consumer_ranks

    @property
    def transfers(self) -> int:
        """How many bring this consumer's rank its KV."""
        return transfers_per_rank(self.producer_ranks, self.consumer_ranks, self.stages)

    @property
    def number(self) -> int:
        """Of this pair's transfer among them."""
        return self.stage * self._of_stage + self._turn

    @property
    def _of_stage(self) -> int:
        return transfers_per_rank(self.producer_ranks, self.consumer_ranks)

    @property
    def _turn(self) -> int:
        """Of the producer among those of its stage that send to this consumer."""
        return self.producer % self._of_stage

    @property
    def finer_rank(self) -> int:
        """The rank on the side that has more: no other pair of the two engines has it in this stage."""
        return max(self.producer, self.consumer)

    def share(
        self,
        sent: PageLayout,
        kept: PageLayout,
        producer: str,
        consumer: str,
        *,
        place: int = 0,
        copies: int = 1,
    ) -> tuple[PageLayout, PageLayout] | None:
        """The part of a layer's pages that goes from this producer's rank to this consumer's rank.

        Args:
            sent: how the producer keeps the layer.
            kept: how the consumer does.
            producer: its name, for the sentence.
            consumer: its name.
            place: number of the layer's region: ranks that keep the same take turns by it.
            copies: how many ranks of the consumer keep the same of it and read what one of them was sent.

        Returns:
            At either side; None: another rank sends what both have, or is sent what this one reads.

        Raises:
            UnlikePagesError: the heads can't be divided so.
        """
        if self.consumer % copies != place % copies:
            return None
        if self.is_alike:
            return sent, kept
        turn = place // copies
        copied = sent == kept or (sent.kind is GroupKind.STATE and sent.page_bytes == kept.page_bytes)
        if copied or not sent.parts or len(sent.parts) != len(kept.parts):
            # What all ranks have as a whole leaves from one of them. All else is for `wire_forms` to refuse.
            return (sent, kept) if self._turn == turn % self._of_stage else None
        ours: list[PagePart] = []
        theirs: list[PagePart] = []
        for mine, other in zip(sent.parts, kept.parts, strict=True):
            found = self._heads(mine.heads, other.heads, turn)
            if found is None:
                raise unlike_pages(
                    "heads",
                    f"{sent.kind.value} layers on {self.producer_ranks} and {self.consumer_ranks} ranks",
                    (producer, mine.heads),
                    (consumer, other.heads),
                )
            first_sent, first_kept, heads = found
            if heads:
                ours.append(_narrowed(mine, first_sent, heads))
                theirs.append(_narrowed(other, first_kept, heads))
        if not ours:
            return None
        return replace(sent, parts=tuple(ours)), replace(kept, parts=tuple(theirs))

    def _heads(self, sent: int, kept: int, turn: int = 0) -> tuple[int, int, int] | None:
        """(First head at the producer, at the consumer, how many) of what this pair moves; None: it does not fit."""
        if self.producer_ranks >= self.consumer_ranks:
            if sent * self._of_stage == kept:
                return 0, self._turn * sent, sent
            if sent == 1 and self._of_stage % kept == 0:
                copies = self._of_stage // kept
                head, copy = divmod(self._turn, copies)
                return 0, head, int(copy == turn % copies)
            return None
        receivers = self.consumer_ranks // self.producer_ranks
        place = self.consumer % receivers
        if kept * receivers == sent:
            return place * kept, 0, kept
        if kept == 1 and receivers % sent == 0:
            return place // (receivers // sent), 0, 1
        return None


def _narrowed(part: PagePart, first_head: int, heads: int) -> PagePart:
    return replace(
        part,
        heads=heads,
        offset_bytes=part.offset_bytes + first_head * part.head_stride_bytes,
        head_stride_bytes=part.head_stride_bytes if heads > 1 else 0,
    )


def rank_copies(heads: int, rank_heads: int, ranks: int) -> int:
    """How many ranks that follow each other keep the same heads: 1 where heads are divided, or it is not certain.

    Args:
        heads: of the model; 0: one latent that all ranks keep.
        rank_heads: of one rank.
        ranks: tensor-parallel ranks.
    """
    if heads == 0:
        return ranks
    return ranks // heads if rank_heads == 1 and heads < ranks and ranks % heads == 0 else 1
