"""Every shipped file composes and is valid; every rule names its key in one line."""

import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from rlpost.commands.run import check_task
from rlpost.config.build import (
    build,
    conf_dir,
    correct_function,
    correct_function_by_task,
    resolve_paths,
    reward_nodes,
)
from rlpost.config.validation import validate
from rlpost.errors import UserError
from rlpost.sweep.arms import named_arms

ROOT = Path(__file__).parents[1]
CONF = ROOT / "conf"
SWEEPS = ROOT / "sweeps"
GROUPS = sorted(p.name for p in CONF.iterdir() if p.is_dir())
CHOICES = [f"{p.parent.name}={p.stem}" for p in sorted(CONF.glob("*/*.yaml"))]
# What a choice leaves for its user to say.
NEEDS = {"model=hf": ["model.path=owner/name"], "task=jsonl": ["task.path=x"], "task=hf": ["task.path=x"]}
NEEDS["experiment=gsm8k"] = NEEDS["task=parquet"] = ["task.path=x"]
NEEDS["task=mixture"] = ["+task@task.tasks.sums=addition"]
NEEDS["reward=model"] = ["reward.model.path=x"]
NEEDS["reward=judge"] = ["reward.judge.model=x"]
NEEDS["environment=tools"] = ["environment.functions=[{_target_: rlpost.errors.nearest, _partial_: true}]"]
EXAMPLE = ROOT / "docs" / "examples" / "miles_reducer.py"
NEEDS["reducer=function"] = [f"reducer.path={EXAMPLE}:get_pg_loss_reducer", "plugins.allow=[miles_reducer]"]


def composed(*overrides: str, config_dir: Path = CONF, name: str = "train") -> DictConfig:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_dir), version_base="1.3"):
        return compose(name, [*overrides, *_search(config_dir)], return_hydra_config=False)


def _search(config_dir: Path) -> list[str]:
    return [] if config_dir == CONF else [f"hydra.searchpath=[file://{CONF}]"]


def plain(*overrides: str) -> DictConfig:
    """Without interpolations that need a running job."""
    return composed("name=n", "run_dir=outputs/n/1", *overrides)


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_of_every_group_is_valid(choice: str) -> None:
    overrides = [choice, "name=n", "run_dir=outputs/n/1", *NEEDS.get(choice, [])]
    cfg = composed(*overrides)
    settings = validate(cfg)
    OmegaConf.resolve(cfg)
    for key in ("reducer", "algorithm.loss", "algorithm.advantage", "model", "task", "cluster"):
        build(OmegaConf.to_container(OmegaConf.select(cfg, key)))
    for name, node in reward_nodes(settings).items():
        if name not in ("model", "code"):  # one has to be on the disk, the other needs namespaces
            build(node.target)


def test_all_groups_of_the_design_are_there() -> None:
    assert set(GROUPS) == {
        *("algorithm", "reducer", "reward", "model", "cluster", "task", "rollout", "optimizer", "tracking"),
        *("experiment", "environment"),
    }
    assert conf_dir() == CONF


@pytest.mark.parametrize("sweep", sorted(p.stem for p in SWEEPS.glob("*.yaml")))
def test_every_sweep_composes_and_every_job_is_valid(sweep: str) -> None:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(SWEEPS), version_base="1.3"):
        search = [f"hydra.searchpath=[file://{CONF}]"]
        full = compose(sweep, search, return_hydra_config=True)
        assert full.hydra.mode.name == "MULTIRUN"
        if not full.sweep.arms:  # a search
            assert dict(full.hydra.sweeper.params) == {"optimizer.lr": "tag(log, interval(1e-6, 1e-4))"}
            validate(compose(sweep, [*search, "run_dir=outputs/n/1"]))
            return
        jobs = named_arms(full.sweep.arms, full.sweep.seeds)
        assert len({job.directory for job in jobs}) == len(jobs) >= 6
        assert full.sweep.baseline in {job.arm for job in jobs}
        for job in jobs:
            validate(compose(sweep, [*search, "run_dir=outputs/n/1", *job.overrides]))


