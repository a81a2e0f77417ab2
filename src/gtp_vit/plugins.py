"""Methods and families of other packages, which name them in entry points; they are imported when first asked for.

Groups: `gtp_vit.methods`, whose entries are subclasses of `Method`, and `gtp_vit.backbones`, of `Backbone`.
"""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, entry_points

from gtp_vit.errors import GTPError, first_line, short_repr


def plugins(group: str, base: type, reserved: dict[str, type]) -> dict[str, type]:
    """The classes that installed packages register in a group; raises GTPError with the package that is at fault.

    Args:
        group: of entry points.
        base: what each class must be derived from.
        reserved: the classes that have names already.
    """
    classes: dict[str, type] = {}
    for entry in _entry_points(group):
        about = f"the package {entry.dist.name if entry.dist else '?'} registers {short_repr(entry.name)} in {group}"
        try:
            cls = entry.load()
        except Exception as error:  # whatever its modules raise when they are imported
            raise GTPError(
                f"{about}, and {entry.value} cannot be imported: {type(error).__name__}: {first_line(error)}; update "
                "or uninstall that package"
            ) from error
        if not isinstance(cls, type) or base not in cls.__mro__:
            raise GTPError(f"{about}, and {entry.value} is not a subclass of {base.__name__}; report it to its authors")
        own_name = getattr(cls, "name", entry.name)
        if own_name != entry.name:
            raise GTPError(
                f"{about}, and {entry.value} calls itself {short_repr(own_name)}; both names must be the same"
            )
        other = classes.get(entry.name, reserved.get(entry.name, cls))
        if other is not cls:
            raise GTPError(f"{about}, and {other.__module__}.{other.__name__} has that name already; uninstall one")
        classes[entry.name] = cls
    return classes


@functools.cache
def _entry_points(group: str) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=group))
