"""The readers of what comes over the network, each as a function that lets documented errors out.

What a target asserts beyond that are the promises of the reader: what it accepts can be written
again, split, read again, and stays the same.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Final

from google.protobuf.message import DecodeError

from experience_buffer import trxp
from experience_buffer._codec import pickle_reader, safetensors
from experience_buffer._codec.frame import split_frame
from experience_buffer._codec.limits import DEFAULT_LIMITS, Limits
from experience_buffer._codec.plain_values import Normaliser
from experience_buffer.collation import padded_collate, varlen_collate, verl_collate
from experience_buffer.errors import ExperienceBufferError, TrxpError
from experience_buffer.packed import PackedBatch, PackedRow, pack
from experience_buffer.trxp import Item, TensorView
from experience_buffer.v1 import service_pb2
from experience_buffer_server.buffer.intake.admission import admit
from experience_buffer_server.buffer.intake.annotation import admit_annotated
from experience_buffer_server.buffer.intake.compiled.candidates import CompiledReader
from experience_buffer_server.buffer.intake.push_reading import each_alone
from experience_buffer_server.buffer.state.entries import Candidate, Refusal
from experience_buffer_server.rpc import messages
from experience_buffer_server.settings.buffer import BufferSettings
from tests.fuzz import messages as requests_of_calls
from tests.fuzz import pickles, tables
from tests.fuzz.bombs import one
from tests.fuzz.mutations import Mutation, mostly, of_choices, of_frame

Target = Callable[[bytes], None]

LIMITS: Final = Limits(max_message_bytes=1024 * 1024)
"""What experiences may take each alone: 24 MiB, so that what is metered is what reading them takes."""
_MAX_TEXT: Final = 16_384
"""Characters of one error or refusal: a sender's values are cut in them."""


_COLLATES: Final = (
    padded_collate(pad_token_id=0, max_prompt_length=32, max_response_length=64, columns=["info"]),
    varlen_collate(columns=["task"]),
    verl_collate(pad_token_id=0, max_prompt_length=32, max_response_length=64),
)


def frame(data: bytes) -> None:
    """The outermost lengths."""
    with _documented(TrxpError):
        metadata, section = split_frame(data, limits=DEFAULT_LIMITS)
        assert 21 + len(metadata) + len(section) == len(data)


def metadata(data: bytes) -> None:
    """The reader of plain data, and the walk that decides what may be used."""
    with _documented(TrxpError):
        value, is_suspect = pickle_reader.load(data, limits=DEFAULT_LIMITS)
        if is_suspect:
            value = Normaliser(DEFAULT_LIMITS).normal(value, index=0)
        assert type(value).__module__ == "builtins", value


def tensors(data: bytes) -> None:
    with _documented(TrxpError):
        table = safetensors.read(memoryview(data), max_header_bytes=8 * 1024 * 1024)
        written = b"".join(safetensors.write(table))
        again = safetensors.read(memoryview(written), max_header_bytes=16 * 1024 * 1024)
        ranks = list(safetensors.ITEM_BYTES)
        ordered = sorted(table, key=lambda entry: (ranks.index(entry[1].dtype), entry[0]))
        assert _known(again) == _known(ordered)


def push(data: bytes) -> None:
    """A pushed payload as the server reads it, for buffers of several kinds."""
    with _documented(ExperienceBufferError):
        kind = sum(data[-4:]) % 4
        found = pushed(data, _settings()[kind], published=5)
        _check_errors(one.message for one in found if isinstance(one, Refusal))
        stored = [one for one in found if isinstance(one, Candidate) and not one.tombstone]
        for candidate in stored if len(data) % 4 == 0 else ():
            (again,) = trxp.read(bytes(candidate.payload))
            assert isinstance(again, Item), again
            assert again.uid == candidate.uid
            assert again.encode() == candidate.payload
        if len(data) % 8 == 1:
            _repack(stored)


def pushed(
    data: bytes, settings: BufferSettings, *, published: int | None = None
) -> list[Candidate | Refusal | None]:
    """What a server makes of a pushed payload, each experience alone."""
    admitted = (
        Refusal("", str(item))  # type: ignore[arg-type]
        if isinstance(item, TrxpError)
        else admit(item, settings, published=published)
        for item in trxp.read(data)
    )
    return list(each_alone(admitted, pushed_bytes=len(data), limits=LIMITS))


def compiled(data: bytes) -> None:
    """The compiled reader: what it makes of a payload is what the checked one makes of it."""
    settings = _settings()[sum(data[-4:]) % 4]
    found = _compiled().candidates(memoryview(data), settings, published=5)
    assert found == _compiled().candidates(memoryview(data), settings, published=5, is_lent=True)
    if found is not None:
        items = trxp.read(data)
        expected = [admit(item, settings, published=5) for item in items if isinstance(item, Item)]
        assert found == expected
        assert len(found) == len(items)


def _repack(stored: Iterable[Candidate]) -> None:
    """What was admitted goes into a packed batch and comes out of it unchanged."""
    rows = [PackedRow(uid=each.uid, payload=bytes(each.payload), tensors={}) for each in stored]
    batch = PackedBatch.parse(b"".join(pack(rows)))
    assert [batch.payload(index) for index in range(len(batch))] == [row.payload for row in rows]


