"""Images and models that no figure can come of are refused, and the image is named."""

import warnings

import pytest
import torch

from gtp_vit import GTPError, SearchConfig, Target, calibrate, tune
from gtp_vit.data.dataset import InMemoryDataset
from gtp_vit.metrics.base import UNREDUCED
from gtp_vit.metrics.evaluate import evaluate
from gtp_vit.metrics.input_checks import check_has_weights, check_pixels
from gtp_vit.testing import families


@pytest.fixture(scope="module")
def model():
    return families.make("vit")


@pytest.fixture
def images():
    return families.images("vit", 24).clone()


@pytest.mark.parametrize(
    "do", [calibrate, lambda model, images: tune(model, images, Target("macs", 0.8), search=SearchConfig(passes=1))]
)
def test_an_image_with_a_pixel_that_is_no_number_is_named(model, images, do):
    images[5, 0, 3, 3] = float("nan")
    with pytest.raises(GTPError, match=r"image 5 \(counted from 0\) has pixels that are not finite"):
        do(model, images)
    images[[7, 9, 11], 0, 0, 0] = float("inf")
    with pytest.raises(GTPError, match=r"images 5, 7, 9 and 1 more \(counted from 0\) have pixels"):
        do(model, images)


def test_evaluate_names_the_image_by_its_place_in_the_data_set(model, images):
    images[9, 0, 3, 3] = float("nan")
    dataset = InMemoryDataset(images, torch.zeros(24, dtype=torch.long))
    with pytest.raises(GTPError, match=r"image 9 \(counted from 0\) has pixels that are not finite; repair"):
        evaluate({UNREDUCED: model}, dataset, batch_size=8, workers=0)


def test_images_without_pixels_and_models_without_weights_are_refused(images):
    with pytest.raises(GTPError, match="on the meta device, where it has no weights"):
        calibrate(families.make("vit").to("meta"), images)
    with pytest.raises(GTPError, match="the images are on the meta device"):
        calibrate(families.make("vit"), images.to("meta"))
    check_has_weights(torch.nn.Linear(2, 2))


def test_images_that_teach_nothing_are_named(images):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_pixels(images)
    with pytest.warns(UserWarning, match=r"images 0, 1, 2 and 21 more .* have one value in all pixels"):
        check_pixels(torch.zeros_like(images))
    with pytest.warns(UserWarning, match=r"all 24 images are the same one"):
        check_pixels(images[:1].expand(24, -1, -1, -1))
    images[2] *= 255
    with pytest.warns(UserWarning, match=r"image 2 \(counted from 0\) has values up to"):
        check_pixels(images)
