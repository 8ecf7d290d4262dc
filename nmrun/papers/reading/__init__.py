"""Questions whose answers are passages of a text (SQuAD), and a reader: a table of S-STE."""
