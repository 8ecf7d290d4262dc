"""What keeps the files of a run whole: who has the folder, what a file holds, which rows are lost."""
