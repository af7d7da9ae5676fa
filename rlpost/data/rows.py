"""Rows of files and datasets become examples: which field is what, which rows are wanted."""

import io
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlpost.data.split import user_message
from rlpost.errors import UserError, require
from rlpost.types import IMAGE, Example


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """The reading of rows, which the tasks made of rows have in common.

    Attributes:
        question, answer: names of the fields. A question may be a text or a list of chat messages; answer null: none.
        answer_pattern: a regular expression whose last match in the answer field is the gold answer (its
            group 1 if it has one); GSM8K's is '####\\s*(.+)'. null: the field as it is.
        images: a field with an image or a list of them: paths, which start at the file's directory, contents of files, or the
            datasets library's images. Each stands where the question has "<image>", or an image part; all before the
            first user message where it has none.
        columns: other names for fields, as rewards are to see them: {tests: unit_tests}.
        where: the rows that are wanted, by field: a value, a list of values, or {min: 1, max: 3}.
        held_out: how many rows are held out where no file or split has them.
        limit: read at most this many wanted rows of each file or split.
        split_seed: the seed by which held-out rows are drawn.
        name: the task's name, as in eval/<name>/accuracy; "": that of the file or the dataset.
    """

    question: str = "question"
    answer: str | None = "answer"
    answer_pattern: str | None = None
    images: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    where: Mapping[str, Any] = field(default_factory=dict)
    held_out: int = 64
    limit: int | None = None
    split_seed: int = 0
    name: str = ""

    def examples(self, rows: Iterable[tuple[Any, str]], directory: Path | None = None) -> list[Example]:
        """The wanted rows, at most `limit`.

        Args:
            rows: each with where it stands, for errors.
            directory: where relative paths of images start.
        """
        if self.images is not None:
            require({"PIL": "images"}, f"task.images={self.images}")
        to_example = self._example_maker(directory)
        found: list[Example] = []
        for row, place in rows:
            if self.limit is not None and len(found) >= self.limit:
                break
            if not isinstance(row, Mapping):
                raise UserError(f"{place}: a JSON object is expected, not {type(row).__name__}")
            if all(_is_wanted(row, name, wanted, place) for name, wanted in self.where.items()):
                found.append(to_example(row, place))
        return found

    def _example_maker(self, directory: Path | None) -> Callable[[Mapping[str, Any], str], Example]:
        try:
            pattern = re.compile(self.answer_pattern) if self.answer_pattern is not None else None
        except re.error as error:
            raise UserError(f"task.answer_pattern={self.answer_pattern}: not a regular expression ({error})") from None
        question, answer = self.question, self.answer

        def to_example(row: Mapping[str, Any], place: str) -> Example:
            for key, name in (("question", question), ("answer", answer), ("images", self.images)):
                if name is not None and name not in row:
                    raise UserError(f"{place}: no field {name!r}; it has {_fields(row)}: set task.{key} to one of them")
            asked = row[question]
            messages = user_message(asked) if isinstance(asked, str) else _messages(asked, place, question)
            gold = None if answer is None or row[answer] is None else str(row[answer])
            if gold is not None and pattern is not None:
                matches = list(pattern.finditer(gold))
                if not matches:
                    raise UserError(
                        f"{place}: task.answer_pattern={self.answer_pattern} matches nothing in {gold[-60:]!r}"
                    )
                gold = matches[-1].group(1 if pattern.groups else 0).strip()
            images = (
                () if self.images is None else _images(row[self.images], f"{place}, field {self.images!r}", directory)
            )
            if images:
                messages = _with_places(messages, len(images), place)
            kept = {name: value for name, value in row.items() if name not in (question, answer, self.images)}
            for new, old in self.columns.items():
                if old not in row:
                    raise UserError(f"{place}: no field {old!r}; it has {_fields(row)}: set task.columns.{new} to one")
                kept[new] = row[old]
            return Example(messages, gold, kept, images=images)

        return to_example


def _is_wanted(row: Mapping[str, Any], name: str, wanted: Any, place: str) -> bool:
    if name not in row:
        raise UserError(f"{place}: no field {name!r}; it has {_fields(row)}: task.where needs one of them")
    value = row[name]
    if isinstance(wanted, Mapping):
        if unknown := set(wanted) - {"min", "max"}:
            raise UserError(f"task.where.{name}: {', '.join(sorted(unknown))} is neither min nor max")
        try:
            return wanted.get("min", value) <= value <= wanted.get("max", value)
        except TypeError:
            raise UserError(f"{place}: {name}={value!r} cannot be compared with task.where.{name}") from None
    return value in wanted if isinstance(wanted, list | tuple) else value == wanted


def _fields(row: Mapping[str, Any]) -> str:
    return ", ".join(map(str, row))


def _messages(value: Any, place: str, name: str) -> tuple[Mapping[str, str], ...]:
    try:
        messages = tuple({"role": str(m["role"]), "content": _content(m["content"])} for m in value)
    except (TypeError, KeyError):
        messages = ()
    if not messages:
        raise UserError(f"{place}: field {name!r} must be a text or a list of messages with role and content")
    return messages


def _content(value: Any) -> str:
    """A message's text; one in parts becomes one text, with IMAGE for each image.

    Raises: TypeError, KeyError for anything else.
    """
    if isinstance(value, str):
        return value
    return "".join(IMAGE if part["type"] == "image" else part["text"] for part in value)


def _with_places(messages: tuple[Mapping[str, str], ...], num_images: int, place: str) -> tuple[Mapping[str, str], ...]:
    """Messages with a place for each image."""
    found = sum(message["content"].count(IMAGE) for message in messages)
    if found not in (0, num_images):
        raise UserError(f"{place}: {num_images} images, but {found} places for one ({IMAGE}) in the messages")
    if found:
        return messages
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
    here = {**messages[first], "content": IMAGE * num_images + messages[first]["content"]}
    return (*messages[:first], here, *messages[first + 1 :])


def _images(value: Any, place: str, directory: Path | None) -> tuple[str | bytes, ...]:
    """A field's images as files or their contents."""
    values = value if isinstance(value, list | tuple) else [] if value is None else [value]
    return tuple(_image(one, place, directory) for one in values)


def _image(value: Any, place: str, directory: Path | None) -> str | bytes:
    if isinstance(value, Mapping):  # parquet files as the datasets library writes them
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        path = (directory or Path()) / Path(value).expanduser()
        if not path.is_file():
            raise UserError(f"{place}: no such file: {path}")
        return str(path)
    if not hasattr(value, "save"):  # a PIL image, from the datasets library
        raise UserError(
            f"{place}: a path, the content of a file or a list of them is expected, not {type(value).__name__}"
        )
    content = io.BytesIO()
    value.save(content, format="PNG")
    return content.getvalue()
