"""The real scheduler on a virtual clock: machines that cost what a model of them says, and loads.

    simulate(Scenario(machine=MachineSpec(costs=...), load=Chat(users=100))) -> Report

Every decision is `SchedulerCore`'s; only the device, the clock and the clients are simulated. The
same scenario and seed give the same report. Nothing here reads a clock, a file or the network.
"""

from scheduler.simulation.clients import Chat
from scheduler.simulation.costs import (
    AcceptanceModel,
    MachineCosts,
    MachineSpec,
    TableCosts,
    WidthCosts,
)
from scheduler.simulation.fleet import Failure
from scheduler.simulation.report import Objective, Report, Summary
from scheduler.simulation.routing import POLICIES
from scheduler.simulation.scenario import (
    Needed,
    Open,
    Scenario,
    Simulation,
    StalledError,
    find_machines,
    simulate,
)
from scheduler.simulation.traces import Amount, Arrival, Kind, TraceError, read_trace

__all__ = [
    "POLICIES",
    "AcceptanceModel",
    "Amount",
    "Arrival",
    "Chat",
    "Failure",
    "Kind",
    "MachineCosts",
    "MachineSpec",
    "Needed",
    "Objective",
    "Open",
    "Report",
    "Scenario",
    "Simulation",
    "StalledError",
    "Summary",
    "TableCosts",
    "TraceError",
    "WidthCosts",
    "find_machines",
    "read_trace",
    "simulate",
]
