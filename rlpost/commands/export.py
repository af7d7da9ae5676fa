"""rlpost-export: a checkpoint of a run as a plain Hugging Face directory, which transformers and vLLM load."""

import argparse
from pathlib import Path

from rlpost.config.build import build
from rlpost.errors import UserError, run_command
from rlpost.record.rundir import RunDir


def checkpoint_of(run_dir: Path, step: int | None) -> Path:
    """The run's checkpoint of that step; None: its newest.

    Raises: UserError if the run or the checkpoint is not there.
    """
    if not (run_dir / "config.yaml").is_file():
        raise UserError(f"{run_dir}: not a run directory (no config.yaml)")
    saved = {int(path.name.removeprefix("step-")): path for path in (run_dir / "checkpoints").glob("step-*")}
    if not saved:
        raise UserError(f"{run_dir}: it has no checkpoint yet")
    chosen = max(saved) if step is None else step
    if chosen not in saved:
        raise UserError(f"--step {step}: the run has checkpoints of steps {', '.join(map(str, sorted(saved)))}")
    return saved[chosen]


def export(run_dir: Path, out: Path, step: int | None = None, dtype: str = "float32") -> Path:
    """Returns: the checkpoint that was exported.

    Raises: UserError for a run, a step or a place that will not do.
    """
    from rlpost.trainer.export import write_model

    checkpoint = checkpoint_of(run_dir, step)
    settings = RunDir(run_dir).settings()
    source = build(settings.model)
    write_model(source.directory(), checkpoint, out, dtype, source.trust_remote_code, settings.trainer.lora)
    return checkpoint


def main() -> None:
    run_command("rlpost-export", _main)


def _main() -> int:
    parser = argparse.ArgumentParser(prog="rlpost-export", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("out", type=Path, help="a directory that is not there yet, or is empty")
    parser.add_argument("--step", type=int, help="default: the newest checkpoint")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    arguments = parser.parse_args()
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    checkpoint = export(arguments.run_dir, arguments.out, arguments.step, arguments.dtype)
    print(f"{arguments.out}: {checkpoint}, {arguments.dtype}")
    return 0


if __name__ == "__main__":
    main()
