"""SPOT that probes the relay's methods only, and nothing else that its score would select. An exploratory control.

    PYTHONPATH=experiments/mechanism python experiments/mechanism/run.py DIR --settings choice \
        --rows SPOT "SPOT gamma 4" --seeds 102 103 104 --keep --set policy.kind=choice_policy:ChoicePolicy

SPOT's score also selects positions that are no choice. The forecast's formula takes every choice for probed, so this
says what is left of the difference between forecast and outcome when it is.
"""

from __future__ import annotations

import numpy as np

from spot_async.policies.spot import SpotPolicy, SpotSettings
from spot_async.types import PolicyContext

METHODS = "WXYZ"


class ChoicePolicy(SpotPolicy):
    """SPOT whose eligible positions are those at which the student named a method."""

    def __init__(self, settings: SpotSettings, context: PolicyContext) -> None:
        super().__init__(settings, context)
        methods = np.zeros(context.vocab_size, dtype=np.bool_)
        methods[context.tokenizer.convert_tokens_to_ids(list(METHODS))] = True
        self._probeable = methods
