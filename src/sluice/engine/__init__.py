"""The engine: budget, sessions, steps. Knows models and stores by their interfaces; yields tokens."""

from sluice.engine.engine import Engine, Token
from sluice.engine.session import Session

__all__ = ["Engine", "Session", "Token"]
