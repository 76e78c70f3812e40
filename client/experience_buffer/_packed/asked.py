"""What a batch is asked for: a position, or whether it holds an experience. No torch."""

from __future__ import annotations

from experience_buffer._arguments import shown


def check_position(index: object) -> None:
    """Check that a batch is indexed by what sequences are indexed by.

    Raises:
        TypeError: It is something else, such as the name of a field.
    """
    if not isinstance(index, slice) and not hasattr(type(index), "__index__"):
        raise TypeError(
            f"a batch is indexed by position, as in batch[0] or batch[2:5]; this is {shown(index)}: for "
            "a field of all experiences take packed.tensor(name), packed.column(name), or a "
            "collation function"
        )


def uid_of(experience: object) -> str:
    """The uid of what is given by itself, or by its identity or uid.

    Raises:
        TypeError: It is something else.
    """
    uid = experience
    if not isinstance(experience, str):
        uid = getattr(getattr(experience, "eid", experience), "uid", None)
    if not isinstance(uid, str):
        raise TypeError(
            "a batch holds experiences: ask for an Experience, an EID or a uid, not "
            f"{shown(experience)}"
        )
    return uid
