"""Who was about together expects more to come, for a while."""

from __future__ import annotations

from semantic.application.engine.scheduler import RecentConcurrency


def test_one_request_after_the_other_is_no_company() -> None:
    company = RecentConcurrency()
    assert not any(company.observe(1, now) for now in (0.0, 1.0, 2.0))


def test_company_lasts_for_a_while_after_the_last_meeting() -> None:
    company = RecentConcurrency()
    assert company.observe(2, 10.0)
    assert company.observe(1, 30.0)
    assert company.observe(3, 59.0)
    assert company.observe(1, 88.0)
    assert not company.observe(1, 90.0)
    assert not company.observe(0, 91.0)
