"""The test kit: what every method promises on every family of ViTs, for methods and families of your own.

    import pytest
    from gtp_vit import testing

    @pytest.mark.parametrize("case", testing.cases(methods=[MyMethod(r=5)]), ids=str)
    def test_my_method(case):
        testing.check(case)

docs/guides/test-your-method.md lists the promises. Needs timm; families of other libraries are left out where these are
not installed.
"""

from gtp_vit.testing.battery import BrokenPromisesError as BrokenPromisesError
from gtp_vit.testing.battery import cases as cases
from gtp_vit.testing.battery import check as check
from gtp_vit.testing.battery import fits as fits
from gtp_vit.testing.promises import PROMISES as PROMISES
from gtp_vit.testing.promises import SLOW_PROMISES as SLOW_PROMISES
from gtp_vit.testing.subject import Case as Case
