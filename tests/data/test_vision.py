"""Images as tokens and as the model's inputs, with a real processor."""

from pathlib import Path

import pytest
import torch

from rlpost.data.split import split
from rlpost.data.tasks import JsonLines, Parquet
from rlpost.data.vision import Vision
from rlpost.errors import UserError
from rlpost.types import IMAGE
from tests.images import NONE, ONE, RUN_OF_TOKENS, TWO, example, picture, png, prompts_of, save


def test_an_image_is_a_run_of_tokens_where_it_stands(vision: Vision) -> None:
    (prompt,) = prompts_of(vision, TWO)
    assert prompt.text == "<|im_start|>user\nFirst <image> then <image>.<|im_end|>\n<|im_start|>assistant\n"
    names = vision.tokenizer.convert_ids_to_tokens(prompt.token_ids)
    before, after = names.index(RUN_OF_TOKENS[0]), len("First ")
    assert names[:6] == ["<|im_start|>", "u", "s", "e", "r", "Ċ"]
    assert before == 6 + after
    assert names[before : before + 7] == RUN_OF_TOKENS
    assert "".join(names[before + 7 : before + 13]) == "ĠthenĠ"
    assert names[before + 13 : before + 20] == RUN_OF_TOKENS
    assert vision.tokenizer.decode(prompt.unexpanded_ids) == prompt.text
    assert len(prompt.token_ids) == len(prompt.unexpanded_ids) + 2 * 6


def test_a_text_alone_stays_as_it_is(vision: Vision) -> None:
    (prompt,) = prompts_of(vision, NONE)
    assert vision.tokenizer.decode(prompt.token_ids) == prompt.text
    assert prompt.unexpanded_ids == ()


def test_a_text_alone_is_truncated_like_any(vision: Vision, tiny_tokenizer: object) -> None:
    text = example("x" * 100 + " end")
    (seeing,) = prompts_of(vision, text, max_tokens=40, overlong="truncate")
    (plain,) = prompts_of(tiny_tokenizer, text, max_tokens=40, overlong="truncate")  # type: ignore[arg-type]
    assert len(seeing.token_ids) == 40
    assert seeing.text == plain.text
    assert seeing.text.endswith(" end<|im_end|>\n<|im_start|>assistant\n")


def test_plain_prompts_have_no_images(vision: Vision) -> None:
    with pytest.raises(UserError, match=r"prompt\.template=plain writes neither images nor tools"):
        prompts_of(vision, ONE, template="plain")


@pytest.mark.parametrize("room", [60, 50, 40])
def test_truncation_keeps_the_tokens_of_images(vision: Vision, room: int) -> None:
    long = example("x" * 300 + f"a{IMAGE}b{IMAGE}" + "the question?", png(1), png(2))
    (prompt,) = prompts_of(vision, long, max_tokens=room, overlong="truncate")
    assert len(prompt.token_ids) == room
    names = vision.tokenizer.convert_ids_to_tokens(prompt.token_ids)
    runs = [i for i in range(room) if names[i : i + 7] == RUN_OF_TOKENS]
    assert len(runs) == 2
    assert names.count("<image>") == 8
    whole = "<|im_start|>user\n" + "x" * 300 + "a<image>b<image>the question?<|im_end|>\n<|im_start|>assistant\n"
    cut = prompt.text
    for special in ("<|im_start|>", "<image>", "<|im_end|>"):  # they all stay; of the rest, the end does
        assert cut.count(special) == whole.count(special)
        cut, whole = cut.replace(special, ""), whole.replace(special, "")
    assert whole.endswith(cut)
    # What the model takes is in step with it.
    inputs = vision.model_inputs([prompt], [0], room)
    assert inputs["pixel_values"].shape[:2] == (1, 2)


def test_images_alone_can_be_too_long(vision: Vision) -> None:
    two = example(f"{IMAGE}{IMAGE}?", png(1), png(2))
    with pytest.raises(UserError, match=r"training prompt 1: its images and special tokens alone are over .*=15"):
        prompts_of(vision, two, max_tokens=15, overlong="truncate")
    with pytest.raises(UserError, match="all 1 training prompts are over"):
        prompts_of(vision, two, max_tokens=15)


def test_model_inputs_are_those_of_each_row(vision: Vision) -> None:
    one, two, none = prompts_of(vision, ONE, TWO, NONE)
    together = vision.model_inputs([none, two, one], [0, 0, 0], 99)
    for row, prompt in enumerate([two, one]):
        alone = vision.model_inputs([prompt], [0], 99)
        count = len(prompt.images)
        assert torch.equal(together["pixel_values"][row, :count], alone["pixel_values"][0])
    assert vision.model_inputs([none, none], [0, 0], 50) == {}
    assert vision.model_inputs([], [], 1) == {}


