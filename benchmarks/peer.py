"""One trl GRPOTrainer run, the other side of `against_trl`: prints a JSON line with every step's seconds and lengths.

python -m benchmarks.peer CASE STEPS PROMPTS.jsonl
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.common import default_model
from rlpost.rewards.format import FormatReward
from rlpost.rewards.number import NumberReward


class StepTimes(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self._started)


def main(case: str, steps: str, prompts: str) -> None:
    from benchmarks.against_trl import COIN

    scorer = NumberReward() if case == "default" else FormatReward(COIN)

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = [messages[-1]["content"] for messages in completions]
        return list(scorer(prompts=[""] * len(texts), completions=texts, answers=answer))

    rows = [json.loads(line) for line in Path(prompts).read_text().splitlines()]
    dataset = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in rows]
    )
    directory = default_model()
    settings = GRPOConfig(
        output_dir=str(Path(prompts).parent / "trl"),
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=32,
        learning_rate=1e-5,
        adam_beta1=0.9,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        lr_scheduler_type="constant",
        beta=0.0,
        temperature=1.0,
        max_steps=int(steps),
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    times = StepTimes()
    trainer = GRPOTrainer(
        model=str(directory),
        reward_funcs=reward,
        args=settings,
        train_dataset=dataset,
        processing_class=AutoTokenizer.from_pretrained(directory),
        callbacks=[times],
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "completions/mean_length" in entry]
    result = {
        "seconds": times.seconds,
        "lengths": [entry["completions/mean_length"] for entry in logged],
        "rewards": [entry["reward"] for entry in logged],
        "idle_groups": [entry["frac_reward_zero_std"] for entry in logged],
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
