"""Client of the experience buffer server.

Every public name can be imported from here and is loaded when first used, so that importing the
package alone costs nothing and loads neither gRPC nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from experience_buffer._async.batch import AsyncBatch as AsyncBatch
    from experience_buffer._async.listing import AsyncPages as AsyncPages
    from experience_buffer._async.policy_watch import AsyncPolicyVersions as AsyncPolicyVersions
    from experience_buffer._async.scanning import AsyncScan as AsyncScan
    from experience_buffer._async.stream import AsyncSampleStream as AsyncSampleStream
    from experience_buffer._async.writer import AsyncWriter as AsyncWriter
    from experience_buffer._sync.batch import Batch as Batch
    from experience_buffer._sync.listing import Pages as Pages
    from experience_buffer._sync.policy_watch import PolicyVersions as PolicyVersions
    from experience_buffer._sync.scanning import Scan as Scan
    from experience_buffer._sync.stream import SampleStream as SampleStream
    from experience_buffer._sync.writer import Writer as Writer
    from experience_buffer.advice import Advice as Advice
    from experience_buffer.advice import advise as advise
    from experience_buffer.aio import AsyncClient as AsyncClient
    from experience_buffer.client import Client as Client
    from experience_buffer.consumer_options import ConsumerConfig as ConsumerConfig
    from experience_buffer.consumer_options import Limiter as Limiter
    from experience_buffer.consumer_options import Pacing as Pacing
    from experience_buffer.consumer_options import Selector as Selector
    from experience_buffer.consumer_options import Staleness as Staleness
    from experience_buffer.dataset import ExperienceDataset as ExperienceDataset
    from experience_buffer.eid import EID as EID
    from experience_buffer.errors import AlreadyExistsError as AlreadyExistsError
    from experience_buffer.errors import AnnotateRefusedError as AnnotateRefusedError
    from experience_buffer.errors import BufferFullError as BufferFullError
    from experience_buffer.errors import BufferNotFoundError as BufferNotFoundError
    from experience_buffer.errors import CallCancelledError as CallCancelledError
    from experience_buffer.errors import ConsumerNotFoundError as ConsumerNotFoundError
    from experience_buffer.errors import DataLossError as DataLossError
    from experience_buffer.errors import DeadlineExceededError as DeadlineExceededError
    from experience_buffer.errors import ExperienceBufferError as ExperienceBufferError
    from experience_buffer.errors import ExperienceNotFoundError as ExperienceNotFoundError
    from experience_buffer.errors import ForbiddenError as ForbiddenError
    from experience_buffer.errors import GroupNotFoundError as GroupNotFoundError
    from experience_buffer.errors import InternalServerError as InternalServerError
    from experience_buffer.errors import InvalidRequestError as InvalidRequestError
    from experience_buffer.errors import LeaseNotFoundError as LeaseNotFoundError
    from experience_buffer.errors import MessageTooLargeError as MessageTooLargeError
    from experience_buffer.errors import NotFoundError as NotFoundError
    from experience_buffer.errors import PushRefusedError as PushRefusedError
    from experience_buffer.errors import ResourceExhaustedError as ResourceExhaustedError
    from experience_buffer.errors import TrxpError as TrxpError
    from experience_buffer.errors import UnauthenticatedError as UnauthenticatedError
    from experience_buffer.errors import UnavailableError as UnavailableError
    from experience_buffer.errors import UnsupportedError as UnsupportedError
    from experience_buffer.errors import WrongStateError as WrongStateError
    from experience_buffer.experience import CustomField as CustomField
    from experience_buffer.experience import Experience as Experience
    from experience_buffer.history import Departure as Departure
    from experience_buffer.history import Departures as Departures
    from experience_buffer.history import Distribution as Distribution
    from experience_buffer.history import LaterFinding as LaterFinding
    from experience_buffer.history import StepInfo as StepInfo
    from experience_buffer.history import Trends as Trends
    from experience_buffer.leaving_options import Archive as Archive
    from experience_buffer.leaving_options import Retention as Retention
    from experience_buffer.looking import ConsumerPlace as ConsumerPlace
    from experience_buffer.looking import GroupInfo as GroupInfo
    from experience_buffer.looking import GroupMember as GroupMember
    from experience_buffer.looking import LeasedUnit as LeasedUnit
    from experience_buffer.looking import LeaseInfo as LeaseInfo
    from experience_buffer.looking import LeasePart as LeasePart
    from experience_buffer.looking import Where as Where
    from experience_buffer.options import AdvantageConfig as AdvantageConfig
    from experience_buffer.options import BufferConfig as BufferConfig
    from experience_buffer.options import ClientOptions as ClientOptions
    from experience_buffer.options import RetryOptions as RetryOptions
    from experience_buffer.options import TlsOptions as TlsOptions
    from experience_buffer.options import WriterOptions as WriterOptions
    from experience_buffer.outcomes import AnnotateOutcome as AnnotateOutcome
    from experience_buffer.outcomes import AnnotateResult as AnnotateResult
    from experience_buffer.outcomes import PushOutcome as PushOutcome
    from experience_buffer.outcomes import PushResult as PushResult
    from experience_buffer.packed import PackedBatch as PackedBatch
    from experience_buffer.scanned import ScannedExperience as ScannedExperience
    from experience_buffer.stats import ArchiveStats as ArchiveStats
    from experience_buffer.stats import BufferStats as BufferStats
    from experience_buffer.stats import ConsumerStats as ConsumerStats
    from experience_buffer.stats import DiskStats as DiskStats
    from experience_buffer.stats import Stats as Stats
    from experience_buffer.values import BufferInfo as BufferInfo
    from experience_buffer.values import DeleteResult as DeleteResult
    from experience_buffer.values import ExperienceSummary as ExperienceSummary
    from experience_buffer.values import PriorityResult as PriorityResult
    from experience_buffer.values import Reservation as Reservation
    from experience_buffer.values import RewindResult as RewindResult
    from experience_buffer.values import SafeResult as SafeResult
    from experience_buffer.values import SealedGroup as SealedGroup
    from experience_buffer.values import SnapshotResult as SnapshotResult
    from experience_buffer.values import StoredExperience as StoredExperience
    from experience_buffer.values import Tombstone as Tombstone
    from experience_buffer.values import WriterCounts as WriterCounts

    __version__: str

_NAMES: Final = {
    "_async.batch": ("AsyncBatch",),
    "_async.listing": ("AsyncPages",),
    "_async.policy_watch": ("AsyncPolicyVersions",),
    "_async.scanning": ("AsyncScan",),
    "_async.stream": ("AsyncSampleStream",),
    "_async.writer": ("AsyncWriter",),
    "_sync.batch": ("Batch",),
    "_sync.listing": ("Pages",),
    "_sync.policy_watch": ("PolicyVersions",),
    "_sync.scanning": ("Scan",),
    "_sync.stream": ("SampleStream",),
    "_sync.writer": ("Writer",),
    "advice": ("Advice", "advise"),
    "aio": ("AsyncClient",),
    "client": ("Client",),
    "consumer_options": (
        "ConsumerConfig",
        "Limiter",
        "Pacing",
        "Selector",
        "Staleness",
    ),
    "eid": ("EID",),
    "errors": (
        "AlreadyExistsError",
        "AnnotateRefusedError",
        "BufferFullError",
        "BufferNotFoundError",
        "CallCancelledError",
        "ConsumerNotFoundError",
        "DataLossError",
        "DeadlineExceededError",
        "ExperienceBufferError",
        "ExperienceNotFoundError",
        "ForbiddenError",
        "GroupNotFoundError",
        "InternalServerError",
        "InvalidRequestError",
        "LeaseNotFoundError",
        "MessageTooLargeError",
        "NotFoundError",
        "PushRefusedError",
        "ResourceExhaustedError",
        "TrxpError",
        "UnauthenticatedError",
        "UnavailableError",
        "UnsupportedError",
        "WrongStateError",
    ),
    "experience": (
        "CustomField",
        "Experience",
    ),
    "history": ("Departure", "Departures", "Distribution", "LaterFinding", "StepInfo", "Trends"),
    "looking": (
        "ConsumerPlace",
        "GroupInfo",
        "GroupMember",
        "LeaseInfo",
        "LeasePart",
        "Where",
        "LeasedUnit",
    ),
    "leaving_options": ("Archive", "Retention"),
    "options": (
        "AdvantageConfig",
        "BufferConfig",
        "ClientOptions",
        "RetryOptions",
        "TlsOptions",
        "WriterOptions",
    ),
    "outcomes": (
        "AnnotateOutcome",
        "AnnotateResult",
        "PushOutcome",
        "PushResult",
    ),
    "dataset": ("ExperienceDataset",),
    "packed": ("PackedBatch",),
    "scanned": ("ScannedExperience",),
    "stats": ("ArchiveStats", "BufferStats", "ConsumerStats", "DiskStats", "Stats"),
    "values": (
        "BufferInfo",
        "DeleteResult",
        "ExperienceSummary",
        "PriorityResult",
        "Reservation",
        "RewindResult",
        "SafeResult",
        "SealedGroup",
        "SnapshotResult",
        "StoredExperience",
        "Tombstone",
        "WriterCounts",
    ),
}
_MODULES: Final = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    # Each where it is needed: some take as long as all of the client's values.
    if name == "__all__":
        from importlib import util

        # Type checkers go by the imports above. A dataset is a class of torch's.
        has_torch = util.find_spec("torch") is not None
        return sorted(_MODULES if has_torch else _MODULES.keys() - {"ExperienceDataset"})
    if name == "__version__":
        from importlib import metadata

        return metadata.version("experience-buffer")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*_MODULES, "__version__"]
