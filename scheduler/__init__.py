"""Who runs next: queue, sequences, pages, depth, the loop. Knows tokens, pages and time; no arrays
on a device, no network, and no clock it was not given."""

from scheduler.admission import Limits
from scheduler.config import SchedulerConfig, TenantPolicy
from scheduler.core import SchedulerCore
from scheduler.costs import CostTable
from scheduler.handle import RequestHandle
from scheduler.loop import Scheduler
from scheduler.pages import IntegrityError
from scheduler.request import (
    Event,
    Finished,
    FinishReason,
    GenerationRequest,
    InvalidRequestError,
    NotRunningError,
    Priority,
    QueueFullError,
    Refusal,
    SubmitError,
    Tokens,
    Usage,
)
from scheduler.sessions import NoRoomError, SessionInfo, UnknownSessionError
from scheduler.statistics import Statistics
from scheduler.step_record import StepRecord

__all__ = [
    "CostTable",
    "Event",
    "FinishReason",
    "Finished",
    "GenerationRequest",
    "IntegrityError",
    "InvalidRequestError",
    "Limits",
    "NoRoomError",
    "NotRunningError",
    "Priority",
    "QueueFullError",
    "Refusal",
    "RequestHandle",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerCore",
    "SessionInfo",
    "Statistics",
    "StepRecord",
    "SubmitError",
    "TenantPolicy",
    "Tokens",
    "UnknownSessionError",
    "Usage",
]
