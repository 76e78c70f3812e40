"""The opcodes that most payloads hold few of: large numbers, tuples, sets, calls never made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from experience_buffer._codec.pickle_foreign import Foreign, build, find, reduce
from experience_buffer._codec.pickle_machine import Machine
from experience_buffer._codec.plain_values import MAX_INT_BYTES

_NODES_PER_SET: Final = 64


def _push_long_text(machine: Machine) -> None:
    start = machine.pos + 8
    text = machine.skip(machine.number(8))
    try:
        value = text.decode()
    except UnicodeDecodeError:
        value = machine.odd_text(start, machine.pos)
    machine.stack.append(value)


def _push_sized_bytes(machine: Machine, num_length_bytes: int) -> None:
    data = machine.skip(machine.number(num_length_bytes))
    # A slice of one byte is Python's only object for it, which the pickle may not have shared.
    machine.stack.append(data[0].to_bytes(1, "little") if len(data) == 1 else data)


def _push_bytearray(machine: Machine) -> None:
    machine.skip(machine.number(8))
    _push_foreign(machine, Foreign("builtins.bytearray"))


def _push_sized_int(machine: Machine, num_length_bytes: int) -> None:
    num_bytes = machine.number(num_length_bytes)
    if num_bytes > MAX_INT_BYTES:
        raise machine.error(
            f"an integer of {num_bytes} bytes exceeds {MAX_INT_BYTES}; send it as text"
        )
    machine.stack.append(int.from_bytes(machine.skip(num_bytes), "little", signed=True))


def _push_int32(machine: Machine) -> None:
    machine.stack.append(int.from_bytes(machine.skip(4), "little", signed=True))


def _push_foreign(machine: Machine, value: object) -> None:
    machine.is_suspect = True
    machine.stack.append(value)


def _put(machine: Machine, num_index_bytes: int) -> None:
    index = machine.number(num_index_bytes)
    memo = machine.memo
    if index < len(memo):
        memo[index] = machine.memoizable(machine.top())
    elif index == len(memo):
        memo.append(machine.memoizable(machine.top()))
    else:
        raise machine.error(f"memo index {index}, but only {len(memo)} values were kept")


def _get(machine: Machine) -> None:
    value = machine.memo[machine.number(4)]
    if type(value) is not str:
        machine.is_suspect = True
    machine.stack.append(value)


def _push_tuple(machine: Machine, members: list[Any]) -> None:
    # Wrapping value after value in a tuple nests without any mark, which `depth` doesn't see.
    machine.has_composites = machine.is_suspect = True
    machine.stack.append(tuple(members))


def _push_set(machine: Machine, members: list[Any] | None) -> None:
    machine.num_sets += 1
    if machine.num_sets * _NODES_PER_SET > machine.limits.max_nodes:
        raise machine.error("too many sets; send lists")
    machine.has_composites = machine.is_suspect = True
    if members is None:
        machine.stack.append(set())
    else:
        machine.stack.append(frozenset(machine.fill_set(set(), members)))


def _add_items(machine: Machine) -> None:
    members = machine.take_marked()
    target = machine.top()
    if type(target) is set:
        machine.fill_set(target, members)
    elif not isinstance(target, Foreign):
        raise machine.error(f"members added to a {type(target).__name__}")


def _frame(machine: Machine) -> None:
    if machine.number(8) > len(machine.data) - machine.pos:
        raise IndexError


def _stack_global(machine: Machine) -> None:
    module, name = machine.take(2)
    if type(module) is not str or type(name) is not str:
        raise machine.error("a global whose name isn't text")
    _push_foreign(machine, find(module, name))


def _text_global(machine: Machine) -> None:
    names = []
    for _ in range(2):
        end = machine.data.find(b"\n", machine.pos)
        names.append(
            machine.skip(end - machine.pos + 1) if end >= 0 else machine.skip(len(machine.data))
        )
    module, name = (text[:-1].decode("utf-8", "replace") for text in names)
    _push_foreign(machine, find(module, name))


def _reduce(machine: Machine) -> None:
    function, args = machine.take(2)
    if not isinstance(function, Foreign):
        raise machine.error(f"a {type(function).__name__} is called")
    value = reduce(function, args)
    if isinstance(value, str | bytes):
        # Made anew of bytes that may be fetched from the memo over and over.
        machine.num_made += len(value)
        if machine.num_made > len(machine.data):
            raise machine.error("NumPy texts longer than the pickle that holds them")
    _push_foreign(machine, value)


def _new_object(machine: Machine, num_operands: int) -> None:
    kind = machine.take(num_operands)[0]
    if not isinstance(kind, Foreign):
        raise machine.error(f"a {type(kind).__name__} is used as a class")
    _push_foreign(machine, Foreign(kind.name))


def _build(machine: Machine) -> None:
    (state,) = machine.take(1)
    if not build(machine.top(), state):
        raise machine.error(f"a state is set on a {type(machine.top()).__name__}")


RARE: Final[dict[int, Callable[[Machine], None]]] = {
    0x88: lambda machine: machine.stack.append(True),
    0x89: lambda machine: machine.stack.append(False),
    0x4A: _push_int32,
    0x8A: lambda machine: _push_sized_int(machine, 1),
    0x8B: lambda machine: _push_sized_int(machine, 4),
    0x8D: _push_long_text,
    0x43: lambda machine: _push_sized_bytes(machine, 1),
    0x42: lambda machine: _push_sized_bytes(machine, 4),
    0x8E: lambda machine: _push_sized_bytes(machine, 8),
    0x96: _push_bytearray,
    0x71: lambda machine: _put(machine, 1),
    0x72: lambda machine: _put(machine, 4),
    0x6A: _get,
    0x29: lambda machine: machine.stack.append(()),
    0x74: lambda machine: _push_tuple(machine, machine.take_marked()),
    0x85: lambda machine: _push_tuple(machine, machine.take(1)),
    0x86: lambda machine: _push_tuple(machine, machine.take(2)),
    0x87: lambda machine: _push_tuple(machine, machine.take(3)),
    0x8F: lambda machine: _push_set(machine, None),
    0x90: _add_items,
    0x91: lambda machine: _push_set(machine, machine.take_marked()),
    0x95: _frame,
    0x93: _stack_global,
    0x63: _text_global,
    0x52: _reduce,
    0x62: _build,
    0x81: lambda machine: _new_object(machine, 2),
    0x92: lambda machine: _new_object(machine, 3),
}
"""What to do for an opcode; all others are handled in `pickle_reader`, or refused."""
