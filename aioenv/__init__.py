"""aioenv: stateful environments for training LLM agents, served over HTTP from forked processes."""

__version__ = "0.1.0"
