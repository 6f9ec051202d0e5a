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
