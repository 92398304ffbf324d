"""Finding envs: built in, by entry point, in a folder, as package.module:Class; and telling what is wrong with one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from aioenv.envs import BaseEnv, EnvSpec, Registry, find_env, known_envs
from aioenv.errors import EnvError, UnknownEnv


def write_env(folder: Path, name: str, code: str, file: str | None = None) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / (file or f"{name}_env.py")).write_text(code)


def test_built_in_envs_are_known_without_importing_them() -> None:
    specs = known_envs()
    assert {"appworld", "echo"} <= set(specs)
    assert find_env("echo", specs).load().__name__ == "EchoEnv"


def test_an_installed_packages_entry_point_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shop_package.py").write_text("from aioenv.envs.echo import EchoEnv\nclass Shop(EchoEnv): pass\n")
    info = tmp_path / "shop-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shop\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[aioenv.envs]\nshop = shop_package:Shop\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = known_envs()["shop"]
    assert spec == EnvSpec("shop", "shop_package:Shop", "entry point")
    assert "shop_package" not in sys.modules
    assert spec.load().__name__ == "Shop"


def test_a_folders_envs_go_before_all_others(tmp_path: Path) -> None:
    code = "from aioenv.envs import BaseEnv\nfrom aioenv.envs.echo import EchoEnv as E\nclass EchoEnv(E): pass\n"
    write_env(tmp_path, "echo", code)
    write_env(tmp_path, "no_env_here", "", file="other.py")
    specs = known_envs(tmp_path)
    assert specs["echo"].origin == f"in {tmp_path}"
    assert "no_env_here" not in specs
    assert "no_env_here" in known_envs(tmp_path, "other")


def test_a_registered_class_goes_before_one_by_name(tmp_path: Path) -> None:
    write_env(
        tmp_path,
        "web_shop",
        "from aioenv.envs import Registry\nfrom aioenv.envs.echo import EchoEnv\nclass WebShopEnv(EchoEnv): pass\n"
        "@Registry.register('web_shop')\nclass Chosen(EchoEnv): pass\n",
    )
    assert known_envs(tmp_path)["web_shop"].load().__name__ == "Chosen"
    assert Registry.get("web_shop") is not None


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("x = 1", "has neither a class OddOneEnv nor one registered as 'odd_one'"),
        ("from aioenv.envs import BaseEnv\nclass OddOneEnv(BaseEnv): pass", "lacks methods: evaluate, get_init_state"),
        ("class OddOneEnv: pass", "is not a subclass of aioenv.envs.BaseEnv"),
        ("import no_such_module_anywhere", "No module named 'no_such_module_anywhere'"),
    ],
)
def test_what_is_wrong_with_a_module_is_told(tmp_path: Path, code: str, expected: str) -> None:
    write_env(tmp_path, "odd_one", code)
    with pytest.raises((EnvError, ImportError), match=expected):
        known_envs(tmp_path)["odd_one"].load()


def test_an_unknown_name_is_told_what_there_is() -> None:
    with pytest.raises(UnknownEnv, match=r"unknown env 'nope'; there is: appworld, echo; or package\.module:Class"):
        find_env("nope", known_envs())
    assert find_env("some.module:Class", known_envs()).target == "some.module:Class"


def test_an_env_must_have_the_methods_that_are_not_optional() -> None:
    assert BaseEnv.__abstractmethods__ == {"get_init_state", "step", "evaluate", "get_query_list"}
