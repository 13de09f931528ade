"""Pictures: names stay what they are, and what was not measured is not drawn."""

import html
import re

import attrs

from treeflash.evaluation import charts
from treeflash.evaluation.bench import PromptRuns
from treeflash.evaluation.counts import Run, TreeCounts
from treeflash.evaluation.summary import summarise

# As formulas, the one would be read, the other fail.
ARM, SET = "_a $5 to $6 <b>", r"a$\x$b"


def summaries(**changes):
    """An arm on a prompt set."""
    run = Run(
        arm="plain",
        turn=0,
        prompt_tokens=3,
        token_ids=[5] * 3,
        stop_reason="max_new_tokens",
        prefill_seconds=0.5,
        decode_seconds=1.0,
        emitted=[1, 1],
        accepted=[0, 0],
        drafted=[1, 1],
        depth=[1, 1],
        seconds={"verify": 1.0},
        trees=TreeCounts([2], [[2]], [[1]]),
        peak_bytes=None,
        audit="identical",
    )
    run = attrs.evolve(run, **changes)
    return summarise([PromptRuns(SET, 0, "0", [run, attrs.evolve(run, arm=ARM)])])


def test_names_are_shown_as_they_are():
    found, shown = summaries(), f">{html.escape(ARM)}<"
    drawn = charts.efficiency_and_speed(found)
    # In the legend; the prompt set below both pictures.
    assert (drawn.count(shown), drawn.count(f">{SET}<")) == (1, 2)
    assert charts.ranks(found[SET][1:]).count(shown) == 1
    assert charts.stages(found[SET]).count(shown) == 1
    curve = {"drafts": [1], "tvd": [0.5], "tvd_error": [0.1], "coverage": {}}
    assert charts.by_depth({ARM: curve}, ()).count(shown) == 1


def test_without_times_of_stages_there_is_no_picture_of_them():
    (rows,) = summaries(seconds={}).values()
    assert charts.stages(rows) == ""


def test_many_arms_stand_below_one_another():
    def drawn(count):
        (rows,) = summaries().values()
        picture = charts.ranks([attrs.evolve(rows[1], arm=f"arm {number}") for number in range(count)])
        width, height = re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', picture).groups()
        # What surrounds a picture has its own group: an unused one has none.
        assert picture.count('id="matplotlib.axis_') == 2 * count
        label = re.search(r'aria-label="(.*?)"', picture).group(1)
        assert label == "; ".join(f"arm {number}" for number in range(count))
        return float(width), float(height)

    width, height = drawn(3)
    assert drawn(1) == (width / 3, height)
    assert drawn(7) == (width, 3 * height)
