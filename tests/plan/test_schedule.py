"""Simulated schedules against published bubble fractions and bounds that no schedule can beat."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hpjob.plan.schedule import interleaved, makespan, one_f_one_b
from hpjob.plan.schedule_timeline import timeline
from hpjob.plan.schedule_zbv import most_held, stage_costs, zbv_orders
from hpjob.plan.schedule_zbv_regular import Op, regular_orders
from hpjob.plan.stage_times import StageTimes


def _uniform(stages: int, chunks: int, forward: float = 1.0, inputs: float = 1.0, weights: float = 1.0) -> StageTimes:
    return StageTimes(*[[time / chunks] * stages for time in (forward, inputs, weights)])


def _bubble(style: str, pp: int, chunks: int, count: int) -> float:
    return 1 - 3 * count / makespan(style, pp, chunks, count, _uniform(pp * chunks, chunks), 0.0)


@pytest.mark.parametrize(("pp", "count"), [(4, 4), (4, 8), (4, 32), (8, 16), (16, 32), (8, 200)])
def test_bubbles_of_equal_stages_follow_the_formulas(pp: int, count: int) -> None:
    assert _bubble("1f1b", pp, 1, count) == pytest.approx((pp - 1) / (count + pp - 1))
    for chunks in (2, 4):
        if count % pp == 0:
            expected = (pp - 1) / (chunks * count + pp - 1)
            assert _bubble("interleaved", pp, chunks, count) == pytest.approx(expected)


@pytest.mark.parametrize(("pp", "count", "published"), [(4, 4, 0.111), (4, 8, 0.059), (8, 16, 0.068), (16, 32, 0.072)])
def test_zero_bubble_v_has_its_published_bubble(pp: int, count: int, published: float) -> None:
    assert _bubble("zbv", pp, 2, count) == pytest.approx(published, abs=0.0006)


@settings(max_examples=40, deadline=None)
@given(pp=st.integers(2, 9), count=st.integers(1, 60))
def test_zero_bubble_v_has_no_bubble_but_the_ramp(pp: int, count: int) -> None:
    """From pp microbatches on; with fewer nothing can fill a rank."""
    assume(count == pp or count >= 2 * pp - 1)
    assert _bubble("zbv", pp, 2, count) == pytest.approx((pp - 1) / (6 * count + pp - 1))


@pytest.mark.parametrize("pp", [2, 4, 8, 16])
def test_many_microbatches_of_zbv_take_what_all_operations_say(pp: int) -> None:
    """A makespan is worked out for some microbatches and extended."""
    times = _uniform(2 * pp, 2, 1.0, 1.21, 0.87)
    for count in (100, 333):
        assert makespan("zbv", pp, 2, count, times, 0.0) == pytest.approx(_ends(zbv_orders(pp, count), times))


@settings(max_examples=40, deadline=None)
@given(pp=st.integers(2, 6), count=st.integers(1, 20), data=st.data())
def test_an_order_made_for_any_costs_keeps_to_the_memory(pp: int, count: int, data: st.DataObject) -> None:
    """Inputs wait for weight gradients, so they count until those are done."""
    cost = st.tuples(*[st.integers(8, 40)] * 3)
    orders = zbv_orders(pp, count, tuple(data.draw(cost) for _ in range(2 * pp)))
    assert most_held(orders) <= min(2 * count, 2 * pp + 1)
    assert most_held(zbv_orders(pp, count)) <= min(2 * count, 2 * pp)
    assert all(len(order) == len(set(order)) == 6 * count for order in orders)


@pytest.mark.parametrize("count", [3, 4, 24])
def test_the_order_is_the_faster_one_of_those_by_rule_and_for_the_costs(count: int) -> None:
    times = _uniform(8, 1, 1.0, 1.21, 0.87)
    equal = [1.0] * 8
    assert stage_costs(StageTimes(equal, equal, equal)) == ((16, 16, 16),) * 8
    own = makespan("zbv", 4, 2, count, times, 0.0)
    spans = timeline("zbv", 4, 2, count, times, 0.0)
    assert max(span.end for span in spans) == pytest.approx(own)
    by_rule = _ends(regular_orders(4, count), times)
    assert own == pytest.approx(by_rule) if count >= 2 * 4 - 1 else own < 0.95 * by_rule


def _ends(orders: tuple[tuple[Op, ...], ...], times: StageTimes) -> float:
    """Return when the last rank ends if every operation waits for those that it needs."""
    seconds = {"F": times.forward, "B": times.backward_input, "W": times.backward_weight}
    last = len(times.forward) - 1
    done: dict[Op, float] = {}
    clocks, positions = [0.0] * len(orders), [0] * len(orders)
    while any(position < len(order) for position, order in zip(positions, orders, strict=True)):
        for rank, order in enumerate(orders):
            while positions[rank] < len(order):
                kind, stage, microbatch = op = order[positions[rank]]
                needed = {"F": ("F", stage - 1, microbatch), "W": ("B", stage, microbatch)}.get(
                    kind, ("B", stage + 1, microbatch) if stage < last else ("F", stage, microbatch)
                )
                if needed not in done and (kind, stage) != ("F", 0):
                    break
                clocks[rank] = done[op] = max(clocks[rank], done.get(needed, 0.0)) + seconds[kind][stage]
                positions[rank] += 1
    return max(clocks)


def test_every_operation_runs_once_and_backward_follows_forward() -> None:
    for rank in range(4):
        for order, chunks in ((one_f_one_b(4, rank, 8), 1), (interleaved(4, rank, 2, 8), 2)):
            assert len(order) == len(set(order)) == 2 * 8 * chunks
            for kind, chunk, microbatch in order:
                if kind == "B":
                    assert order.index(("F", chunk, microbatch)) < order.index(("B", chunk, microbatch))


@given(
    style=st.sampled_from(["1f1b", "interleaved", "zbv"]),
    pp=st.integers(2, 6),
    rounds=st.integers(1, 3),
    hop=st.floats(0, 0.5),
    data=st.data(),
)
@settings(max_examples=30, deadline=None)
def test_no_schedule_beats_its_slowest_rank_or_its_longest_path(
    style: str, pp: int, rounds: int, hop: float, data: st.DataObject
) -> None:
    chunks = 1 if style == "1f1b" else 2
    count, stages = rounds * pp, pp * chunks
    times = [data.draw(st.lists(st.floats(0.1, 2), min_size=stages, max_size=stages)) for _ in range(3)]
    span = makespan(style, pp, chunks, count, StageTimes(*times), hop)
    total = [sum(parts) for parts in zip(*times, strict=True)]
    if style == "zbv":
        busy = max(total[rank] + total[2 * pp - 1 - rank] for rank in range(pp))
    else:
        busy = max(sum(total[rank::pp]) for rank in range(pp))
    path = sum(times[0]) + sum(times[1])
    assert span >= count * busy - 1e-9
    assert span >= path - 1e-9
    assert span <= count * sum(total) + 4 * count * stages * hop + 1e-9
    assert makespan(style, pp, chunks, count, StageTimes(*times), 0.0) <= span + 1e-9


@pytest.mark.parametrize("parts", [(1.0, 1.2, 0.8), (1.0, 1.4, 1.0), (0.8, 1.2, 1.0)])
def test_unequal_passes_leave_bubbles_that_a_schedule_made_for_them_has_less_of(
    parts: tuple[float, float, float],
) -> None:
    times = _uniform(8, 2, *parts)
    busy = 16 * sum(parts)
    own = makespan("zbv", 4, 2, 16, times, 0.0)
    made_for_them = makespan("zbv", 4, 2, 16, times, 0.0, own_order=False)
    assert busy < made_for_them <= own < makespan("1f1b", 4, 1, 16, _uniform(4, 1, *parts), 0.0)


@pytest.mark.parametrize(("style", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zbv", 2)])
@pytest.mark.parametrize("blocking", [0.0, 1.0])
def test_a_slow_hop_costs_as_much_as_it_is_used(style: str, chunks: int, blocking: float) -> None:
    times = _uniform(4 * chunks, chunks)

    def span(*hops: float) -> float:
        return makespan(style, 4, chunks, 8, times, hops, blocking)

    free, one_slow, all_slow = span(0, 0, 0, 0), span(0, 0.1, 0, 0), span(0.1, 0.1, 0.1, 0.1)
    assert free < one_slow < all_slow
    assert all_slow == pytest.approx(makespan(style, 4, chunks, 8, times, 0.1, blocking))
    # Only interleaved chunks go from the last rank back to the first.
    back = span(0, 0, 0, 0.1)
    assert back > free if style == "interleaved" else back == free
