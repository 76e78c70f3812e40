"""docker/alerts.yml: rules that Prometheus takes, over metrics that the server has, explained."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.server import Server
from tests.integration.test_prometheus import DOCKER, promtool

RULES = DOCKER / "alerts.yml"
OPERATIONS = DOCKER.parent / "docs" / "operations.md"
SERIES = 'experience_buffer_{}{{instance="a", job="experience-buffer"{}}}'


def _alerts() -> dict[str, dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def test_promtool_accepts_the_rules() -> None:
    promtool("check", "rules", "--lint=all", "--lint-fatal", RULES)


def test_the_rules_name_metrics_that_the_server_has(shared_server: Server) -> None:
    types = re.findall(r"^# TYPE (\w+) (\w+)$", shared_server.metrics(), re.MULTILINE)
    series = {name for name, _ in types} | {"up"}
    series |= {f"{name}_bucket" for name, kind in types if kind == "histogram"}
    named = {
        name
        for rule in _alerts().values()
        for name in re.findall(
            r"\b(?:experience_buffer|grpc|process)_\w+", re.sub(r'"[^"]*"', "", rule["expr"])
        )
    }
    named -= {"grpc_method", "grpc_code"}
    assert len(named) > 15
    assert not named - series


def test_every_alert_is_explained_and_says_how_urgent_it_is() -> None:
    text = OPERATIONS.read_text(encoding="utf-8")
    alerts = _alerts()
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| .+ \| .+ \|$", text, re.MULTILINE)
    explained = [name for row in rows for name in re.findall(r"`([A-Z]\w+)`", row)]
    assert sorted(explained) == sorted(alerts)
    for name, rule in alerts.items():
        assert rule["labels"]["severity"] in ("page", "ticket"), name
        assert rule["annotations"]["summary"], name


def test_they_go_off_when_they_should_and_only_then(tmp_path: Path) -> None:
    """Prometheus itself plays half an hour of a server that fares well, and of one that doesn't."""
    good = {
        SERIES.format("store_disk_free_bytes", ""): "100e9+0x120",
        SERIES.format("store_live_bytes", ""): "1e9+0x120",
        SERIES.format("store_limit_bytes", ""): "1e12+0x120",
        SERIES.format("waiting_samples", ', buffer="b", consumer="trainer"'): "1+0x120",
        SERIES.format("sampled_experiences_total", ', buffer="b", consumer="trainer"'): "0+60x120",
        SERIES.format("ready_units", ', buffer="b", consumer="trainer"'): "5+0x120",
        SERIES.format("acked_experiences_total", ', buffer="b", consumer="trainer"'): "0+60x120",
    }
    bad = {
        SERIES.format("store_disk_free_bytes", ""): "1e9+0x120",
        SERIES.format("store_live_bytes", ""): "9e11+0x120",
        SERIES.format("store_limit_bytes", ""): "1e12+0x120",
        SERIES.format("waiting_samples", ', buffer="b", consumer="trainer"'): "1+0x120",
        SERIES.format("sampled_experiences_total", ', buffer="b", consumer="trainer"'): "60+0x120",
        SERIES.format("ready_units", ', buffer="b", consumer="trainer"'): "5+0x120",
        SERIES.format("acked_experiences_total", ', buffer="b", consumer="trainer"'): "60+0x120",
        SERIES.format("overdue_groups", ', buffer="b"'): "3+0x120",
        SERIES.format("pushes_held_back_total", ', buffer="b", reason="max_bytes"'): "0+9x120",
        SERIES.format(
            "pushed_experiences_total", ', buffer="b", outcome="refused", reason="late"'
        ): "0+9x120",
        'up{instance="a", job="experience-buffer"}': "0+0x120",
    }
    going = {
        *("DiskAlmostFull", "StoreAlmostFull", "TrainerStarves", "NobodyConsumes"),
        *("GroupsOverdue", "BufferFull", "PushesRefused", "ServerDown"),
    }
    _check_going_off(good, {100: set()}, tmp_path)
    _check_going_off(bad, {100: going}, tmp_path)


BUFFER = ', buffer="b"'
READER = f'{BUFFER}, consumer="trainer"'


