"""Whole runs through the command line: real processes, real engines, the tiny model."""

import json
from collections.abc import Sequence
from pathlib import Path

import mlflow
import pyarrow.parquet as pq
import pytest

from tests.runs import LIGHT, TINY, Started, assert_equal, exact, rlpost, rows, weights

pytestmark = pytest.mark.slow

METRICS = {
    *("reward/mean", "reward/std", "reward/format/mean", "reward/format/std", "reward/zero_std_groups"),
    *("completions/length_mean", "completions/length_min", "completions/length_max", "completions/truncated"),
    *("completions/length_terminated", "completions/length_correct", "completions/length_incorrect"),
    *("policy/loss", "policy/entropy", "policy/clip_low", "policy/clip_high", "policy/ratio_mean"),
    *("objective/pg_scale", "policy/ratio_max", "policy/grad_norm", "policy/lr", "rollout/logprob_diff_mean"),
    *("rollout/logprob_diff_max", "rollout/tokens_per_s", "rollout/staleness", "train/tokens_per_s"),
    *("time/rollout", "time/reward", "time/update", "time/sync", "time/step", "memory/rss_gb", "tokens/total"),
}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module", params=["vllm", "transformers"])
def finished(request: pytest.FixtureRequest, work: Path) -> tuple[Path, str, str]:
    """A finished run of each engine: its directory, its engine, what it printed."""
    run = work / f"runs/{request.param}"
    result = rlpost(work, *TINY, f"rollout={request.param}", f"run_dir={run}", "evaluation.at_start=true")
    return run, request.param, result.stdout


def test_a_run_leaves_its_whole_record(finished: tuple[Path, str, str], work: Path) -> None:
    run, _, printed = finished
    start_row, *steps = rows(run)
    assert start_row.keys() == {
        "step",
        "eval/addition/accuracy",
        "eval/addition/length_mean",
        "eval/addition/pass_at_1",
    }
    assert [row["step"] for row in steps] == [1, 2, 3]
    for row in steps:
        assert row.keys() - {"step", "time/evaluation"} >= METRICS
        assert ("time/between_steps" in row) == (row["step"] > 1)
        assert row["rollout/logprob_diff_max"] < 1e-3
    assert steps[-1]["eval/addition/accuracy"] is not None
    assert steps[-1]["tokens/total"] == sum(
        pq.read_table(run / "completions" / f"step-{s:06d}.parquet").column("num_tokens").to_numpy().sum()
        for s in (1, 2, 3)
    )
    for step in (1, 2, 3):
        table = pq.read_table(run / "completions" / f"step-{step:06d}.parquet")
        assert set(table.column("policy_version").to_pylist()) == {step - 1}
    status = json.loads((run / "status.json").read_text())
    result = json.loads((run / "result.json").read_text())
    assert (status["state"], status["step"]) == ("finished", 3)
    assert result["reward_first"] == steps[0]["reward/mean"]
    assert result["eval/addition/accuracy"] == steps[-1]["eval/addition/accuracy"]
    assert (run / "checkpoints" / "step-000003").is_dir()
    assert "experiment=debug" in (run / "overrides.yaml").read_text()
    for step in (1, 2, 3):
        assert f"step {step}/3  reward {steps[step - 1]['reward/mean']:.3f}" in printed
    assert "\x1b[" not in printed  # piped: plain lines

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{work}/outputs/mlflow.db")
    logged = client.get_run(result["mlflow_run_id"])
    assert logged.info.status == "FINISHED"
    assert logged.data.params["reducer._target_"] == "rlpost.objective.reducers.SequenceMean"
    assert {"version.torch", "config_hash"} <= logged.data.tags.keys()
    assert ("git.commit" in logged.data.tags) == (Path(__file__).parents[1] / ".git").exists()
    for name in METRICS:
        history = {m.step: m.value for m in client.get_metric_history(result["mlflow_run_id"], name)}
        assert history == {row["step"]: row[name] for row in steps if row[name] is not None}
    artifacts = {f.path for f in client.list_artifacts(result["mlflow_run_id"])}
    assert {"config.yaml", "overrides.yaml", "metrics.jsonl", "result.json", "completions"} <= artifacts


def test_the_same_seed_gives_the_same_run(finished: tuple[Path, str, str], work: Path) -> None:
    run, engine, _ = finished
    again = run.with_name(f"{engine}-again")
    rlpost(work, *TINY, f"rollout={engine}", f"run_dir={again}", "evaluation.at_start=true", "tracking=none")
    assert exact(again) == exact(run)
    assert_equal(weights(again, 3), weights(run, 3))


