"""Pictures of a plan: what they draw is what was simulated."""

from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from hpjob.cli.app import app
from hpjob.plan.schedule import makespan
from hpjob.plan.schedule_timeline import timeline
from hpjob.plan.stage_times import StageTimes
from hpjob.recipe.model import PipelineStyle

_SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(("style", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zbv", 2)])
def test_timeline_is_the_schedule_that_was_priced(style: PipelineStyle, chunks: int) -> None:
    stages = 4 * chunks
    times = StageTimes([1.0 + 0.1 * s for s in range(stages)], [1.2] * stages, [0.7] * stages)
    spans = timeline(style, 4, chunks, 8, times, 0.3, 0.5)
    assert max(span.end for span in spans) == pytest.approx(makespan(style, 4, chunks, 8, times, 0.3, 0.5))
    assert (
        len({(s.kind, s.stage, s.microbatch) for s in spans}) == len(spans) == (3 if style == "zbv" else 2) * 8 * stages
    )
    for before, after in pairwise(spans):
        assert before.rank != after.rank or before.end <= after.begin + 1e-9, "a rank does one thing at a time"


def test_command_writes_pictures_that_are_well_formed(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    arguments = ["plan", "--recipe", "7b", "--nodes", "1", "--machine", "hgx-h100", "--set", "parallel.pp_size=4"]
    done = CliRunner().invoke(app, [*arguments, "--pictures", str(folder)])
    assert done.exit_code == 0, done.output
    roots = {path.name: ElementTree.parse(path).getroot() for path in folder.iterdir()}
    assert sorted(roots) == ["memory.svg", "placement.svg", "timeline.svg"]
    memory = [element.text or "" for element in roots["memory.svg"].iter(f"{_SVG}title")]
    assert len(memory) == 4 * 6, "six kinds of memory in each of four stages"
    operations = [element.text or "" for element in roots["timeline.svg"].iter(f"{_SVG}title")]
    assert any(text.startswith("forward, stage 3, microbatch 0") for text in operations)
