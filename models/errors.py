"""Errors of the models package. Every message is one sentence that a user can act on.

ModelError
├── ModelReferenceError    what the user typed names nothing we understand
├── ModelNotFoundError     it is understood, but there is no such model, file or folder
├── SourceUnavailableError the hub or the package index cannot be reached or refused
├── ModelCorruptError      a file is not what it should be; the message names the repair
├── UnsupportedModelError  the files are whole, but this model cannot be served
│   └── NoTokenizerError   the model has no tokenizer, and one is needed now
├── StorageError           no room, no permission, or a read-only disk
├── ChatTemplateError      the model's chat template cannot be read, or refuses these messages
│   └── TemplateLimitError it takes too long, or makes too much
└── GrammarError           a grammar cannot be read, is impossible, too large or too slow
"""


class ModelError(Exception):
    """Base of all."""


class ModelReferenceError(ModelError):
    pass


class ModelNotFoundError(ModelError):
    pass


class SourceUnavailableError(ModelError):
    pass


class ModelCorruptError(ModelError):
    pass


class UnsupportedModelError(ModelError):
    pass


class NoTokenizerError(UnsupportedModelError):
    pass


class StorageError(ModelError):
    pass


class ChatTemplateError(ModelError):
    pass


class TemplateLimitError(ChatTemplateError):
    pass


class GrammarError(ModelError):
    pass
