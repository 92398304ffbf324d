"""The client behind a proxy that does harm: what it returns, how often it tries, and what the server ran."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Server, served
from fault_proxy import FAULTS, FaultProxy, fault_proxy

from aioenv.client import EnvClient

# Behind each, the server has run the call.
RUN = {"delay", "reset after", "truncate", "junk"}
CODES = {
    "reset before": "reply_lost",
    "reset after": "reply_lost",
    "truncate": "reply_lost",
    "junk": "bad_reply",
    "500": "http_error",
    "503": "at_capacity",
}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with served("odd", scratch=tmp_path / "scratch") as server:
        yield server


@pytest.fixture
async def proxy(server: Server) -> AsyncIterator[FaultProxy]:
    async with fault_proxy(server.call.url) as proxy:
        yield proxy


def client_of(proxy: FaultProxy, **options: Any) -> EnvClient:
    return EnvClient(proxy.url, **{"min_backoff": 0.0, "max_backoff": 0.05, **options})


async def history(server: Server, instance_id: str) -> list[str]:
    """What the world was told to do; asked past the proxy."""
    content = (await server.call.say(instance_id, "history")).data["state"][0]["content"]
    return str(content).split()[:-1]


@pytest.mark.parametrize("fault", FAULTS)
async def test_one_fault_changes_nothing_but_the_number_of_tries(server: Server, proxy: FaultProxy, fault: str) -> None:
    met: Counter[str] = Counter()

    def first_time(path: str, body: dict[str, Any]) -> str | None:
        met[body["request_id"]] += 1
        return fault if met[body["request_id"]] == 1 else None

    proxy.choose = first_time
    tries = 1 if fault == "delay" else 2
    async with client_of(proxy) as client:
        assert (await client.get_env_profile("odd"))[0] == "t"
        created = await client.create_instance("odd", "t")
        instance_id = created["info"]["instance_id"]
        assert len((await server.call.get("instances")).body) == 1
        stepped = await client.step(instance_id, {"content": "sleep 0"})
        assert stepped["state"][0]["content"] == "slept"
        assert stepped["info"]["step"] == 1
        replayed = fault in RUN and fault != "delay"
        assert stepped["info"].get("replayed", False) is replayed
        assert created["info"].get("replayed", False) is replayed
        assert await history(server, instance_id) == ["sleep"]
        score = await client.evaluate(instance_id, params={"score": 0.5})
        assert (score, score.fallback) == (0.5, False)
        assert await client.release_instance(instance_id) is True
    # The probe for the header is a GET, which the proxy lets pass.
    assert [path for path, _ in proxy.seen if path == "/step"] == ["/step"] * tries
    assert client.stats.tries == 5 * tries
    assert client.stats.fallbacks == 0


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "delay"])
async def test_a_fault_that_stays_is_a_marked_fallback_and_the_action_ran_at_most_once(
    server: Server, proxy: FaultProxy, fault: str
) -> None:
    await server.call.create("mine")
    proxy.choose = lambda path, body: fault
    async with client_of(proxy) as client:
        stepped = await client.step("mine", {"content": "sleep 0"})
        score = await client.evaluate("mine")
        created = await client.create_instance("odd", "t", instance_id="other")
    for reply in (stepped, created):
        assert (reply["info"]["fallback"], reply["info"]["error"]["tries"]) == (True, 3)
        assert reply["info"]["error"]["code"] == CODES[fault]
        assert (reply["reward"], reply["is_terminated"]) == (0.0, False)
    assert (score, score.fallback) == (0.0, True)
    assert await history(server, "mine") == (["sleep"] if fault in RUN else [])
    told = stepped["state"][0]["content"]
    assert ("was not run" in told) is (fault == "503")
    assert ("It is unknown whether" in told) is (fault != "503")


async def test_64_episodes_at_10_percent_faults_all_end_and_none_runs_an_action_twice(
    server: Server, proxy: FaultProxy
) -> None:
    dice = random.Random(7)
    proxy.choose = lambda path, body: dice.choice(FAULTS) if dice.random() < 0.1 else None
    failed = []

    async def play(client: EnvClient, number: int) -> None:
        instance_id = f"episode-{number}"
        created = await client.create_instance("odd", "t", instance_id=instance_id)
        told, sure = [], True
        if created["info"].get("fallback"):
            failed.append(created)
            return
        for step in range(10):
            reply = await client.step(instance_id, {"content": f"measure {'x' * step}"})
            if reply["info"].get("fallback"):
                failed.append(reply)
                sure = False
                continue
            assert reply["state"][0]["content"] == step
            told.append(reply["info"]["step"])
        assert told == sorted(set(told))
        ran = await history(server, instance_id)
        assert len(ran) == 10 if sure else len(told) <= len(ran) <= 10
        assert max(told) <= len(ran)
        await client.release_instance(instance_id)

    async with client_of(proxy, tries=2) as client:
        await asyncio.gather(*(play(client, number) for number in range(64)))
        stats = client.stats
    assert stats.retried > 30
    assert len(failed) <= stats.fallbacks
    assert all(reply["info"]["error"]["code"] in CODES.values() for reply in failed)
    left = {line["instance_id"] for line in (await server.call.get("instances")).body}
    assert len(left) <= stats.fallbacks  # whose release failed, or whose create's reply was lost
