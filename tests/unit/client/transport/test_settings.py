from __future__ import annotations

import copy
import inspect
import pickle
import socket
import threading
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

import experience_buffer
from experience_buffer import (
    EID,
    AsyncClient,
    Client,
    ClientOptions,
    InvalidRequestError,
    RetryOptions,
    TlsOptions,
    Tombstone,
    consumer_options,
    options,
    outcomes,
    values,
)
from experience_buffer._messages import convert, names
from experience_buffer._transport import channel
from experience_buffer.v1 import config_pb2, types_pb2

PUBLIC = """
AdvantageConfig Advice AlreadyExistsError AnnotateOutcome AnnotateRefusedError AnnotateResult
Archive ArchiveStats AsyncBatch AsyncClient AsyncPages AsyncPolicyVersions AsyncSampleStream AsyncScan AsyncWriter Batch
BufferConfig BufferFullError BufferInfo BufferNotFoundError BufferStats CallCancelledError Client
ClientOptions ConsumerConfig ConsumerNotFoundError ConsumerPlace ConsumerStats CustomField
DataLossError DeadlineExceededError DeleteResult Departure Departures DiskStats Distribution EID
Experience ExperienceBufferError ExperienceDataset ExperienceNotFoundError ExperienceSummary
ForbiddenError GroupInfo GroupMember GroupNotFoundError InternalServerError InvalidRequestError
LaterFinding LeaseInfo LeaseNotFoundError LeasePart LeasedUnit Limiter MessageTooLargeError NotFoundError Pacing
PackedBatch Pages PolicyVersions PriorityResult PushOutcome PushRefusedError PushResult Reservation
ResourceExhaustedError Retention RetryOptions RewindResult SafeResult SampleStream Scan
ScannedExperience SealedGroup Selector SnapshotResult Staleness Stats StepInfo StoredExperience
TlsOptions Tombstone Trends TrxpError UnauthenticatedError UnavailableError UnsupportedError Where
Writer WriterCounts WriterOptions WrongStateError advise
"""
VERBS = """
ack address annotate close create_buffer declare_safe delete delete_buffer drop_group extend_lease
get get_buffer get_group get_stats get_trends list list_buffers list_departures list_groups
list_leases list_steps load_state_dict nack options publish_policy_version push release_quarantined
reserve_groups rewind sample scan scan_step seal_group snapshot state_dict stream timeout update_buffer
update_priorities watch_policy_version writer
"""


def test_public_surface() -> None:
    assert sorted(experience_buffer._MODULES) == PUBLIC.split()
    for name in experience_buffer._MODULES:
        assert getattr(experience_buffer, name).__name__ == name
    assert set(PUBLIC.split()) <= set(dir(experience_buffer))
    with pytest.raises(AttributeError, match="nonsense"):
        experience_buffer.nonsense  # noqa: B018


def test_names_for_type_checkers_are_the_same() -> None:
    source = inspect.getsource(experience_buffer)
    declared = {line.split()[0] for line in source.splitlines() if " as " in line and "," in line}
    declared |= {
        line.split(" import ")[1].split()[0] for line in source.splitlines() if " import " in line
    }
    assert set(PUBLIC.split()) <= declared


def test_both_clients_have_the_same_verbs_and_parameters() -> None:
    for cls in (Client, AsyncClient):
        assert [name for name in dir(cls) if not name.startswith("_")] == VERBS.split()
    for name in VERBS.split():
        ours, theirs = getattr(Client, name), getattr(AsyncClient, name)
        if callable(ours):
            assert inspect.signature(ours).parameters == inspect.signature(theirs).parameters, name


@pytest.mark.parametrize("cls", [Client, AsyncClient])
def test_clients_travel_without_their_channels(cls: Any) -> None:
    given = {
        "token": "secret",
        "timeout": 7.0,
        "tls": TlsOptions(server_name="x"),
        "options": ClientOptions(max_push_items=3, retry=RetryOptions(max_attempts=2)),
    }
    copy = pickle.loads(pickle.dumps(cls("host:1", **given)))
    assert type(copy) is cls
    assert copy.address == "host:1"
    assert copy.timeout == 7.0
    assert copy.options == given["options"]
    assert copy._metadata == (("authorization", "Bearer secret"),)
    assert copy._tls == given["tls"]
    assert "secret" not in repr(copy)


