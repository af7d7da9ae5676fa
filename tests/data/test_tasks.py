import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlpost.data.mixture import Mixture
from rlpost.data.split import disjoint, split, user_message
from rlpost.data.tasks import Addition, HubDataset, JsonLines, Parquet, ReasoningGym
from rlpost.errors import UserError
from rlpost.types import Example

DATA = Path(__file__).parents[3] / "shared" / "data"


def texts(examples: list[Example]) -> set[str]:
    return {json.dumps(example.messages) for example in examples}


def write(path: Path, rows: list[object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_addition_holds_every_pair_once_and_answers_right() -> None:
    data = Addition(low=1, high=4, held_out=5).load()
    assert len(data.train) == 11
    assert len(data.held_out) == 5
    assert not texts(data.train) & texts(data.held_out)
    for example in data.train + data.held_out:
        a, b = (int(word) for word in example.messages[0]["content"].rstrip("?").split() if word.isdigit())
        assert example.answer == str(a + b)


def test_the_split_is_a_function_of_its_seed() -> None:
    assert Addition(held_out=9).load() == Addition(held_out=9).load()
    assert Addition(held_out=9).load() != Addition(held_out=9, split_seed=1).load()


def test_duplicates_of_a_held_out_prompt_are_not_trained_on() -> None:
    examples = [Example(user_message(text), None) for text in "abcaabbd"]
    for seed in range(20):
        data = split(examples, 2, seed)
        assert len(data.held_out) == len(texts(data.held_out)) == 2
        assert not texts(data.train) & texts(data.held_out)


def test_disjoint_compares_whole_conversations() -> None:
    system = ({"role": "system", "content": "s"}, {"role": "user", "content": "q"})
    data = disjoint([Example(user_message("q"), "1"), Example(system, "1")], [Example(user_message("q"), "2")])
    assert data.train == [Example(system, "1")]


def test_holding_out_everything_is_refused() -> None:
    with pytest.raises(UserError, match="leaves no prompt to train on: the task has 4 distinct"):
        Addition(low=1, high=2, held_out=4).load()


def test_reasoning_gym_by_name_and_settings() -> None:
    data = ReasoningGym("chain_sum", {"min_terms": 2, "max_terms": 2}, size=30, held_out=5).load()
    assert len(data.held_out) == 5
    example = data.train[0]
    assert example.answer is not None
    assert example.columns["dataset"] == "chain_sum"


def test_reasoning_gym_names_what_is_wrong() -> None:
    with pytest.raises(UserError, match=r"task\.dataset=chain_som.*did you mean 'chain_sum'"):
        ReasoningGym("chain_som").load()
    with pytest.raises(UserError, match=r"task\.settings"):
        ReasoningGym("chain_sum", {"no_such": 1}).load()


@pytest.mark.skipif(not DATA.is_dir(), reason="the shared test data is not at hand")
def test_gsm8k_and_math_files_as_they_are() -> None:
    gsm8k = JsonLines(
        str(DATA / "gsm8k" / "train.jsonl"),
        held_out_path=str(DATA / "gsm8k" / "test.jsonl"),
        answer_pattern=r"####\s*(.+)",
    ).load()
    assert (len(gsm8k.train), len(gsm8k.held_out)) == (7473, 1319)
    assert gsm8k.held_out[0].answer == "18"
    math = JsonLines(str(DATA / "math" / "math.jsonl"), question="problem").load()
    assert len(math.train) + len(math.held_out) == 500
    assert all(example.answer for example in math.train)


def test_jsonl_rows_keep_their_other_columns(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl", [{"q": "1?", "a": "x #### 1", "level": 3}, {"q": "2?", "a": "#### 2", "level": 4}]
    )
    data = JsonLines(path, question="q", answer="a", answer_pattern=r"####\s*(.+)", held_out=1).load()
    (held_out,) = data.held_out
    assert held_out.answer in ("1", "2")
    assert held_out.columns["level"] in (3, 4)
    assert JsonLines(path, question="q", answer="a").name == "t"


def test_jsonl_takes_chat_messages(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    path = write(tmp_path / "t.jsonl", [{"question": messages, "answer": 1}, {"question": "r", "answer": 2}])
    data = JsonLines(path, held_out=0).load()
    assert data.train[0].messages == tuple(messages)
    assert data.train[0].answer == "1"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"question": "q", "answer": "a"}\nnot json\n', r"row 2: not JSON"),
        ("[1]\n", r"row 1: a JSON object is expected, not list"),
        (
            '{"problem": "q", "answer": "a"}\n',
            r"row 1: no field 'question'; it has problem, answer: set task.question",
        ),
        ('{"question": "q"}\n', r"row 1: no field 'answer'.*set task.answer"),
        ('{"question": 3, "answer": "a"}\n', r"row 1: field 'question' must be a text or a list of messages"),
        ('{"question": "q", "answer": "none"}\n', r"row 1: task.answer_pattern=.* matches nothing in 'none'"),
        ("\n", r"the file has no rows"),
    ],
)
def test_jsonl_names_file_and_row(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=message) as error:
        JsonLines(str(path), answer_pattern="a$").load()
    assert "t.jsonl" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_pattern_that_is_none(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [{"question": "q", "answer": "a"}])
    with pytest.raises(UserError, match="not a regular expression"):
        JsonLines(path, answer_pattern="(").load()


