"""Rewards, tasks and environments in whole runs: real processes, real engines."""

import json
from pathlib import Path
from typing import Any

import mlflow
import pyarrow.parquet as pq
import pytest

from tests.images import save
from tests.rewards.judge_server import judge_server
from tests.rewards.test_model import save_classifier
from tests.runs import LIGHT, TINY, exact, rlpost, rows

pytestmark = pytest.mark.slow

SMALL = ["evaluation.at_end=false", "checkpoint.at_end=false", "checkpoint.every=0"]


def completions(run: Path, step: int) -> list[dict[str, Any]]:
    return pq.read_table(run / "completions" / f"step-{step:06d}.parquet").to_pylist()


def test_a_model_and_a_judge_score_beside_a_pattern(tmp_path: Path, tiny_dir: Path, tiny_tokenizer: Any) -> None:
    path = save_classifier(tmp_path / "rm", tiny_dir, tiny_tokenizer, ["score"])
    with judge_server(lambda asked, number: (200, "yes" if "e" in asked.rpartition("Response:")[2] else "no")) as judge:
        overrides = [
            *("reward=[format,model,judge]", f"reward.model.path={path}", "reward.model.weight=0.1"),
            *("reward.judge.model=m", f"reward.judge.base_url={judge.url}", "steps=2", "run_dir=run"),
        ]
        rlpost(tmp_path, "experiment=debug", "rollout=transformers", *overrides, *SMALL)
    assert len(judge.asked) >= 16
    for row in rows(tmp_path / "run"):
        parts = [row[f"reward/{name}/mean"] for name in ("format", "model", "judge")]
        assert row["reward/mean"] == pytest.approx(parts[0] + 0.1 * parts[1] + parts[2])
        assert row["reward/errors"] == row["reward/not_applicable"] == 0
    for row in completions(tmp_path / "run", 1):
        assert len(row["trainer_logprobs"]) == row["num_tokens"]
        assert row["trainer_logprobs"] == pytest.approx(row["rollout_logprobs"], abs=1e-3)

    # A sample of the rollouts is in MLflow as traces, their rewards as assessments.
    run_id = json.loads((tmp_path / "run/result.json").read_text())["mlflow_run_id"]
    uri = f"sqlite:///{tmp_path}/outputs/mlflow.db"
    mlflow.set_tracking_uri(uri)
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_run(run_id).info.experiment_id
    traces = client.search_traces(locations=[experiment], run_id=run_id)
    assert len(traces) == 4
    for trace in traces:
        named = {a.name: a.feedback.value for a in trace.info.assessments if a.feedback is not None}
        assert named.keys() == {"reward", "reward/format", "reward/model", "reward/judge"}
        (span,) = trace.data.spans
        (row,) = [
            r
            for r in completions(tmp_path / "run", 1)
            if (r["group_id"], r["sample_index"]) == (span.attributes["group_id"], span.attributes["sample_index"])
        ]
        assert span.outputs == {"completion": row["completion"]}
        assert named["reward"] == pytest.approx(row["reward"])


def test_failures_are_counted_named_and_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fragile.py").write_text(
        "import os, time\n"
        "def fragile(*, completions, **_):\n"
        "    for text in completions:\n"
        "        if set(text) & set('abcd'): os._exit(1)\n"
        "        if set(text) & set('efghijklmnop'): raise ValueError('e to p')\n"
        "    return [1.0 if set(text) & set('0123456789') else None for text in completions]\n"
    )
    (tmp_path / "mine/reward").mkdir(parents=True)
    (tmp_path / "mine/reward/fragile.yaml").write_text("fragile:\n  _target_: fragile.fragile\n  _partial_: true\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    own = [
        "--config-dir",
        "mine",
        "experiment=debug",
        "rollout=transformers",
        "reward=fragile",
        "plugins.allow=[fragile]",
        "tracking=none",
        "steps=1",
    ]
    result = rlpost(tmp_path, *own, *SMALL, "scoring.on_error=zero", "run_dir=run")
    (row,) = rows(tmp_path / "run")
    table = completions(tmp_path / "run", 1)
    failed = [r for r in table if set("abcdefghijklmnop") & set(r["completion"])]
    assert failed
    assert row["reward/errors"] == len(failed)
    assert {bool(r["reward_errors"]) for r in failed} == {True}
    assert {r["reward"] for r in failed} == {0.0}
    assert "it counts as zero (said once)" in result.stderr
    nothing = [r for r in table if not set("abcdefghijklmnop0123456789") & set(r["completion"])]
    assert row["reward/not_applicable"] == pytest.approx(len(nothing) / len(table))
    assert {r["advantage"] for r in nothing} <= {0.0}
    ended = rlpost(tmp_path, *own, *SMALL, "run_dir=ended", code=1)
    assert "RewardError: reward.fragile " in ended.stderr


