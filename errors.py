"""The one family of errors that a user can cause; each message says what is wrong and what to do."""

from __future__ import annotations


class CakeError(Exception):
    """Base of every error this package raises on purpose. The command line prints it as one line and exits with 1."""


class ModelNotFound(CakeError):
    """A model name, folder or revision could not be turned into files (unknown, gated, offline, no safetensors)."""


class UnsupportedModel(CakeError):
    """A config names an architecture, rope kind, activation or quantisation that the engine does not have."""


class WeightsError(CakeError):
    """A weight file is missing, broken, incomplete or does not fit its config. Names the file and the tensor."""


class TokenizerError(CakeError):
    """The tokenizer files are missing, broken or do not fit the model."""


class PromptError(CakeError):
    """The prompt is empty, undecodable or too long."""


class OptionError(CakeError):
    """An option has a value that cannot be applied."""


class BudgetError(OptionError):
    """A cache budget is below what the method needs. States the minimum."""


class MemoryLimit(CakeError):
    """A run would need more memory or disk than there is. States both figures."""


class ArenaFull(MemoryLimit):
    """What was asked for fits, but not beside what runs now: ask again when some of that is over."""


class BackendError(CakeError):
    """An attention backend or device was asked for that cannot be used here. States the reason."""


class SnapshotError(CakeError):
    """A saved cache is truncated, altered, of another model or of a newer format."""
