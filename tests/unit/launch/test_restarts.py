"""Restarts of a job by the local launcher."""

import pytest

from kdist.launch import supervision


@pytest.fixture
def policy(tmp_path, monkeypatch):
    """Returns a function that creates a policy, and the list of its messages."""
    monkeypatch.setattr(supervision.time, "sleep", lambda seconds: None)
    messages = []

    def create(max_restarts):
        return supervision.RestartPolicy(max_restarts, tmp_path, messages.append), messages

    return create


def test_failures_count_until_there_is_a_new_checkpoint(policy, tmp_path):
    policy, messages = policy(2)
    assert [policy.wait_before_restart(code) for code in (1, 75, 137)] == [True, True, False]
    assert "2 restarts in a row produced no new checkpoint" in messages[-1]
    (tmp_path / "step-0000000005").mkdir()
    assert policy.wait_before_restart(1)
    assert "from the checkpoint of step 5 in 1 s; restart 1 of 2" in messages[-1]


def test_a_job_that_has_saved_is_restarted_without_being_counted(policy):
    policy, messages = policy(1)
    assert [policy.wait_before_restart(143) for _ in range(3)] == [True] * 3
    assert messages[-1].endswith("in 1 s; not counted, as it has saved")
    assert policy.wait_before_restart(1)
    assert not policy.wait_before_restart(1)


@pytest.mark.parametrize("code", [124, 130])
def test_a_person_and_a_time_limit_end_a_job_for_good(policy, code):
    policy, messages = policy(5)
    assert not policy.wait_before_restart(code)
    assert messages == [f"not started again after exit code {code}"]


@pytest.mark.parametrize("code", [1, 143])
def test_nothing_is_restarted_unless_the_user_allows_it(policy, code):
    policy, messages = policy(0)
    assert not policy.wait_before_restart(code)
    assert not messages
