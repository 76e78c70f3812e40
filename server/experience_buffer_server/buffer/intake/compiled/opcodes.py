"""The opcodes of pickles that `pickle.dumps` writes for plain data, as `pickletools` names them."""

from __future__ import annotations

from typing import Final

BININT: Final = 0x4A
BININT1: Final = 0x4B
BININT2: Final = 0x4D
LONG1: Final = 0x8A
BINFLOAT: Final = 0x47
OP_NONE: Final = 0x4E
NEWTRUE: Final = 0x88
NEWFALSE: Final = 0x89
SHORT_BINUNICODE: Final = 0x8C
BINUNICODE: Final = 0x58
BINGET: Final = 0x68
LONG_BINGET: Final = 0x6A
MEMOIZE: Final = 0x94
EMPTY_DICT: Final = 0x7D
EMPTY_LIST: Final = 0x5D
OP_MARK: Final = 0x28
SETITEM: Final = 0x73
SETITEMS: Final = 0x75
APPEND: Final = 0x61
APPENDS: Final = 0x65
FRAME: Final = 0x95
