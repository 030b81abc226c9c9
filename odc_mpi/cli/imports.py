"""Importing large libraries in less time. Nothing here knows any of them."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Import without looking for garbage meanwhile, and never look at what was imported again. Local.

    torch and transformers make half a million objects that stay for as long as the process. To look through them as
    they come takes a third of the import, and each full collection later 0.2 s, at another time on every rank.
    """
    was_on, num_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_modules:
            gc.freeze()
        if was_on:
            gc.enable()
