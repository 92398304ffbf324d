"""`python -m aioenv …`: the command line. Settings come from options, else from AIOENV_… variables, else defaults."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import logging
import os
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aioenv import __version__
from aioenv.config import MIB, Limits, Settings
from aioenv.envs.registry import known_envs
from aioenv.errors import AioenvError, UnknownEnv

LEVELS = ("debug", "info", "warning", "error")
LIMITS = Limits()
DEFAULTS = Settings(envs=())


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 where something failed, 2 where the command makes no sense."""
    args = _parser().parse_args(argv)
    command: Any = args.command
    try:
        return int(command(args))
    except KeyboardInterrupt:  # before, or beside, the server's own handling of it
        return 130


# -- commands ----------------------------------------------------------------------------------------------------------


def _serve(args: argparse.Namespace) -> int:
    from aioenv.server.serve import serve  # here, so that the other commands start faster

    faulthandler.enable()  # a crash of the interpreter tells where it was
    # Each world takes two file descriptors of the server's.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(serve(_settings(args), lambda line: print(line, flush=True)))
    except UnknownEnv as error:
        return _complain(str(error), 2)
    except AioenvError as error:
        return _complain(str(error), 1)
    except OSError as error:
        return _complain(f"can't start: {error}", 1)
    except Exception:
        logging.getLogger("aioenv").critical("the server ended by a fault of its own: please report it", exc_info=True)
        return 1
    return 0


