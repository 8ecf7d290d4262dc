"""GLUE's files in the official layout, two rows each."""

from __future__ import annotations

from pathlib import Path

# The official headers, each with two rows, and what they say.
FILES = {
    "cola": ("CoLA", None, ["gj04\t1\t\tOne sees.", "gj04\t0\t*\tSees one."], [("One sees.",), ("Sees one.",)], [1, 0]),
    "sst2": ("SST-2", "sentence\tlabel", ["it 's good \t1", "it \u2028\"bad\x85 \t0"], [("it 's good ",), ("it \u2028\"bad\x85 ",)], [1, 0]),
    "mrpc": (
        "MRPC", "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String", ['1\t7\t8\tHe said " no .\tNo , he said .\r', "0\t1\t2\tA\tB\r"],
        [('He said " no .', "No , he said ."), ("A", "B")], [1, 0],
    ),
    "qqp": (
        "QQP", "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", ["0\t1\t2\tWhy?\tHow?\t0", "5\t6\t7\ttorn", "1\t3\t4\tA?\tB?\t1"],
        [("Why?", "How?"), ("A?", "B?")], [0, 1],
    ),
    "stsb": (
        "STS-B", "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
        ["0\tnews\tf\t2012\t1\tnone\tnone\tA.\tB.\t2.400", "1\tnews\tf\t2012\t2\tnone\tnone\tC.\tD.\t5.000"],
        [("A.", "B."), ("C.", "D.")], [2.4, 5.0],
    ),
    "mnli": (
        "MNLI",
        "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse"
        "\tsentence1\tsentence2\tlabel1\tgold_label",
        ["0\t1\t1n\tx\t(\t(\t(\t(\tA.\tB.\tneutral\tneutral", "1\t2\t2c\tx\t(\t(\t(\t(\tC.\tD.\tneutral\tcontradiction"],
        [("A.", "B."), ("C.", "D.")], [1, 2],
    ),
    "qnli": (
        "QNLI", "index\tquestion\tsentence\tlabel", ["0\tWho?\tMe.\tentailment", "1\tWho?\tNo.\tnot_entailment"],
        [("Who?", "Me."), ("Who?", "No.")], [0, 1],
    ),
    "rte": (
        "RTE", "index\tsentence1\tsentence2\tlabel", ["0\tA.\tB.\tnot_entailment", "1\tC.\tD.\tentailment"],
        [("A.", "B."), ("C.", "D.")], [1, 0],
    ),
    "wnli": ("WNLI", "index\tsentence1\tsentence2\tlabel", ["0\tA.\tB.\t1", "1\tC.\tD.\t0"], [("A.", "B."), ("C.", "D.")], [1, 0]),
}  # fmt: skip


def write(root: Path, task: str, train: list[str] | None = None) -> Path:
    """The files of a task below ``root``/glue, the development sets as long as in ``FILES``."""
    folder, header, lines, _, _ = FILES[task]
    place = root / "glue" / folder
    place.mkdir(parents=True, exist_ok=True)
    for name in ("train", *(["dev_matched", "dev_mismatched"] if task == "mnli" else ["dev"])):
        some = train if name == "train" and train is not None else lines
        (place / f"{name}.tsv").write_bytes(
            "\n".join([*([header] if header else []), *some, ""]).encode()
        )
    return place
