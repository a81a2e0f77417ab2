"""How near half precision has to be to full precision."""

import functools

import torch

from gtp_vit import MCTF, Method, PiToMe, ToFu, patch
from gtp_vit.testing import families
from gtp_vit.testing.subject import output


@functools.cache
def plain(family: str, dtype: torch.dtype) -> torch.Tensor:
    """Logits of the unreduced model."""
    return output(families.make(family).to(dtype), families.images(family).to(dtype)).float()


def half_precision_is_near_full_precision(family: str, method: Method, dtype: torch.dtype) -> None:
    """Rounding may keep a different token here and there: it moves the logits hardly more than the reduction does.

    With the newest torch it is at most 0.6 of that, with torch 2.6, whose half precision is different, 1.2 (MCTF:
    1.3). Where both kept tokens that have nothing to do with each other, it would be 1.4.
    """
    model, images = families.make(family), families.images(family)
    exact = output(patch(model, method), images)
    half = output(patch(model.to(dtype), method), images.to(dtype)).float()
    error, effect = (half - exact).abs().mean(), (exact - plain(family, torch.float32)).abs().mean()
    error_of_the_plain_model = (plain(family, dtype) - plain(family, torch.float32)).abs().mean()
    newest = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
    # Keys, energies and maps of these differ by less between tokens than half precision rounds them.
    share, of_all = (0.6, 0.12) if newest and not isinstance(method, MCTF | PiToMe | ToFu) else (1.25, 0.25)
    if isinstance(method, MCTF) and not newest:
        share, of_all = 1.4, 0.35
    assert error < share * effect + 2 * error_of_the_plain_model
    assert error < of_all * exact.std()
