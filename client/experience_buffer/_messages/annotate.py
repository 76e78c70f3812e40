"""Annotations as requests: what is a tensor, what goes to `info`, and splitting. Pure.

Lists and arrays become tensors without torch, so that a critic written with another library can
annotate too.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from experience_buffer._arguments import as_text, pairs, refused, shown
from experience_buffer._codec import safetensors
from experience_buffer._codec.item import META_FIELDS
from experience_buffer._codec.safetensors import TensorView
from experience_buffer._dense import convert
from experience_buffer._dense.elements import checked
from experience_buffer._dense.rules import ANY, RULES
from experience_buffer._fields import INFO_INPUTS, info_value
from experience_buffer._messages import push_split
from experience_buffer.errors import InvalidRequestError
from experience_buffer.options import ClientOptions
from experience_buffer.v1 import service_pb2 as pb

MAX_ANNOTATIONS: Final = 4096
"""Annotations that one request may hold."""
_MAX_EXACT: Final = 2**53
"""Numbers travel as float64; larger integers would change."""
_MAX_DEPTH: Final = 16
"""Lists and dicts inside one another; protobuf reads no more than some 30."""
_LIKENESS: Final = 0.82
"""As `rewrad` and `logprob` have to `reward` and `logprobs`, and `old_logprobs` hasn't."""
_SCALARS: Final = (bool, int, float, str)
_TENSOR: Final = "a list of numbers, an array or a tensor"


def requests(
    annotations: Mapping[str, Mapping[str, Any]], *, buffer: str, options: ClientOptions
) -> list[pb.AnnotateRequest]:
    """Make the requests that carry all annotations, in order.

    Everything is checked before anything is sent.

    Raises:
        InvalidRequestError: An annotation holds what can't be sent; the text names uid and field.
        MessageTooLargeError: One annotation is over the message limit.
    """
    wanted = "a mapping {uid: {field: value}}"
    if not isinstance(annotations, Mapping):
        raise refused("annotations", annotations, wanted)
    buffer = as_text("buffer", buffer, "a buffer's name as text")
    found: list[pb.AnnotateRequest] = []
    num_bytes, most_bytes = 0, min(options.max_push_bytes, push_split.max_payload_bytes(options))
    for uid, fields in pairs("annotations", annotations, wanted):
        annotation = _annotation(uid, fields)
        size = annotation.ByteSize()
        if size > push_split.max_payload_bytes(options):
            raise push_split.too_large(size, f"the annotation of {uid}", options)
        is_full = found and (
            num_bytes + size > most_bytes or len(found[-1].annotations) == MAX_ANNOTATIONS
        )
        if is_full or not found:
            found.append(pb.AnnotateRequest(buffer=buffer))
            num_bytes = 0
        found[-1].annotations.append(annotation)
        num_bytes += size
    return found


def _annotation(uid: str, fields: Mapping[str, Any]) -> pb.Annotation:
    where = f"annotations[{shown(uid)}]"
    if not isinstance(uid, str):
        raise refused("a key of annotations", uid, "a uid, such as experience.eid.uid")
    wanted = "a mapping of at least one field"
    entries = pairs(where, fields, wanted) if isinstance(fields, Mapping) else []
    if not entries:
        raise refused(where, fields, wanted)
    message = pb.Annotation()
    tensors: list[tuple[str, TensorView]] = []
    info: dict[str, Any] = {}
    for name, given in entries:
        path = f"{where}[{shown(name)}]"
        value = _unwrapped(given, path)
        name = str.__str__(name) if isinstance(name, str) else name
        if name == "reward":
            message.reward = info_value(float, value, path)
        elif name == "info":
            _add_entries(info, value, path)
        elif name in INFO_INPUTS:
            _add(info, name, info_value(INFO_INPUTS[name], value, path), path)
        elif _is_tensor(name, value, path):
            tensors.append((name, _view(name, value, path)))
        else:
            _add(info, name, value, path)
    try:
        message.uid = uid
        message.info.update(info)
    except UnicodeEncodeError:
        raise InvalidRequestError(
            f"{where}: a text holds half of a surrogate pair", subject=where
        ) from None
    if tensors:
        message.tensors = b"".join(safetensors.write(tensors))
    return message


