"""The subcommands that offramp-common contributes to `offramp`."""

from __future__ import annotations

from offramp.common.command import Command

import_checkpoint = Command(
    summary="Turn a Hugging Face or GGUF model into a checkpoint directory, with exits declared or added",
    main="offramp.common.importing:main",
    step=10,
)