def test_a_mixture_trains_and_evaluates_each_task(tmp_path: Path) -> None:
    tasks = ["task=mixture", "+task@task.tasks.small=addition", "+task@task.tasks.large=addition"]
    sizes = ["task.tasks.small.high=9", "task.tasks.large.low=10", "+task.weights.small=3"]
    held_out = ["task.tasks.small.held_out=4", "task.tasks.large.held_out=4", "evaluation.max_prompts=4"]
    rewards = ["reward=[format,number]", "+reward.number.tasks=[small]"]
    rest = ["steps=2", "checkpoint.at_end=false", "tracking=none", "run_dir=run"]
    rlpost(tmp_path, *LIGHT, *tasks, *sizes, *held_out, *rewards, *rest)
    last = rows(tmp_path / "run")[-1]
    assert {"eval/small/accuracy", "eval/large/accuracy"} <= last.keys()
    for step in (1, 2):
        table = completions(tmp_path / "run", step)
        small = [r for r in table if len(r["answer"]) == 1 or r["answer"] in map(str, range(10, 19))]
        assert len(small) >= 3 * 4  # three of four prompts, four samples each
        known = [r["reward/number"] == r["reward/number"] for r in table]  # not NaN
        assert sum(known) == 3 * 4


def test_the_calculator_trains(tmp_path: Path) -> None:
    """The tiny model, guided to call the tool: replies in between, masked, token-exact to the trainer; on one rank, and on
    two that share the engine."""
    guided = ["environment=calculator", "rollout.regex='<calc>[1-9][+*][1-9]</calc>'", "rollout.max_turns=2"]
    sizes = ["rollout.max_tokens=120", "steps=2", "reward=[format,environment]", "reward.format.pattern='[+]'"]
    overrides = [*guided, *sizes, "environment.call_reward=0.5", "tracking=none", "run_dir=run"]
    rlpost(tmp_path, "experiment=debug", *overrides, *SMALL)
    for step, row in enumerate(rows(tmp_path / "run"), start=1):
        table = completions(tmp_path / "run", step)
        for r in table:
            first, reply, last = r["episode"]
            assert first.startswith("assistant: <calc>")
            assert reply.startswith("user: = ")
            assert last == f"assistant: {r['completion']}"
            replied = [p for p, own in zip(r["rollout_logprobs"], r["sampled"], strict=True) if not own]
            assert len(replied) > len(reply)  # its text and the template's around it
            assert set(replied) == {0.0}
        assert row["reward/environment/mean"] == 0.5
        assert 0 < row["reward/format/mean"] < 1
        assert row["policy/grad_norm"] > 0
    sharing = ["cluster=cpu2", "cluster.threads=1", "rollout.engine.tensor_parallel=2", "run_dir=two"]
    rlpost(tmp_path, "experiment=debug", *overrides[:-1], *SMALL, *sharing)
    for step, (two, one) in enumerate(zip(exact(tmp_path / "two"), exact(tmp_path / "run"), strict=True), start=1):
        places = [
            {
                (r["group_id"], r["sample_index"]): (r["token_ids"], r["reward"])
                for r in completions(tmp_path / run, step)
            }
            for run in ("two", "run")
        ]
        assert places[0] == places[1]
        assert two["policy/grad_norm"] == pytest.approx(one["policy/grad_norm"], rel=1e-3)


