"""How rank 0 notices a rank that was killed."""

import pytest

from hpjob.runtime import rendezvous
from hpjob.runtime.rendezvous import _GONE, _SILENCE_S, _SILENT_LOOKS, PeerStore, _Beats


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(rendezvous.time, "monotonic", lambda: now[0])
    return now


def looks(beats: _Beats, clock: list[float], counts: list[int], seconds: float) -> list[bool]:
    found = []
    for count in counts:
        clock[0] += seconds
        found.append(beats.ended(count))
    return found


def test_a_rank_that_stops_counting_is_missed(clock: list[float]) -> None:
    beats = _Beats()
    assert not any(looks(beats, clock, [1, 2, 3], 1.0))
    silent = looks(beats, clock, [3] * 30, 1.0)
    assert silent.index(True) + 1 == pytest.approx(_SILENCE_S, abs=1.0)


def test_a_slow_host_alone_is_no_death(clock: list[float]) -> None:
    beats = _Beats()
    assert not any(looks(beats, clock, [1, 1, 2, 2, 3, 3], 2 * _SILENCE_S))
    assert _SILENT_LOOKS > 2


def test_a_rank_that_never_began_or_left_in_good_order_is_not_missed(clock: list[float]) -> None:
    assert not any(looks(_Beats(), clock, [0] * 50, 5.0))
    assert not any(looks(_Beats(), clock, [1, 2, 2 + _GONE] + [2 + _GONE] * 50, 5.0))


def test_every_rank_learns_that_one_is_silent(clock: list[float]) -> None:
    server = rendezvous.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    stores = [PeerStore("127.0.0.1", server.port, rank=rank, world_size=3) for rank in range(3)]
    for _ in range(3):
        assert [store.probe() for store in stores] == [None] * 3
        clock[0] += 1.0
    found = None
    for _ in range(40):
        clock[0] += 1.0
        assert stores[2].probe() is None
        found = stores[0].probe()
        if found:
            break
    assert found is not None
    assert "rank 1" in found
    assert stores[2].probe() == found
