"""What ``nmrun help`` says of the config's keys: all of them, with the defaults that Hydra composes."""

import contextlib
import itertools
import re

import pytest
import yaml
from hydra import compose
from omegaconf import OmegaConf
from verbs import python, verb

from nmrun.errors import ConfigError
from nmrun.lab.cli import all_verbs
from nmrun.lab.config import reference
from nmrun.lab.config.composition import composing
from nmrun.recipes import RECIPES

EVERY = [reference.options(group) for group in ("", *reference.GROUPS)]


@pytest.mark.parametrize("options", list(itertools.zip_longest(*EVERY)))
def test_every_key_is_there_with_its_meaning_and_its_default(options):
    """Options of different groups side by side: Hydra takes a tenth of a second to compose them."""
    options = [option for option in options if option]
    words = [f"{option.group}={option.name}" for option in options if option.name]
    words += ["sparsity=dense" for option in options if option.group == "sparsity"]
    with composing(None):
        composed = compose("nmrun", words)
    for option in options:
        group = composed[option.group] if option.group else composed
        plain = OmegaConf.to_container(group, resolve=False)
        if not option.group:
            plain = {key: value for key, value in plain.items() if not isinstance(value, dict)}
        # YAML 1.1 reads 1e-05 as a text, and Hydra as the number
        read = {
            key.name.rpartition(".")[2]: yaml.safe_load(
                re.sub(r"(?<![\d.])(\d+)e-", r"\1.0e-", key.default)
            )
            for key in option.keys
        }
        assert read == {key: value for key, value in plain.items() if key != "name"}, option
        assert option.about
        assert all(key.meaning for key in option.keys)


def test_a_key_means_different_things_with_different_options():
    _, *meanings = re.split(r"\n  of (?=\w+:)", reference.about("recipe.decay"))
    own = {part.partition(":")[0]: " ".join(part.split()) for part in meanings}
    assert own["sr_ste"].endswith(
        "takes a number at least 0; nmrun tune tries 1e-06 to 0.01 (log); default 0.0002"
    )
    assert own["step"].endswith("takes a number at least 0; default 0.0")
    assert "default 0.0 (gpt2" in reference.about("model.dropout").replace("\n    ", " ")


def test_a_group_lists_its_options_and_an_option_its_keys():
    names = re.findall(r"^schedule=(\w+):", reference.about("schedule"), re.M)
    assert names == ["constant", "cosine", "custom", "inverse_sqrt", "linear", "multistep"]
    text = reference.about("recipe=step")
    for part in ("arXiv", "When to use", "Cost", "recipe.t_max", "recipe.eps_mode"):
        assert part in text
    assert "``" not in text
    assert "trainer.epochs" in reference.about("trainer")
    assert reference.about("sparsity=2:4") == reference.about("sparsity")


def test_help_on_recipes_begins_with_which_to_take():
    first, _, rest = reference.about("recipe").partition("\n\n")
    assert "images from scratch" in first
    assert "](" not in first
    assert rest.startswith("recipe=dense:")
    assert set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", first)) <= set(RECIPES)


@pytest.mark.parametrize(
    "option",
    [
        *("recipe=step", "dataset=digits", "model=mlp", "optimizer=sgd", "track=wandb"),
        "experiment=step_glue",
    ],
)
def test_the_name_of_an_option_alone_leads_to_it(option):
    assert reference.about(option.partition("=")[2]) == reference.about(option)


def test_options_of_ones_own_are_told(tmp_path):
    for name, text in {
        "recipe/mine": "_target_: mine_of_help.Mine\nrate: 0.3\nother: 1\n",
        "optimizer/slow": "defaults: [sgd]\nmomentum: 0.5\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text)
    lines = reference.about("recipe=mine", str(tmp_path)).splitlines()
    assert [line.strip() for line in lines] == [
        "recipe=mine", str(tmp_path / "recipe/mine.yaml"), "recipe.rate", "default 0.3",
        "recipe.other", "default 1",
    ]  # fmt: skip
    assert "default 0.5" in reference.about("optimizer=slow", str(tmp_path))
    assert "default 0.3" in reference.about("recipe.rate", str(tmp_path))
    assert "recipe=mine:" in reference.about("recipe", str(tmp_path))
    with pytest.raises(ConfigError, match="did you mean mine"):
        reference.about("recipe=mien", str(tmp_path))


def test_every_word_of_the_groups_has_help():
    """All that ``nmrun --help`` lists, and the words of a sweep."""
    text = reference.overview()
    listed = text[text.index("dataset: ") :].split("\n\n")[0].splitlines()
    groups = {group: names.split(", ") for group, _, names in (s.partition(": ") for s in listed)}
    assert set(groups) > {"debug", "experiment", "recipe"}
    words = [*groups, "scale", "zip"]
    for group, names in groups.items():
        words += [f"{group}={name}" for name in names if group != "trainer"]
    for word in words:
        assert len(reference.about(word).split()) > 3, word
    assert "1,000 steps" in " ".join(reference.about("experiment=step_long").split())
    with pytest.raises(ConfigError, match="did you mean step_long"):
        reference.about("experiment=step_lon")


@pytest.mark.parametrize(
    ("topic", "hint"),
    [
        ("recipe.dcay", "did you mean recipe.decay?"),
        ("epochs", "write trainer.epochs=VALUE"),
        ("recipe=stpe", "did you mean step?"),
        ("trainer=fast", "no such trainer"),
        ("sparsity=5:4", "is not an N:M pattern"),
        ("nothing.like=it", "no such key, group, option or verb"),
    ],
)
def test_other_words_get_one_line(topic, hint, capsys):
    with pytest.raises(ConfigError, match=hint.replace("?", r"\?")):
        reference.about(topic)
    assert verb("help", topic) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_verbs_options_and_ratios_are_asked_for_together(capsys):
    assert verb("help", "trainer=default", "status", "sparsity=3:7", "step") == 0
    told = capsys.readouterr().out
    places = [told.index(text) for text in ("trainer.epochs", "usage: nmrun status", "recipe=step")]
    assert places == sorted(places)


def test_help_imports_no_torch():
    code = (
        "import sys\nfrom nmrun.lab import cli\nfor topic in sys.argv[1:]:\n"
        "  sys.argv = ['nmrun', 'help', topic]\n"
        "  try:\n    status = cli.main()\n  except SystemExit as end:\n    status = end.code\n"
        "  print('PROBE', topic, status, 'torch' in sys.modules)"
    )
    topics = ["recipe.decay", "model", "table", "bench", "export", "status"]
    process = python("-c", code, *topics)
    probes = [line for line in process.stdout.splitlines() if line.startswith("PROBE")]
    assert probes == [f"PROBE {topic} 0 False" for topic in topics], process.stderr
    assert len(process.stdout.splitlines()) > 2 * len(topics)


def test_help_of_every_verb_is_its_own(capsys):
    for name in all_verbs():
        with contextlib.suppress(SystemExit):  # argparse exits; bench has a text of its own
            assert verb("help", name) == 0
        assert capsys.readouterr().out.startswith(f"usage: nmrun {name}")
