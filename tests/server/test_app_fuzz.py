"""Requests made from the server's own description: no 5xx, and answers that keep to what it says of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from api_server import Served, served
from hypothesis import HealthCheck, given, settings
from tiny import write_tiny

from sluice.engine import Engine
from sluice.server.limits import MAX_CHOICES

schemathesis = pytest.importorskip("schemathesis")
checks = pytest.importorskip("schemathesis.checks")
EXAMPLES = 15
# a request that keeps to the description may be refused all the same, for its length, say
NOT_CHECKED = [checks.positive_data_acceptance, checks.missing_required_header]
KINDS = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = write_tiny(tmp_path_factory.mktemp("fuzz") / "tiny.gguf", n_layers=1).path
    with (
        Engine.open(path, expert_slots=8, threads=1, ctx=64, streams=2) as engine,
        served(engine, max_queue=256) as running,
    ):
        yield running
        assert running.faults == []


@pytest.fixture(scope="module")
def api(server: Served) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.value)
def test_no_request_is_the_servers_fault(api: Any, server: Served, kind: Any) -> None:
    answered = server.worker.state().totals.finished
    for found in api.get_all_operations():
        operation = found.ok()
        if operation.method == "get" and kind == schemathesis.GenerationMode.NEGATIVE:
            continue  # nothing of it could be wrong

        @settings(
            max_examples=EXAMPLES, deadline=None, derandomize=True, database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        )  # fmt: skip
        @given(case=operation.as_strategy(generation_mode=kind))
        def check(case: Any) -> None:
            if isinstance(case.body, dict):
                case.body.pop("model", None)  # nearly always another's
                if case.body.get("n") in range(3, MAX_CHOICES + 1):  # fewer will do; others must be refused
                    case.body["n"] = 2
            case.call_and_validate(excluded_checks=NOT_CHECKED, timeout=60)

        check()
    if kind == schemathesis.GenerationMode.POSITIVE:
        assert server.worker.state().totals.finished > answered