@pytest.mark.parametrize(
    ("address", "target"),
    [
        ("host", "host:50051"),
        ("host:17", "host:17"),
        ("10.0.0.7:17", "10.0.0.7:17"),
        ("[::1]", "[::1]:50051"),
        ("[::1]:17", "[::1]:17"),
        ("unix:/run/buffer.sock", "unix:/run/buffer.sock"),
        ("dns:///host:17", "dns:///host:17"),
    ],
)
def test_addresses(address: str, target: str) -> None:
    assert channel.parse_address(address) == target


@pytest.mark.parametrize(
    "address", ["", "host:", "host:0", "host:65536", "http://host:17", "::1", "a b", "host:x"]
)
def test_bad_addresses_say_what_is_possible(address: str) -> None:
    with pytest.raises(ValueError, match="is none of 'host', 'host:port'"):
        Client(address)


@pytest.mark.parametrize("address", ["localhost:1", "127.0.0.1:1", "[::1]:1", "unix:/x"])
def test_token_may_go_unencrypted_to_this_machine(address: str) -> None:
    Client(address, token="secret")


@pytest.mark.parametrize("address", ["host:1", "10.0.0.7:1", "dns:///host:1", "localhost.evil:1"])
def test_token_needs_tls_or_leave_for_another_machine(address: str) -> None:
    with pytest.raises(ValueError, match="unencrypted"):
        Client(address, token="secret")
    Client(address, token="secret", tls=TlsOptions())
    Client(address, token="secret", options=ClientOptions(allow_insecure_token=True))


@pytest.mark.parametrize("token", ["", "a b", "a\n", "\u00e9", "a\x00"])
def test_a_token_that_cannot_travel_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(ValueError, match=f"the token has {len(token)} characters") as caught:
        Client("localhost", token=token)
    assert not token or token not in str(caught.value)