def test_a_directory_with_a_run_is_refused_and_a_finished_one_stays(
    finished: tuple[Path, str, str], work: Path
) -> None:
    run, _, _ = finished
    before = rows(run)
    refused = rlpost(work, *TINY, f"run_dir={run}", code=2)
    assert "holds a run already; resume=true goes on with it" in refused.stderr
    assert "has finished its 3 steps already" in rlpost(work, f"run_dir={run}", "resume=true").stdout
    groups = rlpost(work, f"run_dir={run}", "resume=true", "reducer=drgrpo", code=2)
    assert "reducer=drgrpo: resume=true goes on with the run's own reducer" in groups.stderr
    unknown = rlpost(work, f"run_dir={run}", "resume=true", "stepz=4", code=2)
    assert "stepz" in unknown.stderr
    assert rows(run) == before


def test_resuming_nothing_is_an_error(work: Path) -> None:
    assert "there is no run to resume" in rlpost(work, "run_dir=runs/none", "resume=true", code=2).stderr
    assert not (work / "runs/none").exists()


SILENT = """
class Silent:
    \"\"\"A cluster whose workers end before they have said anything.\"\"\"

    def __init__(self, num_processes=1, threads=None, max_restarts=0): ...

    def launch(self, run_dir):
        return 3
"""


