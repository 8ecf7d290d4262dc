"""Print the folder that ``--user-dir`` takes."""

from pathlib import Path

print(Path(__file__).with_name("nmrun_fairseq"))
