"""Messages and trajectories: what env, client and trainer pass to each other.

What a trainer needs on top of these is in `aioenv.schema.training`, whose `Reward`, `Sample` and `Trajectory` are other
classes than those here. The models work under pydantic 1.10 and 2, and importing them imports nothing else of aioenv.
"""

from aioenv.schema.message import ActionMessage, Message, Role, StateMessage, ToolCall
from aioenv.schema.trajectory import Reward, Sample, Step, Trajectory

__all__ = [
    "ActionMessage",
    "Message",
    "Reward",
    "Role",
    "Sample",
    "StateMessage",
    "Step",
    "ToolCall",
    "Trajectory",
]
