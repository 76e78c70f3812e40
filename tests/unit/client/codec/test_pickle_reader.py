"""The reader of pickled plain data: it agrees with pickle on data, and survives everything else."""

from __future__ import annotations

import contextlib
import datetime
import pickle
import struct
import tracemalloc
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experience_buffer._codec import pickle_reader
from experience_buffer._codec.limits import DEFAULT_LIMITS, Limits
from experience_buffer._codec.plain_values import Normaliser
from experience_buffer.errors import TrxpError

TEXT = st.text(st.characters(exclude_categories=()), max_size=20)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**600), 2**600)
    | st.floats()
    | TEXT
    | st.binary(max_size=300)
    | st.integers(250, 260).map(lambda length: "x" * length)
)
KEYS = st.one_of(TEXT, st.integers(), st.binary(max_size=5), st.none(), st.tuples(TEXT, TEXT))
PLAIN = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(KEYS, inner, max_size=5)
        | st.tuples(inner)
        | st.tuples(inner, inner)
        | st.tuples(inner, inner, inner, inner)
    ),
    max_leaves=30,
)
PROTOCOLS = st.integers(3, 5)  # protocol 2 spells bytes as a call


@st.composite
def sharing(draw: st.DrawFn) -> Any:
    """Values that hold one another more than once, without a cycle."""
    values: list[Any] = draw(st.lists(PLAIN, min_size=1, max_size=5))
    for _ in range(draw(st.integers(0, 5))):
        picked = [values[i] for i in draw(st.lists(st.integers(0, len(values) - 1), max_size=4))]
        kind = draw(st.sampled_from([list, tuple, dict]))
        values.append(dict(zip("abcd", picked, strict=False)) if kind is dict else kind(picked))
    return values


def load(data: bytes, limits: Limits = DEFAULT_LIMITS) -> Any:
    value, is_suspect = pickle_reader.load(data, limits=limits)
    if is_suspect:
        value = Normaliser(limits).normal(value, index=0)
    return value


def test_bytes_of_one_byte_are_shared_only_where_the_pickle_shares_them() -> None:
    once, again = (98).to_bytes(1, "little"), (98).to_bytes(1, "little")
    data = pickle.dumps([once, again, once], 5)
    assert pickle.dumps(load(data), 5) == data


