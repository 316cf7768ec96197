"""Options of `data`: where prompts come from and how they are cut into batches."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from neoproto.config.base import Count, Date, Name, Section, Seed, Size, Strings


class TaskConfig(Section):
    """A procedural reasoning-gym task, used when `data.train_files` is null."""

    name: Name = "spell_backward"
    """Name of the reasoning-gym data set."""
    size: Count = 4096
    """Distinct questions to train on; a task that has fewer gives what it has, with a note."""
    val_size: Size = 600
    """Questions held out for validation; none of them is ever trained on. 0 = no validation set."""
    seed: Seed = 0
    """Seed of the generator: which questions exist, and how they are split."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the task's own configuration, handed over as they are."""


class DataConfig(Section):
    """Prompts. Lengths are in tokens; batch sizes in prompts (each is sampled `rollout.n` times)."""

    train_files: Strings | None = None
    """Parquet or JSON Lines file(s) in verl's row layout; takes the place of `task`."""
    val_files: Strings | None = None
    """The same for validation; null beside `train_files` = no validation."""
    task: TaskConfig = TaskConfig()
    """The procedural task used when `train_files` is null."""
    train_batch_size: Count = 64
    """Prompts a step."""
    val_batch_size: Count | None = None
    """Prompts a validation call; null = the whole validation set at once."""
    max_prompt_length: Count = 64
    """Width P of the prompt columns; longer prompts follow `truncation`."""
    max_response_length: Count = 8
    """Width R of the response columns, and the most tokens a response may have."""
    truncation: Literal["error", "left", "right", "filter"] = "error"
    """A prompt longer than P: stop the run, cut its left or right end, or drop the row (counted)."""
    shuffle: bool = True
    """Draw the prompts of each epoch in a new random order."""
    seed: Seed = 0
    """Seed of that order."""
    system_prompt: str | None = None
    """A system message before every prompt that does not begin with one of its own; null = none."""
    chat_template: Literal["auto", "plain"] = "auto"
    """auto = the tokenizer's own template (an error without one); plain = the messages' text, a line each."""
    date: Date | None = None
    """The day given to a chat template that asks for it (`strftime_now`); null = the day of the run's
    first start, also when it is resumed."""
