"""GLUE as text to text, and T5: a table of the gradient-flow recipes (MdGf, SdGf)."""
