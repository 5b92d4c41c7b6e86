"""The one exception family of shapetune.

Every message names the argument, its value, and what to do about it.
"""

from __future__ import annotations


class ShapetuneError(Exception):
    """Base of every error that shapetune raises on purpose."""


class ProblemError(ShapetuneError, ValueError):
    """A field of a problem, or an argument of an op, has an impossible value."""


class UnknownNameError(ShapetuneError, KeyError):
    """An op or an implementation is asked for that is not registered."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0]) if self.args else ""


class ConfigError(ShapetuneError, ValueError):
    """A config is not in its implementation's space for the problem."""


class UnsupportedError(ShapetuneError, ValueError):
    """The implementation asked for cannot do this problem on this device."""


class CacheError(ShapetuneError, OSError):
    """A cache place cannot be read or written, or is something else."""


class RecordError(ShapetuneError, ValueError):
    """Bytes that claim to be a record are not one."""


class UntunedError(ShapetuneError, LookupError):
    """A call has no record, and SHAPETUNE_ON_MISS is "error"."""


class StorageError(ShapetuneError, ValueError):
    """The storage for Optuna's studies cannot be opened."""


class TargetError(ShapetuneError, ValueError):
    """A GPU to compile for is not known, or cannot be compiled for here."""


class IsolationError(ShapetuneError, RuntimeError):
    """The worker process that trials run in cannot do its work."""


class DeviceError(ShapetuneError, RuntimeError):
    """jax finds no device that it can use."""


class DivergenceError(ShapetuneError, RuntimeError):
    """The processes of one job would not run the same kernels."""
