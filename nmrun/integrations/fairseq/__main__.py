"""Print the folder that ``--user-dir`` takes."""

from pathlib import Path

print(Path(__file__).parent / "user_dir" / "nmrun_fairseq")