def test_tools_are_shown_called_and_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "def double(number: int) -> int:\n"
        '    """Doubles.\n\n    Args:\n        number: what to double.\n    """\n'
        "    return 2 * number\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    functions = ["environment=tools", "environment.functions=[{_target_: mine.double, _partial_: true}]"]
    call = r"<tool_call>\{\"name\": \"double\", \"arguments\": \{\"number\": [1-9]\}\}</tool_call>"
    guided = [f"rollout.regex='{call}'", "rollout.max_turns=2", "rollout.max_tokens=240", "prompt.max_tokens=600"]
    rest = ["plugins.allow=[mine]", "tracking=none", "steps=1", "run_dir=run"]
    rlpost(tmp_path, *TINY, *functions, *guided, *rest, *SMALL)
    for r in completions(tmp_path / "run", 1):
        assert '"name": "double", "description": "Doubles."' in r["prompt"]
        first, reply, _ = r["episode"]
        asked = json.loads(first.partition("<tool_call>")[2].partition("</tool_call>")[0])
        assert reply == f"tool: {2 * asked['arguments']['number']}"


def test_prompts_with_settings_of_their_own_train(tmp_path: Path) -> None:
    own = [{"regex": "[0-9]{2}"}, {"max_tokens": 5}, None, {"stop": ["e"]}]
    lines = [{"question": f"{i}?", "answer": "1", "settings": own[i % 4]} for i in range(8)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = ["task=jsonl", "task.path=t.jsonl", "task.held_out=1", "rollout.per_prompt=settings"]
    result = rlpost(tmp_path, *TINY, *task, *SMALL, "steps=2", "tracking=none", "run_dir=run")
    assert "max_logprob_diff is reported and not enforced" in result.stderr
    table = [row for step in (1, 2) for row in completions(tmp_path / "run", step)]
    by_settings = {i: [r for r in table if f"\n{i}?" in r["prompt"] or f"\n{i + 4}?" in r["prompt"]] for i in range(4)}
    assert all(r["completion"].isdigit() and len(r["completion"]) == 2 for r in by_settings[0])
    assert all(r["num_tokens"] <= 5 for r in by_settings[1])
    assert any(r["num_tokens"] > 5 for r in by_settings[2])
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text("".join(json.dumps(line | {"settings": {"temperature": 2}}) + "\n" for line in lines))
    refused = rlpost(tmp_path, *TINY, *task, "task.path=wrong.jsonl", "run_dir=wrong", code=2)
    assert "rollout.per_prompt=settings: a row sets 'temperature'; expected one of max_tokens" in refused.stderr


def test_a_model_that_sees_trains_on_images(tmp_path: Path) -> None:
    """Prompts with one image, two and none, some of them truncated; the engine's and the trainer's view of them agree."""
    names = save(tmp_path, 12)
    texts = ["What is this?", "x" * 80 + " What is this?"]
    tasks = [{"question": texts[i % 2], "answer": str(i), "images": names[i]} for i in range(9)]
    tasks += [{"question": "First <image>, then <image>?", "answer": "9", "images": names[9:11]}]
    tasks += [{"question": f"No image, {i}.", "answer": str(i), "images": None} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    task = ["task=jsonl", "task.path=rows.jsonl", "task.images=images", "task.held_out=2"]
    prompt = ["prompt.max_tokens=80", "prompt.overlong=truncate"]
    rest = ["rollout.max_logprob_diff=1e-4", "tracking=none", "prompts_per_step=6"]
    rlpost(tmp_path, *TINY, "model=tiny_vision", *task, *prompt, *rest, *SMALL, "run_dir=run")
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3]
    assert all(row["policy/grad_norm"] > 0 for row in rows(tmp_path / "run"))
    seen = {r["prompt"] for step in (1, 2, 3) for r in completions(tmp_path / "run", step)}
    assert {prompt.count("<image>") for prompt in seen} == {0, 1, 2}
    cut = {prompt for prompt in seen if "xx" in prompt}
    assert cut
    assert all("<image>" in prompt and len(prompt) < len(texts[1]) + 40 for prompt in cut)
