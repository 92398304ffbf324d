"""Finding envs by name. The server looks names up without importing any env; a template loads one."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from aioenv.envs.base import BaseEnv
from aioenv.errors import EnvError, UnknownEnv

ENTRY_POINT_GROUP = "aioenv.envs"
BUILT_IN = {
    "appworld": "aioenv.envs.appworld.env:AppworldEnv",
    "echo": "aioenv.envs.echo:EchoEnv",
}
EnvClass = TypeVar("EnvClass", bound=type[BaseEnv])


class Registry:
    """Names given to env classes by `@Registry.register("name")`, in the process that imported them."""

    _classes: dict[str, type[BaseEnv]] = {}

    @classmethod
    def register(cls, name: str) -> Callable[[EnvClass], EnvClass]:
        def decorate(env_class: EnvClass) -> EnvClass:
            cls._classes[name] = env_class
            return env_class

        return decorate

    @classmethod
    def get(cls, name: str) -> type[BaseEnv] | None:
        return cls._classes.get(name)


@dataclass(frozen=True)
class EnvSpec:
    """Where an env's class is: in a module (`package.module:Class`) or in a file."""

    name: str
    target: str
    origin: str  # for people: "built in", "entry point", "--env-dir", "given"

    def to_dict(self) -> dict[str, str]:
        return asdict(self)

    def load(self) -> type[BaseEnv]:
        """Import it. Raises EnvError where it is not an env.

        Any exception of the module's own passes through, so that its author sees where it failed."""
        place, _, class_name = self.target.rpartition(":")
        module = _import_file(self.name, Path(place)) if place.endswith(".py") else importlib.import_module(place)
        env_class = Registry.get(self.name) or _find_class(module, class_name)
        if env_class is None:
            raise EnvError(f"{place} has neither a class {class_name} nor one registered as {self.name!r}")
        if not (isinstance(env_class, type) and issubclass(env_class, BaseEnv)):
            raise EnvError(f"{self.target} is not a subclass of aioenv.envs.BaseEnv")
        if env_class.__abstractmethods__:
            raise EnvError(f"{self.target} lacks methods: {', '.join(sorted(env_class.__abstractmethods__))}")
        return env_class


def known_envs(env_dir: Path | None = None, env_file: str | None = None) -> dict[str, EnvSpec]:
    """All envs that can be named, by name. A file in `env_dir` goes before an entry point, that before a built-in."""
    specs = {name: EnvSpec(name, target, "built in") for name, target in BUILT_IN.items()}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        specs[entry.name] = EnvSpec(entry.name, entry.value, "entry point")
    if env_dir is not None:
        specs |= {spec.name: spec for spec in _in_folder(env_dir, env_file)}
    return specs


def find_env(name: str, known: dict[str, EnvSpec]) -> EnvSpec:
    """The env called `name`, or at `package.module:Class`. Raises UnknownEnv, listing what exists."""
    if name in known:
        return known[name]
    if re.fullmatch(r"[\w.]+:\w+", name):
        return EnvSpec(name, name, "given")
    raise UnknownEnv(
        f"unknown env {name!r}; there is: {', '.join(sorted(known))}; or package.module:Class, or one in --env-dir"
    )


def _in_folder(env_dir: Path, env_file: str | None) -> Iterable[EnvSpec]:
    """`DIR/NAME/NAME_env.py`, or `DIR/NAME/env_file`."""
    for folder in sorted(env_dir.iterdir()):
        file = folder / _file_name(folder.name, env_file)
        if file.is_file():
            yield EnvSpec(folder.name, f"{file.resolve()}:{_class_name(folder.name)}", f"in {env_dir}")


def _file_name(name: str, env_file: str | None) -> str:
    if env_file is None:
        return f"{name}_env.py"
    return env_file if env_file.endswith(".py") else f"{env_file}.py"


def _class_name(name: str) -> str:
    """`web_shop` is `WebShopEnv`."""
    return "".join(part[:1].upper() + part[1:] for part in re.split(r"[_\W]+", name)) + "Env"


def _import_file(name: str, file: Path) -> Any:
    # Its neighbours can be imported as the author would from a script there.
    sys.path.insert(0, str(file.parent))
    module_name = "aioenv_env_" + re.sub(r"\W", "_", name)
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module


def _find_class(module: Any, class_name: str) -> Any:
    wanted = class_name.lower()
    return next((value for key, value in vars(module).items() if key.lower() == wanted), None)