def test_workers_that_never_began_do_not_leave_the_last_runs_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "silent.py").write_text(SILENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    cluster = ["cluster._target_=silent.Silent", "plugins.allow=[silent]", "tracking=none"]
    rlpost(tmp_path, *TINY, *cluster, "run_dir=run", code=3)
    file = tmp_path / "run/status.json"
    file.write_text(json.dumps({"state": "interrupted", "step": 2}))
    rlpost(tmp_path, "run_dir=run", "resume=true", code=3)
    status = json.loads(file.read_text())
    assert (status["state"], status["step"]) == ("failed", 2)
    assert status["error"] == "the workers ended with exit code 3"


def test_what_asked_to_be_called_at_the_end_of_a_worker_is(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text(
        "import atexit\nfrom rlpost.worker import _leave\natexit.register(print, 'called')\nprint('left')\n_leave(3)\n"
    )
    ended = Started(tmp_path, [], "leaves")
    out, _ = ended.communicate()
    assert (ended.returncode, out) == (3, "left\ncalled\n")


def test_it_learns(work: Path) -> None:
    overrides = ["tracking=none", "steps=20", "prompts_per_step=8", "samples_per_prompt=8"]
    rlpost(work, *LIGHT, *overrides, "run_dir=runs/learns", "reward.format.pattern='[0-4]'")
    rewards = [row["reward/mean"] for row in rows(work / "runs/learns")]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2


def test_a_multirun_makes_a_run_a_job(work: Path) -> None:
    overrides = ["tracking=none", "steps=1", "evaluation.at_end=false"]
    rlpost(work, "-m", *LIGHT, *overrides, "reducer=drgrpo", "reducer.divisor=100,1000", "hydra.sweep.dir=sweep")
    norms = [rows(work / "sweep" / str(job))[0]["policy/grad_norm"] for job in (0, 1)]
    assert norms[0] == pytest.approx(10 * norms[1], rel=1e-5)  # the same rollouts, a tenth of the weight


PLUGIN = """
class Loud:
    def __init__(self, word: str) -> None:
        self.word = word

    def __call__(self, *, completions, **columns):
        if self.word == "raise":
            raise RuntimeError("the plugin broke")
        return [float(len(completion)) for completion in completions]
"""


def test_a_users_own_reward_and_one_that_raises(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (work / "my_rewards.py").write_text(PLUGIN)
    monkeypatch.setenv("PYTHONPATH", str(work))
    (work / "mine" / "reward").mkdir(parents=True)
    (work / "mine" / "reward" / "loud.yaml").write_text("loud:\n  _target_: my_rewards.Loud\n  word: ok\n")
    own = ["--config-dir", "mine", "experiment=debug", "reward=loud", "rollout=transformers", "steps=1"]
    refused = rlpost(work, *own, code=2)
    assert "plugins.allow=[my_rewards]" in refused.stderr
    assert (
        "did you mean 'word'" in rlpost(work, *own, "plugins.allow=[my_rewards]", "+reward.loud.wordy=1", code=2).stderr
    )

    rlpost(work, *own, "plugins.allow=[my_rewards]", "run_dir=runs/own", "tracking=none")
    assert rows(work / "runs/own")[0]["reward/loud/mean"] > 0

    broken = rlpost(work, *own, "plugins.allow=[my_rewards]", "reward.loud.word=raise", "run_dir=runs/broken", code=1)
    assert "RuntimeError: the plugin broke" in broken.stderr
    status = json.loads((work / "runs/broken/status.json").read_text())
    assert status["state"] == "failed"
    assert "the plugin broke" in status["error"]
    log = (work / "runs/broken/run.log").read_text()
    assert 'raise RuntimeError("the plugin broke")' in log  # the user's own line, from the process that ran it
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{work}/outputs/mlflow.db")
    assert client.get_run(status["mlflow_run_id"]).info.status == "FAILED"


BROKEN = """
class Engine:
    def __init__(self, directory, end_token_ids, max_model_len, trust_remote_code):
        raise TypeError("this engine cannot be made")
"""


def test_a_plugin_that_cannot_be_made_ends_the_tracking_run_and_leaves_its_traceback(work: Path) -> None:
    (work / "unmade.py").write_text(BROKEN)
    (work / "own/rollout").mkdir(parents=True)
    (work / "own/rollout/unmade.yaml").write_text("engine:\n  _target_: unmade.Engine\nmax_tokens: 8\n")
    own = ["--config-dir", "own", "plugins.allow=[unmade]", *TINY, "rollout=unmade", "run_dir=runs/unmade"]
    failed = rlpost(work, *own, code=2, PYTHONPATH=str(work))
    assert "unmade.Engine: this engine cannot be made" in failed.stderr
    status = json.loads((work / "runs/unmade/status.json").read_text())
    assert (status["state"], status["kind"]) == ("failed", "configuration")
    assert 'raise TypeError("this engine cannot be made")' in (work / "runs/unmade/run.log").read_text()
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{work}/outputs/mlflow.db")
    assert client.get_run(status["mlflow_run_id"]).info.status == "FAILED"


def test_without_held_out_prompts_it_trains_and_evaluates_only_what_is_there(work: Path) -> None:
    nothing = [*LIGHT, "tracking=none", "steps=1", "task.held_out=0"]
    rlpost(work, *nothing, "evaluation.at_end=false", "run_dir=runs/nothing")
    assert len(rows(work / "runs/nothing")) == 1
    refused = rlpost(work, *nothing, "evaluation.every=1", "run_dir=runs/refused", code=2)
    assert "evaluation.every=1: the task holds out no prompts to evaluate" in refused.stderr
    assert "evaluation.every=0, evaluation.at_end=false" in refused.stderr


def test_the_worked_example_of_every_hook(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = Path(__file__).parents[1] / "docs" / "examples"
    monkeypatch.setenv("PYTHONPATH", str(examples))
    small = ["model=tiny", "rollout=transformers", "rollout.max_tokens=200", "steps=2", "prompts_per_step=2"]
    own = ["--config-dir", str(examples / "conf"), "experiment=hooks", *small, "run_dir=runs/hooks", "tracking=none"]
    rlpost(work, *own)
    for row in rows(work / "runs/hooks"):
        share = row["reward/vowels/mean"]
        assert 0 < share < 1
        assert row["reward/mean"] == pytest.approx(share / (1 + share), rel=0.1)  # squashed
        assert row["objective/unlikely_cut"] == 0.0
        assert row["sampling/attempts"] == 1
        assert row["objective/pg_scale"] > 2  # the root of the length weighs more than the length


def test_a_file_reducer_trains_like_drgrpo(work: Path) -> None:
    file = Path(__file__).parents[1] / "docs" / "examples" / "miles_reducer.py"
    common = [*LIGHT, "tracking=none", "steps=2", "evaluation.at_end=false"]
    path = [f"reducer.path={file}:get_pg_loss_reducer", "plugins.allow=[miles_reducer]"]
    rlpost(work, *common, "reducer=function", *path, "run_dir=runs/file")
    rlpost(work, *common, "reducer=drgrpo", "run_dir=runs/constant")
    assert exact(work / "runs/file") == exact(work / "runs/constant")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["reducer=drgrpo", "reducer.divizor=1000"],
            "reducer.divizor: there is no such setting; did you mean 'divisor",
        ),
        (["reducer=drgrpo", "+reducer.divizor=1000"], "did you mean 'divisor'?"),
        (["reducer=drgrp"], "reducer=drgrp: there is no such choice; did you mean 'drgrpo'?"),
        (["reducr=drgrpo"], "reducr: there is no such setting; did you mean 'reducer'?"),
        (["+foo=1"], "foo: there is no such setting"),
        (["steps=abc"], "steps=abc: expected a whole number"),
        (["resume=maybe"], "resume=maybe: expected true or false"),
        (["steps"], "steps: not an override; key=value is expected"),
        (["prompt.max_tokens=1", "model=tiny"], "all 2436 training prompts are over prompt.max_tokens=1"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line_and_exit_code_2(
    overrides: Sequence[str], message: str, tmp_path: Path
) -> None:
    result = rlpost(tmp_path, *overrides, "run_dir=run", code=2)
    lines = [line for line in result.stderr.splitlines() if "prompts are over prompt.max_tokens=1 and were" not in line]
    assert len(lines) == 1, result.stderr
    assert message in lines[0]


def test_help_and_cfg_answer(tmp_path: Path) -> None:
    assert "reducer: drgrpo, function, grpo, sum, token_mean" in rlpost(tmp_path, "--help").stdout
    assert "divisor: 64" in rlpost(tmp_path, "--cfg", "job", "reducer=drgrpo", "reducer.divisor=64").stdout
