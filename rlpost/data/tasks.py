"""Tasks: where examples come from. Imports no torch, so a wrong file or field is answered before anything starts.

A task gives train and held-out examples; `disjoint` sees to it that no held-out prompt is trained on.
"""

import json
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rlpost.errors import UserError
from rlpost.types import Example


class TaskData(NamedTuple):
    train: list[Example]
    held_out: list[Example]


class Task(Protocol):
    name: str  # as in eval/<name>/accuracy

    def load(self) -> TaskData: ...


def user_message(text: str) -> tuple[Mapping[str, str], ...]:
    return ({"role": "user", "content": text},)


def disjoint(train: Iterable[Example], held_out: Sequence[Example]) -> TaskData:
    """Drop from `train` every example whose messages a held-out example has too."""
    reserved = {json.dumps(example.messages) for example in held_out}
    return TaskData([e for e in train if json.dumps(e.messages) not in reserved], list(held_out))


def split(examples: Sequence[Example], num_held_out: int, seed: int) -> TaskData:
    """Hold out `num_held_out` distinct prompts, drawn by `seed`; the order of the rest is kept."""
    first_of: dict[str, int] = {}
    for index, example in enumerate(examples):
        first_of.setdefault(json.dumps(example.messages), index)
    if num_held_out >= len(first_of):
        raise UserError(
            f"task.held_out={num_held_out} leaves no prompt to train on: the task has {len(first_of)} distinct "
            "prompts; hold out fewer"
        )
    chosen = random.Random(seed).sample(sorted(first_of.values()), num_held_out)
    return disjoint(examples, [examples[index] for index in sorted(chosen)])


@dataclass(frozen=True)
class Addition:
    """ "What is a + b?" for every a and b in low..high: what a small model can learn within minutes."""

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
    """

    dataset: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    size: int = 1000
    held_out: int = 64
    seed: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.dataset)

    def load(self) -> TaskData:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        if self.dataset not in DATASETS:
            from rlpost.suggest import nearest

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
class JsonLines:
    """A JSON-lines file with a question and an answer a row (GSM8K's and MATH's files work as they are).

    Attributes:
        path: the training rows.
        held_out_path: a file of held-out rows; without it `held_out` rows of `path` are held out.
        question, answer: names of the fields. A question may be a text or a list of chat messages.
        answer_pattern: a regular expression whose last match in the answer field is the gold answer (its
            group 1 if it has one); GSM8K's is '####\\s*(.+)'. null: the field as it is.
        limit: read at most this many rows of each file.
    """

    path: str
    held_out_path: str | None = None
    question: str = "question"
    answer: str | None = "answer"
    answer_pattern: str | None = None
    held_out: int = 64
    limit: int | None = None
    split_seed: int = 0
    name: str = ""

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
        to_example = example_maker(self.question, self.answer, self.answer_pattern)
        examples: list[Example] = []
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if self.limit is not None and len(examples) >= self.limit:
                    break
                if not line.strip():
                    continue
                where = f"{path}, row {number}"
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise UserError(f"{where}: not JSON ({error.msg}); one JSON object a line is expected") from None
                examples.append(to_example(row, where))
        if not examples:
            raise UserError(f"{key}={path}: the file has no rows")
        return examples


@dataclass(frozen=True)
class HubDataset:
    """A dataset of the Hugging Face hub, or a local folder in its formats, read with the datasets library."""

    path: str
    subset: str | None = None
    train_split: str = "train"
    held_out_split: str | None = None
    question: str = "question"
    answer: str | None = "answer"
    answer_pattern: str | None = None
    held_out: int = 64
    limit: int | None = None
    revision: str | None = None
    split_seed: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.path.rstrip("/").rsplit("/", 1)[-1])

    def load(self) -> TaskData:
        train = self._read(self.train_split)
        if self.held_out_split is None:
            return split(train, self.held_out, self.split_seed)
        return disjoint(train, self._read(self.held_out_split))

    def _read(self, split_name: str) -> list[Example]:
        import datasets

        try:
            rows = datasets.load_dataset(self.path, self.subset, split=split_name, revision=self.revision)
        except Exception as error:  # the library raises many kinds; the user needs its first line and the key
            raise UserError(f"task.path={self.path} ({split_name}): {str(error).splitlines()[0]}") from error
        to_example = example_maker(self.question, self.answer, self.answer_pattern)
        count = len(rows) if self.limit is None else min(self.limit, len(rows))
        return [to_example(rows[i], f"{self.path} ({split_name}), row {i + 1}") for i in range(count)]


def example_maker(question: str, answer: str | None, answer_pattern: str | None) -> Callable[[Any, str], Example]:
    """How a row becomes an example; the returned function takes the row and where it stands, for errors."""
    try:
        pattern = re.compile(answer_pattern) if answer_pattern is not None else None
    except re.error as error:
        raise UserError(f"task.answer_pattern={answer_pattern}: not a regular expression ({error})") from None

    def to_example(row: Any, where: str) -> Example:
        if not isinstance(row, Mapping):
            raise UserError(f"{where}: a JSON object is expected, not {type(row).__name__}")
        for key, name in (("question", question), ("answer", answer)):
            if name is not None and name not in row:
                fields = ", ".join(map(str, row))
                raise UserError(f"{where}: no field {name!r}; it has {fields}: set task.{key} to one of them")
        asked = row[question]
        messages = user_message(asked) if isinstance(asked, str) else _messages(asked, where, question)
        gold = None if answer is None else _text(row[answer])
        if gold is not None and pattern is not None:
            matches = list(pattern.finditer(gold))
            if not matches:
                raise UserError(f"{where}: task.answer_pattern={answer_pattern} matches nothing in {gold[-60:]!r}")
            gold = matches[-1].group(1 if pattern.groups else 0).strip()
        columns = {name: value for name, value in row.items() if name not in (question, answer)}
        return Example(messages, gold, columns)

    return to_example


def _messages(value: Any, where: str, name: str) -> tuple[Mapping[str, str], ...]:
    well_formed = (
        isinstance(value, list)
        and value
        and all(isinstance(m, Mapping) and isinstance(m.get("content"), str) and "role" in m for m in value)
    )
    if not well_formed:
        raise UserError(f"{where}: field {name!r} must be a text or a list of messages with role and content")
    return tuple({"role": str(m["role"]), "content": m["content"]} for m in value)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
