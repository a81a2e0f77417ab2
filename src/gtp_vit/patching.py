"""patch(model, method): a new model that shares the weights and reduces tokens; the original stays as it is."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from torch import nn

from gtp_vit.backbones.host import Host, find_vit
from gtp_vit.backbones.modules import shallow_copy
from gtp_vit.core.loop import PatchedModel, Reduction
from gtp_vit.core.reducer import Method, Reducer
from gtp_vit.errors import SettingError, UnsupportedModelError, short_repr
from gtp_vit.kernels import Kernels, describe
from gtp_vit.kernels import check as check_kernels
from gtp_vit.methods import known_methods
from gtp_vit.methods.gtp_plus.calibration import weight_fingerprint
from gtp_vit.recipes.defaults import as_recipe, resolve
from gtp_vit.recipes.provenance import Origin
from gtp_vit.recipes.recipe import Recipe

Model = TypeVar("Model", bound=nn.Module)


def patch(
    model: Model,
    method: Method | Recipe | str | Path | None = None,
    *,
    restore: bool = False,
    shorten_last_block: bool = True,
    kernels: Kernels = "auto",
    quiet: bool = False,
) -> Model:
    """A model of the same class with the same weights that reduces tokens by `method`.

    Nothing is copied and `model` is not changed: both share their blocks. Therefore `.train()`, `.half()`, `.to()` or
    `load_state_dict(..., assign=True)` on one reaches the blocks of the other; deep-copy first where that is not
    wanted. Patching a patched model starts again from the original. Hooks on a block or its attention do not fire in
    layers that are reduced; a model that has such hooks already is refused. Of a classifier around a ViT that reads the
    class token only, the ViT inside returns prefix tokens only; with shorten_last_block=False it returns all that
    remain.

    Args:
        model: a supported ViT, or a model around one; the error for any other names the unsupported module.
        method: e.g. `GTP(propagate=8)`; the name of a method, for its defaults; or a recipe that `tune` made, its
            file, or the name of one in the package. Without it, and for "gtp_plus", GTP+ with what is known to be
            good for this model, at 65 % of its MACs.
        restore: give back the full grid wherever the model returns tokens (forward_features, forward_intermediates,
            hidden_states, last_hidden_state, ...): every patch has a feature, in order, for heads that need a map. What
            a model pools is pooled from the tokens that remain. docs/dense.md says how well it works.
        shorten_last_block: where the head reads prefix tokens only, let the last block compute nothing else. Exact.
        kernels: "auto" uses the native kernels where they can run (on a CPU, in float32 or bfloat16, under
            torch.no_grad or inference_mode), except in exported programs; "native" there as well; "torch" never. On a
            CUDA GPU "auto" uses Triton kernels where they can run, and "triton" raises where they cannot; with
            gradients, and in exported programs, torch operators run.
        quiet: do not warn of settings that cannot give good results, such as untrained predictors.

    Returns:
        The patched model, of a subclass of the model's class; its attribute `reduction` has the method.

    Raises:
        UnsupportedModelError: the model, or a module in it, is not supported.
        SettingError: the settings do not fit the model.
        UnknownNameError: there is no method or recipe of this name.

    >>> import timm, torch, gtp_vit
    >>> model = timm.create_model("test_vit").eval()
    >>> fast = patch(model, gtp_vit.GTP(propagate=8))
    >>> fast(torch.zeros(1, 3, 160, 160)).shape
    torch.Size([1, 1000])
    """
    if not isinstance(model, nn.Module):
        raise SettingError(f"model is a {type(model).__name__}; give the model itself, e.g. timm.create_model(...)")
    on_cpu = all(parameter.is_cpu for parameter in model.parameters())  # elsewhere native kernels are not missed
    check_kernels(kernels, quiet=quiet or not on_cpu)
    host = host_of(model)
    recipe = as_recipe(method)
    method = _settings(resolve(recipe or method, host))
    caution = method.warning()
    if caution is not None and not quiet:
        warnings.warn(caution, stacklevel=2)
    method.check_weights(host.block_weights)
    if host.needs_all_patches is not None and not restore:
        raise UnsupportedModelError(
            f"{host.needs_all_patches}; patch it with restore=True, which gives every patch a feature. The model was "
            "not changed"
        )
    root: Any = _shallow_copies(host.model, host.path)
    tower: Any = root.get_submodule(host.path)
    # In the precision of the blocks: some models keep their embeddings and norms in another one.
    weight = next(parameter for parameter in host.backbone.blocks(tower)[0].parameters() if parameter.ndim == 2)
    reducer = method.build(host.vit).train(tower.training)
    if restore and reducer.drops_patches and not quiet:
        warnings.warn(
            f"{type(method).__name__} drops patches: restored, such a patch is a copy of the nearest one that stays, "
            "with some of its own last feature; ToMe and GTP+ drop none",
            stacklevel=2,
        )
    reads = (
        None
        if host.wrapper is None or host.wrapper.reads_image_tokens == "as the ViT"
        else host.vit.head_reads_image_tokens
    )
    origin = (
        None if recipe is None else Origin(recipe.provenance, recipe.measured, weight_fingerprint(host.fingerprint))
    )
    tower.reduction = Reduction(host.backbone, method, host.vit, shorten_last_block, kernels, restore, reads, origin)
    tower.reducer = reducer.to(weight.device, weight.dtype if weight.is_floating_point() else None)
    tower.__class__ = _patched_class(tower.__class__, host.backbone.forwards, "")
    if root is not tower:
        root.__class__ = _patched_class(root.__class__, PatchedWrapper, host.path)
    return root


def _settings(method: object) -> Method:
    if isinstance(method, type) and issubclass(method, Method):
        raise SettingError(f"method is the class {method.__name__}; give settings, e.g. {method.__name__}()")
    if not isinstance(method, Method):
        names = ", ".join(cls.__name__ for cls in known_methods().values())
        raise SettingError(f"method is {short_repr(method)}; give one of {names} with its settings")
    return method


def unpatch(model: Model) -> Model:
    """The original of a patched model, sharing the weights; other models are returned as they are.

    Args:
        model: a patched model, or any other.

    Returns:
        A model of the original's class.

    >>> import gtp_vit
    >>> model = gtp_vit.create_model("test_vit")
    >>> type(unpatch(gtp_vit.patch(model))) is type(model)
    True
    """
    if not is_patched(model):
        return model
    root: Any = _shallow_copies(model, model.path)
    tower: Any = root.get_submodule(model.path)
    del tower.reduction, tower.reducer
    for module in {root, tower}:
        module.__class__ = type(module).original
    return root


def host_of(model: nn.Module) -> Host:
    """The host of a plain model, or of a patched one as it was before; raises GTPError if it is not supported."""
    return find_vit(unpatch(model))


def is_patched(model: nn.Module) -> TypeGuard[Patched]:
    """Whether `patch` made this model.

    Args:
        model: any model.

    Returns:
        True for a model that `patch` returned, and for a copy of it; False for a model around one.

    >>> import gtp_vit
    >>> model = gtp_vit.create_model("test_vit")
    >>> is_patched(model), is_patched(gtp_vit.patch(model))
    (False, True)
    """
    return isinstance(model, Patched)


class Patched(PatchedModel):
    """Marks the classes that `patch` makes, and lets their instances be pickled and copied."""

    original: type[nn.Module]
    original_weights: tuple[type, type, str]  # the arguments of `_patched_class`
    path: str  # of the ViT in the model

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        # The class is made at run time, so a pickle says how.
        return _restore, self.original_weights, self.__getstate__()

    @property
    def kernels(self) -> str:
        """The kernels a forward pass would use now, and if torch operators, why."""
        return describe(self.reduction.kernels, next(self.parameters()))

    def extra_repr(self) -> str:
        return f"reduction={self.reduction.method}"


class SavesRecipe(nn.Module):
    """Part of the classes that `patch` makes of Hugging Face models: the reduction is saved as well."""

    def save_pretrained(self, save_directory: Any, *arguments: Any, push_to_hub: bool = False, **options: Any) -> None:
        """As the model's own, and a recipe beside the weights, which `gtp_vit.load_pretrained` reads."""
        if push_to_hub:
            raise SettingError("push_to_hub would leave out the recipe; save to a folder, then upload that")
        from gtp_vit.recipes.saving import save_recipe_beside

        plain: Any = unpatch(self)
        plain.save_pretrained(save_directory, *arguments, **options)
        save_recipe_beside(find_vit(plain), tower_of(self), Path(save_directory))


