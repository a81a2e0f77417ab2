"""A test that is not marked slow takes two seconds at the most, so that `make test` stays as quick as it is.

Only its own body counts: a fixture that many tests share is paid by whichever comes first. On a busy or a slow machine
the limit grows by what a reference loop takes right after the test.
"""

import time

LIMIT = 2.0  # seconds
# The loop takes 0.05 s on an idle core of the machine where tests were marked; a third of it is a margin for noise.
REFERENCE = 0.035
ROUNDS = 5


def reference_loop() -> float:
    """Seconds of a fixed piece of work: the slowest of some rounds, as noise comes in bursts."""
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        total = 0
        for number in range(500_000):
            total += number * number % 7
        times.append(time.perf_counter() - begin)
    return max(times)


def limit_of(item) -> float | None:
    """Seconds that a test may take on an idle core; None = as many as it likes."""
    if item.get_closest_marker("slow"):
        return None
    marker = item.get_closest_marker("time_limit")
    return marker.args[0] if marker else LIMIT


def hold_to_limit(report, item) -> None:
    """Turn the report of a test that passed, but took too long, into a failure."""
    limit = limit_of(item)
    if limit is None or report.when != "call" or report.outcome != "passed" or report.duration <= limit:
        return
    factor = max(1.0, reference_loop() / REFERENCE)
    if report.duration > limit * factor:
        report.outcome = "failed"
        report.longrepr = (
            f"{item.nodeid} took {report.duration:.1f} s; {limit * factor:.1f} s are allowed here ({limit:g} s on an "
            f"idle core, and this machine is {factor:.1f} times as slow now). Make it quicker, or mark it: "
            "pytest.mark.slow"
        )
