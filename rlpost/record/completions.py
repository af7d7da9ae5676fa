"""The completions table: one Parquet file a step, a row a rollout. Its columns are written and read here alone."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from rlpost.errors import UserError
from rlpost.types import Completion, Example, Prompt, Rollout

# Columns that a trace shows, and columns with a value a token, which a table for people leaves out.
TRACED = ["step", "group_id", "sample_index", "advantage", "num_tokens", "finish_reason", "kept"]
PER_TOKEN = ["prompt_token_ids", "token_ids", "rollout_logprobs", "trainer_logprobs", "sampled"]


def path_of(run_dir: Path, step: int) -> Path:
    """The file in which a run keeps the completions of a step."""
    return run_dir / "completions" / f"step-{step:06d}.parquet"


def saved_steps(run_dir: Path) -> list[int]:
    """The steps whose completions the run has, in order."""
    return sorted(int(p.stem.removeprefix("step-")) for p in run_dir.glob("completions/step-*.parquet"))


def completions_table(rollouts: Sequence[Rollout], step: int) -> pa.Table:
    """A row a rollout: prompt, completion, tokens, rewards, advantage, finish reason."""
    return pa.Table.from_pylist(_rows(rollouts, step))


def _rows(rollouts: Sequence[Rollout], step: int) -> list[dict[str, Any]]:
    functions = sorted({name for rollout in rollouts for name in rollout.rewards})
    return [
        {
            "step": step,
            "policy_version": r.completion.policy_version,
            "task": r.prompt.example.task,
            "group_id": r.prompt.group_id,
            "sample_index": r.sample_index,
            "prompt": r.prompt.text,
            "completion": r.completion.text,
            "answer": r.prompt.example.answer,
            "reward": r.reward,
            **{f"reward/{name}": r.rewards.get(name) for name in functions},
            "reward_errors": json.dumps(r.reward_errors, ensure_ascii=False) if r.reward_errors else "",
            "advantage": r.advantage,
            "kept": r.is_trained_on,
            "finish_reason": r.completion.finish_reason,
            "num_tokens": len(r.completion.token_ids),
            "sampled": None if r.completion.sampled_mask is None else list(r.completion.sampled_mask),
            "episode": [f"{m['role']}: {m['content']}" for m in r.completion.messages],
            "environment_reward": r.completion.environment_reward,
            "prompt_token_ids": list(r.prompt.token_ids),
            "token_ids": list(r.completion.token_ids),
            "rollout_logprobs": list(r.completion.rollout_logprobs),
            "trainer_logprobs": [] if r.trainer_logprobs is None else r.trainer_logprobs.tolist(),
        }
        for r in rollouts
    ]


def write_table(table: pa.Table, run_dir: Path, step: int) -> None:
    """Write a step's file, so that a reader finds all of it or nothing."""
    file = path_of(run_dir, step)
    file.parent.mkdir(exist_ok=True)
    building = file.with_name(f".{file.name}")
    pq.write_table(table, building)
    building.replace(file)


def num_rows(run_dir: Path, step: int) -> int:
    """The number of completions that a step has, without reading them."""
    return pq.read_metadata(path_of(run_dir, step)).num_rows


def table_for_people(rollouts: Sequence[Rollout], step: int) -> list[dict[str, Any]]:
    """The rows of a step without what they hold of each token."""
    return [{name: row[name] for name in row if name not in PER_TOKEN} for row in _rows(rollouts, step)]


def trace_attributes(rollout: Rollout, step: int) -> dict[str, Any]:
    """A trace's attributes of a rollout beside its texts and its rewards, under the table's names."""
    (row,) = _rows([rollout], step)
    return {name: row[name] for name in TRACED}


def read_rollouts(run_dir: Path, step: int) -> list[Rollout]:
    """The rollouts of a saved step, those that a filter left out too.

    Raises: UserError if the run or the step is not there.
    """
    if not path_of(run_dir, step).is_file():
        steps = saved_steps(run_dir)
        have = f"it has steps {steps[0]}..{steps[-1]}" if steps else "it has no saved completions"
        raise UserError(f"{run_dir}: no completions of step {step}; {have}")
    return [_rollout(row) for row in pq.read_table(path_of(run_dir, step)).to_pylist()]


def load_rollouts(run_dir: Path, step: int) -> list[Rollout]:
    """The rollouts of a saved step, those it trained on.

    Raises: UserError if the run or the step is not there.
    """
    return [rollout for rollout in read_rollouts(run_dir, step) if rollout.is_trained_on]


def _rollout(row: Mapping[str, Any]) -> Rollout:
    example = Example((), row["answer"], task=row.get("task", ""))
    prompt = Prompt(example, tuple(row["prompt_token_ids"]), row["prompt"], group_id=row["group_id"])
    turns = (turn.partition(": ") for turn in row.get("episode") or ())
    completion = Completion(
        tuple(row["token_ids"]),
        tuple(row["rollout_logprobs"]),
        row["completion"],
        row["finish_reason"],
        tuple(row["sampled"]) if row.get("sampled") else None,
        tuple({"role": role, "content": content} for role, _, content in turns),
        row.get("environment_reward"),
        row.get("policy_version", 0),
    )
    rewards = {
        name.removeprefix("reward/"): math.nan if value is None else value
        for name, value in row.items()
        if name.startswith("reward/")
    }
    logprobs = row.get("trainer_logprobs")
    return Rollout(
        prompt,
        completion,
        row["sample_index"],
        rewards,
        math.nan if row["reward"] is None else row["reward"],
        _errors(row.get("reward_errors") or ""),
        row["advantage"],
        row["kept"],
        trainer_logprobs=torch.tensor(logprobs) if logprobs else None,
    )


def _errors(text: str) -> dict[str, str]:
    """The reasons by function. Versions before JSON wrote "name reason; name reason", of which no reason can be told apart."""
    if text.startswith("{"):
        return json.loads(text)
    name, _, reason = text.partition(" ")
    return {name: reason} if text else {}