class PatchedWrapper(nn.Module):
    """The parts of the reduction that a model around a patched ViT has."""

    @property
    def reduction(self) -> Reduction:
        return tower_of(self).reduction

    @property
    def reducer(self) -> Reducer:
        return tower_of(self).reducer


def tower_of(model: nn.Module) -> Patched:
    """The ViT of a patched model, in which the tokens are reduced."""
    assert isinstance(model, Patched)
    tower = model.get_submodule(model.path)
    assert isinstance(tower, Patched)
    return tower


@functools.cache
def _patched_class(original: Any, mixin: Any, path: str) -> Any:
    # A model around a ViT keeps its name, as do Hugging Face's: some libraries look models up by it.
    name = original.__name__ if path or getattr(mixin, "keeps_name", False) else f"Reduced{original.__name__}"
    own = {
        "original": original,
        "original_weights": (original, mixin, path),
        "path": path,
        "__module__": original.__module__,
    }
    own["__qualname__"] = name
    saves = (SavesRecipe,) if hasattr(original, "save_pretrained") else ()
    return type(name, (Patched, *saves, mixin, original), own)


def _restore(original: type, mixin: type, path: str) -> Any:
    cls = _patched_class(original, mixin, path)
    return cls.__new__(cls)


def _shallow_copies(model: nn.Module, path: str) -> nn.Module:
    """The same module tree with shells for the model and every module along `path`."""
    root = here = shallow_copy(model)
    for name in path.split(".") if path else ():
        here._modules[name] = inner = shallow_copy(here.get_submodule(name))
        here = inner
    return root
