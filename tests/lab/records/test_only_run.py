"""A folder above runs, where one run is asked for."""

import pytest

from nmrun.errors import ConfigError
from nmrun.lab.records.settings import only_run


def begin(folder):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 0\noutput_dir: outputs\nsparsity: {n: 2, m: 4}\n")
    return folder


def test_the_only_run_below_a_folder_is_meant(tmp_path):
    run = begin(tmp_path / "outputs" / "asp" / "s0-a")
    assert only_run(tmp_path / "outputs") == run
    assert only_run(run) == run
    begin(tmp_path / "outputs" / "asp" / "s1-b")
    with pytest.raises(ConfigError, match="nmrun status"):
        only_run(tmp_path / "outputs")


def test_where_no_run_is_the_folder_stays(tmp_path):
    assert only_run(tmp_path) == tmp_path
