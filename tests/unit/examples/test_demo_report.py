"""What the demo says and draws of a run: when it is enough, the verdict, the summary, the picture."""

from __future__ import annotations

import math
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.demo import __main__ as command
from examples.demo.history import Depth, History, Kill, Update, Verdict
from examples.demo.journal import Audit
from examples.demo.plot import draw, write_plot
from examples.demo.processes import how_it_ended
from examples.demo.report import summary, verdict
from examples.demo.runner import Outcome, buffer_config
from examples.demo.server import Server, ServerError
from examples.demo.settings import DemoSettings

SETTINGS = DemoSettings(address="", folder=Path())
CLEAN = Audit(
    num_acked=23,
    num_trained=19,
    num_undone=7,
    num_in_buffer=4,
    missing=(),
    unknown=(),
    repeated=(),
)


def make_history(*, accuracy: float = 0.97, num_stale: int = 0) -> History:
    history = History(num_stale=num_stale)
    history.kills += [
        Kill(what="server", time=1003.0, version=3, recovery_seconds=0.7),
        Kill(what="trainer", time=1006.0, version=6, recovery_seconds=0.4, resumed_version=5),
    ]
    history.updates.append(Update(version=0, time=1000.0, accuracy=0.0))
    for version in range(1, 8):
        history.updates.append(
            Update(
                version=version,
                time=1000.0 + version,
                accuracy=version / 8 if version % 2 else None,
                reward=version / 10,
                staleness=1.5,
                max_staleness=2,
            )
        )
        history.depths.append(Depth(1000.0 + version, 64 * version, 128 * (version % 3)))
    history.verdict = Verdict(accuracy=accuracy, num_problems=997)
    return history


def make_outcome(**changes: Any) -> Outcome:
    outcome = Outcome(settings=SETTINGS, audit=CLEAN, history=make_history())
    return replace(outcome, **changes)


def evaluated(*points: tuple[int, float]) -> History:
    return History(updates=[Update(version=v, time=0.0, accuracy=a) for v, a in points])


@pytest.mark.parametrize(
    ("points", "is_enough"),
    [
        ([(0, 0.0), (10, 0.9), (20, 0.95), (30, 1.0)], True),
        ([(0, 0.0), (10, 0.9), (20, 0.95)], False),
        ([(10, 0.9), (20, 0.95), (30, 0.89), (40, 0.9)], False),
        # Resumed from a checkpoint: what came after it is undone, its policy counts once.
        ([(10, 0.9), (20, 0.95), (20, 0.95)], False),
        ([(10, 0.9), (20, 0.95), (30, 0.5), (20, 0.95), (30, 0.95)], True),
        ([], False),
    ],
)
def test_it_is_enough_when_the_target_has_held(
    points: list[tuple[int, float]], is_enough: bool
) -> None:
    assert evaluated(*points).has_held(0.9, num_held=3) == is_enough


def test_the_last_accuracy_is_of_the_policy_that_survives() -> None:
    assert History().last_accuracy == 0.0
    assert evaluated((10, 0.3), (20, 0.6), (10, 0.3)).last_accuracy == 0.3


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "success"),
        ({"history": make_history(accuracy=0.9)}, "success"),
        (
            {"history": make_history(accuracy=0.89)},
            "FAILED: 89.0% solved after 7 updates is under 90%",
        ),
        ({"audit": replace(CLEAN, missing=("0/1-2/3/0/0",))}, "0/1-2/3/0/0"),
        ({"audit": replace(CLEAN, repeated=("u",))}, "trained more than once"),
        ({"audit": replace(CLEAN, unknown=("u",))}, "never acknowledged"),
        (
            {"not_killed": ("server", "trainer")},
            "FAILED: the server was to be killed, and the training ended before; "
            "the trainer was to be killed, and the training ended before",
        ),
        (
            {"settings": replace(SETTINGS, max_staleness=1)},
            "FAILED: a batch was 2 policy versions behind, 1 is the bound",
        ),
        # What is too stale leaves untrained: as many are missing as were counted, no more, no less.
        (
            {
                "audit": replace(CLEAN, missing=("u", "v")),
                "history": make_history(num_stale=2),
            },
            "success",
        ),
        ({"history": make_history(num_stale=2)}, "2 were left out as too stale"),
    ],
)
def test_the_verdict_names_every_promise_that_was_not_kept(
    changes: dict[str, Any], expected: str
) -> None:
    said = verdict(make_outcome(**changes))
    assert expected in said
    assert (said == "success") == (expected == "success")


