from __future__ import annotations

import pytest

from benchmarks.growth_figures import (
    MEGABYTES,
    RATE,
    Figures,
    Record,
    cost,
    max_memory_bytes,
    memory_table,
    table,
)

CONTEST = "experiences stored"


def _records(shape: str, figure: str, unit: str, *values: float) -> list[Record]:
    return [
        Record(contest=CONTEST, shape=shape, figure=figure, unit=unit, value=value)
        for value in values
    ]


def test_a_rate_costs_what_it_falls() -> None:
    assert cost(1000.0, 830.0, RATE) == pytest.approx(0.17)
    assert cost(1000.0, 1130.0, RATE) == pytest.approx(-0.13)


def test_a_time_costs_what_it_rises() -> None:
    assert cost(2.0, 2.38, "ms") == pytest.approx(0.19)
    assert cost(59.0, 53.1, "CPU us") == pytest.approx(-0.1)


def test_what_is_too_little_to_measure_costs_nothing() -> None:
    assert cost(0.0, 3.0, "CPU us") == 0.0


def test_the_goal_is_judged_by_medians_in_both_directions() -> None:
    found = Figures(
        [
            *_records("10,000", "background writer", RATE, 900.0, 1000.0, 5000.0),
            *_records("10,000", "push of one, p50", "ms", 1.0, 1.0, 7.0),
            *_records("10,000", "pushed: server", "CPU us", 50.0),
            *_records("1,000,000", "background writer", RATE, 870.0, 10.0, 1100.0),
            *_records("1,000,000", "push of one, p50", "ms", 1.2, 0.1, 1.2),
            *_records("1,000,000", "pushed: server", "CPU us", 57.0),
        ]
    )
    assert list(table(found, CONTEST, ["10,000", "1,000,000"], max_cost=0.15)) == [
        "\n| experiences stored | 10,000 | 1,000,000 | costs | goal |",
        "|---|---|---|---|---|",
        "| background writer, experiences/s | 1,000 | 870 | +13% | met |",
        "| push of one, p50, ms | 1 | 1.2 | +20% | **MISSED** |",
        "| pushed: server, CPU us | 50 | 57 | +14% | met |",
    ]


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
        "| sampled, packed, experiences/s | 2,000 | 7,000 | 9,000 | -350% |"
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
