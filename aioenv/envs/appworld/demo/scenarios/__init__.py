"""All scenarios of the demo data, in the order in which the dataset files list them."""

from __future__ import annotations

from aioenv.envs.appworld.demo.scenario import Scenario
from aioenv.envs.appworld.demo.scenarios import desk, mixed, money, music, phone, shopping

SCENARIOS: tuple[Scenario, ...] = (
    *music.SCENARIOS,
    *phone.SCENARIOS,
    *desk.SCENARIOS,
    *money.SCENARIOS,
    *shopping.SCENARIOS,
    *mixed.SCENARIOS,
)
