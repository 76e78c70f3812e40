from __future__ import annotations

import pytest

from benchmarks.growth_figures import (
    MEGABYTES,
    MET,
    MISSED,
    RATE,
    UNDECIDED,
    Cost,
    Figures,
    Record,
    max_memory_bytes,
    memory_table,
    table,
    undecided,
    verdicts,
)

CONTEST = "experiences stored"


def _records(shape: str, figure: str, unit: str, *values: float) -> list[Record]:
    return [
        Record(contest=CONTEST, shape=shape, figure=figure, unit=unit, value=value)
        for value in values
    ]


def test_a_rate_costs_what_it_falls() -> None:
    assert Cost.of([1000.0], [830.0], RATE).median == pytest.approx(0.17)
    assert Cost.of([1000.0], [1130.0], RATE).median == pytest.approx(-0.13)


def test_a_time_costs_what_it_rises() -> None:
    assert Cost.of([2.0], [2.38], "ms").median == pytest.approx(0.19)
    assert Cost.of([59.0], [53.1], "CPU us").median == pytest.approx(-0.1)


def test_what_is_too_little_to_measure_costs_nothing() -> None:
    assert Cost.of([0.0], [3.0], "CPU us").median == 0.0


def test_turns_are_compared_one_by_one() -> None:
    """The machine is three times as slow for some of them: each tells the same all the same."""
    small = [100.0, 300.0, 100.0, 310.0, 300.0, 100.0]
    found = Cost.of(small, [1.1 * value for value in small], "CPU us")
    assert [found.low, found.median, found.high] == pytest.approx([0.1, 0.1, 0.1])


@pytest.mark.parametrize(
    ("count", "places"),
    # What tables of the sign test's interval of 95 % say.
    [(6, (0, 5)), (8, (0, 7)), (9, (1, 7)), (12, (2, 9)), (17, (4, 12)), (32, (9, 22))],
)
def test_the_interval_leaves_out_what_chance_alone_explains(
    count: int, places: tuple[int, int]
) -> None:
    costs = [index / 100 for index in range(count)]
    found = Cost.of([1.0] * count, [1.0 + cost for cost in costs[::-1]], "ms")
    assert (found.low, found.high) == pytest.approx((costs[places[0]], costs[places[1]]))


def test_too_few_turns_tell_nothing() -> None:
    assert Cost.of([1.0] * 5, [1.01] * 5, "ms").verdict(0.15) == UNDECIDED


@pytest.mark.parametrize(
    ("costs", "verdict"),
    [
        ((-0.9, 0.1, 0.1, 0.1, 0.1, 0.14), MET),
        ((0.1, 0.1, 0.1, 0.1, 0.1, 0.16), UNDECIDED),
        ((0.14, 0.2, 0.2, 0.2, 0.2, 0.2), UNDECIDED),
        ((0.16, 0.2, 0.2, 0.2, 0.2, 0.2), MISSED),
    ],
)
def test_the_goal_is_met_or_missed_where_all_that_is_likely_is_on_one_side(
    costs: tuple[float, ...], verdict: str
) -> None:
    found = Cost.of([1.0] * len(costs), [1.0 + cost for cost in costs], "ms")
    assert found.verdict(0.15) == verdict


POPULATIONS = ["10,000", "1,000,000"]
FOUND = Figures(
    [
        *_records("10,000", "background writer", RATE, *[900.0, 1000.0, 5000.0] * 2),
        *_records("10,000", "push of one, p50", "ms", *[1.0, 1.0, 7.0] * 2),
        *_records("10,000", "pushed: server", "CPU us", *[50.0] * 6),
        *_records("1,000,000", "background writer", RATE, *[870.0, 950.0, 4900.0] * 2),
        *_records("1,000,000", "push of one, p50", "ms", *[1.2, 1.25, 8.4] * 2),
        *_records("1,000,000", "pushed: server", "CPU us", *[57.0] * 5, 58.0),
        Record(
            contest=CONTEST,
            shape="1,000,000",
            figure="after the load",
            unit=MEGABYTES,
            value=899.0,
            population=1_000_000,
        ),
    ]
)


def test_the_table_gives_medians_and_what_each_figure_costs() -> None:
    assert list(table(FOUND, CONTEST, POPULATIONS, max_cost=0.15)) == [
        "\n| experiences stored | 10,000 | 1,000,000 | costs | between | below 15% |",
        "|---|---|---|---|---|---|",
        "| background writer, experiences/s | 1,000 | 950 | +3% | +2% and +5% | met |",
        "| push of one, p50, ms | 1 | 1.25 | +20% | +20% and +25% | **MISSED** |",
        "| pushed: server, CPU us | 50 | 57 | +14% | +14% and +16% | undecided |",
    ]
    assert undecided(FOUND, CONTEST, POPULATIONS, 0.15) == ["pushed: server"]


def test_each_goal_has_one_verdict() -> None:
    growing, memory = verdicts(FOUND, CONTEST, POPULATIONS)
    assert growing == (
        "\nGrowing from 10,000 to 1,000,000 experiences costs less than 15% of any figure: "
        "**MISSED** (1 of 3; the most: push of one, p50, +20%, at most +25%)"
    )
    assert memory == (
        "Memory under 300 MB plus 600 bytes per experience: met (the least room: experiences stored "
        "1,000,000, after the load: 899 MB)"
    )
    assert list(verdicts(Figures([]), CONTEST, POPULATIONS)) == []


def test_without_a_goal_there_is_no_verdict_and_the_last_is_compared_with_the_first() -> None:
    found = Figures(
        [
            # Who begins a turn changes.
            *_records("64", "sampled, packed", RATE, 9000.0),
            *_records("8", "sampled, packed", RATE, 7000.0),
            *_records("1", "sampled, packed", RATE, 2000.0),
        ]
    )
    assert list(table(found, CONTEST, ["1", "8", "64"]))[2:] == [
        "| sampled, packed, experiences/s | 2,000 | 7,000 | 9,000 | -350% | too few turns |"
    ]


def test_what_is_alone_is_compared_with_nothing() -> None:
    found = Figures(_records("10,000,000", "start", "s", 97.0, 101.0, 103.0))
    assert list(table(found, CONTEST, ["10,000,000"])) == [
        "\n| experiences stored | 10,000,000 |",
        "|---|---|",
        "| start, s | 101 |",
    ]


def test_memory_is_judged_by_what_is_stored() -> None:
    assert max_memory_bytes(1_000_000) == 900e6
    records = [
        Record(
            contest=CONTEST,
            shape=f"{population:,}",
            figure="after the start",
            unit=MEGABYTES,
            value=value,
            population=population,
        )
        for population, value in ((10_000, 307.0), (1_000_000, 899.0))
    ]
    found = Figures(records)
    assert found.names(CONTEST) == []
    assert list(memory_table(found))[1:] == [
        "| experiences stored 10,000, after the start | 307 | 306 | **MISSED** |",
        "| experiences stored 1,000,000, after the start | 899 | 900 | met |",
    ]
