"""An env module that can't be imported."""

NEVER = 1 / 0