@pytest.mark.parametrize(
    ("series", "minutes", "alert"),
    [
        (
            {SERIES.format("oldest_open_group_age_seconds", BUFFER): "0+60x120"},
            (34, 37),
            "GroupStuck",
        ),
        (
            {SERIES.format("oldest_lease_age_seconds", READER): "0+60x120"},
            (64, 67),
            "LeaseHeldLong",
        ),
        (
            {SERIES.format("oldest_ready_age_seconds", READER): "0+60x120"},
            (74, 77),
            "ReadyUnitsGetOld",
        ),
        (
            {
                SERIES.format("zero_variance_groups_total", BUFFER): "0+19x120",
                SERIES.format("whole_groups_total", f'{BUFFER}, solved="none"'): "0+19x120",
                SERIES.format("whole_groups_total", f'{BUFFER}, solved="some"'): "0+1x120",
            },
            (29, 33),
            "NothingToLearn",
        ),
        (
            {
                SERIES.format("store_live_bytes", ""): "0+1e9x120",
                SERIES.format("store_limit_bytes", ""): "4e11+0x120",
            },
            (29, 33),
            "StoreFillsUp",
        ),
        (
            {SERIES.format("archive_lost_experiences_total", BUFFER): "0+0x30 1+0x90"},
            (30, 33),
            "ArchiveLoses",
        ),
    ],
    ids=["group", "lease", "ready", "learning", "store", "archive"],
)
def test_what_lasts_too_long(
    tmp_path: Path, series: dict[str, str], minutes: tuple[int, int], alert: str
) -> None:
    """None of them needs a deadline, or any other setting."""
    before, after = minutes
    _check_going_off(series, {before: set(), after: {alert}}, tmp_path)


def test_groups_that_some_solve_teach(tmp_path: Path) -> None:
    played = {
        SERIES.format("zero_variance_groups_total", BUFFER): "0+4x120",
        SERIES.format("whole_groups_total", f'{BUFFER}, solved="some"'): "0+5x120",
        SERIES.format("oldest_open_group_age_seconds", BUFFER): "600+0x120",
        SERIES.format("store_live_bytes", ""): "4e9-1e3x120",
        SERIES.format("store_limit_bytes", ""): "1e11+0x120",
    }
    _check_going_off(played, {100: set()}, tmp_path)


def _calls(code: str) -> str:
    return f'grpc_server_handled_total{{instance="a", grpc_method="Push", grpc_code="{code}"}}'


def _reloads(outcome: str) -> str:
    labels = f', section="tls", outcome="{outcome}"'
    return SERIES.format("credential_reloads_total", labels)


def _snapshots(outcome: str) -> str:
    return SERIES.format("snapshots_total", f', outcome="{outcome}"')


NEVER_TAKEN = {SERIES.format("snapshot_timestamp_seconds", ""): "NaN+0x120"}


@pytest.mark.parametrize(
    ("series", "harmless", "alert"),
    [
        (_calls("INTERNAL"), _calls("OK"), "ServerFailing"),
        (_calls("DATA_LOSS"), _calls("NOT_FOUND"), "ServerFailing"),
        (_reloads("failed"), _reloads("ok"), "CredentialsNotReloaded"),
        (_snapshots("full"), _snapshots("busy"), "SnapshotFailed"),
        (_snapshots("failed"), _snapshots("taken"), "SnapshotFailed"),
    ],
    ids=["internal", "data-loss", "reload", "no-room", "no-snapshot"],
)
def test_the_first_event_is_enough(tmp_path: Path, series: str, harmless: str, alert: str) -> None:
    """A counter's series begins with its first event, at 1, and may stay so for good."""
    first = {series: "_x40 1+0x80", harmless: "1+1x120"}
    second = {series: "1+0x40 2+0x80", harmless: "_x40 1+1x80"}
    for played in (first, second):
        _check_going_off(played, {39: set(), 43: {alert}, 60: set()}, tmp_path)


def test_a_server_that_never_took_a_snapshot(tmp_path: Path) -> None:
    """Who asks for none gets no alert; who asks in vain does, although no time is old."""
    _check_going_off(NEVER_TAKEN, {100: set()}, tmp_path)
    asked = NEVER_TAKEN | {_snapshots("failed"): "_x20 1+0x100"}
    _check_going_off(asked, {100: {"SnapshotsMissing"}}, tmp_path)
    newest = SERIES.format("snapshot_timestamp_seconds", "")
    taken = {newest: "0+60x120", _snapshots("failed"): "1+0x120"}
    _check_going_off(taken, {100: set()}, tmp_path)
    _check_going_off({newest: "-86400+0x120"}, {59: set(), 65: {"SnapshotsStale"}}, tmp_path)


def _check_going_off(series: dict[str, str], expected: dict[int, set[str]], folder: Path) -> None:
    """Compare the alerts that fire after so many minutes of these series, one value a minute."""
    firing = [
        {
            "expr": 'group by (alertname) (ALERTS{alertstate="firing"})',
            "eval_time": f"{minute}m",
            "exp_samples": [
                {"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(names)
            ],
        }
        for minute, names in expected.items()
    ]
    played = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": firing,
    }
    test = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [played]}
    path = folder / "test.yml"
    path.write_text(yaml.safe_dump(test), encoding="utf-8")
    promtool("test", "rules", path)