def _loop_factory() -> Any:
    """uvloop's, where that is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _envs(args: argparse.Namespace) -> int:
    for name, spec in sorted(known_envs(args.env_dir, args.env_file).items()):
        print(f"{name:20} {spec.origin:12} {spec.target}")
    return 0


def _demo_data(args: argparse.Namespace) -> int:
    from aioenv.envs.appworld import demo, install

    try:
        install.unpack_apps()
        demo.build(args.dir, rows=args.rows, seed=args.seed, report=print)
    except (AioenvError, OSError, ImportError) as error:
        return _complain(str(error), 1)
    print(f"serve it with: python -m aioenv serve --env appworld --root {args.dir}")
    return 0


def _complain(message: str, code: int) -> int:
    print(f"aioenv: {message}", file=sys.stderr)
    return code


# -- options -----------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m aioenv", description="Stateful environments for training LLM agents, served over HTTP."
    )
    parser.add_argument("--version", action="version", version=f"aioenv {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_serve(commands.add_parser("serve", help="serve envs over HTTP", description="Serve envs until Ctrl-C."))

    envs = commands.add_parser("envs", help="list the envs that can be served")
    _add_env_places(envs)
    envs.set_defaults(command=_envs)

    appworld = commands.add_parser("appworld", help="AppWorld's data").add_subparsers(required=True, metavar="command")
    demo = appworld.add_parser(
        "demo-data",
        help="build the demo data set",
        description="Build aioenv's own small AppWorld data set in DIR/data, for trying, testing and measuring.",
    )
    demo.add_argument("dir", type=Path, metavar="DIR", help="an AppWorld root folder, without data in it")
    demo.add_argument("--rows", type=_whole(0), default=0, metavar="N", help="pad the databases to about N more rows")
    demo.add_argument("--seed", type=int, default=0, help="the same seed gives the same data (default: 0)")
    demo.set_defaults(command=_demo_data)
    return parser


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_serve)
    parser.epilog = "Each option can be set as an environment variable: --idle-ttl is AIOENV_IDLE_TTL, and so on."
    envs = parser.add_argument_group("envs")
    envs.add_argument(
        "--env",
        action="append",
        default=_from_environ("ENV").split(",") if _from_environ("ENV") else [],
        metavar="NAME",
        help="an env to serve: a name (`python -m aioenv envs` lists them) or package.module:Class; can be repeated,"
        " the first one serves requests that name none (AIOENV_ENV: separated by commas)",
    )
    _add_env_places(envs)
    _option(envs, "--root", type=Path, metavar="DIR", help="AppWorld's root, with data/ in it (default: APPWORLD_ROOT)")

    net = parser.add_argument_group("network")
    _option(net, "--host", "--portal", default=DEFAULTS.host, help="the address to listen on (default: %(default)s)")
    _option(
        net, "--port", type=_whole(0, 65535), default=DEFAULTS.port, help="0 picks a free one (default: %(default)s)"
    )

    life = parser.add_argument_group("life of instances (times are in seconds)")
    _option(life, "--idle-ttl", type=_positive, default=DEFAULTS.idle_ttl, metavar="S", help=_H_TTL)
    _option(life, "--max-lifetime", type=_positive, metavar="S", help=_H_LIFETIME)
    _option(life, "--reap-interval", type=_positive, default=DEFAULTS.reap_interval, metavar="S", help=_H_REAP)
    _option(life, "--group-templates", type=_whole(0), default=DEFAULTS.group_templates, metavar="N", help=_H_GROUPS)
    _option(life, "--group-ttl", type=_positive, default=DEFAULTS.group_ttl, metavar="S", help=_H_GROUP_TTL)
    _option(life, "--stop-grace", type=_positive, default=DEFAULTS.stop_grace, metavar="S", help=_H_GRACE)
    _option(life, "--scratch", type=Path, metavar="DIR", help="where instances' folders are made (default: TMPDIR)")
    _option(life, "--keep-outputs", type=Path, metavar="DIR", help="keep ended instances' folders, in DIR/INSTANCE_ID")

    limits = parser.add_argument_group("limits")
    _option(limits, "--max-instances", type=_whole(1), default=LIMITS.max_instances, metavar="N", help=_H_MAX)
    _option(limits, "--create-timeout", type=_positive, default=LIMITS.create_timeout, metavar="S", help=_H_LIMIT)
    _option(limits, "--step-timeout", type=_positive, default=LIMITS.step_timeout, metavar="S", help=_H_LIMIT)
    _option(limits, "--evaluate-timeout", type=_positive, default=LIMITS.evaluate_timeout, metavar="S", help=_H_LIMIT)
    _option(limits, "--create-queue", type=_whole(0), default=LIMITS.create_queue, metavar="N", help=_H_QUEUE)
    _option(limits, "--queue-timeout", type=_positive, default=LIMITS.queue_timeout, metavar="S", help=_H_QUEUE_TIME)
    _option(limits, "--max-body", type=_whole(1), default=LIMITS.max_body // MIB, metavar="MIB", help=_H_BODY)

    world = parser.add_argument_group("limits of each world: it ends when it is over one")
    _option(world, "--memory-limit", type=_whole(1), metavar="MIB", help=_H_MEMORY)
    _option(world, "--disk-limit", type=_whole(1), default=LIMITS.disk // MIB, metavar="MIB", help=_H_DISK)
    _option(world, "--scratch-limit", type=_whole(1), metavar="MIB", help=_H_SCRATCH)
    _option(world, "--process-limit", type=_whole(1), default=LIMITS.processes, metavar="N", help=_H_PROCESSES)
    _option(world, "--file-limit", type=_whole(32), default=LIMITS.open_files, metavar="N", help=_H_FILES)
    _option(
        world, "--answer-limit", type=_whole(1, 79), default=LIMITS.max_answer // MIB, metavar="MIB", help=_H_ANSWER
    )

    other = parser.add_argument_group("other")
    _option(other, "--log-level", type=_level, default=DEFAULTS.log_level, metavar="LEVEL", help=_H_LEVEL)


_H_LEVEL = f"{', '.join(LEVELS)} (default: %(default)s)"
_H_TTL = "an instance that was not called for so long is released (default: %(default)g)"
_H_REAP = "how often idle instances are looked for (default: %(default)g)"
_H_GROUPS = (
    "worlds kept to be copied for further creates of the same task, where the env can be forked; the least recently"
    " used goes; 0 turns it off (default: %(default)s)"
)
_H_GROUP_TTL = "such a world goes after so long without a create (default: %(default)g)"
_H_GRACE = "what running calls have to end when the server stops (default: %(default)g)"
_H_MAX = (
    "instances that may live at once; beyond, creates wait for one to end (default: by cores and free memory, here"
    " %(default)s)"
)
_H_QUEUE = "creates that may wait for that; beyond, they get 503 (default: %(default)s)"
_H_QUEUE_TIME = "and so long; then they get 503 (default: %(default)g)"
_H_LIFETIME = "an instance that is so old is released as soon as no call runs (default: no limit)"
_H_MEMORY = "memory of its own, beyond what it shares with other worlds (default: no limit)"
_H_DISK = "what it has on disk, and the size of any file that it writes (default: %(default)s)"
_H_SCRATCH = (
    "what all have on disk together; beyond, creates get 503 and the largest ends (default: 90 %% of what is free)"
)
_H_PROCESSES = "processes (default: %(default)s)"
_H_FILES = "open files of each of its processes: there it gets an error and lives on (default: %(default)s)"
_H_ANSWER = "one answer, an observation above all: there the call fails and it lives on (default: %(default)s)"
_H_LIMIT = "after so many seconds the call fails and its world is killed (default: %(default)g)"
_H_BODY = "the largest request body, in MiB (default: %(default)s)"


def _add_env_places(parser: Any) -> None:
    _option(parser, "--env-dir", type=_folder, metavar="DIR", help="more envs: DIR/NAME/NAME_env.py with class NameEnv")
    _option(parser, "--env-file", "--env_file_name", metavar="FILE", help="the file name in DIR/NAME, if another one")


def _option(parser: Any, *names: str, **details: Any) -> None:
    """An option whose default is its environment variable, where that is set. argparse checks that as it would a
    typed value."""
    variable = names[0].removeprefix("--").replace("-", "_").upper()
    details["default"] = _from_environ(variable) or details.get("default")
    parser.add_argument(*names, **details)


def _from_environ(variable: str) -> str:
    return os.environ.get(f"AIOENV_{variable}", "")


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def _whole(least: int, most: int | None = None) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not text.strip().isdigit() or int(text) < least or (most is not None and int(text) > most):
            wanted = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {wanted}")
        return int(text)

    return convert


def _level(text: str) -> str:
    if text not in LEVELS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(LEVELS)}")
    return text


def _folder(text: str) -> Path:
    folder = Path(text)
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder")
    return folder


def _settings(args: argparse.Namespace) -> Settings:
    known = known_envs(args.env_dir, args.env_file)
    if not args.env:
        raise UnknownEnv(f"name an env to serve with --env; there is: {', '.join(sorted(known))}")
    return Settings(
        envs=tuple(dict.fromkeys(args.env)),
        host=args.host,
        port=args.port,
        env_dir=args.env_dir,
        env_file=args.env_file,
        env_options={"root": str(args.root)} if args.root else {},
        idle_ttl=args.idle_ttl,
        max_lifetime=args.max_lifetime,
        reap_interval=args.reap_interval,
        group_templates=args.group_templates,
        group_ttl=args.group_ttl,
        stop_grace=args.stop_grace,
        scratch=args.scratch,
        scratch_limit=args.scratch_limit * MIB if args.scratch_limit else None,
        keep_outputs=args.keep_outputs,
        limits=Limits(
            create_timeout=args.create_timeout,
            step_timeout=args.step_timeout,
            evaluate_timeout=args.evaluate_timeout,
            max_instances=args.max_instances,
            create_queue=args.create_queue,
            queue_timeout=args.queue_timeout,
            max_body=args.max_body * MIB,
            max_answer=args.answer_limit * MIB,
            memory=args.memory_limit * MIB if args.memory_limit else None,
            processes=args.process_limit,
            open_files=args.file_limit,
            disk=args.disk_limit * MIB,
        ),
        log_level=args.log_level,
    )
