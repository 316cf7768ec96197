"""One training run of TRL, started by `bench_peer.py` with the Python of the peer's own environment.

    python _peer_trl.py JOB.json          writes the file that JOB.json calls "report"

Imports nothing of this project. The clock of a step is the trainer's: from one step's end to the next one's.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

STARTED = time.time()


def rows_of(path: str) -> list[dict[str, Any]]:
    """The rows of a file in verl's layout, as TRL wants them: chat messages, and the answer beside them."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [
        {"prompt": row["prompt"], "answer": row["reward_model"]["ground_truth"]}
        for row in map(json.loads, lines)
    ]


def judged(tokenizer: Any, completion_ids: list[list[int]], answers: list[str]) -> list[float]:
    """1 where the answer is right to the letter; of special tokens, only the one that ends it is left out."""
    end = tokenizer.eos_token_id
    texts = [
        tokenizer.decode(ids[:-1] if ids and ids[-1] == end else ids, skip_special_tokens=False)
        for ids in completion_ids
    ]
    return [float(text.strip() == answer.strip()) for text, answer in zip(texts, answers, strict=True)]


def trainer_options(job: dict[str, Any]) -> dict[str, Any]:
    """Options of the trainer: one optimizer step on all samples of a step, and nothing that only costs time.

    Of gradient checkpointing, bf16, logging and saving, TRL's defaults are those for large models on GPUs.
    """
    common: dict[str, Any] = {
        "output_dir": job["folder"],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": job["prompts"] * job["samples"],
        "gradient_accumulation_steps": 1,
        "num_generations": job["samples"],
        "num_iterations": 1,
        "max_completion_length": job["max_tokens"],
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "beta": 0.0,
        "learning_rate": job["lr"],
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "max_grad_norm": 1.0,
        "max_steps": job["max_steps"],
        "seed": job["seed"],
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    if job["algorithm"] == "grpo":
        # The mean over all tokens of the batch, advantages divided by the group's deviation.
        common |= {"loss_type": "dapo", "scale_rewards": "group", "epsilon": 0.2}
    else:
        common |= {"normalize_advantages": False, "epsilon": 0.2}
    return common | dict(job["options"])


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Train until `seconds` have passed since the first step began; the model is saved, outside the clock."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    lengths: list[list[int]] = []
    scores: list[float] = []

    def reward(completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        found = judged(tokenizer, completion_ids, answer)
        lengths.append([len(ids) for ids in completion_ids])
        scores.append(sum(found) / len(found))
        return found

    class Clock(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.began, self.ends = 0.0, list[float]()

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = self.began or time.time()

        def on_step_end(self, _: Any, __: Any, control: Any, **___: Any) -> None:
            self.ends.append(time.time())
            if self.ends[-1] - self.began >= job["seconds"]:
                control.should_training_stop = True

    config, trainer_class = {
        "grpo": (trl.GRPOConfig, trl.GRPOTrainer),
        "rloo": (trl.RLOOConfig, trl.RLOOTrainer),
    }[job["algorithm"]]
    clock = Clock()
    trainer = trainer_class(
        model=model,
        reward_funcs=reward,
        train_dataset=Dataset.from_list(rows_of(job["rows"])),
        processing_class=tokenizer,
        callbacks=[clock],
        args=config(**trainer_options(job)),
    )
    trainer.train()
    model.save_pretrained(job["folder"])
    tokenizer.save_pretrained(job["folder"])
    return {
        "began": clock.began,
        "ends": clock.ends,
        "lengths": lengths,
        "scores": scores,
        "prompt_ids": prompt_ids(tokenizer, job["rows"]),
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("torch", "trl", "transformers", "accelerate", "datasets")
        },
    }


def prompt_ids(tokenizer: Any, path: str) -> list[int]:
    """Token ids of the first row's prompt, for the other side to compare with its own."""
    found = tokenizer.apply_chat_template(
        rows_of(path)[0]["prompt"], add_generation_prompt=True, return_dict=False
    )
    return list(found)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    report = {"started": STARTED} | train(job)
    Path(job["report"]).write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