def test_hub_dataset_reads_a_local_folder(tmp_path: Path) -> None:
    folder = tmp_path / "sums"
    folder.mkdir()
    write(folder / "train.jsonl", [{"question": f"{i}?", "answer": str(i)} for i in range(10)])
    write(folder / "test.jsonl", [{"question": f"{i}?", "answer": str(i)} for i in range(8, 12)])
    data = HubDataset(str(folder), held_out_split="test").load()
    assert len(data.held_out) == 4
    assert [e.answer for e in data.train] == [str(i) for i in range(8)]
    with pytest.raises(UserError, match=r"task\.path=.*no_such"):
        HubDataset(str(tmp_path / "no_such")).load()


ROWS = [{"question": f"{i}?", "answer": str(i), "level": i % 5, "kind": "odd" if i % 2 else "even"} for i in range(20)]


def test_parquet_rows_are_those_of_jsonl(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "t.parquet")
    settings = {"where": {"level": {"min": 2}}, "columns": {"difficulty": "level"}, "held_out": 3}
    ours = Parquet(str(tmp_path / "t.parquet"), **settings).load()
    assert ours == JsonLines(write(tmp_path / "t.jsonl", ROWS), **settings).load()
    assert len(ours.train) == 9
    (tmp_path / "no.parquet").write_text("no")
    with pytest.raises(UserError, match=r"no\.parquet: not a parquet file"):
        Parquet(str(tmp_path / "no.parquet")).load()


@pytest.mark.parametrize(
    ("where", "count"),
    [
        ({"level": 3}, 4),
        ({"level": [3, 4]}, 8),
        ({"level": {"min": 1, "max": 2}}, 8),
        ({"level": {"max": 0}, "kind": "odd"}, 2),
        ({}, 20),
    ],
)
def test_where(tmp_path: Path, where: dict[str, object], count: int) -> None:
    path = write(tmp_path / "t.jsonl", ROWS)
    assert len(JsonLines(path, where=where, held_out=0).load().train) == count
    assert len(JsonLines(path, where=where, held_out=0, limit=1).load().train) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"where": {"depth": 1}}, r"row 1: no field 'depth'; it has question, answer, level, kind: task\.where"),
        ({"where": {"level": {"mini": 1}}}, r"task\.where\.level: mini is neither min nor max"),
        ({"where": {"kind": {"min": 1}}}, r"row 1: kind='even' cannot be compared with task\.where\.kind"),
        ({"where": {"level": 9}}, r"the file has no rows that task\.where wants"),
        ({"columns": {"tests": "unit"}}, r"row 1: no field 'unit'; .*: set task\.columns\.tests"),
    ],
)
def test_rows_name_what_is_wrong(tmp_path: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        JsonLines(write(tmp_path / "t.jsonl", ROWS), **settings).load()


def test_a_mixture_names_its_tasks_and_holds_out_in_turn() -> None:
    tasks = {"small": Addition(1, 4, held_out=2), "large": Addition(50, 60, held_out=5)}
    data = Mixture(tasks, {"large": 3}).load()
    assert data.weights == {"small": 1.0, "large": 3.0}
    assert [e.task for e in data.held_out[:4]] == ["small", "large", "small", "large"]
    assert len(data.held_out) == 7
    assert {e.task for e in data.train} == {"small", "large"}
    assert Mixture(tasks).load().weights == {}


@pytest.mark.parametrize(
    ("weights", "message"), [({"huge": 1}, r"task\.weights\.huge: .* it has small"), ({"small": 0}, "a number over 0")]
)
def test_a_mixture_names_wrong_weights(weights: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Mixture({"small": Addition(1, 4)}, weights)
    with pytest.raises(UserError, match=r"task\.tasks is empty"):
        Mixture({})
