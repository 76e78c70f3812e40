"""A reader of pickled plain data that can't call, import or allocate without bound.

Only the opcodes that plain data needs are known. What a pickle would construct by calling
something becomes an inert `Foreign` value that names it; NumPy scalars become Python numbers.
`plain_values` decides what may then be used; writing is `pickle.dumps`.
"""

from __future__ import annotations

import struct

from experience_buffer._codec.limits import Limits
from experience_buffer._codec.pickle_machine import Machine
from experience_buffer._codec.pickle_opcodes import RARE
from experience_buffer._codec.plain_values import MAX_FREE_KEYS

_read_float = struct.Struct(">d").unpack_from
_read_uint32 = struct.Struct("<I").unpack_from


def load(data: bytes, *, limits: Limits) -> tuple[object, bool]:
    """Read one pickle of plain data, protocol 2 to 5.

    Objects that the pickle shares are shared in the result, so that pickling a part of it again
    gives the bytes its writer would have given.

    Args:
        data: The pickle.
        limits: `max_nodes` bounds the opcodes; `max_depth` decides what is suspect.

    Returns:
        The value, and whether it is suspect: it may share containers, be nested deeper than
        `limits.max_depth` or hold foreign values, so a `Normaliser` has to pass it before
        use.

    Raises:
        TrxpError: The pickle is damaged, exceeds a limit or uses an opcode that isn't data's.
    """
    machine = Machine(data, limits)
    try:
        return _run(machine), machine.is_suspect
    except (IndexError, struct.error):
        raise machine.error("the pickle is cut short or its stack runs dry") from None
    except TypeError:
        raise machine.error("a list, dict or set is used as a dict key or set member") from None


def _run(machine: Machine) -> object:
    """Read opcodes until STOP, in one function: a call for each would double the cost.

    `depth` bounds from above how deep the values since the innermost mark are nested, as long
    as no container is fetched from the memo; a bound above the limit makes the value suspect.
    """
    data, stack, memo, marks = machine.data, machine.stack, machine.memo, machine.marks
    max_depth = machine.limits.max_depth
    push, remember = stack.append, memo.append
    read_float, read_uint32 = _read_float, _read_uint32
    fence = depth = 0
    if data[:1] != b"\x80" or not 2 <= data[1] <= 5:
        raise machine.error("not a pickle of protocol 2 to 5")
    pos = 2
    try:
        for _ in range(machine.limits.max_nodes):
            op = data[pos]
            pos += 1
            if op == 0x68:  # BINGET, mostly a key: read what follows in the same round
                value = memo[data[pos]]
                push(value)
                if type(value) is not str:
                    machine.is_suspect = True
                op = data[pos + 1]
                pos += 2
            if op == 0x4B:  # BININT1
                push(data[pos])
                pos += 1
            elif op == 0x4E:  # NONE
                push(None)
            elif op == 0x7D:  # EMPTY_DICT, mostly followed by MEMOIZE and MARK
                value = {}
                push(value)
                if data[pos] == 0x94:
                    remember(value)
                    pos += 1
                    if data[pos] == 0x28:
                        pos += 1
                        marks.append((fence, depth))
                        fence = len(stack)
                        depth = 0
            elif op == 0x75:  # SETITEMS
                start = fence
                fence, outer_depth = marks.pop()
                if start <= fence:
                    raise IndexError
                end = len(stack)
                value = stack[start - 1]
                if (
                    type(value) is dict
                    and (size := len(value) + (end - start) // 2) <= MAX_FREE_KEYS
                ):
                    if machine.has_composites:
                        machine.pos = pos
                        machine.check_keys(stack[start::2], 0)
                    for i in range(start, end, 2):
                        value[stack[i]] = stack[i + 1]
                    if len(value) != size:
                        machine.pos = pos
                        machine.check_size(value, size)
                else:
                    machine.pos = pos
                    machine.set_items(value, stack[start:])
                del stack[start:]
                depth = depth + 1 if depth >= outer_depth else outer_depth
                if depth > max_depth:
                    machine.is_suspect = True
            elif op == 0x8C or op == 0x58:  # SHORT_BINUNICODE, BINUNICODE
                if op == 0x8C:
                    start = pos + 1
                    pos = start + data[pos]
                else:
                    start = pos + 4
                    pos = start + read_uint32(data, pos)[0]
                try:
                    text = data[start:pos].decode()
                except UnicodeDecodeError:
                    text = machine.odd_text(start, pos)
                push(text)
                if data[pos] == 0x94:  # fails if the text was cut short
                    remember(text)
                    pos += 1
            elif op == 0x5D:  # EMPTY_LIST, mostly followed by MEMOIZE
                value = []
                push(value)
                if data[pos] == 0x94:
                    remember(value)
                    pos += 1
            elif op == 0x47:  # BINFLOAT
                push(read_float(data, pos)[0])
                pos += 8
            elif op == 0x4D:  # BININT2
                push(data[pos] | data[pos + 1] << 8)
                pos += 2
            elif op == 0x94:  # MEMOIZE
                remember(machine.memoizable(stack[-1]))
            elif op == 0x28:  # MARK
                marks.append((fence, depth))
                fence = len(stack)
                depth = 0
            elif op == 0x68:  # BINGET after BINGET
                pos -= 1
            elif op == 0x65:  # APPENDS
                start = fence
                fence, outer_depth = marks.pop()
                if start <= fence:
                    raise IndexError
                machine.pos = pos
                machine.extend(stack[start - 1], stack[start:])
                del stack[start:]
                depth = depth + 1 if depth >= outer_depth else outer_depth
                if depth > max_depth:
                    machine.is_suspect = True
            elif op == 0x61 or op == 0x73:  # APPEND, SETITEM
                start = len(stack) - (1 if op == 0x61 else 2)
                if start <= fence:
                    raise IndexError
                fill = machine.extend if op == 0x61 else machine.set_items
                machine.pos = pos
                fill(stack[start - 1], stack[start:])
                del stack[start:]
                depth += 1
                if depth > max_depth:
                    machine.is_suspect = True
            elif op == 0x2E:  # STOP
                break
            else:
                machine.pos, machine.fence = pos, fence
                rare = RARE.get(op)
                if rare is None:
                    raise machine.error(f"opcode 0x{op:02x} isn't one of plain data's")
                rare(machine)
                pos, fence = machine.pos, machine.fence
        else:
            machine.pos = pos
            raise machine.error(
                f"more than {machine.limits.max_nodes:,} values (max_metadata_nodes); send "
                "smaller batches"
            )
    finally:
        machine.pos = pos
    return machine.finish()
