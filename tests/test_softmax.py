"""The kernels' online softmax (csrc/softmax.cuh), on the CPU, in both of its layouts."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import pytest
from host_sources import can_compile, compile_host

pytestmark = can_compile

LAYOUTS = {"matrix warps": True, "leaf warps": False}
LOG2_E = 1.4426950408889634


@pytest.fixture(scope="module")
def host(tmp_path_factory) -> ctypes.CDLL:
    host = compile_host("softmax_host.cpp", tmp_path_factory.mktemp("host"))
    host.attend_rows.restype = ctypes.c_char_p
    return host


@dataclass(frozen=True)
class Rows:
    """What came of rows of scores: the weighted mean of values, the lse, follows of each warp."""

    out: np.ndarray
    lse: np.ndarray
    num_follows: np.ndarray


def attend(
    host: ctypes.CDLL, layout: str, scores: np.ndarray, values: np.ndarray, scale: float = 1.0
) -> Rows:
    by_row = LAYOUTS[layout]
    scores, values = (np.ascontiguousarray(x, dtype=np.float32) for x in (scores, values))
    out, lse = np.empty(len(scores), np.float32), np.empty(len(scores), np.float32)
    num_follows = np.zeros(32, np.int32)
    places = [ctypes.c_void_p(x.ctypes.data) for x in (scores, values, out, lse, num_follows)]
    error = host.attend_rows(
        by_row, *places[:2], scores.shape[1], ctypes.c_float(scale * LOG2_E), 0, *places[2:]
    )
    assert error is None, error.decode()
    return Rows(out, lse / LOG2_E, num_follows)


def true_rows(scores: np.ndarray, values: np.ndarray, scale: float) -> tuple:
    scaled = scores.astype(np.float32).astype(np.float64) * scale
    largest = scaled.max(axis=1, keepdims=True, initial=-1e300)
    weights = np.exp(scaled - largest)
    sums = weights.sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        out = np.where(sums > 0, weights @ values.astype(np.float32) / sums, 0.0)
        lse = np.where(sums > 0, largest[:, 0] + np.log(sums), -np.inf)
    return out, lse


def random_rows(host: ctypes.CDLL, layout: str, num_tokens: int, size: float) -> tuple:
    random = np.random.default_rng(num_tokens)
    shape = host.rows_at_once(LAYOUTS[layout]), num_tokens
    return size * random.standard_normal(shape), random.standard_normal(num_tokens)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_tokens", [1, 31, 64, 65, 1000])
@pytest.mark.parametrize("size", [0.0, 1.0, 30.0, 1e4])
def test_it_is_the_softmax(host, layout: str, num_tokens: int, size: float) -> None:
    scores, values = random_rows(host, layout, num_tokens, size)
    scores[::3, num_tokens // 2 :] = -np.inf  # what a row does not see
    scores[::7] = -np.inf
    scores[1::5, : num_tokens // 2] = -np.inf  # nothing in the first tiles
    found = attend(host, layout, scores, values, scale=0.3)
    out, lse = true_rows(scores, values, 0.3)
    np.testing.assert_allclose(found.out, out, atol=2e-5 + 2e-7 * size, rtol=0)
    np.testing.assert_allclose(found.lse, lse, atol=1e-5, rtol=2e-7)
    assert (found.out[::7] == 0).all()
    assert (found.lse[::7] == -np.inf).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("step", [1e-3, 0.01, 0.09, 1.0, 50.0, -0.09, -50.0])
def test_scores_that_rise_or_fall(host, layout: str, step: float) -> None:
    """By less than the slack a tile, so that the maximum lags behind, and by much more."""
    scores, values = random_rows(host, layout, 1000, 0.5)
    scores += step * np.arange(1000)
    found = attend(host, layout, scores, values)
    out, lse = true_rows(scores, values, 1.0)
    np.testing.assert_allclose(found.out, out, atol=2e-4, rtol=0)
    np.testing.assert_allclose(found.lse, lse, atol=1e-4, rtol=2e-7)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_maxima_seldom_follow(host, layout: str) -> None:
    """In the first tile, and then where a score exceeds them by 2^8: of 63 tiles or 125."""
    scores, values = random_rows(host, layout, 4000, 1.0)
    assert (attend(host, layout, scores, values).num_follows == 1).all()
    assert (attend(host, layout, 3 * scores, values).num_follows < 10).all()
    rising = scores + 0.1 * np.arange(4000)
    assert (attend(host, layout, rising, values).num_follows > 50).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("companion", [np.nan, np.inf, -np.inf, 0.0, "rising", "falling"])
def test_bits_of_a_row_do_not_depend_on_its_companions(host, layout: str, companion) -> None:
    """Though all rows of a warp vote on whether maxima follow."""
    scores, values = random_rows(host, layout, 500, 5.0)
    expected = attend(host, layout, scores, values)
    slope = {"rising": 3.0, "falling": -3.0}.get(companion)
    for kept in (0, 5):
        others = np.arange(len(scores)) % 8 != kept
        changed = scores.copy()
        changed[others] = companion if slope is None else slope * np.arange(500)
        found = attend(host, layout, changed, values)
        for name in ("out", "lse"):
            ours, theirs = (getattr(x, name)[~others] for x in (found, expected))
            assert (ours.view(np.int32) == theirs.view(np.int32)).all()