def rewrite(data: bytes) -> None:
    """Payloads that are cut up, put together, added to and made objects of, as trainers do."""
    with _documented(TrxpError):
        singles = trxp.split(data, limits=LIMITS)
        whole = trxp.merge([data, data]) if len(data) % 4 == 0 else trxp.merge([])
        singles = singles if len(data) % 4 == 0 else []
        # Not bytes: merging lets equal keys be one object, which they needn't be in a payload.
        assert [_content(single) for single in trxp.split(whole, limits=LIMITS)] == [
            *map(_content, singles)
        ] * 2
        for single in singles:
            view = TensorView("F32", (2,), memoryview(bytes(8)))
            trxp.with_tensors(single, {"advantages": view})
    with _documented(TrxpError):
        trxp.with_tensors(data, {"returns": TensorView("F32", (1,), memoryview(bytes(4)))})
    if len(data) % 8 == 0:
        with _documented(ValueError):
            trxp.decode(data)


def packed(data: bytes) -> None:
    with _documented(TrxpError):
        batch = PackedBatch.parse(data)
        _ = (batch.uids, batch.groups, batch.flags, repr(batch))
        for name in batch.columns:
            with _documented(ValueError):
                batch.column(name)
        for name in batch.fields:
            with _documented(ValueError):
                batch.tensor(name)
            with _documented(ValueError):
                batch.offsets(name)
        for index in range(min(len(batch), 4)):
            batch.payload(index)
            with _documented(ValueError):
                batch.of(index)
        with _documented(ValueError):
            batch.padded(max_prompt_length=32, max_response_length=64)
        with _documented(ValueError):
            batch.varlen()
        for collate in _COLLATES:
            with _documented(ValueError):
                collate(batch)
        with _documented(ValueError):
            _check_copy(batch, pickle.loads(pickle.dumps(batch[::-1]))[::-1])


def _check_copy(batch: PackedBatch, copy: PackedBatch) -> None:
    """What was taken apart and written anew has the same experiences."""
    assert copy.uids == batch.uids
    for index in range(min(len(batch), 4)):
        assert copy.payload(index) == batch.payload(index)


def annotation(data: bytes) -> None:
    """An annotation, applied to a stored experience."""
    try:
        message = service_pb2.Annotation.FromString(data)
    except DecodeError:
        return
    with _documented(TrxpError):
        found = messages.annotation_from(message)
        admitted = admit_annotated(
            found, _stored(), settings=_settings()[0], max_payload_bytes=1 << 20
        )
        if isinstance(admitted, str):
            _check_errors([admitted])
        else:
            assert isinstance(trxp.read(bytes(admitted.payload))[0], Item)


DECODERS: Final[dict[str, Target]] = {
    "frame": frame,
    "metadata": metadata,
    "tensors": tensors,
    "push": push,
    "compiled": compiled,
    "rewrite": rewrite,
    "packed": packed,
    "annotation": annotation,
}


MUTATIONS: Final[dict[str, Mutation]] = {
    "frame": mostly(of_frame),
    "metadata": mostly(pickles.mutate),
    "tensors": mostly(tables.mutate),
    "push": mostly(of_frame),
    "compiled": mostly(of_frame),
    "rewrite": mostly(of_frame),
    "packed": mostly(tables.mutate),
    "annotation": requests_of_calls.mutate_annotation,
    "requests": requests_of_calls.mutate,
    "verbs": of_choices,
}
"""In the order in which `make fuzz` runs them."""


def make_target(name: str) -> Target:
    if name == "requests":
        # Imports all of the server, which no decoder needs.
        from tests.fuzz.service import ServiceTarget

        return ServiceTarget()
    if name == "verbs":
        # Imports the clients, torch and NumPy.
        from tests.fuzz.verbs import Verbs

        return Verbs()
    return DECODERS[name]


class _documented(contextlib.AbstractContextManager[None]):
    """Swallows what a reader documents; everything else is a finding."""

    def __init__(self, *kinds: type[Exception]) -> None:
        self._kinds = kinds

    def __exit__(self, kind: type[BaseException] | None, error: object, _: object) -> bool:
        # A ValueError that is no error of the package has a plain text of ours; subclasses are bugs.
        if kind is None or not issubclass(kind, self._kinds):
            return False
        _check_errors([str(error)])
        return issubclass(kind, ExperienceBufferError) or kind is ValueError


def _check_errors(texts: Iterable[str]) -> None:
    for text in texts:
        assert len(text) <= _MAX_TEXT, f"{len(text)} characters of an error: {text[:100]}"


def _content(single: bytes) -> tuple[str, list[tuple[str, str, tuple[int, ...], bytes]]]:
    (item,) = trxp.read(single)
    assert isinstance(item, Item), item
    return item.uid, _known(sorted(item.tensors.items()))


def _known(table: list[tuple[str, TensorView]]) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    return [(name, view.dtype, view.shape, bytes(view.data)) for name, view in table]


@cache
def _settings() -> tuple[BufferSettings, ...]:
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"advantage": {"estimator": "grpo"}, "on_bad_reward": "tombstone"},
        {"advantage": {"estimator": "gae"}, "on_missing_field": "wait"},
        {"advantage": {"estimator": "gae"}, "on_future_version": "refuse"},
    )
    return tuple(BufferSettings.model_validate(kind) for kind in kinds)


@cache
def _compiled() -> CompiledReader:
    return CompiledReader(DEFAULT_LIMITS)


@cache
def _stored() -> bytes:
    return trxp.split(one())[0]
