from __future__ import annotations

import pickle

import grpc
import pytest

from experience_buffer import errors, status
from experience_buffer._transport.retry import is_retryable
from experience_buffer.outcomes import AnnotateOutcome, AnnotateResult, PushOutcome, PushResult

ALL = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, errors.ExperienceBufferError)
]
CONCRETE = [
    cls
    for cls in ALL
    if cls
    not in (errors.ExperienceBufferError, errors.PushRefusedError, errors.AnnotateRefusedError)
]


class Failed(grpc.RpcError):
    """What gRPC raises when a call ends with the given status."""

    def __init__(
        self,
        code: grpc.StatusCode,
        details: str,
        metadata: tuple[tuple[str, str | bytes], ...] = (),
    ) -> None:
        self._status = (code, details, metadata)

    def code(self) -> grpc.StatusCode:
        return self._status[0]

    def details(self) -> str:
        return self._status[1]

    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:  # type: ignore[override]
        return self._status[2]


def over_the_wire(error: errors.ExperienceBufferError) -> errors.ExperienceBufferError:
    sent = status.to_status(error)
    failed = Failed(sent.code, sent.details, sent.trailing_metadata)
    return status.from_rpc_error(failed, doing="push to host:1")


@pytest.mark.parametrize("cls", ALL)
def test_every_error_is_pickled_whole(cls: type[errors.ExperienceBufferError]) -> None:
    error = cls("what was wrong", subject="math", retry_delay_seconds=1.5)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == "what was wrong"
    assert (copy.subject, copy.retry_delay_seconds) == ("math", 1.5)


@pytest.mark.parametrize("cls", CONCRETE)
def test_every_error_refines_one_of_the_standard_library(
    cls: type[errors.ExperienceBufferError],
) -> None:
    builtin = [base for base in cls.__mro__ if base.__module__ == "builtins"]
    assert builtin[0] is not Exception
    assert grpc.StatusCode[cls.status]


@pytest.mark.parametrize("cls", CONCRETE)
def test_every_error_crosses_the_wire(cls: type[errors.ExperienceBufferError]) -> None:
    copy = over_the_wire(cls("what was wrong", subject="math", retry_delay_seconds=1.5))
    assert type(copy) is cls
    assert str(copy) == "what was wrong"
    assert (copy.subject, copy.retry_delay_seconds) == ("math", 1.5)
    assert over_the_wire(cls("x")).retry_delay_seconds is None


@pytest.mark.parametrize("cls", [errors.PushRefusedError, errors.AnnotateRefusedError])
def test_refusals_are_outcomes_and_never_cross_the_wire(
    cls: type[errors.ExperienceBufferError],
) -> None:
    assert type(over_the_wire(cls("x"))) is errors.InvalidRequestError


def test_reasons_are_unique() -> None:
    assert len({cls.reason for cls in ALL}) == len(ALL)


def test_huge_texts_stay_below_the_limit_of_trailers() -> None:
    error = errors.InvalidRequestError("é" * 100_000, subject="ü" * 100_000)
    sent = status.to_status(error)
    [(key, details)] = sent.trailing_metadata
    assert key == "grpc-status-details-bin"
    assert len(details) < 4096
    assert len(sent.details.encode()) <= 1024
    assert sent.details.startswith("éé")
    assert sent.details.endswith("…")
    assert type(over_the_wire(error)) is errors.InvalidRequestError


def test_lone_surrogates_do_not_break_the_answer() -> None:
    assert str(over_the_wire(errors.InvalidRequestError("bad \ud800 uid"))) == "bad ? uid"


def test_texts_of_grpc_itself_name_the_call_and_the_cure() -> None:
    failed = Failed(grpc.StatusCode.UNAVAILABLE, "connection refused")
    error = status.from_rpc_error(failed, doing="push to host:1")
    assert type(error) is errors.UnavailableError
    assert "push to host:1" in str(error)
    assert "connection refused" in str(error)
    assert "check that the server runs" in str(error)


@pytest.mark.parametrize("blob", [b"", b"\xff\xff\xff", b"plain text"])
def test_damaged_details_are_ignored(blob: bytes) -> None:
    failed = Failed(grpc.StatusCode.NOT_FOUND, "gone", ((status.DETAILS_KEY, blob),))
    assert type(status.from_rpc_error(failed, doing="Get to h")) is errors.NotFoundError