def test_no_proxy_stands_between_programs_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would get the token in plain text."""
    with (
        socket.create_server(("127.0.0.1", 0)) as proxy,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        proxy.settimeout(0.0)
        server.settimeout(20.0)
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        once = ClientOptions(retry=RetryOptions(max_attempts=1))
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with Client(address, token="secret", timeout=20.0, options=once) as client:
            thread = threading.Thread(target=_ignore_failure, args=(client,))
            thread.start()
            server.accept()[0].close()
            thread.join()
        with pytest.raises(BlockingIOError):
            proxy.accept()


def _ignore_failure(client: Client) -> None:
    with pytest.raises(experience_buffer.ExperienceBufferError):
        client.get_stats()


def test_channel_has_no_second_retry_mechanism_and_raised_limits() -> None:
    arguments = dict(channel.arguments(ClientOptions(max_message_bytes=70_000), None))
    assert arguments["grpc.enable_retries"] == 0
    assert arguments["grpc.max_send_message_length"] == 70_000
    assert arguments["grpc.max_receive_message_length"] == 70_000
    assert arguments["grpc.keepalive_time_ms"] == 60_000
    off = dict(channel.arguments(ClientOptions(keepalive_seconds=0), None))
    assert "grpc.keepalive_time_ms" not in off


@pytest.mark.parametrize(
    "make",
    [
        lambda: RetryOptions(initial_backoff_seconds=0),
        lambda: RetryOptions(multiplier=0.5),
        lambda: ClientOptions(max_push_items=0),
        lambda: ClientOptions(max_message_bytes=10),
        lambda: TlsOptions(key_file="k"),
        lambda: options.WriterOptions(max_pending_bytes=0),
        lambda: Client("h", timeout=0),
    ],
)
def test_impossible_options_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        make()


@pytest.mark.parametrize(
    ("literal", "enum"),
    [
        (options.GroupBy, config_pb2.GroupBy),
        (options.DeadlinePolicy, config_pb2.DeadlinePolicy),
        (options.LatePolicy, config_pb2.LatePolicy),
        (options.BadRewardPolicy, config_pb2.BadRewardPolicy),
        (options.MissingFieldPolicy, config_pb2.MissingFieldPolicy),
        (consumer_options.Unit, config_pb2.Unit),
        (consumer_options.SelectorKind, config_pb2.SelectorKind),
        (consumer_options.SelectorKey, config_pb2.SelectorKey),
        (consumer_options.StalePolicy, config_pb2.StalePolicy),
        (consumer_options.SampleFormat, types_pb2.SampleFormat),
        (options.FullPolicy, config_pb2.FullPolicy),
        (options.FuturePolicy, config_pb2.FuturePolicy),
        (options.MissingVersionPolicy, config_pb2.MissingVersionPolicy),
        (outcomes.PushStatus, types_pb2.PushStatus),
        (outcomes.RefusalReason, types_pb2.RefusalReason),
        (outcomes.AnnotateRefusalReason, types_pb2.AnnotateRefusal),
        (Literal[values.ExperienceState, "archived"], types_pb2.ExperienceState),
    ],
)
def test_texts_are_the_enums_values(literal: Any, enum: Any) -> None:
    texts = [text for text in typing.get_args(literal) if text]
    assert texts == list(names.names_of(enum.DESCRIPTOR).by_name)


def test_tombstone_keeps_the_identity_apart() -> None:
    [message] = convert.tombstones_to_messages(
        [Tombstone(EID("0/eval", 7, 3, 5, "s"), "timed out")]
    )
    assert message.id == types_pb2.ExperienceId(batch="0/eval", task="7", run=3, step=5, suffix="s")
    assert message.reason == "timed out"


@pytest.mark.parametrize("content", ["", "no certificate", "-----BEGIN CERTIFICATE-----\nAAAA\n"])
@pytest.mark.parametrize("name", ["ca_file", "certificate_file"])
def test_files_without_certificates_are_no_absent_server(
    tmp_path: Path, name: str, content: str
) -> None:
    path = tmp_path / "file.pem"
    path.write_text(content, encoding="utf-8")
    files: dict[str, Any] = {name: path}
    if name == "certificate_file":
        files["key_file"] = path
    with (
        Client("127.0.0.1:1", tls=TlsOptions(**files)) as client,
        pytest.raises(InvalidRequestError, match=f"{name} of tls: .*file.pem (doesn't|don't) hold"),
    ):
        client.get_stats()


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.push([], group_size=-1, tombstones=[Tombstone(EID(), "x")]),
        lambda client: client.push([], buffer="\ud800", tombstones=[Tombstone(EID(), "x")]),
        lambda client: client.get(["uid"]),
        lambda client: client.ack([]),
        lambda client: client.sample(1, buffer=[]),
        lambda client: client.sample(1, timeout="x"),
        lambda client: next(client.stream(1, prefetch=10**30)),
    ],
)
def test_wrong_values_are_errors_of_this_package(call: Any, connect: Any) -> None:
    with connect("127.0.0.1:1", timeout=0.1) as client, pytest.raises(InvalidRequestError):
        call(client)


@pytest.mark.parametrize("make", ["stream", "writer", "watch_policy_version"])
@pytest.mark.parametrize("travel", [pickle.dumps, copy.copy, copy.deepcopy])
def test_what_has_a_connection_stays_in_its_process(
    make: str, travel: Callable[[Any], Any]
) -> None:
    arguments = (1,) if make == "stream" else ()
    for client in (Client("127.0.0.1:1"), AsyncClient("127.0.0.1:1")):
        found = getattr(client, make)(*arguments)
        reason = f"a {type(found).__name__} can't be pickled or copied: .* Pass the client"
        with pytest.raises(TypeError, match=reason):
            travel(found)
        assert travel(client)
