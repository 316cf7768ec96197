"""Built-in reward functions, one a file: its function and what is known of it (`CHOICE`).

A new file here is a new value of `reward.name`, and of a row's `reward_model.style`. Libraries that take long
to import are imported inside the functions, as the configuration reads the entries.
"""

from __future__ import annotations

from neoproto.choices import Choices
from neoproto.rewards.score import Reward

REWARDS = Choices(__name__, Reward)
