"""How one consumer of a buffer is served: what it gets, in which order, how fast and how fresh.

Small immutable values; nothing here talks to a server. Bounds are the server's to check: it names
the field that is out of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from experience_buffer._arguments import NONE, made
from experience_buffer._show import Shown

if TYPE_CHECKING:
    from experience_buffer._arguments import Like

__all__ = [
    "ConsumerConfig",
    "Limiter",
    "Pacing",
    "SampleFormat",
    "Selector",
    "SelectorKey",
    "SelectorKind",
    "StalePolicy",
    "Staleness",
    "Unit",
]
__dir__ = __all__.copy

Unit: TypeAlias = Literal["item", "group"]
"""What one delivery is made of: single experiences or whole groups."""
StalePolicy: TypeAlias = Literal["drop", "keep", "mark"]
"""What happens to a unit that is too stale for a consumer when it would be delivered."""
SampleFormat: TypeAlias = Literal["trxp", "packed"]
"""What delivered experiences look like: one payload each, or columns of the whole batch."""
SelectorKind: TypeAlias = Literal[
    "fifo",
    "lifo",
    "uniform",
    "prioritized",
    "min",
    "max",
    "freshest",
    "advantage",
    "staleness",
]
"""In which order units are chosen."""
SelectorKey: TypeAlias = Literal["priority", "reward", "response_tokens"]
"""What the orders "min" and "max" compare; of a group, the mean of its members."""


@dataclass(frozen=True, slots=True, repr=False)
class Selector(Shown):
    """In which order units are chosen, for delivery or for removal.

    Attributes:
        kind: The oldest first ("fifo"), the newest first ("lifo"), any with equal probability
            ("uniform"), any in proportion to priority ** exponent ("prioritized") or to mean
            |advantage| ** exponent ("advantage"), the smallest or largest key first ("min", "max"),
            the newest policy version first ("freshest"), any in proportion to decay ** (policy
            versions behind) ("staleness").
        key: What "min" and "max" compare: "priority", "reward" or "response_tokens"; of a group,
            the mean of its members.
        exponent: Of "prioritized" and "advantage", 0 to 10; with 0 all are equally probable.
        decay: Of "staleness", above 0 and at most 1.
        seed: Makes the choices of one server's life repeatable; None: they differ each time.
    """

    kind: SelectorKind = "fifo"
    key: SelectorKey = field(default="priority", kw_only=True)
    exponent: float = field(default=1.0, kw_only=True)
    decay: float = field(default=0.5, kw_only=True)
    seed: int | None = field(default=None, kw_only=True)


_FIFO: Any = Selector()


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Limiter(Shown):
    """Keeps pushing and sampling in step; counts are of the consumer's units.

    With I units inserted, S delivered and r `samples_per_insert`, a batch of n is delivered while
    I * r - S - n >= min_diff, and n units are accepted while (I + n) * r - S <= max_diff.

    Attributes:
        min_size: Fewest units in the buffer for sampling to begin.
        samples_per_insert: How often each unit is to be sampled on average.
        min_diff: Sampling waits below; None: never.
        max_diff: Pushes wait above; None: never.
        max_ahead_bytes: Pushes wait while more payload bytes than this haven't been sampled yet; 0:
            never.
    """

    min_size: int = 1
    samples_per_insert: float = 1.0
    min_diff: float | None = None
    max_diff: float | None = None
    max_ahead_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Staleness(Shown):
    """How stale a unit may be for a consumer; its version is the lowest of its members.

    Attributes:
        max_lag: Most policy versions behind the published one; None: any.
        max_version_span: Most versions between a unit's lowest and highest; None: any.
        max_age_seconds: Oldest age since the push; None: any.
        on_stale: What is too stale is removed unless another consumer holds it or was rewound to it
            ("drop"), passed over for good by this consumer ("keep"), or delivered with the flag
            "stale" ("mark").
    """

    max_lag: int | None = None
    max_version_span: int | None = None
    max_age_seconds: float | None = None
    on_stale: StalePolicy = "drop"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Pacing(Shown):
    """Admission of new tasks by what the trainer can still use in time; see `reserve_groups`.

    A group is admitted while (max_staleness + 1) * batch_size exceeds the groups that are reserved
    or stored and not consumed.

    Attributes:
        consumer: The consumer whose acknowledgements count.
        max_staleness: Most policy versions between a task's start and its use, at least 0.
        batch_size: Units that the trainer consumes per policy version, at least 1.
        max_running: Most reserved groups at once; 0: any number.
    """

    consumer: str
    max_staleness: int
    batch_size: int
    max_running: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class ConsumerConfig(Shown):
    """A named reader of a buffer.

    What is a value of its own may be given as a dict of its fields, as in TOML.

    Attributes:
        name: 1 to 64 characters of letters, digits, ".", "_" and "-".
        unit: What one delivery is made of, and what `batch_size` counts: single experiences
            ("item") or whole groups ("group").
        raw: True: it gets experiences as soon as they are stored (groups as soon as they are
            whole), without waiting for advantages or missing fields: a reference model or critic
            that annotates them.
        selector: In which order it gets units: a `Selector`, or its kind alone.
        replay: True: a unit is delivered again after its ack, up to `max_times_sampled`.
        max_times_sampled: With `replay`: acknowledged deliveries after which a unit is consumed; 0:
            never, it leaves by eviction or `delete`.
        with_replacement: With `replay`: the same unit may come several times in one batch.
        limiter: Keeps it in step with pushes; None: no limits.
        staleness: What is too stale for it; None: nothing.
        max_deliveries: Deliveries without an ack after which a unit is quarantined; 0: any number.
        max_leased_experiences: Most experiences leased at once; 0: bounded by the server only.
        max_leased_bytes: Most payload bytes leased at once, except that one batch may always be; 0:
            any.
        retain_steps: Newest training steps whose acks can be rewound; 0: all, until `declare_safe`.
    """

    name: str
    unit: Unit = "item"
    raw: bool = field(default=False, kw_only=True)
    selector: Like[Selector] = field(default=_FIFO, kw_only=True)
    replay: bool = field(default=False, kw_only=True)
    max_times_sampled: int = field(default=0, kw_only=True)
    with_replacement: bool = field(default=False, kw_only=True)
    limiter: Like[Limiter | None] = field(default=NONE, kw_only=True)
    staleness: Like[Staleness | None] = field(default=NONE, kw_only=True)
    max_deliveries: int = field(default=0, kw_only=True)
    max_leased_experiences: int = field(default=0, kw_only=True)
    max_leased_bytes: int = field(default=0, kw_only=True)
    retain_steps: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        # It is frozen once it is made.
        keep = partial(object.__setattr__, self)
        keep("selector", made(Selector, self.selector, "selector", alone="kind"))
        if self.limiter is not None:
            keep("limiter", made(Limiter, self.limiter, "limiter"))
        if self.staleness is not None:
            keep("staleness", made(Staleness, self.staleness, "staleness"))
