"""Time: a discrete-event model of the units of an SM, and blocks over SMs. The page docs/time.md says what it holds."""

from simulator.time.engine import UNITS, Event
from simulator.time.timeline import UNIT_NAMES, LaunchTime, Timeline, timeline

__all__ = ["UNITS", "UNIT_NAMES", "Event", "LaunchTime", "Timeline", "timeline"]
