"""What an env is: the class that its author writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar


class BaseEnv(ABC):
    """One world: a task being worked on. One object, in a process of its own, for one instance.

    aioenv constructs it in a freshly forked process whose working directory is the instance's own scratch folder:
    write there, and nowhere else. It is called by one caller at a time, always in the main thread. What it prints goes
    to `world.log` in that folder. An exception is answered as `env_error` with its traceback, and the world lives on.

    Raise `aioenv.errors.UnknownTask` from the constructor or `get_init_state` for a task id that does not exist, and
    `aioenv.errors.BadRequest` from anywhere for parameters that make no sense: the caller gets 404 and 400.
    """

    def __init__(self, task_id: str, instance_id: str, params: dict[str, Any]) -> None:
        self.task_id = task_id
        self.instance_id = instance_id
        self.params = params

    @abstractmethod
    def get_init_state(self, params: dict[str, Any]) -> dict[str, Any]:
        """The first observation: `{"state": [message, …], "reward": 0.0, "is_terminated": False, "info": {}}`.

        A message is `{"role": …, "content": …}`; usually one of the system and one of the user.
        """

    @abstractmethod
    def step(self, action: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
        """Act, and observe: `{"state": [message], "reward": float, "is_terminated": bool, "info": {}}`.

        `action` is a message of the assistant (`content`, maybe `tool_calls`). An action that makes no sense is the
        agent's mistake: say so in the observation, don't raise.
        """

    @abstractmethod
    def evaluate(self, messages: dict[str, Any], params: dict[str, Any]) -> float:
        """The score of what was done so far. May be asked at any time, more than once."""

    def get_info(self, messages: dict[str, Any], params: dict[str, Any]) -> Any:
        """What an agent may want to know about the tools; any JSON value."""
        return None

    def save(self) -> None:
        """Write to the working directory what was put off until somebody wants to read it.

        Called before `close` when the service keeps the outputs of ended instances.
        """

    def close(self) -> None:
        """Free what outlives the process (it is killed right after): remote sessions, say."""

    @staticmethod
    @abstractmethod
    def get_query_list(split: str, params: dict[str, Any]) -> list[str]:
        """The ids of the tasks in `split`. Runs in a job process: there is no world.

        Raise `aioenv.errors.BadRequest` for a split that does not exist, naming those that do.
        """

    # -- optional hooks ----------------------------------------------------------------------------------------------

    @classmethod
    def prepare(cls, options: Mapping[str, str]) -> dict[str, str]:
        """Once at start, in a job process, before any template: unpack, build, check. May take minutes.

        `options` are the server's settings for envs (`root`, …; absent when not given). Returns environment variables
        for the template and all its worlds. Write to `sys.stderr` what a person should know. An exception ends the
        server with its traceback; `aioenv.errors.EnvError`, for what a person can mend, with its message alone.
        """
        return {}

    @classmethod
    def warm(cls) -> None:
        """Once in the template process: import and build all that worlds share, so that a fork is all a world costs.

        Threads must have ended and connections be closed when it returns: a fork copies neither well.
        """

    # Whether a world of this env can be copied by a fork. Rollouts come in groups on one task: the first create of a
    # task then makes a world that stays as the group's template, and each create forks a copy of it.
    forkable: ClassVar[bool] = False

    def before_fork(self) -> None:
        """In a world about to be copied: end what a fork does not copy, threads and connections above all.

        Called after `get_init_state` in a group's template, which takes no calls from then on; and between two calls
        of a live world that is branched (`/fork`, `/checkpoint`), which goes on afterwards.
        """

    def after_fork(self) -> None:
        """Take up what `before_fork` ended, and renew what must not be shared.

        In the copy, before its first call: `instance_id` and the working directory are its own already, with copies of
        the source's files. In a live world that was copied, too, where these are as before. Open files share their
        position with the other copies; Python's `random` was reseeded by the fork, so keep its state in `before_fork`
        where a copy has to draw what its source draws; other libraries' generators are not reseeded.

            def before_fork(self):
                self.connection.close()
                self.random_state = random.getstate()

            def after_fork(self):
                self.connection = connect(Path.cwd() / "shop.db")
                random.setstate(self.random_state)
        """