def test_reason_of_another_status_does_not_win() -> None:
    sent = status.to_status(errors.LeaseNotFoundError("x"))
    failed = Failed(grpc.StatusCode.UNAVAILABLE, "x", sent.trailing_metadata)
    assert type(status.from_rpc_error(failed, doing="ack to h")) is errors.UnavailableError


def test_internal_on_a_stream_is_a_broken_stream_unless_the_server_says_so() -> None:
    failed = Failed(grpc.StatusCode.INTERNAL, "Internal error from Core")
    unary = status.from_rpc_error(failed, doing="x")
    assert type(unary) is errors.InternalServerError
    stream = status.from_rpc_error(failed, doing="x", is_stream=True)
    assert type(stream) is errors.UnavailableError
    sent = status.to_status(errors.InternalServerError("id 17"))
    said = Failed(sent.code, sent.details, sent.trailing_metadata)
    assert (
        type(status.from_rpc_error(said, doing="x", is_stream=True)) is errors.InternalServerError
    )


@pytest.mark.parametrize("is_stream", [False, True])
def test_cancelled_is_a_server_that_goes_away_unless_the_server_says_so(is_stream: bool) -> None:
    failed = Failed(grpc.StatusCode.CANCELLED, "CANCELLED")
    error = status.from_rpc_error(failed, doing="ack to host:1", is_stream=is_stream)
    assert type(error) is errors.UnavailableError
    assert "ack to host:1 failed (CANCELLED)" in str(error)
    assert type(over_the_wire(errors.CallCancelledError("x"))) is errors.CallCancelledError


def test_too_many_calls_under_way_is_no_message_that_is_too_large() -> None:
    failed = Failed(grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!")
    error = status.from_rpc_error(failed, doing="Sample to h")
    assert type(error) is errors.ResourceExhaustedError
    assert error.retry_delay_seconds == 1.0
    assert "server.max_calls" in str(error)
    assert "max_message_bytes" not in str(error)
    assert is_retryable(error, idempotent=False)
    large = Failed(grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max")
    final = status.from_rpc_error(large, doing="Sample to h")
    assert "max_message_bytes" in str(final)
    assert not is_retryable(final, idempotent=True)


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code.name != "OK"])
def test_every_status_becomes_an_error(code: grpc.StatusCode) -> None:
    error = status.from_rpc_error(Failed(code, "text"), doing="x")
    assert isinstance(error, errors.ExperienceBufferError)


def test_errors_of_single_messages() -> None:
    full = errors.BufferFullError("full", subject="math", retry_delay_seconds=2.5)
    error = status.from_request_error(status.to_request_error(full))
    assert type(error) is errors.BufferFullError
    assert (str(error), error.subject, error.retry_delay_seconds) == ("full", "math", 2.5)
    sent = status.to_request_error(errors.LeaseNotFoundError("gone"))
    error = status.from_request_error(sent)
    assert type(error) is errors.LeaseNotFoundError
    assert error.retry_delay_seconds is None
    sent.reason = "NAMED_BY_A_NEWER_SERVER"
    assert type(status.from_request_error(sent)) is errors.NotFoundError


def test_refusal_is_pickled_with_its_result() -> None:
    outcomes = tuple(
        PushOutcome(index=i, uid=f"u{i}", status="refused", reason="late", message="closed")
        for i in range(5)
    )
    result = PushResult(outcomes=outcomes, policy_version=None)
    with pytest.raises(errors.PushRefusedError, match="and 2 more") as caught:
        result.raise_for_refused()
    assert pickle.loads(pickle.dumps(caught.value)).result == result


def test_refused_annotations_are_named_and_pickled() -> None:
    outcomes = [
        AnnotateOutcome(uid=f"u{i}", status="refused", reason="invalid", message="too long")
        for i in range(5)
    ]
    outcomes.append(AnnotateOutcome(uid="good", status="stored"))
    result = AnnotateResult(outcomes=tuple(outcomes))
    assert (result.num_stored, len(result.refused)) == (1, 5)
    with pytest.raises(
        errors.AnnotateRefusedError, match=r"5 annotations .*u0: invalid: too long.* and 2 more"
    ) as caught:
        result.raise_for_refused()
    assert pickle.loads(pickle.dumps(caught.value)).result == result
    AnnotateResult(outcomes=tuple(outcomes[5:])).raise_for_refused()
