"""How partial states are kept in 16 bits (csrc/partial_state.cuh, packed_rows.cuh), on the CPU."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from host_sources import CUDA_HEADERS, can_compile, compile_host

pytestmark = [
    *can_compile,
    pytest.mark.skipif(CUDA_HEADERS is None, reason="no CUDA toolkit: cuda_fp16.h is its"),
]

LEAST_STORED, MOST_STORED = 2.0**-12, 65504.0
LAYOUTS = {"matrix warps": True, "leaf warps": False}
SIZES = (0.0, 1.0, 65504 / 3, 2.0**-13, 2.0**-40, 2.0**60, 2.0**-100, 2.0**124)


@pytest.fixture(scope="module")
def host(tmp_path_factory) -> ctypes.CDLL:
    host = compile_host("partial_state_host.cpp", tmp_path_factory.mktemp("host"))
    host.pack_all.restype = ctypes.c_char_p
    return host


def restored(
    host: ctypes.CDLL, layout: str, values: np.ndarray, normalizers: np.ndarray, exist: np.ndarray
) -> np.ndarray:
    """The values times their normalizers, as they come back from 16 bits."""
    arrays = [values.astype(np.float32), normalizers.astype(np.float32), exist.astype(np.uint8)]
    stored, scales = np.empty_like(arrays[0]), np.ones(len(values), np.float32)
    places = [ctypes.c_void_p(x.ctypes.data) for x in (*arrays, stored, scales)]
    error = host.pack_all(LAYOUTS[layout], *places)
    assert error is None, error.decode()
    with np.errstate(invalid="ignore"):
        return stored * scales[:, None]


def random_rows(host: ctypes.CDLL, layout: str, seed: int) -> tuple[np.ndarray, ...]:
    """Rows of sizes that meet each other in a warp, one in eight of which does not exist."""
    random = np.random.default_rng(seed)
    num_rows = host.rows_at_once(LAYOUTS[layout])
    values = random.uniform(-1, 1, (num_rows, 64)) * random.choice(SIZES, (num_rows, 1))
    stands_out = np.arange(64) == random.integers(0, 64, (num_rows, 1))
    values *= np.where(stands_out, 1, 2.0**-8)
    return values, random.uniform(0.01, 1, num_rows), random.integers(0, 8, num_rows) > 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_rows_of_any_size_come_back(host, layout: str, seed: int) -> None:
    values, normalizers, exist = random_rows(host, layout, seed)
    true = values.astype(np.float32).astype(np.float64) * normalizers[:, None].astype(np.float32)
    error = np.abs(restored(host, layout, values, normalizers, exist) - true)
    earned = np.abs(true).max(axis=1, keepdims=True) * 2.0**-11 + 1e-44  # a subnormal's rounding
    assert (error <= earned)[exist].all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_knows_nothing_of_its_neighbours(host, layout: str) -> None:
    values, normalizers, exist = random_rows(host, layout, 0)
    before = restored(host, layout, values, normalizers, exist)
    others = np.arange(len(values)) % 3 > 0
    for size in (0.0, 2.0**100, np.inf, np.nan):
        changed = np.where(others[:, None], size, values)
        after = restored(host, layout, changed, normalizers, exist)
        mine = exist & ~others
        assert (after[mine].view(np.uint32) == before[mine].view(np.uint32)).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lost", [np.inf, -np.inf, np.nan])
def test_what_is_lost_takes_nothing_along(host, layout: str, lost: float) -> None:
    values, normalizers, exist = random_rows(host, layout, 1)
    values = np.clip(values, -1, 1)
    values[:, 5] = lost
    normalizers[:] = 1
    out = restored(host, layout, values, normalizers, exist)[exist]
    assert ((out[:, 5] == lost) | np.isnan(out[:, 5])).all()
    others = np.arange(64) != 5
    assert np.allclose(out[:, others], values[exist][:, others], rtol=2.0**-11, atol=2.0**-24)


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


def test_places_hold_each_column_once(host) -> None:
    assert sorted(host.column_of(place) for place in range(16)) == list(range(16))
