"""The states of an instance: one place changes them, and an illegal change raises with the history."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioenv.pool.state import ALLOWED, IllegalChange, Lifecycle, State


@given(st.lists(st.sampled_from(State)))
def test_any_order_of_changes_is_legal_or_raises_and_changes_nothing(wanted: list[State]) -> None:
    life = Lifecycle("i")
    for state in wanted:
        before = (life.state, list(life.history))
        if state in ALLOWED[life.state]:
            life.to(state)
            assert life.state is state
        else:
            with pytest.raises(IllegalChange, match="instance i can't go from"):
                life.to(state)
            assert (life.state, list(life.history)) == before
        assert life.takes_calls == (life.state in (State.READY, State.BUSY))


@given(st.lists(st.sampled_from(State)))
def test_what_has_ended_stays_ended(wanted: list[State]) -> None:
    life = Lifecycle("i")
    life.to(State.ENDED, "why")
    for state in wanted:
        with pytest.raises(IllegalChange):
            life.to(state)
    assert (life.state, life.cause) == (State.ENDED, "why")


def test_the_first_cause_is_kept() -> None:
    life = Lifecycle("i")
    life.to(State.READY)
    life.to(State.CLOSING, "idle for 3600 s")
    life.to(State.ENDED, "killed")
    assert life.cause == "idle for 3600 s"


def test_the_error_shows_the_history() -> None:
    life = Lifecycle("i")
    life.to(State.READY)
    with pytest.raises(IllegalChange, match=r"from ready to starting: starting at 0\.000 s, ready at 0\."):
        life.to(State.STARTING)
