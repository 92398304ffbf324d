"""An episode as an object, for threads: the twin of `aioenv.client.session`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from aioenv.client import session
from aioenv.client.client import EnvClient as AsyncEnvClient
from aioenv.client.fallback import Score
from aioenv.client.session import Action
from aioenv.schema import Message, Trajectory

if TYPE_CHECKING:
    from aioenv.client.sync import EnvClient

T = TypeVar("T")


class Session:
    """One episode on an instance of its own: `with client.session("appworld", task_id) as session`.

    Attributes and methods are those of `aioenv.client.session.Session`. One thread at a time may use it.
    """

    def __init__(
        self,
        client: EnvClient,
        env_type: str,
        task_id: str,
        *,
        params: Mapping[str, Any] | None = None,
        instance_id: str | None = None,
        patience: float = 600.0,
    ) -> None:
        """`patience`: seconds for which a server that is full or starting is asked again for an instance."""
        self._client = client
        self._session = session.Session(
            client._here(), env_type, task_id, params=params, instance_id=instance_id, patience=patience
        )

    @property
    def env_type(self) -> str:
        return self._session.env_type

    @property
    def task_id(self) -> str:
        return self._session.task_id

    @property
    def instance_id(self) -> str:
        return self._session.instance_id

    @property
    def state(self) -> list[dict[str, Any]]:
        """The messages that the env showed last."""
        return self._session.state

    @property
    def done(self) -> bool:
        """No further step makes sense: the episode terminated, failed, or could not begin."""
        return self._session.done

    @property
    def reward(self) -> float:
        """That of the last step."""
        return self._session.reward

    @property
    def error(self) -> dict[str, Any] | None:
        """Why a call failed for good, as in `info.error` of a fallback; None while all is well."""
        return self._session.error

    @property
    def trajectory(self) -> Trajectory:
        """What happened so far, without the calls that failed."""
        return self._session.trajectory

    def __enter__(self) -> Session:
        """Make the instance. With a client that was told to raise, raises CallFailed."""
        self._run(lambda session: session.__aenter__())
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._client.release_soon(self.instance_id)

    def step(self, action: Action, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Take one action, a text or an assistant's message; the step's data, as of `EnvClient.step`.

        Nothing is sent once the session is `done`: the answer is a fallback then.
        """
        return self._run(lambda session: session.step(action, params))

    def evaluate(self, **params: Any) -> Score:
        """The env's score as it stands, which becomes the trajectory's reward; keywords are the call's params."""
        return self._run(lambda session: session.evaluate(**params))

    def branch(self, n: int = 1) -> list[Session]:
        """`n` sessions that go on from here, each on a copy of the instance and with a copy of the trajectory.

        They have begun, and are released when they are left: use each with `with`, or see `branches`. Where the copies
        could not be made, all of them are `done` and have the `error`.
        """
        return [self._over(made) for made in self._run(lambda session: session.branch(n))]

    @contextlib.contextmanager
    def branches(self, n: int = 1) -> Iterator[list[Session]]:
        """`with session.branches(8) as branches`: as `branch`; all of them are released at its end."""
        made = self.branch(n)
        try:
            yield made
        finally:
            self._client.release_soon(*(branch.instance_id for branch in made))

    def checkpoint(self, *, keep: bool = False, ttl: float | None = None) -> str:
        """Save the episode as it stands: an id for `restore`; empty after a failure, which ends the episode."""
        return self._run(lambda session: session.checkpoint(keep=keep, ttl=ttl))

    def restore(self, checkpoint: str) -> None:
        """Go back to a checkpoint of this session: the instance, and state, done, reward, error and trajectory."""
        self._run(lambda session: session.restore(checkpoint))

    def _over(self, made: session.Session) -> Session:
        twin = object.__new__(Session)
        twin._client, twin._session = self._client, made
        return twin

    def messages(self) -> list[Message]:
        """The whole conversation so far, as an agent wants it."""
        return self._session.messages()

    def fail(self, code: str, message: str) -> None:
        """End the episode for a reason outside of the service: what an agent raised, a deadline."""
        self._session.fail(code, message)

    def _run(self, call: Callable[[session.Session], Coroutine[Any, Any, T]]) -> T:
        def begin(client: AsyncEnvClient) -> Coroutine[Any, Any, T]:
            self._session._client = client  # another one than before, where a fork came between
            return call(self._session)

        return self._client._run(begin)
