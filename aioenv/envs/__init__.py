"""Envs: what an author writes (`BaseEnv`), and how they are found (`Registry`). Imports no env."""

from aioenv.envs.base import BaseEnv
from aioenv.envs.registry import EnvSpec, Registry, find_env, known_envs

__all__ = ["BaseEnv", "EnvSpec", "Registry", "find_env", "known_envs"]
