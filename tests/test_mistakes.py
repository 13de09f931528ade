"""Deliberate mistakes, on the command line and in Python: each is one clear error, and no traceback."""

import json
import re

import numpy as np
import pytest
import torch

import treeflash
from treeflash import Decoder, TreeflashError
from treeflash.components.builders.frontier import Frontier
from treeflash.components.builders.top_m import TopM
from treeflash.components.drafters.none import NoDrafter
from treeflash.components.refiners.none import NoRefiner
from treeflash.components.selectors.chain import Chain
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.sampling import Draws

ASK = "Ana has 7 apples."


def generate(recipe, *options):
    return ["generate", recipe, ASK, *options]


def override(*assignments):
    return generate("tiny-treeflash", *(word for text in assignments for word in ("-o", text)))


# What is typed, and what of the message tells a user what to do. FILE and FOLDER exist, NOWHERE does not.
TYPED = {
    # commands
    "misspelt command": (["generat"], "did you mean 'generate'"),
    "unknown command": (["zzz"], "there is no command 'zzz' (known: bench,"),
    "unknown flag": (["--versoin"], "--version"),
    "no subcommand": (["recipes", "lst"], "did you mean 'list'"),
    "no cache command": (["cache", "lst"], "did you mean 'list'"),
    "cached nothing": (["cache", "clear", "zzz", "--yes"], "keeps nothing called 'zzz'"),
    "no shell": (["completion"], "Missing argument"),
    "another shell": (["completion", "bsh"], "expected bash, zsh or fish, found 'bsh'; did you mean 'bash'"),
    "a kind": (["components", "drafer"], "did you mean 'drafter'"),
    "a kind in plural": (["components", "selectors"], "did you mean 'selector'"),
    "two kinds": (["components", "drafter", "builder"], "unexpected extra argument"),
    "an argument to list": (["recipes", "list", "x"], "unexpected extra argument"),
    # generate: arguments
    "nothing": (["generate"], "Missing argument 'RECIPE'"),
    "an empty prompt": (["generate", "tiny-plain", ""], "the prompt is empty"),
    "an empty recipe": (generate(""), "no recipe is called ''"),
    "arguments swapped": (["generate", ASK, "tiny-plain"], "expected the recipe first"),
    "a prompt in words": ([*generate("tiny-plain"), "more"], "unexpected extra argument"),
    "misspelt recipe": (generate("tiny-treflash"), "did you mean"),
    "recipe in capitals": (generate("TINY-PLAIN"), "no recipe is called 'TINY-PLAIN'"),
    "no file": (generate("NOWHERE.toml"), "no recipe file"),
    "a folder": (generate("FOLDER"), "no recipe is called"),
    "a study": (generate("paper"), "no recipe is called 'paper'"),
    "a target": (generate("smollm2-135m-instruct"), "no recipe is called 'smollm2-135m-instruct'"),
    "a training recipe": (generate("tiny-train"), "this recipe trains a drafter (treeflash train)"),
    "seed in words": (generate("tiny-plain", "--seed", "one"), "'one' is not a valid integer"),
    "negative seed": (generate("tiny-plain", "--seed", "-1"), "-1 is not in the range"),
    "seed too large": (generate("tiny-plain", "--seed", str(2**64)), "is not in the range"),
    "broken seed": (generate("tiny-plain", "--seed", "1.5"), "'1.5' is not a valid integer"),
    "temperature in words": (generate("tiny-plain", "--temperature", "hot"), "'hot' is not a valid float"),
    "negative temperature": (generate("tiny-plain", "--temperature", "-1"), "is not in the range"),
    "endless temperature": (generate("tiny-plain", "--temperature", "inf"), "temperature must be a finite"),
    "no temperature": (generate("tiny-plain", "--temperature", "nan"), "temperature must be a finite number"),
    "no tokens": (generate("tiny-plain", "--max-new-tokens", "0"), "is not in the range"),
    "tokens in words": (generate("tiny-plain", "--max-new-tokens", "all"), "'all' is not a valid integer"),
    "a flag without value": (generate("tiny-plain", "--seed"), "requires an argument"),
    "a misspelt flag": (generate("tiny-plain", "--max-tokens", "3"), "--max-new-tokens"),
    "a flag of an option": (generate("tiny-plain", "--budget", "3"), "No such option"),
    "a dtype": (generate("tiny-plain", "--dtype", "float23"), "did you mean 'float32'"),
    "an integer dtype": (generate("tiny-plain", "--dtype", "int8"), "found 'int8'"),
    # generate: overrides
    "no table": (override("budget=3"), "expected table.key=value, found 'budget=3'"),
    "no value": (override("selector.budget"), "expected table.key=value, found 'selector.budget'"),
    "no key": (override("selector.=3"), "expected table.key=value"),
    "no assignment": (override(""), "expected table.key=value, found ''"),
    "another separator": (override("selector:budget=3"), "expected table.key=value"),
    "two without tables": (override("a=1", "b=2"), "2 faults"),
    "misspelt table": (override("selectr.budget=3"), "did you mean 'selector'"),
    "unknown table": (override("zzz.budget=3"), "unknown table [zzz]"),
    "misspelt key": (override("selector.budgt=3"), "did you mean 'budget'"),
    "unknown key of the target": (override("target.dtyp=float32"), "did you mean 'dtype'"),
    "text for a number": (override("selector.budget=many"), "expected an integer, found 'many'"),
    "a broken number": (override("selector.budget=1.5"), "expected an integer, found 1.5"),
    "a negative number": (override("selector.budget=-1"), "expected >= 0, found -1"),
    "a huge number": (override("selector.budget=100000"), "expected <= 4096, found 100000"),
    "a truth value for a number": (override("selector.budget=true"), "expected an integer, found True"),
    "a list for a number": (override("selector.budget=[3]"), "expected an integer, found [3]"),
    "a number for text": (override("target.model=3"), "target.model: expected a string, found 3"),
    "a number for a truth value": (override("target.lean=1"), "target.lean: expected true or false, found 1"),
    "text for a truth value": (override("target.lean=yes"), "expected true or false, found 'yes'"),
    "a dtype by override": (override("target.dtype=int8"), "found 'int8'"),
    "a device": (override("target.device=abacus"), "'abacus'"),
    "a selector": (override("selector.use=opt-tre"), "did you mean 'opt-tree'"),
    "a refiner for a selector": (override("selector.use=swiglu"), "no selector is called 'swiglu'"),
    "a verifier": (override("verifier.use=sdpa"), "did you mean 'sdpa-tree'"),
    "an empty name": (override("drafter.use="), "drafter.use: no drafter is called ''"),
    "a number for a name": (override("drafter.use=3"), "drafter.use: expected a name, found 3"),
    "branching of none": (override("builder.branching=0"), "expected >= 1, found 0"),
    "least above one": (override("builder.least=2"), "expected < 1, found 2"),
    "temperature of a draft": (
        override("drafter.temperature=0"),
        "drafter.temperature: expected > 0, found 0",
    ),
    "no builder": (override("builder.use=none"), "builder.use: expected one"),
    "a builder too narrow": (override("builder.use=marginal"), "which lays out contexts of 0"),
    "a builder behind no draft": (override("drafter.use=none"), "builder.use: expected none"),
    "another refiner": (override("refiner.use=linear"), "expected 'linear', found 'swiglu'"),
    "a checkpoint": (override("drafter.checkpoint=NOWHERE"), "drafter.checkpoint: expected a folder"),
    "a checkpoint without files": (override("drafter.checkpoint=FOLDER"), "config.json"),
    "a model": (override("target.model=nowhere"), "no folder, hub name or target is called 'nowhere'"),
    "a model without files": (override("target.model=FOLDER"), "FOLDER"),
    "a package": (override("target.model=nopackage:models"), "no package 'nopackage' is installed"),
    "a package's folder": (override("target.model=treeflash.testing:models/tiny"), "did you mean"),
    "another selector's option": (
        override("selector.use=cost-aware", "selector.budget=31"),
        "'chain' and 'opt-tree' take it: selector.use=opt-tree",
    ),
    "another builder's option": (
        override("builder.use=frontier", "builder.branching=3"),
        "'top-m' takes it: builder.use=top-m",
    ),
    # generate: files
    "no TOML": (generate("FILE.toml"), "not valid TOML"),
    "a prompt too long": (["generate", "tiny-plain", ASK * 80], "1024 positions"),
    # recipes
    "show nothing": (["recipes", "show"], "Missing argument 'RECIPE'"),
    "show misspelt": (["recipes", "show", "tiny-treflash"], "did you mean"),
    "show a file": (["recipes", "show", "NOWHERE.toml"], "no recipe file"),
    "show two": (["recipes", "show", "tiny-plain", "tiny-dflash"], "unexpected extra argument"),
    "show overridden": (["recipes", "show", "tiny-plain", "-o", "x"], "expected table.key=value"),
    "check misspelt": (["check", "tiny-treflash"], "did you mean"),
    "check nothing": (["check"], "Missing argument 'RECIPE'"),
    "check a training": (["check", "tiny-train"], "this recipe trains"),
    # regenerate
    "no prompts": (["regenerate", "tiny-plain", "--out", "OUT"], "Missing option '--prompts'"),
    "no output": (["regenerate", "tiny-plain", "--prompts", "FILE"], "Missing option '--out'"),
    "prompts nowhere": (["regenerate", "tiny-plain", "--prompts", "NOWHERE", "--out", "OUT"], "No such file"),
    "prompts in a folder": (["regenerate", "tiny-plain", "--prompts", "FOLDER", "--out", "OUT"], "directory"),
    "prompts of no JSON": (
        ["regenerate", "tiny-plain", "--prompts", "FILE", "--out", "OUT"],
        "not valid JSON",
    ),
    "prompts of no key": (
        ["regenerate", "tiny-plain", "--prompts", "KEYLESS", "--out", "OUT"],
        "one of the keys",
    ),
    "no prompt in the file": (
        ["regenerate", "tiny-plain", "--prompts", "EMPTY", "--out", "OUT"],
        "found none",
    ),
    "regenerate a training": (["regenerate", "tiny-train", "--prompts", "GOOD", "--out", "OUT"], "trains"),
    "heldout above one": (
        ["regenerate", "tiny-plain", "--prompts", "GOOD", "--out", "OUT", "--heldout", "2"],
        "is not in the range",
    ),
    "a batch of none": (
        ["regenerate", "tiny-plain", "--prompts", "GOOD", "--out", "OUT", "--batch-size", "0"],
        "is not in the range",
    ),
    "output in a file": (["regenerate", "tiny-plain", "--prompts", "GOOD", "--out", "FILE/x"], "FILE/x"),
    # train
    "no data": (["train", "tiny-train", "--out", "OUT"], "Missing option '--data'"),
    "data nowhere": (["train", "tiny-train", "--data", "NOWHERE", "--out", "OUT"], "treeflash regenerate"),
    "data of another kind": (
        ["train", "tiny-train", "--data", "FOLDER", "--out", "OUT"],
        "treeflash regenerate",
    ),
    "a recipe that decodes": (
        ["train", "tiny-plain", "--data", "FOLDER", "--out", "OUT"],
        "it does not train",
    ),
    "misspelt training": (["train", "tiny-trian", "--data", "FOLDER", "--out", "OUT"], "did you mean"),
    "steps": (
        ["train", "tiny-train", "--data", "FOLDER", "--out", "OUT", "-o", "train.steps=none"],
        "train.steps: expected an integer, found 'none'",
    ),
    "learning rate": (
        ["train", "tiny-train", "--data", "FOLDER", "--out", "OUT", "-o", "optimizer.lr=0"],
        "optimizer.lr: expected > 0, found 0",
    ),
    "misspelt setting": (
        ["train", "tiny-train", "--data", "FOLDER", "--out", "OUT", "-o", "data.batchsize=3"],
        "did you mean 'batch_size'",
    ),
    # bench
    "no arms": (["bench", "--prompts", "GOOD", "--out", "OUT"], "Missing argument 'ARM...'"),
    "arms of one name": (
        ["bench", "a=tiny-dflash", "a=tiny-ddtree", "--prompts", "GOOD", "--out", "OUT"],
        "found a twice",
    ),
    "the arm plain": (["bench", "plain=tiny-dflash", "--prompts", "GOOD", "--out", "OUT"], "plain decoding"),
    "an arm without recipe": (
        ["bench", "a=", "--prompts", "GOOD", "--out", "OUT"],
        "no recipe is called 'a='",
    ),
    "an arm's missing value": (
        ["bench", "a=tiny-ddtree,selector.budget", "--prompts", "GOOD", "--out", "OUT"],
        "selector.budget: expected a value, found none: selector.budget=VALUE",
    ),
    "a value missing between": (
        ["bench", "a=tiny-ddtree,selector.budget,drafter.temperature=1", "--prompts", "GOOD", "--out", "OUT"],
        "selector.budget: expected a value",
    ),
    "an arm's misspelt table": (
        ["bench", "a=tiny-ddtree,selectr.budget=3", "--prompts", "GOOD", "--out", "OUT"],
        "did you mean 'selector'",
    ),
    "misspelt arm": (
        ["bench", "tiny-ddtre", "--prompts", "GOOD", "--out", "OUT"],
        "did you mean 'tiny-ddtree'",
    ),
    "unknown set": (["bench", "tiny-ddtree", "--prompts", "gsm9k", "--out", "OUT"], "did you mean 'gsm8k'"),
    "unknown set of a file": (
        ["bench", "tiny-ddtree", "--prompts", "gsm9k=GOOD", "--out", "OUT"],
        "did you mean 'gsm8k'",
    ),
    "sets of one name": (
        ["bench", "tiny-ddtree", "--prompts", "GOOD", "--prompts", "GOOD", "--out", "OUT"],
        "found good twice",
    ),
    "prompts that are none": (
        ["bench", "tiny-ddtree", "--prompts", "FILE", "--out", "OUT"],
        "not valid JSON",
    ),
    "a limit of none": (
        ["bench", "tiny-ddtree", "--prompts", "GOOD", "--out", "OUT", "--limit", "0"],
        "is not in the range",
    ),
    # eval
    "texts nowhere": (["eval", "tiny-ddtree", "--data", "NOWHERE", "--out", "OUT"], "treeflash regenerate"),
    "an odd number of paths": (
        ["eval", "tiny-ddtree", "--data", "FOLDER", "--out", "OUT", "--paths", "3"],
        "--paths: expected an even number, found 3",
    ),
    "budgets": (
        ["eval", "tiny-ddtree", "--data", "FOLDER", "--out", "OUT", "--budgets", "4,x"],
        "expected numbers of nodes like 15,63",
    ),
    "a part of the texts": (
        ["eval", "tiny-ddtree", "--data", "FOLDER", "--out", "OUT", "--split", "heldut"],
        "did you mean 'heldout'",
    ),
    # study
    "misspelt study": (["study", "tinny", "--prompts", "FOLDER", "--out", "OUT"], "did you mean 'tiny'"),
    "a study's file": (["study", "NOWHERE.toml", "--prompts", "FOLDER", "--out", "OUT"], "cannot be read"),
    "a study of no TOML": (["study", "FILE.toml", "--prompts", "FOLDER", "--out", "OUT"], "not valid TOML"),
    "a study's folder": (["study", "tiny", "--prompts", "NOWHERE", "--out", "OUT"], "does not exist"),
    "a measurement": (
        ["study", "tiny", "--prompts", "FOLDER", "--out", "OUT", "--only", "bench.zzz"],
        "no measurement is called 'bench.zzz'",
    ),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("places")
    (folder / "FOLDER").mkdir()
    for name in ("FILE", "FILE.toml"):
        (folder / name).write_text("neither = JSON nor [TOML\n")
    (folder / "KEYLESS").write_text('{"zzz": 3}\n')
    (folder / "EMPTY").write_text("")
    (folder / "good").write_text(json.dumps({"prompt": ASK}))
    return {"GOOD": str(folder / "good"), **{name: str(folder / name) for name in _PLACES}}


_PLACES = ("FOLDER", "FILE", "KEYLESS", "EMPTY", "NOWHERE", "OUT")


def put(word, places):
    for name in ("GOOD", *_PLACES):
        word = word.replace(name, places[name])
    return word


@pytest.mark.parametrize("name", TYPED)
def test_what_is_typed(name, command, places, monkeypatch, tmp_path):
    monkeypatch.setenv("TREEFLASH_CACHE", str(tmp_path))
    words, part = TYPED[name]
    status, out, err = command(*(put(word, places) for word in words))
    assert (status, out) == (2, ""), err
    assert "Traceback" not in err
    assert len(re.findall("^(treeflash|Error): ", err, re.MULTILINE)) == 1
    assert put(part, places) in err


@pytest.fixture(scope="module")
def decoder():
    return treeflash.load("tiny-treeflash", target={"device": "cpu"})


CALLS = {
    "a text": (lambda it: it.generate("text"), "expected token ids, found the text 'text'"),
    "bytes": (lambda it: it.generate(b"text"), "expected token ids, found the text"),
    "nothing": (lambda it: it.generate(None), "token ids must be one row of integers"),
    "no token": (lambda it: it.generate([]), "the prompt is empty"),
    "words": (lambda it: it.generate(["a", "b"]), "token ids must be one row of integers"),
    "fractions": (lambda it: it.generate([1.5]), "token ids must be integers, found torch.float32"),
    "truth values": (lambda it: it.generate(torch.ones(3, dtype=torch.bool)), "token ids must be integers"),
    "a tokenizer's answer": (lambda it: it.generate({"input_ids": [1]}), "found a mapping of input_ids"),
    "two texts": (lambda it: it.generate([[1], [2]]), "one sequence at a time"),
    "a token too large": (lambda it: it.generate([10**6]), "token ids must be in 0..127, found 1000000"),
    "a token beyond numbers": (lambda it: it.generate([10**30]), "token ids must be one row of integers"),
    "a negative token": (lambda it: it.generate([-1]), "token ids must be in 0..127, found -1"),
    "a hot temperature": (
        lambda it: it.generate([1], temperature="hot"),
        "a finite number >= 0, found 'hot'",
    ),
    "a quoted temperature": (lambda it: it.generate([1], temperature="1"), "a finite number >= 0, found '1'"),
    "no temperature": (lambda it: it.generate([1], temperature=None), "a finite number >= 0, found None"),
    "a negative temperature": (lambda it: it.generate([1], temperature=-1), "a finite number >= 0, found -1"),
    "a complex temperature": (lambda it: it.generate([1], temperature=1j), "a finite number >= 0"),
    "a quoted seed": (lambda it: it.generate([1], seed="1"), "seed must be an integer in 0..2**64-1"),
    "a negative seed": (lambda it: it.generate([1], seed=-1), "seed must be an integer in 0..2**64-1"),
    "a broken seed": (lambda it: it.generate([1], seed=1.5), "seed must be an integer in 0..2**64-1"),
    "a negative sequence": (lambda it: it.generate([1], sequence=-1), "must be an integer in 0..2**64-1"),
    "no tokens": (lambda it: it.generate([1], max_new_tokens=0), "max_new_tokens must be an integer >= 1"),
    "quoted tokens": (lambda it: it.generate([1], max_new_tokens="9"), "must be an integer >= 1, found '9'"),
    "stop words": (
        lambda it: it.generate([1], stop_ids="x"),
        "stop_ids must be a list of token ids, found 'x'",
    ),
    "a stop word": (lambda it: it.generate([1], stop_ids=["."]), "stop_ids must be a list of token ids"),
    "messages": (
        lambda it: it.target.text.encode_chat([{"role": "user", "content": "x"}]),
        "expected a text, or the texts of a conversation",
    ),
    "a number for a prompt": (lambda it: it.target.text.encode_chat(3), "expected a text"),
    "a number for raw text": (lambda it: it.target.text.encode_raw(3), "expected a text"),
    "no recipe": (lambda it: treeflash.load("tiny-treflash"), "did you mean"),
    "a number for a recipe": (lambda it: treeflash.load(3), "expected a recipe's name or path, found 3"),
    "a training recipe": (lambda it: treeflash.load("tiny-train"), "this recipe trains a drafter"),
    "an unknown table": (lambda it: treeflash.load("tiny-plain", selectr={}), "did you mean 'selector'"),
    "an unknown key": (
        lambda it: treeflash.load("tiny-plain", selector={"budgt": 3}),
        "did you mean 'budget'",
    ),
    "a number for a table": (lambda it: treeflash.load("tiny-plain", selector=3), "a table or a Selector"),
    "a class for a table": (lambda it: treeflash.load("tiny-plain", selector=OptTree), "not an instance"),
    "a quoted option": (
        lambda it: treeflash.load("tiny-plain", selector={"budget": "15"}),
        "expected an integer, found '15'",
    ),
    "a quoted budget": (lambda it: OptTree(budget="15"), "OptTree: budget: expected an integer, found '15'"),
    "a quoted beam": (lambda it: OptTree(15, beam="2"), "OptTree: beam: expected an integer, found '2'"),
    "a negative budget": (lambda it: OptTree(-1), "OptTree: budget: expected >= 0, found -1"),
    "a huge budget": (lambda it: OptTree(5000), "OptTree: budget: expected <= 4096, found 5000"),
    "two faults": (lambda it: OptTree(-1, beam=1.5), "OptTree: 2 faults"),
    "a chain of text": (lambda it: Chain("7"), "Chain: budget: expected an integer, found '7'"),
    "no branching": (lambda it: TopM(branching=0), "TopM: branching: expected >= 1, found 0"),
    "least of text": (lambda it: TopM(least="0"), "TopM: least: expected a number, found '0'"),
    "children of text": (lambda it: Frontier("3"), "Frontier: children: expected an integer, found '3'"),
    "a name for a target": (lambda it: Decoder("gpt2"), "target: expected what load_target(name)"),
    "a model for a target": (lambda it: Decoder(it.target.model), "wrap_model(model) returns"),
    "a name for a drafter": (lambda it: Decoder(it.target, "dflash"), "drafter: expected a Drafter"),
    "a selector for a drafter": (lambda it: Decoder(it.target, OptTree()), "found an OptTree"),
    "a class for a selector": (lambda it: Decoder(it.target, selector=OptTree), "not an instance"),
    "no selector": (
        lambda it: Decoder(it.target, selector=None),
        "selector: expected a Selector, found None",
    ),
    "a drafter alone": (lambda it: Decoder(it.target, it.drafter), "builder: expected one"),
    "a refiner behind none": (
        lambda it: Decoder(it.target, NoDrafter(), TopM(), NoRefiner()),
        "gives no hidden states to build on",
    ),
    "a name for a model": (lambda it: treeflash.wrap_model("gpt2"), "load_target('gpt2') loads one"),
    "draws of text": (lambda it: Draws("hot"), "temperature must be a finite number"),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_called(name, decoder):
    call, part = CALLS[name]
    with pytest.raises(TreeflashError) as error:
        call(decoder)
    assert part in str(error.value)


def test_numbers_of_other_libraries_are_no_mistake(decoder):
    assert OptTree(np.int64(3)).budget == 3
    assert TopM(least=np.float32(0)).least == 0
    assert decoder.generate([1], temperature=np.float32(0.5), max_new_tokens=1).new_tokens == 1


def test_there_are_many():
    assert len(TYPED) + len(CALLS) >= 150


def test_a_decoder_is_shown_on_a_line(decoder):
    assert repr(decoder) == (
        "Decoder(target=HuggingFaceTarget, drafter=DFlash, builder=TopM, refiner=SwiGlu, selector=OptTree, "
        "verifier=SdpaTree)"
    )


def test_what_the_package_offers_is_listed():
    assert set(treeflash.__all__) <= set(dir(treeflash))
