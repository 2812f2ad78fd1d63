"""Errors of persisted documents, and guesses at what a wrong name was meant to be."""

from __future__ import annotations

import pytest

from hpjob.core.errors import UserInputError
from hpjob.core.schema import Persisted, nearest, parse


class Wheel(Persisted):
    diameter_mm: int


class Bike(Persisted):
    name: str
    wheel: Wheel


def test_every_problem_of_a_document_is_reported_with_its_path() -> None:
    with pytest.raises(UserInputError) as caught:
        parse(Bike, {"wheel": {"diametre_mm": 3}}, source="bike.yaml")
    message = caught.value.message
    assert "bike.yaml: name: missing" in message
    assert "bike.yaml: wheel.diameter_mm: missing" in message
    assert "bike.yaml: wheel.diametre_mm: unknown key" in message
    assert "did you mean `diameter_mm`?" in caught.value.hint


def test_a_document_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(UserInputError, match="expected a mapping"):
        parse(Bike, ["name"], source="bike.yaml")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("tinny", "tiny"),
        ("dgx-a100", "dgx-a100-40g"),
        ("zzz", None),
        ("", None),
    ],
)
def test_the_nearest_name_is_the_one_that_was_begun_or_misspelt(word: str, meant: str | None) -> None:
    assert nearest(word, ["dgx-v100", "dgx-a100-80g", "dgx-a100-40g", "tiny"]) == meant
