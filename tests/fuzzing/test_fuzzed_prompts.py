"""Damaged prompt files: prompts, or one error that names the file."""

import gzip
import json

from treeflash.evaluation.prompt_sets import open_set

from .cases import try_all
from .mutations import mutated_bytes, mutated_value

ROWS = [
    {"prompt": "Ana has 7 apples."},
    {"turns": ["Write a poem.", "Now make it rhyme."], "category": "writing"},
    {"question": "How many bolts does it take?", "answer": "3"},
    {"task_id": 12, "text": "Write a function.", "test_list": []},
    {"problem": "What is $1 + 1$?", "level": 1},
]


def damaged(chance):
    """JSON lines or an array, with some damage."""
    rows = ROWS
    if chance.random() < 0.6:
        rows = [mutated_value(row, chance) if chance.random() < 0.4 else row for row in rows]
    text = "\n".join(map(json.dumps, rows)) if chance.random() < 0.7 else json.dumps(rows)
    data = text.encode()
    return mutated_bytes(data, chance) if chance.random() < 0.6 else data


def test_prompt_files(tmp_path, fuzz_cases):
    def attempt(case, chance):
        data, path = damaged(chance), tmp_path / f"case-{case}.jsonl"
        if chance.random() < 0.2:
            path, data = path.with_suffix(".jsonl.gz"), gzip.compress(data)
            data = mutated_bytes(data, chance) if chance.random() < 0.7 else data
        path.write_bytes(data)
        place = chance.choice((str(path), f"mbpp={path}", f"gsm8k={path}"))
        assert open_set(place, limit=chance.choice((None, 2)), draw=chance.choice((None, 3))).prompts

    try_all(fuzz_cases, attempt, named=f"{tmp_path}/case-{{case}}.jsonl")
