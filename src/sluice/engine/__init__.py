"""The engine: budget, sessions, steps. Knows models and stores by their interfaces; yields tokens."""

from sluice.engine.engine import Engine
from sluice.engine.generate import Generation, Token
from sluice.engine.session import Session

__all__ = ["Engine", "Generation", "Session", "Token"]
