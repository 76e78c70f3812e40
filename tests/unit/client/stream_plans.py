"""What a sample stream asks for, in tests of the client's parts."""

from experience_buffer._transport.sample_plan import StreamPlan
from experience_buffer.options import ClientOptions

PLAN = StreamPlan(
    batch_size=2,
    buffer="b",
    consumer="c",
    prefetch=2,
    max_bytes=0,
    min_batch_size=0,
    timeout_seconds=1,
    first_timeout=1,
    lease_seconds=1,
    rank=None,
    world_size=None,
    format="packed",
    options=ClientOptions(shared_memory=False, holder="h"),
)
