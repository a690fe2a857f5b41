"""How partial states are kept in 16 bits (csrc/partial_state.cuh), on the CPU."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from host_sources import can_compile, compile_host

pytestmark = can_compile

LEAST_STORED, MOST_STORED = 2.0**-12, 65504.0


@pytest.fixture(scope="module")
def host(tmp_path_factory) -> ctypes.CDLL:
    return compile_host("partial_state_host.cpp", tmp_path_factory.mktemp("host"))


def exponent_of(host: ctypes.CDLL, largest: float) -> int:
    """Where a row whose largest value this is ends up, by the steps that a warp takes."""
    exponent = 0
    for _ in range(32):
        with np.errstate(over="ignore"):
            stored = np.float16(np.float32(largest) * np.float32(2.0**-exponent))
        more = host.rescaling_of(ctypes.c_float(float(stored)), exponent)
        if more == 0:
            return exponent
        exponent += more
    raise AssertionError(f"no end of it for {largest}")


@pytest.mark.parametrize("power", range(-126, 128))
def test_a_row_of_any_size_fits(host, power: int) -> None:
    for largest in (2.0**power, 1.99 * 2.0**power):
        exponent = exponent_of(host, largest)
        assert LEAST_STORED <= np.float16(largest * 2.0**-exponent) <= MOST_STORED
        assert np.isfinite(np.float32(2.0**exponent) * np.float32(2.0**-exponent))


@pytest.mark.parametrize("largest", [LEAST_STORED, 0.01, 1.0, 300.0, MOST_STORED])
def test_what_fits_is_left_alone(host, largest: float) -> None:
    assert exponent_of(host, largest) == 0


@pytest.mark.parametrize("largest", [0.0, float("inf"), float("nan")])
def test_what_nothing_helps_has_an_end(host, largest: float) -> None:
    assert -126 <= exponent_of(host, largest) <= 127


def test_places_hold_each_column_once(host) -> None:
    assert sorted(host.column_of(place) for place in range(16)) == list(range(16))