def test_what_belongs_to_positions_goes_where_the_prompts_are(vision: Vision, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some models want to know for each position whether it is of an image."""
    one, two, none = prompts_of(vision, ONE, TWO, NONE)
    process = vision._process

    def with_types(*args: object) -> dict[str, torch.Tensor]:
        inputs = dict(process(*args))  # type: ignore[arg-type]
        is_image = inputs["input_ids"] == vision.tokenizer.convert_tokens_to_ids("<image>")
        return {**inputs, "mm_token_type_ids": is_image.long()}

    monkeypatch.setattr(vision, "_process", with_types)
    width = 70
    starts = [width - len(p.token_ids) for p in (one, none, two)]
    types = vision.model_inputs([one, none, two], starts, width)["mm_token_type_ids"]
    assert types.shape == (3, width)
    for row, (prompt, start) in enumerate(zip((one, none, two), starts, strict=True)):
        image = vision.tokenizer.convert_tokens_to_ids("<image>")
        expected = [start + i for i, token in enumerate(prompt.token_ids) if token == image]
        assert types[row].nonzero().flatten().tolist() == expected


def test_a_model_without_eyes_says_so(tiny_tokenizer: object) -> None:
    with pytest.raises(UserError, match="the task has images, and the model takes none"):
        prompts_of(tiny_tokenizer, ONE)  # type: ignore[arg-type]


def write(directory: Path, *rows: dict[str, object]) -> JsonLines:
    import json

    (directory / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return JsonLines(path=str(directory / "rows.jsonl"), images="images", held_out=0)


def test_rows_with_images(tmp_path: Path) -> None:
    names = save(tmp_path, 2)
    parts = [{"type": "text", "text": "a "}, {"type": "image"}, {"type": "text", "text": " b "}, {"type": "image"}]
    asked = [{"role": "system", "content": "S"}, {"role": "user", "content": parts}]
    plain = [{"role": "system", "content": "S"}, {"role": "user", "content": "q"}]
    task = write(
        tmp_path,
        {"question": "q", "answer": "1", "images": names[0]},
        {"question": "look: <image>!", "answer": "2", "images": [names[1]]},
        {"question": asked, "answer": "3", "images": names},
        {"question": plain, "answer": "4", "images": names},
        {"question": "none", "answer": "5", "images": None},
    )
    examples = task.load().train
    paths = tuple(str(tmp_path / name) for name in names)
    assert [e.images for e in examples] == [paths[:1], paths[1:], paths, paths, ()]
    assert [e.messages[-1]["content"] for e in examples] == [
        *("<image>q", "look: <image>!", "a <image> b <image>", "<image><image>q", "none"),
    ]
    assert examples[3].messages[0]["content"] == "S"
    assert all("images" not in e.columns for e in examples)


def test_parquet_files_hold_images_themselves(tmp_path: Path) -> None:
    """As the datasets library writes them: content, or a path."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (name,) = save(tmp_path, 1)
    rows = [
        {"question": "a", "answer": "1", "image": {"bytes": png(5), "path": "x.png"}},
        {"question": "b", "answer": "2", "image": {"bytes": None, "path": name}},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    examples = Parquet(path=str(tmp_path / "rows.parquet"), images="image", held_out=0).load().train
    assert [e.images for e in examples] == [(png(5),), (str(tmp_path / name),)]


def test_images_of_the_datasets_library(vision: Vision) -> None:
    task = JsonLines(path="unused", images="image")
    (found,) = task.examples([({"question": "q", "answer": "1", "image": picture(3)}, "row 1")])
    ((content,),) = [found.images]
    assert isinstance(content, bytes)
    (prompt,), (same,) = prompts_of(vision, found), prompts_of(vision, example("<image>q", png(3)))
    pixels = [vision.model_inputs([p], [0], 50)["pixel_values"] for p in (prompt, same)]
    assert torch.equal(*pixels)


def test_the_same_question_of_other_images_is_another_prompt() -> None:
    examples = [example(f"{IMAGE}What?", png(seed)) for seed in (1, 2, 3, 1)]
    data = split(examples, 1, seed=0)
    assert len(data.held_out) == 1
    assert len(data.train) == 4 - examples.count(data.held_out[0])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q", "answer": "1"}, r"row 1: no field 'images'; .*task.images"),
        ({"question": "q", "answer": "1", "images": "gone.png"}, r"row 1, field 'images': no such file: .*/gone.png"),
        ({"question": "q", "answer": "1", "images": 3}, r"row 1, field 'images': a path, .* not int"),
        ({"question": "<image>", "answer": "1", "images": ["0.png", "0.png"]}, r"row 1: 2 images, but 1 places"),
        (
            {"question": [{"role": "user", "content": [{"type": "audio"}]}], "answer": "1", "images": None},
            "must be a text",
        ),
    ],
)
def test_rows_name_what_is_wrong_with_images(tmp_path: Path, row: dict[str, object], message: str) -> None:
    save(tmp_path, 1)
    with pytest.raises(UserError, match=message):
        write(tmp_path, row).load()


def test_a_file_that_is_no_image(tmp_path: Path, vision: Vision) -> None:
    (tmp_path / "text.png").write_text("hello")
    for source in (str(tmp_path / "text.png"), b"hello"):
        with pytest.raises(UserError, match=r"(text.png|5 bytes of a row): not an image that can be read"):
            prompts_of(vision, example("<image>?", source))
