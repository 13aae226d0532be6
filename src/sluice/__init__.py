"""Sluice runs Mixture-of-Experts language models that are larger than memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sluice.engine import Engine, Generation, Session, Token

__version__ = "0.1.0"
__all__ = ["Engine", "Generation", "Session", "Token", "__version__"]


def __getattr__(name: str) -> Any:
    """The engine's names, loaded when first used: importing sluice alone loads neither numpy nor ggml."""
    if name in ("Engine", "Generation", "Session", "Token"):
        from sluice import engine

        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
