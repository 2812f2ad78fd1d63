"""Recipes: packaged names, files, overrides, YAML's traps, and errors that people can act on."""

import json
from pathlib import Path

import pytest

from hpjob.core import yaml_text
from hpjob.core.errors import ExitCode, UserInputError
from hpjob.recipe.load import dump_recipe, load_recipe, recipe_names

_SMALL = """
model: {num_hidden_layers: 2, hidden_size: 64, intermediate_size: 128, num_attention_heads: 4,
  num_key_value_heads: 2, vocab_size: 256}
data: {seq_length: 32}
training: {global_batch_size: 8, steps: 10}
"""


def _write(folder: Path, text: str, name: str = "mine.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", recipe_names())
def test_packaged_recipe_survives_a_round_trip(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name, [])
    assert load_recipe(_write(tmp_path, dump_recipe(recipe)), []) == recipe


@pytest.mark.parametrize(
    ("name", "billions"), [("7b", 6.74), ("13b", 13.02), ("70b", 68.98), ("llama3-8b", 8.03), ("llama3-405b", 405.85)]
)
def test_packaged_sizes_are_the_published_ones(name: str, billions: float) -> None:
    assert load_recipe(name, []).model.num_parameters / 1e9 == pytest.approx(billions, abs=0.01)


def test_unknown_recipe_names_the_nearest_and_all() -> None:
    with pytest.raises(UserInputError, match="unknown recipe `70c`") as caught:
        load_recipe("70c", [])
    assert "did you mean `70b`?" in caught.value.hint
    assert "tiny" in caught.value.hint
    assert caught.value.exit_code == ExitCode.USER_INPUT


def test_scientific_notation_is_a_number(tmp_path: Path) -> None:
    path = _write(tmp_path, _SMALL + "optimizer: {lr: 3e-4, eps: 1e-8}\n")
    assert load_recipe(path, []).optimizer.lr == 3e-4
    assert load_recipe(path, ["optimizer.lr=2e-5"]).optimizer.lr == 2e-5


def test_bare_clock_is_refused_and_clear_forms_are_read(tmp_path: Path) -> None:
    path = _write(tmp_path, _SMALL + "job: {time_limit: 1:30}\n")
    with pytest.raises(UserInputError, match=r"job.time_limit: .*90m"):
        load_recipe(path, [])
    assert load_recipe(path, ["job.time_limit=01:30:00"]).job.time_limit == 5400
    assert load_recipe(path, ["job.time_limit=90m"]).job.time_limit == 5400
    with pytest.raises(UserInputError, match="needs a unit"):
        load_recipe(path, ["job.time_limit=90"])


def test_sexagesimal_is_no_number() -> None:
    with pytest.raises(UserInputError, match=r"training.steps: expected a whole number, found '1:30'"):
        load_recipe("tiny", ["training.steps=1:30"])


@pytest.mark.parametrize(("word", "value"), [("on", True), ("yes", True), ("no", False), ("off", False)])
def test_on_and_no_are_switches_only_where_a_switch_is_meant(word: str, value: bool, tmp_path: Path) -> None:
    recipe = load_recipe("tiny", [f"parallel.enable_flash_attention={word}", f"job.partition={word}"])
    assert recipe.parallel.enable_flash_attention is value
    assert recipe.job.partition == word
    assert load_recipe(_write(tmp_path, dump_recipe(recipe)), []) == recipe
    with pytest.raises(UserInputError, match="expected a whole number"):
        load_recipe("tiny", [f"training.steps={word}"])


def test_leading_zero_is_refused_with_both_meanings(tmp_path: Path) -> None:
    path = _write(tmp_path, _SMALL.replace("steps: 10", "steps: 0123"))
    with pytest.raises(UserInputError, match=r'0123 has a leading zero: write 123 .* "0123" for text'):
        load_recipe(path, [])
    assert load_recipe("tiny", ['job.account="0123"']).job.account == "0123"


