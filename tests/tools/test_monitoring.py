"""The board and the alerts under `deploy/` ask for metrics and labels that the server has."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import cast

import pytest
import yaml  # type: ignore[import-untyped]  # the package has no types

from semantic.domain.stored import StoreStats, Tier, Wear
from semantic.ports.serving import EngineFigures, EngineState, Figures
from semantic_server.http.metrics import Metrics
from tools.release import ROOT

BOARD = json.loads((ROOT / "deploy" / "grafana" / "semantic.json").read_text(encoding="utf-8"))
RULES = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))
_ADDED = {"up": {"job", "instance"}}
"""Of Prometheus itself."""
_LABELS = {"job", "instance", "le"}
"""Those that Prometheus or a histogram adds to every metric."""
_METRIC = re.compile(r"\b((?:vllm:|semantic_)[a-z_]+|up)\b(\{[^}]*\})?")


def expressions() -> list[tuple[str, str]]:
    """(name, expression) of every panel's query and every alert."""
    found = [
        (panel["title"], target["expr"]) for panel in BOARD["panels"] for target in panel["targets"]
    ]
    return found + [
        (rule["alert"], rule["expr"]) for group in RULES["groups"] for rule in group["rules"]
    ]


@pytest.fixture(scope="module")
def labels() -> Mapping[str, set[str]]:
    """The labels of every sample that the server can show, by the sample's name."""
    counts = dict.fromkeys(("written", "evicted", "dropped", "damaged", "write_errors"), 1)
    wear = Wear("2026-01-31", "2026-01-01", 1, {}, max_a_day=1, rated=1)
    stores = tuple(StoreStats(tier, 1, 1, 1, counts=counts, wear=wear) for tier in Tier)
    figures = Figures(EngineFigures(EngineState.READY, restored_bytes={Tier.DISK: 1}), stores)
    metrics = Metrics("model", lambda: figures)
    found: dict[str, set[str]] = {**_ADDED}
    for family in metrics.registry.collect():
        # A family with labels has samples only once something was counted.
        own = {name for sample in family.samples for name in sample.labels}
        for suffix in ("", "_total", "_bucket", "_sum", "_count"):
            found.setdefault(family.name + suffix, set()).update(own)
    for name in ("vllm:request_success", "semantic_requests_failed"):
        found[f"{name}_total"].add("finished_reason")
    return found


@pytest.mark.parametrize(("name", "expression"), expressions())
def test_what_is_asked_for_exists(
    name: str, expression: str, labels: Mapping[str, set[str]]
) -> None:
    asked = _METRIC.findall(expression)
    assert asked, f"{name}: no metric in {expression}"
    for metric, matchers in asked:
        assert metric in labels, f"{name}: the server has no {metric}"
        named = set(re.findall(r"(\w+)\s*[=!]~?", cast(str, matchers)))
        grouped = {
            one.strip()
            for group in re.findall(r"by \(([^)]*)\)", expression)
            for one in group.split(",")
        }
        unknown = (named | grouped) - labels[metric] - _LABELS
        assert not unknown, f"{name}: {metric} has no labels {unknown}"


def test_panels_do_not_overlap_and_have_numbers_of_their_own() -> None:
    places = [tuple(panel["gridPos"][key] for key in "xy") for panel in BOARD["panels"]]
    assert len({*places}) == len({panel["id"] for panel in BOARD["panels"]}) == len(places)
