"""How one consumer of a buffer is served: what it gets, in which order, how fast and how fresh.

Small immutable values; nothing here talks to a server. Bounds are the server's to check: it names
the field that is out of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

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


@dataclass(frozen=True, slots=True)
class Selector:
    """In which order units are chosen, for delivery or for removal."""

    kind: SelectorKind = "fifo"
    """The oldest first ("fifo"), the newest first ("lifo"), any with equal probability ("uniform"),
    any in proportion to priority ** exponent ("prioritized") or to mean |advantage| ** exponent
    ("advantage"), the smallest or largest key first ("min", "max"), the newest policy version first
    ("freshest"), any in proportion to decay ** (policy versions behind) ("staleness")."""
    key: SelectorKey = field(default="priority", kw_only=True)
    """What "min" and "max" compare."""
    exponent: float = field(default=1.0, kw_only=True)
    """Of "prioritized" and "advantage", 0 to 10; with 0 all are equally probable."""
    decay: float = field(default=0.5, kw_only=True)
    """Of "staleness", above 0 and at most 1."""
    seed: int | None = field(default=None, kw_only=True)
    """Makes the choices of one server's life repeatable; None: they differ each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limiter:
    """Keeps pushing and sampling in step; counts are of the consumer's units.

    With I units inserted, S delivered and r `samples_per_insert`, a batch of n is delivered while
    I * r - S - n >= min_diff, and n units are accepted while (I + n) * r - S <= max_diff.
    """

    min_size: int = 1
    """Fewest units in the buffer for sampling to begin."""
    samples_per_insert: float = 1.0
    """How often each unit is to be sampled on average."""
    min_diff: float | None = None
    """Sampling waits below; None: never."""
    max_diff: float | None = None
    """Pushes wait above; None: never."""
    max_ahead_bytes: int = 0
    """Pushes wait while more payload bytes than this haven't been sampled yet; 0: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """How stale a unit may be for a consumer; its version is the lowest of its members."""

    max_lag: int | None = None
    """Most policy versions behind the published one; None: any."""
    max_version_span: int | None = None
    """Most versions between a unit's lowest and highest; None: any."""
    max_age_seconds: float | None = None
    """Oldest age since the push; None: any."""
    on_stale: StalePolicy = "drop"
    """What is too stale is removed unless another consumer holds it or was rewound to it ("drop"),
    passed over for good by this consumer ("keep"), or delivered with the flag "stale" ("mark")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
    """Admission of new tasks by what the trainer can still use in time; see `reserve_groups`.

    A group is admitted while (max_staleness + 1) * batch_size exceeds the groups that are reserved
    or stored and not consumed.
    """

    consumer: str
    """The consumer whose acknowledgements count."""
    max_staleness: int
    """Most policy versions between a task's start and its use, at least 0."""
    batch_size: int
    """Units that the trainer consumes per policy version, at least 1."""
    max_running: int = 0
    """Most reserved groups at once; 0: any number."""


@dataclass(frozen=True, slots=True)
class ConsumerConfig:
    """A named reader of a buffer."""

    name: str
    """1 to 64 characters of letters, digits, ".", "_" and "-"."""
    unit: Unit = "item"
    """What `batch_size` counts for this consumer."""
    raw: bool = field(default=False, kw_only=True)
    """True: it gets experiences as soon as they are stored (groups as soon as they are whole), without
    waiting for advantages or missing fields: a reference model or critic that annotates them."""
    selector: Selector | SelectorKind = field(default="fifo", kw_only=True)
    """In which order it gets units; a kind alone becomes a `Selector` of that kind."""
    replay: bool = field(default=False, kw_only=True)
    """True: a unit is delivered again after its ack, up to `max_times_sampled`."""
    max_times_sampled: int = field(default=0, kw_only=True)
    """With `replay`: acknowledged deliveries after which a unit is consumed; 0: never, it leaves by
    eviction or `delete`."""
    with_replacement: bool = field(default=False, kw_only=True)
    """With `replay`: the same unit may come several times in one batch."""
    limiter: Limiter | None = field(default=None, kw_only=True)
    """Keeps it in step with pushes; None: no limits."""
    staleness: Staleness | None = field(default=None, kw_only=True)
    """What is too stale for it; None: nothing."""
    max_deliveries: int = field(default=0, kw_only=True)
    """Deliveries without an ack after which a unit is quarantined; 0: any number."""
    max_leased_experiences: int = field(default=0, kw_only=True)
    """Most experiences leased at once; 0: bounded by the server only."""
    max_leased_bytes: int = field(default=0, kw_only=True)
    """Most payload bytes leased at once, except that one batch may always be; 0: any."""
    retain_steps: int = field(default=0, kw_only=True)
    """Newest steps whose acks can be rewound; 0: all, until `declare_safe`."""

    def __post_init__(self) -> None:
        if isinstance(self.selector, str):
            object.__setattr__(self, "selector", Selector(self.selector))
