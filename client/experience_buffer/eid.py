"""The identity of an experience: five parts, and the four texts that name it and its groups.

No I/O and no third-party import lives here.
"""

from __future__ import annotations

import operator
import os
from dataclasses import dataclass, field
from typing import Any, Final

from experience_buffer._arguments import shown
from experience_buffer.errors import InvalidRequestError

_NUMBERS: Final = ("run", "step")

__all__ = ["EID"]
__dir__ = __all__.copy


def _random_suffix() -> str:
    return os.urandom(3).hex()


def task_in_key(task: int | str) -> str:
    """How a task stands in the key of a group: as its text, in which a `/` is written `%2F`.

    So the last `/` of a tid ends the batch, and no two pairs of batch and task have the same tid. A
    text that would be taken for one so written is changed as well: its `%` are written `%25`.
    """
    text = str(task)
    if "/" not in text and ("%2" not in text or ("%2F" not in text and "%25" not in text)):
        return text
    return text.replace("%", "%25").replace("/", "%2F")


def text_of_key(key: str) -> str:
    """The key of a group with its task as it was given: several groups may have this text."""
    return key.replace("%2F", "/").replace("%25", "%")


@dataclass(slots=True)
class EID:
    """Identity of one experience.

    Mutable, because workflows fill in `run` and `step` after the fact; not to be changed while
    another thread reads it. The texts below are for comparing, never for parsing: a batch or task
    may itself hold a `/`, and `EID(1, 2)` and `EID("1", "2")` have one uid.

    Attributes:
        batch: Number or name of what was explored together, such as the explorer's round or
            `"0/eval_gsm8k"`; no delivered batch.
        task: The task within the batch.
        run: The rollout of the task.
        step: The step within the run, such as the turn; no training step.
        suffix: What tells apart experiences of one step of a run: 6 random hex digits unless given, so the
            same experience made again is another one; see `fixed` and `Experience.fix_suffix`.
    """

    batch: int | str = ""
    task: int | str = ""
    run: int = 0
    step: int = 0
    suffix: str = field(default_factory=_random_suffix)

    def __post_init__(self) -> None:
        if not self._is_plain():
            self._make_plain()

    @classmethod
    def fixed(cls, batch: int | str, task: int | str, run: int = 0, step: int = 0) -> EID:
        """Make an identity whose suffix follows from the other four parts: the same each time.

        For experiences of which there is one per step of a run: made and pushed again, by a notebook's cell or a
        worker that starts again, it is a duplicate, or a conflict where it says something else.
        `Experience.fix_suffix` is for those that the four don't tell apart.

        Args:
            batch: Number or name of the batch.
            task: The task within the batch.
            run: The rollout of the task.
            step: The step within the run.
        """
        import hashlib  # Here, since most make up the suffix and load it for nothing.

        eid = cls(batch, task, run, step, "")
        named = f"{eid.batch}/{task_in_key(eid.task)}/{eid.run}/{eid.step}"
        digest = hashlib.blake2b(named.encode("utf-8", "surrogatepass"), digest_size=3)
        eid.suffix = digest.hexdigest()
        return eid

    @property
    def uid(self) -> str:
        """Name of the experience: all five parts."""
        return f"{self.batch}/{self.task}/{self.run}/{self.step}/{self.suffix}"

    @property
    def tid(self) -> str:
        """Name of the task: what all its runs and steps share."""
        task = self.task
        return f"{self.batch}/{task if type(task) is int else task_in_key(task)}"

    @property
    def rid(self) -> str:
        """Name of the run: what all its steps share."""
        return f"{self.tid}/{self.run}"

    @property
    def sid(self) -> str:
        """Name of the step: what all runs of the task share at one step."""
        return f"{self.tid}/{self.step}"

    def __str__(self) -> str:
        return self.uid

    def to_dict(self) -> dict[str, int | str]:
        """Return the five parts by name, in wire order.

        Raises:
            InvalidRequestError: A part that was set since is of another kind.
        """
        if not self._is_plain():
            self._make_plain()
        return {
            "batch": self.batch,
            "task": self.task,
            "run": self.run,
            "step": self.step,
            "suffix": self.suffix,
        }

    def _is_plain(self) -> bool:
        batch, task = type(self.batch), type(self.task)
        return (
            (batch is int or batch is str)
            and (task is int or task is str)
            and type(self.run) is int
            and type(self.step) is int
            and type(self.suffix) is str
        )

    def _make_plain(self) -> None:
        """Make plain values of what stands for them, such as NumPy's integers."""
        for name in ("batch", "task"):
            part = getattr(self, name)
            setattr(self, name, _text(part) if isinstance(part, str) else _whole(name, part))
        for name in ("run", "step"):
            setattr(self, name, _whole(name, getattr(self, name)))
        if not isinstance(self.suffix, str):
            raise _refusal("suffix", self.suffix, "text")
        self.suffix = _text(self.suffix)


def _text(part: str) -> str:
    # Not str(), by which an enumeration's member names itself.
    return str.__str__(part)


def _whole(name: str, part: Any) -> int:
    wanted = "a whole number" if name in _NUMBERS else "a whole number or text"
    if isinstance(part, bool):
        raise _refusal(name, part, wanted)
    try:
        return int(operator.index(part))
    except Exception:  # TypeError, or what the caller's own class raises.
        raise _refusal(name, part, wanted) from None


def _refusal(name: str, part: Any, wanted: str) -> InvalidRequestError:
    text = f"{name} of an EID is {shown(part)}; give {wanted}"
    return InvalidRequestError(text, subject=f"eid.{name}")