def test_a_run_without_a_verdict_is_no_success() -> None:
    history = make_history()
    history.verdict = None
    outcome = make_outcome(history=history)
    assert verdict(outcome) == "FAILED: the trainer ended without measuring its last policy"
    assert "not measured after it" in "\n".join(summary(outcome))


def test_the_summary_says_who_was_killed_and_what_became_of_it() -> None:
    lines = summary(make_outcome())
    text = " ".join(line.strip() for line in lines)
    assert "23 acknowledged to the workers = 19 trained + 4 still in the buffer + 0 too s" in text
    assert "0 missing, 0 trained twice" in text
    assert "2 at most (bound 2)" in text
    assert "server       killed after 3 s, serving again 0.7 s later" in text
    assert "killed after 6 s at update 6, resumed 0.4 s later from update 5; 7 experiences" in text
    assert max(map(len, lines)) <= 90


def test_what_is_promised_of_staleness_is_what_the_buffer_is_told() -> None:
    config = buffer_config(SETTINGS)
    (consumer,) = config.consumers or ()
    assert consumer.staleness is not None
    # A batch that is read ahead ages by one version more.
    assert consumer.staleness.max_lag == SETTINGS.max_staleness - SETTINGS.prefetch == 1
    assert consumer.staleness.on_stale == "drop"


@pytest.mark.parametrize("num_updates", [8, 2, 1])
def test_the_plot_is_a_png(tmp_path: Path, num_updates: int) -> None:
    history = make_history()
    del history.updates[num_updates:]
    path = tmp_path / "curves.png"
    write_plot(history, path, settings=SETTINGS)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(content[16:20], "big") > 1000


def test_the_plot_names_its_axes_and_keeps_its_legends_off_the_data() -> None:
    figure = draw(make_history(), settings=SETTINGS)
    figure.draw_without_rendering()  # Lays it out.
    for axes in figure.axes:
        assert axes.get_xlabel() == "seconds of training"
        assert axes.get_ylabel()
        legend = axes.get_legend()
        assert legend is not None
        assert legend.get_window_extent().y1 < axes.get_window_extent().y0
        assert not axes.texts
    killed = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [text.partition(",")[0] for text in killed] == ["server killed", "both ranks killed"]


def points(line: Any) -> list[tuple[float, float]]:
    return [(x, y) for x, y in line.get_xydata().tolist()]


def test_the_plot_has_the_bound_the_target_and_the_final_measurement() -> None:
    _, accuracy, staleness, _ = draw(make_history(), settings=SETTINGS).axes
    lines = {str(line.get_label()): line for line in (*accuracy.lines, *staleness.lines)}
    assert {y for _, y in points(lines["bound 2"])} == {2}
    assert {y for _, y in points(lines["target 90%"])} == {0.9}
    assert points(lines["at the end, 997 others: 97.0%"]) == [(7.0, 0.97)]


def test_the_mean_of_the_reward_is_of_what_is_around_it() -> None:
    raw, mean = map(points, draw(make_history(), settings=SETTINGS).axes[0].lines[:2])
    # Of a straight line it is the line itself; a mean of what came before would lie below.
    assert mean[3] == pytest.approx(raw[3])


def test_nothing_is_drawn_between_the_points_that_a_kill_lies_between() -> None:
    history = make_history()
    history.kills[0].time += 0.5
    raw = points(draw(history, settings=SETTINGS).axes[0].lines[0])
    assert [x for x, y in raw if math.isnan(y)] == [3.0]


def test_a_port_in_use_is_said_in_a_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=f"port {port} of 127.0.0.1 is in use; give another"):
            Server(tmp_path, port=port)


def test_what_is_not_installed_is_named_before_anything_begins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo"])
    monkeypatch.setitem(sys.modules, "torch", None)
    assert command.main() == 1
    assert capsys.readouterr().err.startswith("demo: not installed: torch. `make demo` installs")


def test_how_a_process_ended_is_said_by_the_name_of_its_signal() -> None:
    assert how_it_ended(-9) == "was killed by SIGKILL"
    assert how_it_ended(3) == "ended with exit status 3"


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    server = Server(tmp_path)
    (tmp_path / "server-data").write_text("no folder")
    with pytest.raises(ServerError, match=r"ended with exit status 2; the end of its log .*File "):
        server.start()