@settings(max_examples=300)
@given(sharing(), PROTOCOLS)
def test_plain_data_is_read_as_pickle_reads_it_sharing_included(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    expected = pickle.loads(data)
    found, _ = pickle_reader.load(data, limits=DEFAULT_LIMITS)
    assert repr(found) == repr(expected)
    # Equal pickles mean equal types, equal texts, NaNs included, and the same objects shared.
    assert pickle.dumps(found, 5) == pickle.dumps(expected, 5)


@settings(max_examples=100)
@given(st.sets(KEYS) | st.frozensets(KEYS), PROTOCOLS)
def test_sets_are_read(value: set[Any], protocol: int) -> None:
    if protocol < 4:  # which spells a set as a call
        protocol = 4
    assert load(pickle.dumps(value, protocol)) == value


@settings(max_examples=300)
@given(st.binary(max_size=60))
def test_no_bytes_do_harm(tail: bytes) -> None:
    with contextlib.suppress(TrxpError):
        pickle.dumps(load(b"\x80\x05" + tail))


OPCODES = st.lists(
    st.sampled_from(
        [bytes([op]) for op in b"N}]()uesabtR\x81\x85\x86\x87\x88\x8f\x90\x91\x92\x93\x94"]
        + [b"h\0", b"h\1", b"h\2", b"q\0", b"r\1\0\0\0", b"K\1", b"\x8c\1x", b"cos\nx\n"]
    ),
    max_size=60,
).map(b"".join)


@settings(max_examples=1000)
@given(OPCODES)
def test_no_opcodes_do_harm(opcodes: bytes) -> None:
    try:
        value = load(b"\x80\x05" + opcodes + b".")
    except TrxpError:
        return
    assert pickle.loads(pickle.dumps(value)) == value


def test_the_ten_bytes_are_refused_at_once() -> None:
    tracemalloc.start()
    with pytest.raises(TrxpError, match="memo index 268435455, but only 0 values were kept"):
        load(bytes.fromhex("80044b0172ffffff0f2e"))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 100_000


def doubled(levels: int, fill: bytes) -> bytes:
    """Tuples of twice the tuple before, the last a dict key: hashing it takes 2**levels steps."""
    tuples = b"".join(b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86\x94" for i in range(levels))
    return b"\x80\x05](K\x01\x94" + tuples + fill.replace(b"KEY", b"h" + bytes([levels])) + b"e."


HOSTILE = {
    "text_longer_than_the_rest": b"\x80\x05X\xff\xff\xff\x7fabc.",
    "text_of_2**63_bytes": b"\x80\x05\x8d\xff\xff\xff\xff\xff\xff\xff\x7fabc.",
    "bytes_longer_than_the_rest": b"\x80\x05B\xff\xff\xff\x7fabc.",
    "int_of_2GB": b"\x80\x05\x8b\xff\xff\xff\x7f\x01.",
    "int_too_wide_to_print": b"\x80\x05\x8b\x01\x04\0\0" + b"\x01" * 1025 + b".",
    "frame_longer_than_the_rest": b"\x80\x05\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.",
    "nested_lists": b"\x80\x05" + b"]" * 20_000 + b"a" * 19_999 + b".",
    "nested_tuples": b"\x80\x05N" + b"\x85" * 100_000 + b".",
    "nested_marks": b"\x80\x05" + b"(" * 20_000 + b"t" * 20_000 + b".",
    "nested_dicts": b"\x80\x05" + b"}K\x01" * 20_000 + b"N" + b"s" * 20_000 + b".",
    "list_in_itself": b"\x80\x05]\x94h\0a.",
    "dict_in_itself": b"\x80\x05}\x94K\x01h\0s.",
    "too_many_values": b"\x80\x05(" + b"N" * 1_000_001 + b"l.",
    "too_many_sets": b"\x80\x05](" + b"\x8f" * 100_000 + b"e.",
    "bomb": b"\x80\x05]\x94"
    + b"".join(b"]\x94(" + (b"h" + bytes([i])) * 2 + b"e" for i in range(60))
    + b".",
    "key_that_hashes_for_ever": doubled(60, b"}KEYNs"),
    "keys_that_hash_for_ever": doubled(60, b"}(KEYNu"),
    "member_that_hashes_for_ever": doubled(60, b"\x8f(KEY\x90"),
    "frozen_member_that_hashes_for_ever": doubled(60, b"(KEY\x91"),
    "set_items_below_the_mark": b"\x80\x05](}((NNuue.",
    "frozenset_as_key": b"\x80\x05}(K\x01\x91Ns.",
    "list_as_key": b"\x80\x05}]Ns.",
    "set_of_lists": b"\x80\x05\x8f(]\x90.",
    "colliding_keys": b"\x80\x05}("
    + b"".join(
        b"\x8a" + bytes([len(raw)]) + raw + b"N"
        for i in range(1, 2000)
        for raw in [(i * (2**61 - 1)).to_bytes(10, "little")]
    )
    + b"u.",
    "key_without_value": b"\x80\x05}(K\x01u.",
    "items_on_a_list": b"\x80\x05](K\x01Nu.",
    "append_to_a_dict": b"\x80\x05}Na.",
    "append_below_the_mark": b"\x80\x05](a.",
    "fill_below_the_mark": b"\x80\x05]((ee.",
    "tuple_below_the_mark": b"\x80\x05NN(\x86.",
    "mark_left": b"\x80\x05(N.",
    "two_values": b"\x80\x05NN.",
    "no_value": b"\x80\x05.",
    "no_mark": b"\x80\x05}u.",
    "trailing": b"\x80\x05N.N",
    "unknown_get": b"\x80\x05h\x07.",
    "bad_utf8": b"\x80\x05\x8c\x02\xff\xff.",
    "protocol_0": b"I1\n.",
    "protocol_6": b"\x80\x06N.",
    "persistent_id": b"\x80\x05NQ.",
    "extension": b"\x80\x05\x82\x01.",
    "instance": b"\x80\x05(ios\nsystem\n.",
    "call": b"\x80\x05cos\nsystem\n\x8c\x02ls\x85R.",
    "stack_call": b"\x80\x05\x8c\x02os\x8c\x06system\x93\x8c\x02ls\x85R.",
    "call_of_a_number": b"\x80\x05K\x01)R.",
    "build_of_a_dict": b"\x80\x05}}b.",
    "class": b"\x80\x05cbuiltins\nobject\n)\x81.",
    "numpy_scalar_of_lies": b"\x80\x05cnumpy._core.multiarray\nscalar\ncnumpy\ndtype\n"
    b"\x8c\x02f8\x89\x88\x87RC\x01x\x86R.",
    "numpy_object": b"\x80\x05cnumpy._core.multiarray\nscalar\ncnumpy\ndtype\n"
    b"\x8c\x02O8\x89\x88\x87RN\x86R.",
    "next_buffer": b"\x80\x05\x97.",
    "global_without_name": b"\x80\x05cos",
    "nothing": b"",
    "protocol_only": b"\x80",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_refused_in_bounded_memory(name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(TrxpError) as caught:
            load(HOSTILE[name])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith(("metadata", "items[0]"))
    assert peak_bytes < 100_000 + 100 * len(HOSTILE[name])


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (datetime.datetime(2026, 1, 2), "datetime.datetime"),
        (OrderedDict(a=1), "collections.OrderedDict"),
        (1j, "builtins.complex"),
        (bytearray(b"x"), "builtins.bytearray"),
        (print, "builtins.print"),
    ],
)
@pytest.mark.parametrize("protocol", [2, 5])
def test_what_is_not_plain_is_named_with_its_path(value: object, name: str, protocol: int) -> None:
    name = name.replace("builtins", "__builtin__") if protocol == 2 else name
    data = pickle.dumps({"info": {"list": [1, {"it's": value}]}}, protocol)
    with pytest.raises(TrxpError) as caught:
        load(data)
    assert caught.value.subject == 'items[0].info.list[1]["it\'s"]'
    assert f"{name} isn't plain data" in str(caught.value)


def test_nesting_up_to_the_limit_is_read() -> None:
    limits = Limits(max_depth=7)
    value: Any = 1
    for _ in range(7):
        value = [value]
    assert load(pickle.dumps(value), limits) == value
    with pytest.raises(TrxpError, match="nested more than 7 deep"):
        load(pickle.dumps({"a": value}), limits)


def test_many_siblings_are_not_taken_for_nesting() -> None:
    value = [[[i], {"a": {"b": i}}, []] for i in range(500)]
    data = pickle.dumps(value)
    assert load(data) == value
    assert not pickle_reader.load(data, limits=DEFAULT_LIMITS)[1]


def test_large_dicts_of_small_numbers_and_of_texts_are_read() -> None:
    value = [dict.fromkeys(range(5000), 1), {str(i): i for i in range(5000)}]
    assert load(pickle.dumps(value)) == value


def test_numbers_at_the_edges() -> None:
    value = [0, 255, 256, 65535, 65536, -1, 2**31 - 1, -(2**31), 2**31, 2**63, -(2**8000), -0.0]
    data = pickle.dumps(value)
    assert pickle.dumps(load(data)) == data
    # BININT1 and BININT2 hold what BININT could as well.
    assert load(b"\x80\x02(K\xffM\xff\xffJ" + struct.pack("<i", -2) + b"t.") == (255, 65535, -2)


def filled_in_steps(keys: list[float], step: int) -> bytes:
    """A dict that is filled by several SETITEMS, as no pickler does with so few keys."""
    parts = [keys[begin : begin + step] for begin in range(0, len(keys), step)]
    pairs = [
        b"(" + b"".join(b"G" + struct.pack(">d", key) + b"N" for key in part) + b"u"
        for part in parts
    ]
    return b"\x80\x04}" + b"".join(pairs) + b"."


@pytest.mark.parametrize("num_keys", [256, 257, 381])
def test_free_keys_are_counted_over_all_steps(num_keys: int) -> None:
    """Else what is read couldn't be read again once it is written as picklers do."""
    keys = [float(key) for key in range(num_keys)]
    data = filled_in_steps(keys, 127)
    if num_keys == 256:
        assert load(data) == load(pickle.dumps(load(data), 5)) == dict.fromkeys(keys)
        return
    for each in (data, pickle.dumps(dict.fromkeys(keys), 5)):
        with pytest.raises(TrxpError, match="more than 256 members"):
            load(each)


@pytest.mark.parametrize("protocol", [3, 4])
def test_a_long_integer_is_not_kept_to_be_repeated(protocol: int) -> None:
    number = pickle.dumps(2**8000, protocol)[2:-1].removeprefix(b"\x95" + bytes(0))
    number = number[number.index(b"\x8b") :]
    for keep in (b"\x94", b"q\x00", b"r\x00\x00\x00\x00"):
        data = b"\x80\x04(" + number + keep + b"h\x00" * 9 + b"l."
        with pytest.raises(TrxpError, match="more than 64 bits is kept in the memo"):
            load(data)


def test_integers_in_composite_keys_are_short() -> None:
    assert load(pickle.dumps({(2**63, -1): 1}, 5)) == {(2**63, -1): 1}
    for value in ({(1, 2**64): 1}, {(2**8000,)}):
        with pytest.raises(TrxpError, match="64 bits"):
            load(pickle.dumps(value, 5))
        with pytest.raises(TrxpError, match="64 bits"):
            Normaliser(DEFAULT_LIMITS).normal({"a": value}, index=0)


@pytest.mark.parametrize("kind", ["tuple", "float", "int64"])
@pytest.mark.parametrize("make", [dict.fromkeys, set, frozenset])
def test_what_is_written_can_be_read(kind: str, make: Any) -> None:
    """A sender hears of its own mistake; its neighbours don't pay for it."""
    of: Any = {"tuple": lambda n: (n, n + 1), "float": float, "int64": lambda n: n + 2**40}[kind]
    for num_keys in (256, 257):
        value = {"info": {"a": make(of(number) for number in range(num_keys))}}
        if num_keys == 256:
            normal = Normaliser(DEFAULT_LIMITS).normal(value, index=0)
            assert load(pickle.dumps(normal, 5)) == value
            continue
        with pytest.raises(TrxpError, match="more than 256 members") as error:
            Normaliser(DEFAULT_LIMITS).normal(value, index=7)
        assert error.value.item == 7
        assert (error.value.subject or "").startswith("items[7].info.a")
        with pytest.raises(TrxpError, match="more than 256 members"):
            load(pickle.dumps(value, 5))
