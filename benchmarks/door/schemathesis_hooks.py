"""What `SCHEMATHESIS_HOOKS` names: whoever imports it has schemathesis' requests made to fit, in the whole process.

The name of the model and the size of its vocabulary come in the environment.
"""

from __future__ import annotations

import os
from typing import Any

import schemathesis
from benchmarks.door.fitting_requests import fitting


@schemathesis.hook
def map_body(context: object, body: Any) -> Any:
    """Of schemathesis: called with every body that it makes."""
    vocabulary = int(os.environ["OFFRAMP_FITTING_VOCABULARY"])
    return fitting(body, model=os.environ["OFFRAMP_FITTING_MODEL"], vocabulary=vocabulary)
