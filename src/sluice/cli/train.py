"""`sluice train`: its commands under one name; those that need PyTorch are refused in a line where it is missing."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from sluice.cli.commands import group
from sluice.cli.extras import check_extra
from sluice.cli.train_data import data
from sluice.cli.train_evaluate import evaluate
from sluice.cli.train_export import export
from sluice.cli.train_fit import locality, pretrain
from sluice.cli.train_stages import onpolicy, prerouter, recover, text


def _training(command: Callable[..., Any]) -> Callable[..., Any]:
    """`command`, which needs PyTorch and its companions."""

    @wraps(command)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check_extra("train")
        return command(*args, **kwargs)

    return checked


COMMANDS = {
    "data": data, "pretrain": _training(pretrain), "locality": _training(locality), "export": export,
    "text": _training(text), "prerouter": _training(prerouter), "recover": _training(recover),
    "onpolicy": _training(onpolicy), "evaluate": _training(evaluate),
}  # fmt: skip
app = group(
    "train",
    "Train what makes routing cacheable: small models, heads that predict routes, adapters that recover.",
    COMMANDS,
)
