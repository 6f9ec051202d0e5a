"""What the heartbeat logs of steps that take long."""

from kdist.cluster.heartbeat import Beat, Heartbeat


def test_a_slow_step_that_is_traced(caplog):
    heartbeat, slow = Heartbeat(), Beat("in step 5", 6.0, usual_seconds=0.01)
    for is_traced in (True, False):
        with heartbeat.step(print, 4):
            if is_traced:
                heartbeat.note_tracing()
            heartbeat._log_if_slow(slow, heartbeat._activity[1])
    traced, slow_again = caplog.messages
    assert "in step 5 for 6 s so far, as TensorFlow traces it" in traced
    assert "traces" not in slow_again


def test_a_worker_that_waits_for_the_others(caplog):
    heartbeat = Heartbeat()
    with heartbeat.collective("gathering weights"):
        activity, since = heartbeat._activity
        for seconds in (59.0, 61.0):
            heartbeat._log_if_alone(activity, Beat("gathering weights", seconds), since)
    heartbeat._log_if_alone("between steps", Beat("between steps", 61.0), since)
    (message,) = caplog.messages
    assert "gathering weights for 61 s" in message
