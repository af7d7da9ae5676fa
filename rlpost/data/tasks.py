"""Tasks: where examples come from. Imports no torch, so a wrong file or field is answered before anything starts.

A task gives train and held-out examples; `disjoint` sees to it that no held-out prompt is trained on.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from rlpost.data.rows import RowFormat
from rlpost.data.split import TaskData, disjoint, split, user_message
from rlpost.errors import UserError, nearest, require
from rlpost.types import Example


class Task(Protocol):
    @property
    def name(self) -> str: ...  # as in eval/<name>/accuracy

    def load(self) -> TaskData: ...


@dataclass(frozen=True)
class Addition:
    """ "What is a + b?" for every a and b in low..high: what a small model can learn within minutes.

    Attributes:
        low, high: the smallest and the largest number.
        held_out: prompts that are held out for evaluation.
        split_seed: the seed by which they are drawn.
        name: the task's name, as in eval/<name>/accuracy.
    """

    low: int = 1
    high: int = 50
    held_out: int = 64
    split_seed: int = 0
    name: str = "addition"

    def load(self) -> TaskData:
        if self.low > self.high:
            raise UserError(f"task.low={self.low} is over task.high={self.high}: give a range with a number in it")
        numbers = range(self.low, self.high + 1)
        examples = [Example(user_message(f"What is {a} + {b}?"), str(a + b)) for a in numbers for b in numbers]
        return split(examples, self.held_out, self.split_seed)


@dataclass(frozen=True)
class ReasoningGym:
    """A dataset of the reasoning-gym library, by name and settings (github.com/open-thought/reasoning-gym).

    Examples carry the dataset's name and entry, from which `reward=reasoning_gym` scores an answer.

    Attributes:
        dataset: the dataset's name in the library, such as chain_sum.
        settings: the dataset's own settings, such as {min_terms: 2}.
        size: entries that are generated.
        held_out: entries that are held out for evaluation.
        seed: the seed of the entries, and of which are held out.
        name: the task's name, as in eval/<name>/accuracy; "": the dataset's.
    """

    requires_packages: ClassVar[Mapping[str, str]] = {"reasoning_gym": "reasoning-gym"}

    dataset: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    size: int = 1000
    held_out: int = 64
    seed: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.dataset)

    def load(self) -> TaskData:
        require(self.requires_packages, f"task.dataset={self.dataset}")
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        if self.dataset not in DATASETS:
            raise UserError(
                f"task.dataset={self.dataset}: reasoning-gym has no such dataset{nearest(self.dataset, DATASETS)}"
            )
        try:
            dataset = reasoning_gym.create_dataset(self.dataset, size=self.size, seed=self.seed, **dict(self.settings))
            entries = list(dataset)
        except (TypeError, AssertionError, ValueError) as error:
            raise UserError(f"task.settings for reasoning-gym's {self.dataset}: {error}") from error
        examples = [
            Example(user_message(e["question"]), _text(e["answer"]), {"dataset": self.dataset, "entry": e})
            for e in entries
        ]
        return split(examples, self.held_out, self.seed)


@dataclass(frozen=True)
class _RowFile(RowFormat):
    """Rows of a file.

    Attributes:
        path: the training rows.
        held_out_path: a file of held-out rows; without it `held_out` rows of `path` are held out.
    """

    path: str
    held_out_path: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or Path(self.path).stem)

    def load(self) -> TaskData:
        train = self._read(self.path, "task.path")
        if self.held_out_path is None:
            return split(train, self.held_out, self.split_seed)
        return disjoint(train, self._read(self.held_out_path, "task.held_out_path"))

    def _read(self, path: str, key: str) -> list[Example]:
        file = Path(path).expanduser()
        if not file.is_file():
            raise UserError(f"{key}={path}: no such file (relative paths start at {Path.cwd()})")
        examples = self.examples(self._rows(file), file.parent)
        if not examples:
            raise UserError(f"{key}={path}: the file has no rows" + (" that task.where wants" if self.where else ""))
        return examples

    def _rows(self, file: Path) -> Iterator[tuple[Any, str]]:
        raise NotImplementedError


@dataclass(frozen=True)
class JsonLines(_RowFile):
    """A JSON-lines file (GSM8K's and MATH's files work as they are)."""

    def _rows(self, file: Path) -> Iterator[tuple[Any, str]]:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    yield json.loads(line), f"{file}, row {number}"
                except json.JSONDecodeError as error:
                    raise UserError(
                        f"{file}, row {number}: not JSON ({error.msg}); one JSON object a line is expected"
                    ) from None


@dataclass(frozen=True)
class Parquet(_RowFile):
    """A parquet file."""

    def _rows(self, file: Path) -> Iterator[tuple[Any, str]]:
        import pyarrow
        import pyarrow.parquet as pq

        try:
            opened = pq.ParquetFile(file)
        except pyarrow.ArrowInvalid as error:
            raise UserError(f"{file}: not a parquet file ({str(error).splitlines()[0]})") from error
        number = 0
        for batch in opened.iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield row, f"{file}, row {number}"


@dataclass(frozen=True)
class HubDataset(RowFormat):
    """A dataset of the Hugging Face hub, or a local folder in its formats, read with the datasets library.

    Attributes:
        path: the hub id or the folder.
        subset: the dataset's configuration; None: its only one.
        train_split: the split of the training rows.
        held_out_split: the split of the held-out rows; None: `held_out` rows of the training split are held out.
        revision: a branch, a tag or a commit of the hub's repository; None: its main branch.
    """

    requires_packages: ClassVar[Mapping[str, str]] = {"datasets": "hub"}

    path: str
    subset: str | None = None
    train_split: str = "train"
    held_out_split: str | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.path.rstrip("/").rsplit("/", 1)[-1])

    def load(self) -> TaskData:
        train = self._read(self.train_split)
        if self.held_out_split is None:
            return split(train, self.held_out, self.split_seed)
        return disjoint(train, self._read(self.held_out_split))

    def _read(self, split_name: str) -> list[Example]:
        require(self.requires_packages, f"task.path={self.path}")
        import datasets

        try:
            rows = datasets.load_dataset(self.path, self.subset, split=split_name, revision=self.revision)
        except Exception as error:  # the library raises many kinds; the user needs its first line and the key
            raise UserError(f"task.path={self.path} ({split_name}): {str(error).splitlines()[0]}") from error
        return self.examples((row, f"{self.path} ({split_name}), row {i}") for i, row in enumerate(rows, start=1))


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
