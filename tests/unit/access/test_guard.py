"""The guard, its policy, the audit log, files that are followed, and where a server may listen."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from experience_buffer import errors
from experience_buffer.v1 import service_pb2
from experience_buffer_server.access import calls, policy
from experience_buffer_server.access.audit import Audit, Event, described
from experience_buffer_server.access.calls import GuardedCall, names_of
from experience_buffer_server.access.entrance import Followed, check_exposure, target
from experience_buffer_server.access.grants import Grants, digest_of
from experience_buffer_server.access.guard import Guard
from experience_buffer_server.runtime.callers import LOCAL_NAME, address_of, caller_of
from experience_buffer_server.settings.access import GrantSettings
from experience_buffer_server.settings.server import ConfigurationError, Settings
from tests.unit.work import counted_lines

SERVICE = service_pb2.DESCRIPTOR.services_by_name["ExperienceBuffer"]
DOCUMENT = (Path(__file__).parents[3] / "docs" / "access.md").read_text(encoding="utf-8")
PUSH = f"/{SERVICE.full_name}/Push"
AUDIT = "experience_buffer_server.audit"


class Context:
    """The part of a call's context that the guard needs."""

    def __init__(self, **shown: list[bytes]) -> None:
        self._shown = shown

    def peer(self) -> str:
        return "ipv4:10.0.0.7:4711"

    def auth_context(self) -> dict[str, list[bytes]]:
        return self._shown


def guard(*entries: Mapping[str, object], **options: object) -> Guard:
    """A guard of some entries; the token of an entry is its name unless it has a certificate."""
    settings = [
        GrantSettings.model_validate(
            {"roles": ["push"]}
            | ({} if "certificate_name" in one else {"token_sha256": _digest(str(one["name"]))})
            | dict(one)
        )
        for one in entries
    ]
    given = {"shows_certificates": False, "count": lambda method, reason: None} | options
    return Guard(Grants(settings), Audit(time.monotonic), **given)  # type: ignore[arg-type]


def _digest(token: str) -> str:
    return digest_of(token).hex()


def call(by: Guard, *values: str, method: str = PUSH, shown: Any = None) -> GuardedCall:
    made = GuardedCall(by, method, [("authorization", value) for value in values])
    return made.entered(Context(**(shown or {})))  # type: ignore[arg-type]


def test_every_call_has_a_rule_and_a_row_in_the_documentation() -> None:
    methods = {method.name for method in SERVICE.methods}
    assert {f"/{SERVICE.full_name}/{name}" for name in methods} <= policy.RULES.keys()
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in DOCUMENT.splitlines()
        if re.match(r"\| `[A-Z]", line)
    ]
    roles = ("push", "sample", "look", "operate")
    documented = {
        name: {role for role, cell in zip(roles, cells, strict=False) if cell == "yes"}
        for name, *cells in rows
    }
    ruled = {
        policy.method_name(method): {"operate", *rule.roles}
        for method, rule in policy.RULES.items()
        if method.startswith(f"/{SERVICE.full_name}/")
    }
    assert documented == ruled


def test_administrative_calls_are_named_in_the_documentation() -> None:
    audited = {policy.method_name(name) for name, rule in policy.RULES.items() if rule.is_audited}
    text = DOCUMENT[DOCUMENT.index("## The audit log") :]
    listed = re.search(r"^(`DropGroup`.+?) are logged", text, flags=re.MULTILINE | re.DOTALL)
    assert listed
    assert set(re.findall(r"`(\w+)`", listed[1])) == audited


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([], "no_token"),
        (["worker"], "unknown_token"),
        (["Basic worker"], "unknown_token"),
        (["Bearer"], "unknown_token"),
        (["Bearer "], "unknown_token"),
        (["Bearer nobody"], "unknown_token"),
        (["Bearer worker", "Bearer worker"], "unknown_token"),
        (["Bearer " + "x" * 5000], "unknown_token"),
        (["Bearer old"], "expired"),
    ],
)
def test_who_is_unknown_is_refused_before_a_request_is_read(values: list[str], reason: str) -> None:
    counted: list[tuple[str, str]] = []
    by = guard(
        {"name": "worker"},
        {"name": "old", "expires": "2020-01-01T00:00:00Z"},
        count=lambda *what: counted.append(what),
    )
    made = GuardedCall(by, PUSH, [("authorization", value) for value in values])
    assert made.is_refused
    with pytest.raises(errors.UnauthenticatedError) as caught:
        made.entered(Context())  # type: ignore[arg-type]
    assert counted == [("Push", reason)]
    assert "worker" not in str(caught.value)


