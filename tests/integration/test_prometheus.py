"""A real Prometheus scrapes a real server, and every query of the dashboard returns data."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from experience_buffer import (
    EID,
    AdvantageConfig,
    Archive,
    BufferConfig,
    Client,
    ConsumerConfig,
    Experience,
    NotFoundError,
    Pacing,
    Staleness,
)
from experience_buffer_server.runtime.metrics import DEPRECATED
from tests.integration.server import eventually
from tests.ports import unused_ports

DOCKER = Path(__file__).parent.parent.parent / "docker"
DASHBOARD = DOCKER / "grafana" / "dashboards" / "experience-buffer.json"
BUFFER = "math"
RATE_WINDOW = "30s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitored:
    """Addresses of a server that has had traffic and of the Prometheus that scrapes it."""

    metrics_url: str
    prometheus_url: str


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitored]:
    """Both processes, after two rounds of traffic with a scrape after each."""
    prometheus, folder = _tool("prometheus"), tmp_path_factory.mktemp("prometheus")
    port, metrics_port, prometheus_port = unused_ports(3)
    serve = [sys.executable, "-m", "experience_buffer_server", "serve", "--data", "data"]
    serve += ["--port", str(port), "--metrics-port", str(metrics_port), "--config", "server.toml"]
    (folder / "server.toml").write_text('[snapshots]\npath = "snapshots"\n', encoding="utf-8")
    scrape = [prometheus, "--config.file=prometheus.yml", "--storage.tsdb.path=series"]
    scrape += [f"--web.listen-address=127.0.0.1:{prometheus_port}"]
    _write_configuration(folder / "prometheus.yml", f"127.0.0.1:{metrics_port}")
    addresses = Monitored(
        metrics_url=f"http://127.0.0.1:{metrics_port}/metrics",
        prometheus_url=f"http://127.0.0.1:{prometheus_port}",
    )
    with (
        _process(serve, folder, "server.log"),
        _process(scrape, folder, "prometheus.log"),
        Client(f"127.0.0.1:{port}", timeout=60.0) as client,
    ):
        config = BufferConfig(
            BUFFER,
            group_size=2,
            consumers=(
                ConsumerConfig(
                    "trainer", "group", max_deliveries=2, staleness=Staleness(max_lag=4)
                ),
            ),
            pacing=Pacing(consumer="trainer", max_staleness=3, batch_size=2),
            advantage=AdvantageConfig("grpo", {"reward_clip": 1.0, "advantage_clip": 0.5}),
            archive=Archive(segment_seconds=0.1),
        )
        client.get_stats()  # Tried again until the server is up, as only idempotent calls are.
        client.create_buffer(config)
        for number in (10, 11):
            _make_traffic(client, number)
            _wait_for_scrape(addresses, after=time.time())
        yield addresses


def test_the_target_is_up(monitored: Monitored) -> None:
    targets = _ask(monitored, "/api/v1/targets")["activeTargets"]
    assert [(t["health"], t["lastError"]) for t in targets] == [("up", "")]


def test_promtool_accepts_the_metrics(monitored: Monitored) -> None:
    checked = promtool("check", "metrics", text=_read(monitored.metrics_url))
    assert not checked.stderr


def test_promtool_accepts_the_configuration() -> None:
    promtool("check", "config", DOCKER / "prometheus.yml")


def test_the_rules_are_evaluated(monitored: Monitored) -> None:
    def rules() -> list[Any]:
        (group,) = _ask(monitored, "/api/v1/rules")["groups"]
        return list(group["rules"])

    eventually(
        lambda: all(rule["health"] != "unknown" for rule in rules()), "an evaluation", seconds=60
    )
    assert [rule["lastError"] for rule in rules() if rule["health"] != "ok"] == []


def test_every_dashboard_query_returns_data(monitored: Monitored) -> None:
    without = [
        f"{title}: {expression}"
        for title, expression in _dashboard_queries()
        if not any(math.isfinite(value) for value in _values(monitored, expression))
    ]
    assert not without, "\n".join(["no data for:", *without])


def test_every_dashboard_variable_has_a_value(monitored: Monitored) -> None:
    found = {}
    for variable in _dashboard()["templating"]["list"]:
        parts = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
        assert parts, f"{variable['name']}: not a query for label values"
        match = urllib.parse.urlencode({"match[]": _without_variables(parts[1])})
        found[variable["name"]] = _ask(monitored, f"/api/v1/label/{parts[2]}/values?{match}")
    assert BUFFER in found["buffer"]
    assert "trainer" in found["consumer"]


def test_every_metric_of_the_server_is_on_the_dashboard(monitored: Monitored) -> None:
    text = _read(monitored.metrics_url)
    families = set(re.findall(r"^# TYPE (experience_buffer_\w+|grpc_\w+) ", text, re.MULTILINE))
    assert not [name for name in families if name.endswith("_created")]
    old = f"^# HELP (\\w+) {re.escape(DEPRECATED)} (\\w+)\\.$"
    renamed = dict(re.findall(old, text, re.MULTILINE))
    assert renamed
    assert set(renamed.values()) <= families
    families -= renamed.keys()
    queries = " ".join(expression for _, expression in _dashboard_queries())
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\w+", queries)}
    assert families
    assert not families - shown


QUESTIONS = (
    "Why is my trainer waiting?",
    "Which groups are stuck, and on what?",
    "How stale is what I train on?",
    "What about the rewards?",
    "Who holds the leases?",
    "How full is the disk, and when is it full?",
)


def test_the_dashboard_answers_the_questions_first() -> None:
    panels = sorted(_dashboard()["panels"], key=lambda panel: panel["gridPos"]["y"])
    rows = [panel["title"] for panel in panels if panel["type"] == "row"]
    assert tuple(rows[: len(QUESTIONS)]) == QUESTIONS
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: dict[tuple[int, int], str] = {}
    for panel in panels:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]
        assert place["x"] + place["w"] <= 24


def test_no_label_holds_an_identity(monitored: Monitored) -> None:
    assert not re.findall(r'="[^"]*task-[^"]*"', _read(monitored.metrics_url))


def _make_traffic(client: Client, number: int) -> None:
    """Do what the server counts: use policy version `number`, then publish the next."""
    client.publish_policy_version(number, buffer=BUFFER)
    groups = [
        [
            # One group's rewards are equal, which is counted.
            _experience(f"task-{number}-{g}", run, number, reward=1.0 if g == 2 else None)
            for run in range(2)
        ]
        for g in range(4)
    ]
    for group in groups:
        assert client.push(group, buffer=BUFFER).num_stored == 2
    assert client.push(groups[0], buffer=BUFFER).num_duplicates == 2
    conflict = _experience(f"task-{number}-0", 0, number, reward=0.25)
    assert client.push([conflict], buffer=BUFFER, raise_on_refused=False).refused
    aborted = _experience(f"task-{number}-aborted", 0, number)
    client.push([aborted], buffer=BUFFER)
    assert client.drop_group(aborted.eid.tid, buffer=BUFFER, reason="aborted") == 1
    # Versions behind the window, and tasks that could only become so.
    client.push([_experience(f"task-{number}-old", run, 1) for run in range(2)], buffer=BUFFER)
    keys = [_experience(f"task-{number}-new-{g}", 0, number).eid.tid for g in range(13)]
    assert client.reserve_groups(keys, buffer=BUFFER, ttl_seconds=0.001).reason
    client.publish_policy_version(number + 1, buffer=BUFFER)

    taken = client.sample(2, buffer=BUFFER, timeout=30.0)
    assert len(taken) == 4
    taken.ack()
    for _ in range(2):  # Which quarantines the group.
        client.sample(1, buffer=BUFFER, timeout=30.0).nack("given back")
    client.sample(1, buffer=BUFFER, timeout=30.0).ack()
    missing = client.sample(1, buffer=BUFFER, timeout=0.01)
    assert missing.shortfall
    client.snapshot()
    with pytest.raises(NotFoundError):
        client.get("no such uid", buffer=BUFFER)


def _experience(task: str, run: int, version: int, reward: float | None = None) -> Experience:
    return Experience(
        eid=EID(batch="0", task=task, run=run, step=0, suffix="a"),
        tokens=[2, 3, 5, 7, 11],
        prompt_length=2,
        logprobs=[-0.5, -0.25, -0.125],
        reward=float(run) if reward is None else reward,
        info={"model_version": version},
    )


def _tool(name: str) -> str:
    """Path of a program from the Debian package `prometheus`."""
    path = shutil.which(name)
    if path is None:
        message = f"{name} isn't installed; install the Debian package prometheus"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return path


def promtool(*arguments: object, text: str = "") -> subprocess.CompletedProcess[str]:
    """What it says of what it finds nothing wrong with."""
    command = [_tool("promtool"), *map(str, arguments)]
    checked = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    return checked


def _write_configuration(path: Path, target: str) -> None:
    """The configuration that users get, with this target and without their patience."""
    config = yaml.safe_load((DOCKER / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"].update(
        scrape_interval="300ms", scrape_timeout="300ms", evaluation_interval="300ms"
    )
    config["rule_files"] = [str(DOCKER / name) for name in config["rule_files"]]
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": [target]}]
    path.write_text(yaml.safe_dump(config), encoding="utf-8")


@contextmanager
def _process(command: list[str], folder: Path, log_name: str) -> Iterator[None]:
    """Run a command in `folder` and stop it with SIGTERM, which must end it with status 0."""
    log = folder / log_name
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield
        process.terminate()
        assert process.wait(timeout=30) == 0, log.read_text(encoding="utf-8")
    except BaseException:
        sys.stderr.write(log.read_text(encoding="utf-8"))
        raise
    finally:
        process.kill()
        process.wait()


def _wait_for_scrape(monitored: Monitored, *, after: float) -> None:
    def scraped() -> bool:
        try:
            times = _values(monitored, "timestamp(experience_buffer_items)")
        except OSError:
            return False
        return any(value > after for value in times)

    eventually(scraped, "a scrape of the server", seconds=60)


def _dashboard() -> Any:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


def _dashboard_queries() -> list[tuple[str, str]]:
    """Title and expression of every panel's queries, with Grafana's variables filled in."""
    return [
        (panel["title"], _without_variables(target["expr"]))
        for panel in _dashboard()["panels"]
        for target in panel.get("targets", ())
    ]


def _without_variables(expression: str) -> str:
    filled = expression.replace("$__rate_interval", RATE_WINDOW)
    filled = filled.replace("$buffer", BUFFER).replace("$consumer", "trainer")
    assert "$" not in filled, f"unknown variable in {expression}"
    return filled


def _values(monitored: Monitored, expression: str) -> list[float]:
    query = urllib.parse.urlencode({"query": expression})
    series = _ask(monitored, f"/api/v1/query?{query}")["result"]
    return [float(sample["value"][1]) for sample in series]


def _ask(monitored: Monitored, path: str) -> Any:
    return json.loads(_read(monitored.prometheus_url + path))["data"]


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: str = answer.read().decode("utf-8")
    return text