def _is_tensor(name: object, value: Any, path: str) -> bool:
    """Whether a field becomes a tensor; else it is an entry of `info`."""
    if not isinstance(name, str):
        raise refused("a key of " + path.rpartition("[")[0], name, "a field's name as text")
    if name in META_FIELDS:
        raise InvalidRequestError(f"{path} can't be changed by an annotation", subject=path)
    if name not in RULES and (meant := _meant(name)):
        raise InvalidRequestError(
            f"{path} would be a field of its own; did you mean {meant!r}? Else give it in info, or "
            "another name",
            subject=path,
        )
    if not isinstance(value, _SCALARS):
        return True
    if name in RULES:
        raise refused(path, value, _TENSOR)
    return False


@lru_cache(maxsize=256)
def _meant(name: str) -> str:
    """The input of estimators that a name is a slip of, as it seems; else empty."""
    import difflib

    # `new_logprobs` is as near to `ref_logprobs`; slips of a first letter are rare.
    known = [one for one in ("reward", "info", *INFO_INPUTS, *RULES) if one[:1] == name[:1]]
    near = difflib.get_close_matches(name, known, n=1, cutoff=_LIKENESS)
    return near[0] if near else ""


def _view(name: str, value: Any, path: str) -> TensorView:
    """Make a field's tensor, as `Experience` does of what it is given."""
    rule = RULES.get(name, ANY)
    try:
        return convert.view_of(convert.kept(value, path, rule), path, rule)
    except TypeError as error:
        raise InvalidRequestError(f"{path} is {error}", subject=path) from None
    except InvalidRequestError:
        raise
    except Exception as error:  # The caller's own class.
        raise refused(path, value, f"{_TENSOR}; it fails by {type(error).__name__}") from error


def _add_entries(info: dict[str, Any], entries: Any, path: str) -> None:
    if not isinstance(entries, Mapping):
        raise refused(path, entries, "a mapping")
    for name, value in pairs(path, entries, "a mapping"):
        if not isinstance(name, str):
            raise refused(f"a key of {path}", name, "text")
        _add(info, str.__str__(name), value, f"{path}[{shown(name)}]")


def _add(info: dict[str, Any], name: str, value: Any, path: str) -> None:
    if name in info:
        raise InvalidRequestError(f"{path} is given twice, here and in info", subject=path)
    info[name] = _plain(value, path, 0)


def _plain(value: Any, path: str, depth: int) -> Any:
    """Check that a struct can hold a value as it is, and unwrap scalars of NumPy and torch."""
    value = _unwrapped(value, path)
    if isinstance(value, int) and abs(value) > _MAX_EXACT:
        raise refused(path, value, "an integer of at most 2**53, or text")
    if isinstance(value, int) and not isinstance(value, bool):
        return int.__pos__(value)  # Plain, whatever a class of the caller's answers.
    if value is None or isinstance(value, _SCALARS):
        return value
    if depth < _MAX_DEPTH and isinstance(value, (list, tuple)):
        return [_plain(member, f"{path}[{i}]", depth + 1) for i, member in enumerate(value)]
    if depth < _MAX_DEPTH and isinstance(value, Mapping):
        entries: dict[str, Any] = {}
        for key, member in pairs(path, value, "a mapping"):
            if not isinstance(key, str):
                raise refused(f"a key of {path}", key, "text")
            entries[str.__str__(key)] = _plain(member, f"{path}[{shown(key)}]", depth + 1)
        return entries
    raise refused(path, value, f"numbers, texts, and lists and dicts of them, {_MAX_DEPTH} deep")


def _unwrapped(value: Any, path: str) -> Any:
    """Python's value of a NumPy scalar or of a tensor without dimensions."""
    if isinstance(value, str):
        return str.__str__(value)
    try:
        has_one = value.shape == ()
    except Exception:  # Most have no shape; the caller's own class may fail at anything.
        return value
    if not has_one:
        return value
    try:
        value = checked(value)
    except TypeError as error:
        raise InvalidRequestError(f"{path} is {error}", subject=path) from None
    try:
        return value.item()
    except Exception:  # The caller's own class.
        return value