async def test_a_token_opens_what_its_grants_cover() -> None:
    by = guard(
        {"name": "worker", "buffers": ["math", "eval-*"]}, {"name": "x", "roles": ["sample"]}
    )
    with call(by, "bearer worker") as made:
        assert caller_of() == "worker"
        for buffer in ("math", "eval-7"):
            made.check(service_pb2.PushRequest(buffer=buffer))
    for buffer in ("other", "", "math2"):
        with pytest.raises(errors.ForbiddenError) as caught, call(by, "bearer worker") as made:
            made.check(service_pb2.PushRequest(buffer=buffer))
        assert f"for buffer {buffer!r}" in str(caught.value)
        assert "operate or push there, it has it for eval-*, math" in str(caught.value)
    with pytest.raises(
        errors.ForbiddenError, match="takes the role operate or push, it has sample"
    ):
        call(by, "Bearer x")


async def test_a_call_without_a_rule_is_refused_to_everyone() -> None:
    by = guard({"name": "worker", "roles": ["operate"]})
    with pytest.raises(errors.ForbiddenError, match="open to no role"):
        call(by, "Bearer worker", method=f"/{SERVICE.full_name}/New")


async def test_a_certificate_stands_in_for_a_token() -> None:
    by = guard({"name": "w", "certificate_name": "worker.example"}, shows_certificates=True)
    names = {"x509_common_name": [b"7"], "x509_subject_alternative_name": [b"worker.example"]}
    with call(by, shown=names) as made:
        assert caller_of() == "w"
        made.check(service_pb2.PushRequest(buffer="math"))
    with pytest.raises(errors.UnauthenticatedError, match="no grant is for the certificate of '7'"):
        call(by, shown={"x509_common_name": [b"7"]})
    with pytest.raises(errors.UnauthenticatedError, match="token is unknown"):
        call(by, "Bearer worker.example", shown=names)
    unverified = guard({"name": "w", "certificate_name": "worker.example"})
    with pytest.raises(errors.UnauthenticatedError, match="carries no token"):
        call(unverified, shown=names)
    assert names_of({"x509_common_name": [b"\xff"]}) == ("\ufffd",)


async def test_without_grants_everyone_may_do_everything() -> None:
    def open_guard(*, shows_certificates: bool) -> Guard:
        return Guard(
            None, Audit(time.monotonic), shows_certificates=shows_certificates, count=print
        )

    with call(open_guard(shows_certificates=False)) as made:
        assert caller_of() == "10.0.0.7"
        made.check(service_pb2.PushRequest(buffer="math"))
    with call(open_guard(shows_certificates=True), shown={"x509_common_name": [b"worker-1"]}):
        assert caller_of() == "worker-1"


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.7:4711", "10.0.0.7"),
        ("ipv6:%5B::1%5D:4711", "::1"),
        ("ipv6:[fe80::1%25eth0]:4711", "fe80::1%eth0"),
        ("unix:", LOCAL_NAME),
        ("unix:/run/x.sock", LOCAL_NAME),
        ("", LOCAL_NAME),
    ],
)
def test_a_caller_without_a_name_has_its_address(peer: str, address: str) -> None:
    assert address_of(peer) == address


def test_a_flood_of_refusals_leaves_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    audit = Audit(lambda: now)
    with caplog.at_level(logging.INFO, logger=AUDIT):
        for _ in range(1000):
            audit.refused(Event(who="a", peer="p", method="Push"), "no_token")
        audit.refused(Event(who="b", peer="p", method="Push", buffer="math"), "no_token")
        assert len(caplog.records) == 6
        for number in range(1000):
            audit.refused(Event(who=f"c{number}", peer="p", method="Push"), "role")
        assert len(caplog.records) == 300
        for _ in range(700):
            audit.administered(Event(who="a", peer="p", method="Delete"), "OK", {})
        assert len(caplog.records) == 1000
        now = 60.0
        audit.tick()
        left_out = {
            vars(record)["reason"]: vars(record)["count"] for record in caplog.records[1000:]
        }
        assert left_out == {"no_token": 995, "role": 706}
        audit.tick()
        audit.refused(Event(who="a", peer="p", method="Push"), "no_token")
        assert len(caplog.records) == 1003


def test_strangers_do_not_hide_what_the_known_do(caplog: pytest.LogCaptureFixture) -> None:
    audit = Audit(time.monotonic)
    with caplog.at_level(logging.INFO, logger=AUDIT):
        for number in range(1000):
            audit.refused(Event(who=f"address {number}", peer="p", method="Push"), "no_token")
        assert len(caplog.records) == 300
        insider = Event(who="insider", peer="p", method="Delete", is_known=True)
        for _ in range(10):
            audit.refused(insider, "role")
            audit.administered(insider, "NOT_FOUND", {})
        assert len(caplog.records) == 310


