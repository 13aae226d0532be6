"""The exceptions Sluice raises on purpose. Their text is one line: the cause, then the remedy.

SluiceError
├── InputError          what the user gave is at fault; the command line exits with 2
│   ├── ModelFileError      the model file is missing, damaged, or not a model Sluice runs
│   ├── BudgetError         the memory budget can't hold what must be resident
│   ├── ContextError        prompt and generation exceed the context
│   └── TemplateError       the model's chat template is broken or missing
├── GgmlError           a ggml library is missing, unsuitable, or refused a call
├── ReadError           the model file could not be read while running
└── EngineClosed        the engine was used after close()
"""

from __future__ import annotations


class SluiceError(Exception):
    """Base of all errors that Sluice raises on purpose."""


class InputError(SluiceError):
    """What the user gave is at fault; the command line exits with 2."""


class ModelFileError(InputError):
    """The model file is missing, damaged, or not a model Sluice runs."""


class BudgetError(InputError):
    """The memory budget can't hold what must be resident; the text names the smallest that works."""


class ContextError(InputError):
    """Prompt and generation exceed the context."""


class TemplateError(InputError):
    """The model's chat template is broken or missing."""


class GgmlError(SluiceError):
    """A ggml library is missing, unsuitable, or refused a call."""


class ReadError(SluiceError):
    """The model file could not be read while running; names file, offset and errno."""


class EngineClosed(SluiceError):
    """The engine was used after close()."""


def words_of(error: BaseException, most: int = 160) -> str:
    """What an error of others' says, on one line of at most `most` characters; its type where it says nothing."""
    return " ".join(str(error).split())[:most] or type(error).__name__
