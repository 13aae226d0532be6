"""`sluice train`: its commands under one name, each refused in a line where the extra's libraries are missing."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from sluice.cli.commands import group
from sluice.cli.extras import check_extra
from sluice.cli.train_data import data


def _training(command: Callable[..., Any]) -> Callable[..., Any]:
    """`command`, which needs PyTorch and its companions."""

    @wraps(command)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check_extra("train")
        return command(*args, **kwargs)

    return checked


app = group(
    "train",
    "Train what makes routing cacheable: small models, heads that predict routes, adapters that recover.",
    {"data": data},
)