def test_calls_that_many_may_make_leave_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    audit = Audit(lambda: now)
    with caplog.at_level(logging.INFO, logger=AUDIT):
        for outcome in ("OK", "CANCELLED") * 500:
            event = Event(who="worker", peer="p", method="DropGroup", is_known=True)
            audit.administered(event, outcome, {}, is_bounded=True)
        assert len(caplog.records) == 60
        now = 60.0
        audit.tick()
    last = vars(caplog.records[-1])
    assert (last["message"], last["method"], last["count"]) == ("calls left out", "DropGroup", 940)


@pytest.mark.parametrize(
    ("role", "method", "request_"),
    [
        ("operate", "DeleteBuffer", service_pb2.DeleteBufferRequest(name="math")),
        ("push", "DropGroup", service_pb2.DropGroupRequest(buffer="math", group="t")),
    ],
)
async def test_what_is_under_way_when_its_grant_ends_is_logged(
    role: str, method: str, request_: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It may have been done."""
    by = guard({"name": "insider", "roles": [role]})

    async def handle() -> None:
        with call(by, "Bearer insider", method=f"/{SERVICE.full_name}/{method}") as made:
            made.check(request_)
            by.replace(Grants([]))
            await asyncio.sleep(60)

    caplog.set_level(logging.INFO, logger=AUDIT)
    with pytest.raises(errors.UnauthenticatedError):
        await asyncio.create_task(handle())
    done, refused = caplog.records
    assert (done.message, vars(done)["outcome"]) == ("administered", "CANCELLED")
    assert vars(done)["who"] == "insider"
    assert (refused.message, vars(refused)["who"]) == ("refused", "insider")


async def test_a_refused_call_takes_no_more_messages() -> None:
    by = guard({"name": "worker"})
    counted: list[str] = []
    by._count = lambda method, reason: counted.append(reason)
    stream = f"/{SERVICE.full_name}/PushStream"
    message = service_pb2.PushStreamRequest(push=service_pb2.PushRequest(buffer="math"))
    with call(by, "Bearer worker", method=stream) as made:
        made.check(message)
        made.sending()
        before = by.grants
        assert before is not None
        for grants in (Grants([]), before):
            # It is told of its end later, and that holds though it would be allowed by then.
            by.replace(grants)
            with pytest.raises(errors.UnauthenticatedError):
                made.check(message)
        with pytest.raises(errors.UnauthenticatedError):
            made.sent()
    assert counted == ["unknown_token"]


async def test_a_refused_call_that_is_not_read_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_SENDING_SECONDS", 0.01)
    by = guard({"name": "worker"})

    async def handle() -> None:
        with call(by, "Bearer worker") as made:
            made.sending()
            by.replace(Grants([]))
            await asyncio.sleep(60)

    with pytest.raises(errors.UnauthenticatedError):
        await asyncio.create_task(handle())


async def test_a_stream_is_judged_by_all_buffers_it_has_named() -> None:
    """What it pushed before may still wait in line."""
    by = guard({"name": "worker", "buffers": ["a", "b"]})
    other = guard({"name": "worker", "buffers": ["b"]}).grants
    assert other is not None

    async def handle() -> None:
        with call(by, "Bearer worker") as made:
            for buffer in "ab":
                made.check(service_pb2.PushRequest(buffer=buffer))
            by.replace(other)
            await asyncio.sleep(60)

    with pytest.raises(errors.ForbiddenError, match="for buffer 'a'"):
        await asyncio.create_task(handle())


@pytest.mark.parametrize("is_open", [False, True])
async def test_names_that_are_none_are_not_kept(is_open: bool) -> None:
    by = guard({"name": "worker", "buffers": ["a*"]})
    if is_open:
        by = Guard(None, by.audit, shows_certificates=False, count=lambda method, reason: None)
    tracemalloc.start()
    try:
        with call(by, "Bearer worker") as made:
            for number in range(200):
                made.check(service_pb2.PushRequest(buffer=f"a{number}" + "x" * 1_000_000))
            assert tracemalloc.get_traced_memory()[0] < 10_000_000
    finally:
        tracemalloc.stop()


def test_the_description_of_a_request_is_bounded() -> None:
    request = service_pb2.DeleteRequest(buffer="x" * 10_000, uids=["u"] * 7)
    request.filter.tid = "t" * 10_000
    assert described(request) == {"buffer": "x" * 200, "uids": "7 of them", "filter": ["tid"]}
    changes = service_pb2.UpdateBufferRequest()
    changes.config.name = "a"
    changes.update_mask.paths.extend(["max_items", "pacing"])
    assert described(changes) == {"config": ["name"], "update_mask": "max_items,pacing"}
    assert described(service_pb2.DeleteBufferRequest(name="a", force=True)) == {
        "name": "a",
        "force": True,
    }


def test_a_changed_file_is_read_and_a_broken_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    path.write_text("one", encoding="utf-8")
    held, counted = ["one"], list[tuple[str, str]]()

    def load() -> None:
        text = path.read_text(encoding="utf-8") if path.exists() else "broken"
        if text == "broken":
            raise ConfigurationError("it is broken")
        held.append(text)

    followed = Followed("access", [path], load, lambda *what: counted.append(what))
    assert not followed.look()
    _replace(path, "two")
    assert followed.look()
    assert not followed.look()
    _replace(path, "broken")
    for _ in range(3):
        assert not followed.look()
    path.unlink()
    assert not followed.look()
    _replace(path, "six")
    assert followed.look()
    assert held == ["one", "two", "six"]
    assert counted == [("access", outcome) for outcome in ("ok", "failed", "failed", "ok")]
    assert "those read before stay in force: it is broken" in caplog.text


def test_a_file_that_could_not_be_read_is_tried_again() -> None:
    """Though it looks the same: it may have been whole only after it was looked at."""
    failures: list[str] = ["later", "later"]
    counted: list[str] = []

    def load() -> None:
        if failures:
            raise ConfigurationError(failures.pop())

    followed = Followed("tls", [Path("/")], load, lambda _, outcome: counted.append(outcome))
    followed._state = [None]
    assert [followed.look() for _ in range(4)] == [False, False, True, False]
    assert counted == ["failed", "ok"]


def _replace(path: Path, text: str) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(text, encoding="utf-8")
    beside.rename(path)


PLAIN = r"in plain text; bind 127\.0\.0\.1, or set tls\.certificate_file"
UNKNOWN = r"everyone there could read, write and delete.+set access\.file.+or tls\.client_ca_file"
TLS = {"certificate_file": "a", "key_file": "b"}


@pytest.mark.parametrize("key", ["host", "metrics_host"])
@pytest.mark.parametrize(
    ("host", "tls", "access", "insecure", "problem"),
    [
        ("127.0.0.1", {}, {}, False, ""),
        ("127.8.8.8", {}, {}, False, ""),
        ("::1", {}, {}, False, ""),
        ("localhost", {}, {}, False, ""),
        ("0.0.0.0", {}, {}, False, PLAIN),
        ("::", {}, {}, False, PLAIN),
        ("", {}, {}, False, PLAIN),
        ("buffer.example", {}, {}, False, PLAIN),
        ("0.0.0.0", {}, {"file": "c"}, False, PLAIN),
        ("0.0.0.0", {}, {}, True, ""),
        ("0.0.0.0", TLS, {}, False, UNKNOWN),
        ("0.0.0.0", TLS, {}, True, ""),
        ("0.0.0.0", TLS, {"file": "c"}, False, ""),
        ("0.0.0.0", TLS | {"client_ca_file": "d"}, {}, False, ""),
    ],
)
def test_where_a_server_may_listen(
    key: str,
    host: str,
    tls: dict[str, str],
    access: dict[str, str],
    insecure: bool,
    problem: str,
) -> None:
    settings = Settings.model_validate(
        {"server": {key: host, "insecure": insecure}, "tls": tls, "access": access}
    )
    if not problem:
        check_exposure(settings)
        return
    with pytest.raises(ConfigurationError, match=rf"^server\.{key}: .*{problem}.*--insecure"):
        check_exposure(settings)


def test_a_metrics_endpoint_that_is_off_exposes_nothing() -> None:
    check_exposure(Settings.model_validate({"server": {"metrics_host": "::", "metrics_port": -1}}))


def test_addresses_are_written_as_grpc_reads_them() -> None:
    assert target("127.0.0.1", 17) == "127.0.0.1:17"
    assert target("::1", 17) == "[::1]:17"
    assert target("unix:/run/x.sock", 17) == "unix:/run/x.sock"


@pytest.mark.parametrize(
    "tls", [{"certificate_file": "a"}, {"key_file": "a"}, {"client_ca_file": "a"}]
)
def test_files_of_tls_belong_together(tls: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="certificate_file and key_file"):
        Settings.model_validate({"tls": tls})


def test_a_judgement_takes_few_steps_however_many_grants_there_are() -> None:
    lines = []
    for number in (2, 200):
        by = guard(*({"name": f"worker-{n}", "buffers": ["math-*"]} for n in range(number)))
        request = service_pb2.PushRequest(buffer="math-1")
        call(by, "Bearer worker-1").check(request)
        with counted_lines() as counted:
            call(by, "Bearer worker-1").check(request)
        lines.append(counted.num)
    assert lines[0] == lines[1] < 150
