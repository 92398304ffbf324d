"""The asynchronous client of an aioenv service. Importing it pays for aiohttp, orjson and pydantic only."""

from aioenv.client.client import EnvClient
from aioenv.client.fallback import Branches, Score

__all__ = ["Branches", "EnvClient", "Score"]
