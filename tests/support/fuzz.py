"""Random damage, for tests that look for what nobody thought of. A case is known by its number and can be run again."""

import contextlib
import copy
import json
import os
import random
import time

SECONDS = float(os.environ.get("GTP_VIT_FUZZ_SECONDS", "7.5"))  # for each of eight tests
FIRST = int(os.environ.get("GTP_VIT_FUZZ_FIRST", "0"))  # the number of the first case
ODD = [None, True, False, 0, 1, -1, 2**70, 10**400, 0.5, -0.0, 1e300, float("nan"), float("inf"), "", "x", "\x1b[31m"]
ODD += ["../x", "\ud800", "0" * 300, [], [1], ["a", None], [[[]]], {}, {"a": 1}, {"method": "gtp"}]


def cases(least=20):
    """(number, random numbers of its own), for some seconds; at least a few on a machine that is very busy."""
    end, number = time.monotonic() + SECONDS, FIRST
    while number < FIRST + least or time.monotonic() < end:
        yield number, random.Random(number)
        number += 1


def damaged(value, chance):
    """A copy of some JSON in which one or two values are odd, missing or of a stranger."""
    value = json.loads(json.dumps(value))
    for _ in range(chance.choice((1, 1, 2))):
        places = list(_places(value))
        if not places:
            return copy.deepcopy(chance.choice(ODD))
        inside, key = chance.choice(places)
        what = chance.random()
        if what < 0.2:
            del inside[key]
        elif what < 0.3 and isinstance(inside, dict):
            inside[chance.choice(("extra", "method", "format", key + "s"))] = copy.deepcopy(chance.choice(ODD))
        elif what < 0.45 and isinstance(inside[key], (int, float)):
            with contextlib.suppress(OverflowError):
                inside[key] = inside[key] + chance.choice((-1, 1, 0.5))
        elif what < 0.6:
            other, name = chance.choice(places)
            with contextlib.suppress(LookupError):  # the first damage may have taken it away
                inside[key] = json.loads(json.dumps(other[name]))
        else:
            inside[key] = copy.deepcopy(chance.choice(ODD))
    return value


def _places(value):
    """Every container in some JSON with every key of it."""
    if isinstance(value, (dict, list)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def harmed(content, chance):
    """Bytes with a bit that turned, a part that is missing, twice or of another kind."""
    content = bytearray(content)
    for _ in range(chance.choice((1, 1, 3))):
        place = chance.randrange(len(content) + 1)
        what = chance.random()
        if what < 0.5 and place < len(content):
            content[place] ^= 1 << chance.randrange(8)
        elif what < 0.65:
            del content[place:]
        elif what < 0.8:
            del content[place : place + chance.randrange(1, 9)]
        else:
            content[place:place] = chance.randbytes(chance.randrange(1, 9))
    return bytes(content)