def test_experiments_override_the_defaults() -> None:
    cfg = composed("experiment=debug", "run_dir=x")
    assert (cfg.name, cfg.steps, cfg.model._target_) == ("debug", 3, "rlpost.models.tiny.TinyLlama")
    assert composed("experiment=drgrpo", "run_dir=x").algorithm.advantage.normalize == "none"


def test_rewards_of_several_options_are_joined() -> None:
    cfg = plain("reward=[number,format]", "reward.format.weight=0.2")
    assert {name: node.weight for name, node in reward_nodes(cfg).items()} == {"number": 1.0, "format": 0.2}


def test_a_reward_group_that_is_one_target() -> None:
    cfg = plain("reward=number")
    cfg.reward = {"_target_": "rlpost.rewards.number.NumberReward"}
    (name, node), *others = reward_nodes(validate(cfg)).items()
    assert (name, others, node.weight, node.runs_in) == ("numberreward", [], 1.0, "processes")
    assert node.target["_target_"] == "rlpost.rewards.number.NumberReward"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("+reward.number.runs_in=trainr", "reward.number.runs_in=trainr: did you mean 'trainer'?"),
        ("+reward.number.tasks=[sums]", "reward.number.tasks: 'sums': expected one of addition"),
        ("+reward.number.tasks=addition", "reward.number.tasks=addition: expected a list of the mixture's tasks"),
        (
            "task=mixture +task.tasks.x._target_=os.getcwd",
            "task.tasks.x._target_=os.getcwd: os is not rlpost's own code",
        ),
        (
            "task=mixture +task@task.tasks.sums=addition +task.tasks.sums.lo=3",
            "task.tasks.sums.lo: .*did you mean 'low'",
        ),
        ("rollout.regex=a rollout.choice=[b]", "rollout.regex and rollout.choice are two ways to guide a completion"),
        ("rollout=transformers rollout.regex=a", "rollout.regex: TransformersEngine does not guide completions"),
        ("rollout=paged rollout.choice=[a]", "rollout.choice: PagedTransformersEngine does not guide completions"),
        ("rollout=vllm_server rollout.engine.urls=[a:8000]", "'a:8000' is not a server's address; expected http://"),
        ("rollout=vllm_server rollout.engine.urls=[http://a:x]", "'http://a:x' is not a server's address"),
        ("rollout=vllm_server rollout.engine.urls=[http://a/v1]", "'http://a/v1' is not a server's address"),
        (
            "rollout=vllm_server rollout.engine.urls=[http://localhost:1] rollout.engine.num_servers=1",
            "rollout.engine.urls and rollout.engine.num_servers: servers are listed or started, not both",
        ),
        (
            "rollout=vllm_server rollout.engine.urls=[http://localhost:1,http://localhost:1/]",
            "a server is listed twice",
        ),
        ("rollout=vllm_server rollout.engine.urls=[http://a:1]", "set rollout.engine.weights_dir to a directory that"),
        (
            "rollout=vllm_server rollout.engine.urls=[http://localhost:1] cluster=cpu2",
            "lists 1 servers for the cluster's 2 processes",
        ),
        ("rollout=vllm_server rollout.engine.num_servers=0", "num_servers=0: expected a whole number, at least 1"),
        ("rollout.max_turns=0", "rollout.max_turns=0: expected a whole number, at least 1"),
        ("scoring.on_error=nil", "scoring.on_error=nil: expected one of fail, zero, none"),
        ("scoring.timeout=0", "scoring.timeout=0.0: expected a number over 0"),
        ("scoring.processes=0", "scoring.processes=0: expected a whole number, at least 1"),
        ("steps=0", "steps=0: expected a whole number, at least 1"),
        *(
            (f"samples_per_prompt=1 algorithm={name}", "samples_per_prompt=1 gives every completion the advantage 0")
            for name in ("grpo", "rloo", "reinforce_pp", "bnpo")
        ),
        ("prompts_per_step=6 algorithm.num_mini_batches=4", "prompts_per_step=6 does not divide"),
        ("prompts_per_step=3 cluster=cpu2", "use a multiple of 2"),
        ("rollout.staleness=1", "nobody to sample beside the update: VLLMEngine works in the trainer's process"),
        ("rollout.staleness=1 rollout=vllm_server", r"correct for it, with \+algorithm\.corrections\.tis="),
        ("trainer.context_parallel=2", "trainer.context_parallel=2 does not divide the cluster's 1 processes"),
        (
            "prompts_per_step=3 cluster=cpu2 cluster.num_processes=4 trainer.context_parallel=2",
            "does not divide over the cluster's 2 context groups x .* use a multiple of 2$",
        ),
        ("trainer.replicas=3 cluster=cpu2", "trainer.replicas=3 does not divide the cluster's 2 processes"),
        (
            "rollout.engine.tensor_parallel=2",
            "rollout.engine.tensor_parallel=2 does not divide the cluster's 1 processes",
        ),
        ("rollout.engine.tensor_parallel=0", "rollout.engine.tensor_parallel=0: expected a whole number, at least 1"),
        (
            "trainer.context_parallel=2 trainer.layout=padded cluster=cpu2",
            "splits rows of trainer.layout=shared_prefix, not of padded",
        ),
        ("prompts_per_step=8 cluster=slurm cluster.nodes=3 cluster.processes_per_node=2", "use a multiple of 6"),
        ("prompts_per_step=8 cluster=ray cluster.num_processes=3", "use a multiple of 3"),
        ("rollout.max_tokens=8000", "over the model's context of 8192 tokens"),
        ("model=tiny prompt.max_tokens=4090", "over the model's context of 4096 tokens"),
        ("reducer=drgrpo reducer.divisor=0", "reducer.divisor=0: expected a number over 0"),
        ("reducer=drgrpo reducer.divisor=many", "reducer.divisor=many: expected float"),
        ("+reducer.divizor=3", "reducer.divizor"),
        ("reducer=drgrpo +reducer.divizor=3", "reducer.divizor: .*did you mean 'divisor'"),
        ("+stepz=3", "stepz: there is no such setting; did you mean 'steps'"),
        ("+optimizer.lrr=3", "optimizer.lrr: .*did you mean 'lr'"),
        ("+rollout.engine.directory=/x", "rollout.engine.directory"),
        ("rollout.engine.max_num_seqs=x", "rollout.engine.max_num_seqs=x: expected int"),
        ("rollout.temperature=0", "rollout.temperature=0.0: expected a number over 0"),
        ("rollout.top_p=0", "rollout.top_p=0"),
        ("rollout.top_p=1.5", "rollout.top_p=1.5"),
        ("rollout.min_p=-1", "rollout.min_p=-1"),
        ("rollout.repetition_penalty=0", "rollout.repetition_penalty"),
        ("optimizer.betas=[0.9]", "optimizer.betas"),
        ("optimizer.lr=-1", "optimizer.lr=-1: expected a finite number, at least 0"),
        ("optimizer.warmup_steps=-1", "optimizer.warmup_steps=-1: expected a whole number, at least 0"),
        ("optimizer.lr=nan", "optimizer.lr=nan"),
        ("optimizer.max_grad_norm=0", "optimizer.max_grad_norm=0"),
        ("optimizer.schedule=cosin", "optimizer.schedule=cosin: did you mean 'cosine'"),
        ("trainer.precision=bf16", "trainer.precision=bf16: did you mean 'bfloat16'"),
        ("trainer.precision=bfloat16", "rollout.max_logprob_diff=0.01 with trainer.precision=bfloat16"),
        ("algorithm.kl.estimator=k9", "algorithm.kl.estimator=k9: expected one of k1, k2, k3"),
        ("evaluation.pass_at=[1,4]", "evaluation.pass_at=.*needs evaluation.num_samples of at least 4"),
        ("evaluation.pass_at=[0]", "every k must be at least 1"),
        ("evaluation.num_samples=4", "would sample the same completion again"),
        ("evaluation.correct_function=numbr", "evaluation.correct_function=numbr: did you mean 'number'"),
        ("reward.number.weight=heavy", "reward.number.weight=heavy: expected a finite number"),
        ("algorithm.max_attempts=3", "algorithm.max_attempts=3 has nothing to refill"),
        ("algorithm=dapo algorithm.multi_reward=normalize_then_sum", "algorithm.reward_processing to change"),
        ("algorithm=rloo algorithm.multi_reward=normalize_then_sum", "algorithm.kl.place=reward to change"),
        ("algorithm.multi_reward=both", "algorithm.multi_reward=both: expected one of sum_then_normalize"),
        ("algorithm.kl.place=los", "algorithm.kl.place=los: did you mean 'loss'"),
        ("algorithm.kl.reference_mix=0", "algorithm.kl.reference_mix=0"),
        ("algorithm.top_entropy_share=1.5", "algorithm.top_entropy_share=1.5"),
        ("algorithm.filter={a: 1}", "algorithm.filter: expected a mapping with _target_"),
        ("+algorithm.corrections.tis=3", "algorithm.corrections.tis=3: expected a group option or a mapping"),
        (
            "+algorithm.corrections.tis={_target_: rlpost.objective.corrections.ImportanceSampling, hihg: 2}",
            "algorithm.corrections.tis.hihg: .*did you mean 'high'",
        ),
        ("reducer=function", "reducer.path is missing"),
        ("reducer=function reducer.path=m:f", r"add m to plugins.allow to import it: plugins.allow=\[m\]"),
        ("reducer=function reducer.path=nodots plugins.allow=[nodots]", "expected package.module:function"),
        ("reducer=function reducer.path=json:loads plugins.allow=[json]", "takes .s, cls, .*; expected .total_lengths"),
        ("reducer=function reducer.path=json:lods plugins.allow=[json]", "json has no 'lods'; did you mean 'loads'"),
        ("reducer=function reducer.path=/no/file.py:f plugins.allow=[file]", "there is no module '/no/file.py'"),
        ("task=jsonl", "task.path is missing; set task.path="),
        ("model=hf", "model.path is missing"),
        ("reward.number._target_=os.system", "plugins.allow=.os."),
        ("reducer._target_=rlpost.objective.reducers.SequenceMeen", "did you mean 'SequenceMean'"),
    ],
)
def test_rules_name_their_key(overrides: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        validate(plain(*re.split(r" (?=[\w+./@]+=)", overrides)))
    text = str(error.value)
    assert re.search(message, text), text
    assert "\n" not in text


def test_the_task_is_checked_before_anything_heavy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        check_task(plain("task=jsonl", f"task.path={tmp_path}/none.jsonl"))
    with pytest.raises(UserError, match="leaves no prompt to train on"):
        check_task(plain("task.held_out=2500"))
    with pytest.raises(UserError, match=r"stream\.curriculum=level: .* no such column"):
        check_task(plain("stream.curriculum=level"))
    rows = tmp_path / "same.jsonl"
    rows.write_text('{"question": "q", "answer": "a"}\n')
    with pytest.raises(UserError, match="no prompt is left to train on"):
        check_task(plain("task=jsonl", f"task.path={rows}", f"task.held_out_path={rows}"))


def test_a_target_that_refuses_its_settings_is_a_users_error() -> None:
    with pytest.raises(UserError, match=r"ConstantDivisor: divisor must be over zero"):
        build({"_target_": "rlpost.objective.reducers.ConstantDivisor", "divisor": -1})


def test_one_sample_is_enough_for_an_advantage_that_needs_no_group() -> None:
    assert validate(plain("samples_per_prompt=1", "algorithm=reinforce")).samples_per_prompt == 1


def test_paths_become_absolute() -> None:
    cfg = plain()
    resolve_paths(cfg)
    assert Path(cfg.run_dir).is_absolute()
    assert cfg.tracking.uri == f"sqlite:///{Path.cwd()}/outputs/mlflow.db"
    server = plain("tracking.uri=http://127.0.0.1:5000", "tracking.artifacts=null")
    resolve_paths(server)
    assert server.tracking.uri == "http://127.0.0.1:5000"


def test_a_mixtures_task_takes_the_first_function_that_applies_to_it() -> None:
    tasks = ["task=mixture", "+task@task.tasks.sums=addition", "+task@task.tasks.prose=addition"]
    cfg = plain(*tasks, "reward=[number,format]", "reward.format.pattern=x", "+reward.number.tasks=[sums]")
    assert correct_function(cfg) == "number"
    assert correct_function_by_task(cfg) == {"prose": "format"}
    assert correct_function_by_task(plain()) == {}
