"""Releases idle instances, every so often, for as long as the server lives."""

from __future__ import annotations

import asyncio
import logging
import time

from aioenv.pool.pool import Pool

log = logging.getLogger("aioenv.pool")


async def reap_forever(pool: Pool, interval: float) -> None:
    """Ends by being cancelled. `interval` is in seconds."""
    while True:
        await asyncio.sleep(interval)
        try:
            reaped = pool.reap(time.monotonic())
            if reaped:
                log.info("reaped %d idle instances: %s", len(reaped), ", ".join(reaped))
        except Exception:
            log.exception("a round of the reaper failed; the next one is in %g s", interval)
