"""How many tokens leave in which layer."""

import pytest

from gtp_vit.core.schedule import removals, round_schedule
from gtp_vit.errors import ScheduleError, UnknownNameError


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (0, (0, 0, 0, 0)),
        (8, (8, 8, 8, 8)),
        ((1, 0, 2, 3), (1, 0, 2, 3)),
        ([1, 0, 2, 3], (1, 0, 2, 3)),
        ("constant:3", (3, 3, 3, 3)),
        ("linear:0:9", (0, 3, 6, 9)),
        ("linear:9:0", (9, 6, 3, 0)),
        ("early:3", (6, 4, 2, 0)),
        ("late:3", (0, 2, 4, 6)),
        ("keep:0.5:1:3", (0, 24, 0, 12)),  # 49 -> 25 (half, rounded up) -> 13
        ("keep:1:0", (0, 0, 0, 0)),
    ],
)
def test_schedules_of_four_layers_and_49_tokens(schedule, expected):
    assert removals(schedule, depth=4, tokens=49) == expected


def test_the_largest_constant_number_leaves_one_token():
    assert sum(removals(12, 4, 49)) == 48
    with pytest.raises(ScheduleError, match=r"removes 52 tokens.*only 49.*largest constant.* is 12"):
        removals(13, 4, 49)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ((1, 2, 3), "3 entries, but the model has 4 layers"),
        ((1, 2, 3, -1), "removes -1 tokens in layer 3"),
        ((1, 2, 3, 1.5), "removes 1.5 tokens in layer 3"),
        ((1, 2, 3, True), "removes True tokens"),
        (-2, "removes -2 tokens"),
        (2.5, "schedule is 2.5"),
        (True, "schedule is True"),
        (None, "schedule is None"),
        ("linear:1", "1 numbers; write it like 'linear:2:14'"),
        ("early", "0 numbers; write it like 'early:8'"),
        ("linear:a:b", "other than numbers"),
        ("constant:nan", "not finite"),
        ("keep:1.5:2", "rate 1.5"),
        ("keep:0.5", "names no layer"),
        ("keep:0.5:4", "layer 4; this model has layers 0 to 3"),
        ("keep:0.5:1.5", "layer 1.5"),
        ("linear:20:20", "removes 80 tokens"),
    ],
)
def test_wrong_schedules_are_refused(schedule, words):
    with pytest.raises(ScheduleError) as error:
        removals(schedule, depth=4, tokens=49)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_schedule_names_get_close_matches():
    with pytest.raises(UnknownNameError, match="did you mean 'linear'"):
        removals("liner:2:4", depth=4, tokens=49)


@pytest.mark.parametrize(
    ("name", "plan"),
    [("default", (0, 0, 6, 9, 9, 7, 6, 4, 3, 3, 1, 0)), ("calibrated", (0, 0, 6, 9, 9, 7, 7, 5, 2, 2, 1, 0))],
)
def test_searched_shapes_at_every_depth(name, plan):
    assert removals(f"{name}:4", 12, 196) == plan
    for depth in (1, 2, 3, 4, 16, 24, 40):
        plan = removals(f"{name}:4", depth, 400)
        assert sum(plan) == 4 * depth
        assert depth < 4 or plan[0] == plan[-1] == 0


def test_rounding_hands_on_what_is_left_over_and_one_token_stays():
    assert round_schedule([0, 1.4, 0, 1.4, 1.4], tokens=49) == [0, 1, 0, 2, 1]
    assert round_schedule([0, 30.5, 30.5, 30.5], tokens=49) == [0, 30, 18, 0]
    assert round_schedule([10, 10], 49, min_tokens=7, snap=lambda left: round(left / 7) * 7) == [7, 14]
