"""The vote of self-consistency: samples, what they agree on, and when that is settled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Answer = TypeVar("Answer", bound=Hashable)


@dataclass(frozen=True)
class Sample(Generic[Answer]):
    """One sampled continuation of a prompt.

    Attributes:
        text: the new tokens as text, without special tokens.
        answer: what `parse` read from it; None is no vote.
    """

    text: str
    answer: Answer | None


@dataclass(frozen=True)
class Consensus(Generic[Answer]):
    """What the samples of a prompt agree on. Made from the samples alone: `Consensus(samples)`.

    Attributes:
        answer: the most frequent answer, of equally frequent ones the one drawn first; None if no
            sample has an answer.
        votes: how many samples gave each answer, `answer` first.
        agreement: votes for `answer` / samples, those without an answer included; 0 to 1.
        samples: in the order in which they were drawn.
    """

    answer: Answer | None = field(init=False)
    votes: dict[Answer, int] = field(init=False, hash=False)
    agreement: float = field(init=False)
    samples: tuple[Sample[Answer], ...]

    def __post_init__(self) -> None:
        # Counter keeps the order of first votes, and most_common that order among equals.
        votes = dict(_count(self.samples).most_common())
        winner = next(iter(votes), None)
        agreement = votes[winner] / len(self.samples) if winner is not None else 0.0
        for name, value in (("answer", winner), ("votes", votes), ("agreement", agreement)):
            object.__setattr__(self, name, value)


def next_chunk(drawn: Sequence[Sample], n: int, chunk_size: int) -> int:
    """How many samples to draw next: at least the fewest that could settle the vote; 0 if it is.

    An answer's lead over another is the difference of their votes, less one if the other was drawn
    first and wins a tie. An answer that nobody gave yet has no votes and was not. The vote is
    settled when the leader's least lead is no less than the samples that are left. Each sample
    adds at most one to that lead and takes one from what is left.
    """
    left = n - len(drawn)
    votes = _count(drawn)
    lead = 0
    if votes:
        (leader, lead), *_ = votes.most_common(1)
        wins_ties = 1
        for answer, count in votes.items():  # in the order of first votes
            if answer == leader:
                wins_ties = 0
            else:
                lead = min(lead, votes[leader] - count - wins_ties)
    if lead >= left:
        return 0
    return min(left, max(chunk_size, (left - lead + 1) // 2))


def _count(samples: Sequence[Sample[Answer]]) -> Counter[Answer]:
    return Counter(sample.answer for sample in samples if sample.answer is not None)