def test_key_written_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    path = _write(tmp_path, _SMALL + "optimizer:\n  lr: 1e-3\n  lr: 2e-3\n")
    with pytest.raises(UserInputError, match=r"line 8: key `lr` is written twice \(first in line 7\)"):
        load_recipe(path, [])


def test_booleans_and_fractions_are_no_counts() -> None:
    for value in ("true", "2.5", "'7'"):
        with pytest.raises(UserInputError, match=r"training\.steps: expected a whole number"):
            load_recipe("tiny", [f"training.steps={value}"])


def test_all_mistakes_come_at_once_with_paths_and_guesses(tmp_path: Path) -> None:
    path = _write(tmp_path, _SMALL + "optimizr: {lr: 1}\nparallel: {tp_sise: 2, zero_stage: 7}\n")
    with pytest.raises(UserInputError) as caught:
        load_recipe(path, ["nonsense", "optimizer.lr=fast"])
    message, hint = caught.value.message, caught.value.hint
    assert "optimizr: unknown key" in message
    assert "parallel.tp_sise: unknown key" in message
    assert "parallel.zero_stage: expected 0, 1, 2 or 3 or 'auto', found 7" in message
    assert "optimizer.lr: expected a number, found 'fast'" in message
    assert "--set nonsense: expected KEY=VALUE" in message
    assert "did you mean `optimizer`?" in hint
    assert "did you mean `tp_size`?" in hint
    assert len(message.splitlines()) == 5


def test_extends_merges_and_refuses_circles(tmp_path: Path) -> None:
    child = load_recipe(_write(tmp_path, "extends: 70b\ntraining: {steps: 7}\n"), [])
    assert (child.training.steps, child.training.global_batch_size) == (7, 1024)
    assert child.name == "mine"
    _write(tmp_path, "extends: b.yaml\n", "a.yaml")
    _write(tmp_path, "extends: a.yaml\n", "b.yaml")
    with pytest.raises(UserInputError, match="goes in a circle"):
        load_recipe(str(tmp_path / "a.yaml"), [])


def test_model_from_config_json(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 3,
        "hidden_size": 96,
        "intermediate_size": 200,
        "num_attention_heads": 6,
        "vocab_size": 500,
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = _write(tmp_path, "extends: tiny\nmodel: {config: config.json, vocab_size: 512}\n")
    model = load_recipe(path, []).model
    assert (model.num_hidden_layers, model.num_key_value_heads, model.rope_theta, model.vocab_size) == (3, 6, 5e5, 512)
    assert load_recipe("tiny", [f"model.config={tmp_path / 'config.json'}"]).model.hidden_size == 96
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "lama"}))
    with pytest.raises(UserInputError, match="model_type `lama` is not known") as caught:
        load_recipe(path, [])
    assert "did you mean `llama`?" in caught.value.hint
    assert "model: missing" not in caught.value.message
    config.pop("model_type")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserInputError, match="has no model_type") as caught:
        load_recipe(path, [])
    assert "add `model`" not in caught.value.hint


def test_no_yaml_says_where(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="line 2"):
        load_recipe(_write(tmp_path, "model:\n\t- x\n"), [])
    with pytest.raises(UserInputError, match="no such file"):
        load_recipe(str(tmp_path / "absent.yaml"), [])
    with pytest.raises(UserInputError, match="is a folder"):
        load_recipe(f"{tmp_path}/", [])


@pytest.mark.parametrize("text", ["model: \0", "a: \x1b[0m", "[" * 3000], ids=["nul", "escape", "deep"])
def test_what_the_yaml_reader_chokes_on_is_no_bug(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserInputError, match="recipe "):
        load_recipe(_write(tmp_path, text), [])


@pytest.mark.parametrize("text", ["3e-4", "on", "0123", "1:30", "null", "1_000", "~", "", " x", "a: b", "true", "0x1f"])
def test_text_survives_writing(text: str) -> None:
    document, refused = yaml_text.load(yaml_text.dump({"key": text}), source="test")
    assert (document, refused) == ({"key": text}, [])
