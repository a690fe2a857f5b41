"""The vote of self-consistency: who wins, and when no sample can change that."""

from __future__ import annotations

import copy
import itertools

import pytest

from hf_cascade import Consensus, Sample
from hf_cascade.vote import next_chunk


def samples_of(answers) -> tuple[Sample, ...]:
    return tuple(Sample(f"it is {answer}", answer) for answer in answers)


@pytest.mark.parametrize(
    ("answers", "votes", "agreement"),
    [
        ([1, 2, 2, 3], {2: 2, 1: 1, 3: 1}, 1 / 2),
        ([3, 1, 1, 3], {3: 2, 1: 2}, 1 / 2),  # the first drawn of equals
        ([None, None, 7, 7, 8], {7: 2, 8: 1}, 2 / 5),  # no vote, but a sample
        ([0, "", 0], {0: 2, "": 1}, 2 / 3),  # an answer may be falsy
        ([False, False, None], {False: 2}, 2 / 3),
        ([None, None], {}, 0),
        ([], {}, 0),
    ],
)
def test_the_most_frequent_answer_wins(answers, votes, agreement):
    consensus = Consensus(samples_of(answers))
    assert list(consensus.votes.items()) == list(votes.items())
    assert consensus.answer == next(iter(votes), None)
    assert consensus.agreement == agreement
    assert Consensus(consensus.samples) == consensus
    assert hash(copy.deepcopy(consensus)) == hash(consensus)


ANSWERS = ("a", "b", "c", "d", None)


def winner(answers):
    return Consensus(samples_of(answers)).answer


def beginnings(n):
    """All ways in which up to n samples may have come out; the first answers come in order."""
    for length in range(n + 1):
        for answers in itertools.product(ANSWERS, repeat=length):
            firsts = list(dict.fromkeys(answer for answer in answers if answer))
            if firsts == list(ANSWERS[: len(firsts)]):  # others are these by other names
                yield answers


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6])
def test_a_vote_is_settled_exactly_when_no_samples_could_change_it(n):
    for drawn in beginnings(n):
        endings = itertools.product(ANSWERS, repeat=n - len(drawn))
        outcomes = {winner([*drawn, *ending]) for ending in endings}
        is_settled = next_chunk(samples_of(drawn), n, 1) == 0
        assert is_settled == (len(outcomes) == 1), drawn
        assert not is_settled or outcomes == {winner(drawn)}, drawn


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6])
def test_a_round_is_the_shortest_that_could_settle_the_vote(n):
    for drawn in beginnings(n):
        count = next_chunk(samples_of(drawn), n, 1)

        def settles(length, drawn=drawn):
            return any(
                next_chunk(samples_of([*drawn, *more]), n, 1) == 0
                for more in itertools.product(ANSWERS, repeat=length)
            )

        assert settles(count), drawn
        assert count == 0 or not settles(count - 1), drawn


def test_a_round_is_a_chunk_or_what_is_left():
    assert next_chunk((), 16, 4) == 8  # of fewer, none could settle it
    assert next_chunk(samples_of("aaaaaaab"), 16, 1) == 1
    assert next_chunk(samples_of("aaaaaaab"), 16, 4) == 4
    assert next_chunk(samples_of("abababab"), 10, 4) == 2
    assert next_chunk(samples_of("aaaaaaaa"), 16, 4) == 0
