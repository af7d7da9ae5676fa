"""Progress for people: a live line on a terminal, plain lines when piped."""

import sys
import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn


class StepProgress:
    """A progress bar with reward, length, tokens per second and time left; one printed line a step."""

    def __init__(self, num_steps: int, enabled: bool = True) -> None:
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True, quiet=not enabled)
        self._num_steps = num_steps
        self._first = 0
        self._started = time.monotonic()
        self._live = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=self._console,
            disable=not (enabled and self._console.is_terminal),
        )
        self._task = self._live.add_task("training", total=num_steps, note="")

    def start_after(self, step: int) -> None:
        """Count the time left from here: the steps up to this one are done."""
        self._first, self._started = step, time.monotonic()
        self._live.update(self._task, completed=step)

    def __enter__(self) -> "StepProgress":
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def phase(self, step: int, name: str) -> None:
        """Say what is going on within a step; on a terminal only."""
        self._live.update(self._task, description=f"step {step}: {name}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        elapsed = time.monotonic() - self._started
        eta = elapsed / (step - self._first) * (self._num_steps - step)
        self._console.print(
            f"step {step:>{len(str(self._num_steps))}}/{self._num_steps}  "
            f"reward {metrics['reward/mean']:.3f}  "
            f"length {metrics['completions/length_mean']:5.1f}  "
            f"entropy {metrics['policy/entropy']:.3f}  "
            f"grad {metrics['policy/grad_norm']:.2f}  "
            f"logprob diff {metrics['rollout/logprob_diff_max']:.1e}  "
            f"{metrics['rollout/tokens_per_s']:.0f} tok/s  "
            f"{metrics['time/step']:.1f} s  eta {_clock(eta)}"
        )
        self._live.update(self._task, completed=step, note=f"eta {_clock(eta)}")

    def say(self, text: str) -> None:
        self._console.print(text)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
